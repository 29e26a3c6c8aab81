"""Stores: the conformance suite on each, and what is particular to a folder."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from easyckpt.errors import (
    Misuse,
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
)
from easyckpt.storage import LocalStorage, MemoryStorage, Parts, Storage, open_storage
from easyckpt.storage.fsspec import FsspecStorage
from easyckpt.storage.posix import Posix
from easyckpt.testing import ConformanceCase, SimulatedDisk, conformance_cases

Open = Callable[[], Storage]


@pytest.fixture(params=["local", "memory", "fsspec", "simulated"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "local":
        yield lambda: LocalStorage(tmp_path / "not" / "yet")
    elif request.param == "memory":
        store = MemoryStorage()
        yield lambda: store
    elif request.param == "fsspec":
        url = f"memory://{uuid.uuid4().hex}/run"
        yield lambda: FsspecStorage(url)
    else:
        disk = SimulatedDisk()
        yield lambda: LocalStorage("/ckpt/run", posix=disk)


@pytest.mark.parametrize("case", conformance_cases(), ids=lambda case: case.name)
def test_conformance(case: ConformanceCase, open_store: Open) -> None:
    case.run(open_store)


def test_open_storage_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("some/folder").where() == str(tmp_path / "some/folder")
    assert open_storage(tmp_path).where("a") == str(tmp_path / "a")
    assert open_storage(f"file://{tmp_path}/with%20space").where() == f"{tmp_path}/with space"
    assert open_storage("memory://x/y").where("z") == "memory://x/y/z"
    assert open_storage("s3://bucket/run").where("z") == "s3://bucket/run/z"
    for bad in (
        "",
        "s3://",
        "s3://key:secret@bucket/run",
        "s3://bucket/run?versionId=1",
        "file://host/x",
        "file://",
        "a\0b",
        "nonsense://x",
    ):
        with pytest.raises(Misuse):
            open_storage(bad)
    assert list(tmp_path.iterdir()) == [], "opening makes nothing"


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "typo")
    assert store.list() == ()
    assert not store.exists("x")
    assert store.free_bytes()
    assert not (tmp_path / "typo").exists()


def test_nothing_unfinished_is_left_and_mode_follows_the_umask(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.write_durable("a/b", b"x" * (2 << 20))
    store.write_durable("a/once", b"x", if_absent=True)
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "once"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "a/once").stat().st_nlink == 1


def test_empty_folders_go_with_their_last_object(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "root")
    store.write_durable("data/g1/s1/body", b"x")
    store.write_durable("data/g1/s2/body", b"x")
    store.delete("data/g1/s1/body")
    assert os.listdir(tmp_path / "root/data/g1") == ["s2"]
    store.delete("data/g1/s2/body")
    assert os.listdir(tmp_path / "root") == []


def test_what_is_not_ours_is_not_listed_and_stays(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.write_durable("data/body", b"x")
    for name in ("notes on this run.txt", ".hidden", "data/.nfs0001", "data/ä"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("mine")
    assert [entry.path for entry in store.list()] == ["data/body"]
    assert store.unfinished() == ()
    store.delete("data/body")
    assert (tmp_path / "data/.nfs0001").exists()


def test_links_out_of_the_folder_are_not_walked(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    store = LocalStorage(tmp_path / "root")
    store.write_durable("data/body", b"x")
    (tmp_path / "root/data/link").symlink_to(outside)
    (tmp_path / "root/data/dangling").symlink_to(tmp_path / "nowhere")
    assert [entry.path for entry in store.list()] == ["data/body"]
    (tmp_path / "root/linked").symlink_to(outside / "precious")
    store.delete("linked")
    assert (outside / "precious").exists(), "only the link goes"


def test_a_root_that_is_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    LocalStorage(tmp_path / "run").write_durable("a/b", b"x")
    assert (tmp_path / "disk/a/b").read_bytes() == b"x"


def test_a_fifo_in_the_place_of_an_object_does_not_hang(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert store.list() == ()
    assert store.stat("pipe") is None
    with pytest.raises(StorageUnavailable, match="not a regular file"):
        store.read("pipe", 0, 10)


def test_a_file_where_a_folder_has_to_be(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    store = LocalStorage(tmp_path)
    with pytest.raises(StorageError, match="cannot write") as caught:
        store.write_durable("data/body", b"x")
    assert str(tmp_path / "data/body") in str(caught.value)
    assert not store.exists("data/body")
    assert store.list("data/") == ()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageUnavailable, match="cannot write"):
        store.write_durable("folder", b"x")
    assert store.unfinished() == ()


class FaultyPosix(Posix):
    """The real system with one operation that answers with an error, the first ``times`` times."""

    def __init__(self, operation: str, number: int, *, times: int = 1_000_000) -> None:
        self.operation, self.number, self.left = operation, number, times

    def _strike(self, operation: str) -> None:
        if operation == self.operation and self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._strike("write")
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._strike("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._strike("close")

    def link(self, source: str, target: str) -> None:
        self._strike("link")
        super().link(source, target)

    def rename_if_absent(self, source: str, target: str) -> None:
        self._strike("rename_if_absent")
        super().rename_if_absent(source, target)

    def replace(self, source: str, target: str) -> None:
        self._strike("replace")
        super().replace(source, target)

    def sync_folder(self, path: str) -> None:
        self._strike("sync_folder")
        super().sync_folder(path)


@pytest.mark.parametrize("operation", ["write", "sync", "close", "replace"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EROFS, StorageDenied),
        (errno.EACCES, StorageDenied),
        (errno.EPERM, StorageDenied),
        (errno.EIO, StorageUnavailable),
        (errno.ESTALE, StorageUnavailable),
    ],
)
def test_a_refused_write_leaves_the_old_object(
    tmp_path: Path, operation: str, number: int, kind: type[StorageError]
) -> None:
    LocalStorage(tmp_path).write_durable("a/b", b"old")
    store = LocalStorage(tmp_path, posix=FaultyPosix(operation, number))
    for length in (5, 2 << 20):
        with pytest.raises(kind) as caught:
            store.write_durable("a/b", b"n" * length)
        assert type(caught.value) is kind
        assert str(tmp_path / "a/b") in str(caught.value)
        assert os.strerror(number) in str(caught.value)
        assert caught.value.hint
        assert store.read("a/b") == b"old"
        assert store.unfinished() == ()
    if number == errno.ENOSPC:
        assert "bytes are free" in str(caught.value)


def test_memory_that_o_direct_refuses_is_written_all_the_same(tmp_path: Path) -> None:
    posix = FaultyPosix("write", errno.EINVAL, times=1)
    data = memoryview(os.urandom((3 << 20) + 17))[1:]
    LocalStorage(tmp_path, posix=posix).write_durable("odd", data)
    assert (tmp_path / "odd").read_bytes() == data
    assert posix.left == 0


def test_without_hard_links_an_exclusive_rename_creates(tmp_path: Path) -> None:
    for number in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
        store = LocalStorage(tmp_path, posix=FaultyPosix("link", number))
        store.write_durable(f"once{number}", b"1", if_absent=True)
        with pytest.raises(StorageConflict):
            store.write_durable(f"once{number}", b"2", if_absent=True)
        assert store.read(f"once{number}") == b"1"
    assert store.unfinished() == ()


def test_without_any_exclusive_create_it_is_refused(tmp_path: Path) -> None:
    class Neither(FaultyPosix):
        def rename_if_absent(self, source: str, target: str) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    store = LocalStorage(tmp_path, posix=Neither("link", errno.EPERM))
    with pytest.raises(StorageDenied, match="neither hard links nor an exclusive rename"):
        store.write_durable("once", b"1", if_absent=True)
    assert store.list() == ()
    assert store.unfinished() == ()


def test_a_link_whose_answer_was_lost_counts_as_ours(tmp_path: Path) -> None:
    class LostAnswer(Posix):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)

    store = LocalStorage(tmp_path, posix=LostAnswer())
    store.write_durable("once", b"1", if_absent=True)
    assert store.read("once") == b"1"
    assert store.unfinished() == ()


def test_a_file_system_that_loses_bytes_is_caught(tmp_path: Path) -> None:
    class Liar(Posix):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            super().write(fd, data[:-1], offset)
            return len(data)

    store = LocalStorage(tmp_path, posix=Liar())
    with pytest.raises(StorageUnavailable, match="loses writes"):
        store.write_durable("a", b"12345")
    assert store.list() == ()
    assert store.unfinished() == ()


def test_a_folder_that_vanishes_between_making_and_using(tmp_path: Path) -> None:
    class Vanishing(Posix):
        vanished = 0

        def create(self, path: str, *, direct: bool) -> int:
            if self.vanished < 2 and os.path.isdir(os.path.dirname(path)):
                self.vanished += 1
                os.rmdir(os.path.dirname(path))
            return super().create(path, direct=direct)

    LocalStorage(tmp_path, posix=Vanishing()).write_durable("a/b/c", b"x")
    assert (tmp_path / "a/b/c").read_bytes() == b"x"


# ----- real trouble from the real system -----

MS_RDONLY, MS_REMOUNT = 1, 32


def _mount(target: Path, options: str, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(number)} (needs root)")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "small"
    target.mkdir()
    _mount(target, "size=4m")
    try:
        yield target
    finally:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.umount2(os.fsencode(target), 0) == 0, os.strerror(ctypes.get_errno())


def test_full_disk(small_disk: Path) -> None:
    store = LocalStorage(small_disk)
    store.write_durable("step/one", b"1" * (3 << 20))
    for if_absent in (False, True):
        with pytest.raises(StorageFull, match="No space left") as caught:
            store.write_durable("step/two", b"2" * (2 << 20), if_absent=if_absent)
        assert "prune" in caught.value.hint
    assert [entry.path for entry in store.list()] == ["step/one"]
    assert store.unfinished() == (), "the half that was written is gone again"
    store.delete("step/one")
    store.write_durable("step/two", b"2" * (2 << 20))


def test_read_only_disk(small_disk: Path) -> None:
    store = LocalStorage(small_disk)
    store.write_durable("a", b"1")
    _mount(small_disk, "", MS_REMOUNT | MS_RDONLY)
    for call in (lambda: store.write_durable("b", b"2"), lambda: store.delete("a")):
        with pytest.raises(StorageDenied, match="Read-only"):
            call()
    assert store.read("a") == b"1"


DENIED = """
import os, sys
from easyckpt.errors import StorageDenied
from easyckpt.storage import LocalStorage
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
store = LocalStorage(sys.argv[1])
for call in (lambda: store.write_durable("b", b"2"), lambda: store.read("a"), lambda: store.delete("a")):
    try:
        call()
    except StorageDenied as error:
        assert "Permission denied" in str(error) and "ls -ld" in error.hint, error
    else:
        raise SystemExit("it was allowed")
