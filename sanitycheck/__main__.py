"""``python -m sanitycheck``."""

from __future__ import annotations

import sys

from sanitycheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
