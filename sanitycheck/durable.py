"""Writing a file so that a reader sees the old one or the whole new one, never a part."""

from __future__ import annotations

import os

__all__ = ["write_whole"]


def write_whole(path: str, text: str) -> None:
    """Write ``text`` under a temporary name, sync, rename; a pipe or a device is written to as it is.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe or a device such as /dev/null: it is written to, never replaced.
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
