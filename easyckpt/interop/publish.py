"""What an export writes appears whole or not at all.

A file or a folder is made under a hidden name beside its final one. When it is complete, everything in it is
synced, and it gets its name by a rename that never replaces anything. A crash leaves only the hidden name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from easyckpt.errors import Misuse
from easyckpt.storage.base import storage_error
from easyckpt.storage.posix import Posix

__all__ = ["new_path"]


@contextmanager
def new_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` at the end of the block if that ends well.

    Args:
        target: a file or folder that is not there yet.

    Yields:
        A path beside it; the block makes a file or a folder there.

    Raises:
        Misuse: the target is there already, or is no local path.
        StorageError: the file system refuses.
    """
    text = os.fspath(target)
    if "://" in text:
        raise Misuse("an export goes to a local path", where=text, hint="copy it with the store's own tool")
    path = Path(text).expanduser().absolute()
    if path.exists() or path.is_symlink():
        raise Misuse("it is there already, and is not replaced", where=str(path), hint="name another one")
    hidden = path.with_name(f".new-{secrets.token_hex(8)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
        _sync(hidden)
        _rename(hidden, path)
        Posix().sync_folder(str(path.parent))
    except OSError as error:
        raise storage_error(error, doing="write", where=str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            if hidden.is_dir():
                shutil.rmtree(hidden, ignore_errors=True)
            else:
                hidden.unlink()


def _sync(path: Path) -> None:
    if path.is_dir():
        for folder, _, names in os.walk(path):
            for name in names:
                _sync(Path(folder, name))
            Posix().sync_folder(folder)
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(hidden: Path, path: Path) -> None:
    try:
        Posix().rename_if_absent(str(hidden), str(path))
    except FileExistsError:
        raise Misuse("somebody else made it meanwhile", where=str(path), hint="name another one") from None
    except OSError:
        if path.exists():
            raise
        os.rename(hidden, path)  # a file system without the exclusive call
