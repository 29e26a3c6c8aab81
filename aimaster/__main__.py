"""``python -m aimaster``: the same as the command ``aimaster``."""

from __future__ import annotations

import sys

from aimaster.cli import main

if __name__ == "__main__":
    sys.exit(main())