"""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """pytest's own temporary folder lies in one that only its owner may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_no_permission(public_folder: Path) -> None:
    root = public_folder / "run"
    LocalStorage(root).write_durable("a", b"1")
    (root / "a").chmod(0)
    root.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", DENIED, str(root)], check=False, capture_output=True, text=True
    )
    root.chmod(0o755)
    assert done.returncode == 0, done.stderr + done.stdout


def test_file_size_limit(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from easyckpt.errors import StorageFull\n"
        "from easyckpt.storage import LocalStorage\n"
        "store = LocalStorage(sys.argv[1])\n"
        "try:\n"
        "    store.write_durable('big', b'x' * (3 << 20))\n"
        "except StorageFull as error:\n"
        "    assert 'ulimit' in error.hint, error\n"
        "else:\n"
        "    raise SystemExit('it was allowed')\n"
        "assert store.list() == () and store.unfinished() == ()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_missing_is_told_from_denied(tmp_path: Path) -> None:
    with pytest.raises(StorageMissing, match="easyckpt ls"):
        LocalStorage(tmp_path).read("nothing")


# ----- long objects, in parts -----


def test_a_long_object_is_written_in_several_lanes_and_read_back_cold(tmp_path: Path) -> None:
    """Whatever the file system: odd lengths, memory that is not aligned, parts that end in the middle."""
    for length in (5 << 20, (5 << 20) + 4096, (4 << 20) + 1, (3 << 20) - 1):
        for skip in (0, 1):
            data = memoryview(os.urandom(length + skip))[skip:]
            seen: set[int] = set()
            parts = Parts(bytes=1 << 20, check=lambda begin, part, seen=seen: seen.add(begin))  # type: ignore[misc]
            LocalStorage(tmp_path, lanes=4).write_durable("long", data, parts=parts)
            assert seen == set(range(0, length, 1 << 20))
            fd = os.open(tmp_path / "long", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            for begin in (0, 4096, 4097, 3 << 20):
                buffer = mmap.mmap(-1, length + 8192)
                for into in (memoryview(buffer), memoryview(buffer)[17:]):
                    got = LocalStorage(tmp_path).read_into("long", into, begin)
                    assert got == max(0, length - begin)
                    assert into[:got] == data[begin:]


def test_a_read_takes_what_is_cached_and_the_rest_from_the_device(tmp_path: Path) -> None:
    data = os.urandom(6 << 20)
    (tmp_path / "mixed").write_bytes(data)
    fd = os.open(tmp_path / "mixed", os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(fd, 1 << 20, 0)
    os.pwrite(fd, b"dirty", 5 << 20)  # cached and not on the device
    os.close(fd)
    assert LocalStorage(tmp_path).read("mixed") == data[: 5 << 20] + b"dirty" + data[(5 << 20) + 5 :]


def test_trouble_in_one_lane_ends_the_write(tmp_path: Path) -> None:
    """ENOSPC in the middle, with other parts under way: nothing is visible, nothing is left."""

    class FullAfterAWhile(Posix):
        def reserve(self, fd: int, length: int) -> None:
            """A file system that promises nothing."""

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if offset >= 5 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data, offset)

    store = LocalStorage(tmp_path, posix=FullAfterAWhile(), lanes=4)
    parts = Parts(bytes=1 << 20, check=lambda begin, part: None)
    before = len(os.listdir("/proc/self/fd"))
    for if_absent in (False, True):
        with pytest.raises(StorageFull):
            store.write_durable("a/b", bytes(16 << 20), if_absent=if_absent, parts=parts)
    assert store.list() == ()
    assert store.unfinished() == ()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lack_of_space_shows_before_a_byte_is_written(small_disk: Path) -> None:
    wrote: list[int] = []

    class Watched(Posix):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            wrote.append(offset)
            return super().write(fd, data, offset)

    with pytest.raises(StorageFull):
        LocalStorage(small_disk, posix=Watched()).write_durable("a", bytes(5 << 20))
    assert wrote == []
