"""``--run-path``: run a script by `runpy.run_path`, as torchrun does for that flag.

Usage: ``python -u -m aimaster.worker.entry SCRIPT [ARGS…]``. As under torchrun an exception is written to
``TORCHELASTIC_ERROR_FILE`` in torchelastic's format, and `SystemExit` with code 0 is a plain end.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback


def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m aimaster.worker.entry SCRIPT [ARGS...]")
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    except Exception as error:
        _record(error)
        raise


def _record(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


if __name__ == "__main__":
    main()
