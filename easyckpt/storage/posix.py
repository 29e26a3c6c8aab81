"""The primitive operations that a durable write is made of.

`LocalStorage` does every change through one `Posix` object. In production that is this class, a thin layer
over the system; in tests it is one that stops at the k-th operation, kills the process there, or keeps in
memory what a disk would have kept after a power loss (`easyckpt.testing`). So the recipe that is proved is
the recipe that runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FileFacts", "Posix"]

DIRECT_READ_BYTES_MIN = 1 << 20
"""Shorter reads go through the page cache."""

BLOCK_BYTES = 4096
"""What O_DIRECT asks of offsets, lengths and memory on every file system we know."""

READ_BYTES = 16 << 20
"""One system call."""

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHED_ONLY = getattr(os, "RWF_NOWAIT", 0)
_NO_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPERM})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What a folder's listing tells of one name."""

    name: str
    is_folder: bool
    bytes: int
    mtime_s: float
    links: int = 1


class Posix:
    """The real system. Every method raises `OSError`; descriptors are closed on exec.

    The first group changes something: each call is a point at which a machine may die. The second group only
    looks.
    """

    # ----- changes -----

    def make_folder(self, path: str) -> None:
        """Create one folder, with the mode that the umask leaves."""
        os.mkdir(path)

    def create(self, path: str, *, direct: bool) -> int:
        """Create a file that is not there and open it for writing; returns the descriptor.

        Args:
            path: where.
            direct: bypass the page cache where the file system can.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct and _O_DIRECT:
            try:
                return os.open(path, flags | _O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some kernels create the file before they refuse the flag.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return os.open(path, flags, 0o666)

    def reserve(self, fd: int, length: int) -> None:
        """Have room for so many bytes, where the file system can, so that a lack of it shows at once.

        Not `os.posix_fallocate`: where the file system cannot, the C library would write into every block.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "fallocate"):
            return
        done = libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(length))
        number = ctypes.get_errno()
        if done != 0 and number not in _NO_RESERVE:
            raise OSError(number, os.strerror(number))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset; returns how many bytes the system took."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and length last."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close. Some file systems report a failed write only here."""
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, if that name is free."""
        os.link(source, target, follow_symlinks=False)

    def rename_if_absent(self, source: str, target: str) -> None:
        """Rename, if the new name is free (Linux `renameat2`); ENOSYS or EINVAL if there is no such call."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        done = libc.renameat2(
            _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE)
        )
        if done != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)

    def replace(self, source: str, target: str) -> None:
        """Rename over whatever has the new name."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder last. Some file systems cannot sync a folder: nothing is to be done."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)

    # ----- looks -----

    def leave_direct(self, fd: int) -> None:
        """Go through the page cache from now on (for a length that is no multiple of the block)."""
        import fcntl  # POSIX only, and only here

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)

    def is_direct(self, fd: int) -> bool:
        """Whether what is written bypasses the page cache."""
        import fcntl  # POSIX only, and only here

        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)

    def leave_cache(self, fd: int, begin: int, length: int) -> None:
        """Have the system begin to write a range out, and forget what is written: training needs the memory.

        A wish: a system that does not know it does nothing.
        """
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, begin, length, os.POSIX_FADV_DONTNEED)

    def length(self, fd: int) -> int:
        """Length of an open file."""
        return os.fstat(fd).st_size

    def links(self, path: str) -> int:
        """How many names the file has."""
        return os.lstat(path).st_nlink

    def facts(self, path: str) -> FileFacts:
        """What a name leads to; symbolic links are followed."""
        found = os.stat(path)
        return FileFacts(
            name=os.path.basename(path),
            is_folder=not stat.S_ISREG(found.st_mode),
            bytes=found.st_size,
            mtime_s=found.st_mtime,
            links=found.st_nlink,
        )

    def read(self, path: str, buffer: memoryview, offset: int) -> int:
        """Fill the buffer from a regular file; returns how many bytes there were.

        What is cached is copied from there; the rest of a long read goes from the device into the buffer,
        past the page cache, where file system and alignment allow it.
        """
        # Without O_NONBLOCK, opening a FIFO that somebody put there would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EISDIR, "not a regular file", path)
            done = 0
            if len(buffer) >= DIRECT_READ_BYTES_MIN and _O_DIRECT and _CACHED_ONLY:
                done = _read_cached(fd, buffer, offset)
                done += _read_direct(path, buffer[done:], offset + done)
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done : done + READ_BYTES]], offset + done)
                if got == 0:
                    break
                done += got
            return done
        finally:
            os.close(fd)

    def scan(self, path: str) -> Iterator[FileFacts]:
        """The names in a folder. Linked folders are left out, so that nothing outside is ever walked."""
        with os.scandir(path) as names:
            for name in names:
                try:
                    is_folder = name.is_dir(follow_symlinks=False)
                    if not is_folder and not name.is_file():
                        continue
                    found = name.stat()
                except FileNotFoundError:
                    continue  # removed meanwhile
                yield FileFacts(
                    name=name.name, is_folder=is_folder, bytes=found.st_size, mtime_s=found.st_mtime
                )

    def free_bytes(self, path: str) -> int:
        """Space left for an unprivileged user."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def _read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """Copy what is in the page cache, up to the first block that is not."""
    done = 0
    while done < len(buffer):
        part = buffer[done : done + READ_BYTES]
        try:
            got = os.preadv(fd, [part], offset + done, _CACHED_ONLY)
        except OSError:  # nothing more is cached, or this file system cannot say
            return done // BLOCK_BYTES * BLOCK_BYTES
        done += got
        if got == 0:
            return done
    return done


def _read_direct(path: str, buffer: memoryview, offset: int) -> int:
    """Read whole blocks from the device; returns how far it got: 0 where O_DIRECT is not possible."""
    whole = len(buffer) // BLOCK_BYTES * BLOCK_BYTES
    if whole < DIRECT_READ_BYTES_MIN or offset % BLOCK_BYTES:
        return 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _O_DIRECT)
    except OSError:  # the file system has no such thing; a real trouble shows in the read through the cache
        return 0
    done = 0
    try:
        while done < whole:
            got = os.preadv(fd, [buffer[done : min(done + READ_BYTES, whole)]], offset + done)
            done += got
            if got == 0 or got % BLOCK_BYTES:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
    return done
