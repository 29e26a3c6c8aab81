"""Parsers and collectors: texts of kernels and libraries as they really look, and this machine."""

from __future__ import annotations

import dataclasses
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sanitycheck.catalogue import CHECKS
from sanitycheck.errors import CodecError, NotApplicableError
from sanitycheck.facts import clock, disk, gpu, host, kernel, limits, mounts, software, store
from sanitycheck.facts.capabilities import container_of
from sanitycheck.facts.codec import decode, encode
from sanitycheck.facts.proc import Mount, parse_cgroup, parse_key_values, parse_mountinfo
from sanitycheck.facts.request import Request
from sanitycheck.options import Options
from sanitycheck.result import Level

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime shared:13 - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 ro,errors=remount-ro
40 27 0:40 / /data\040sets rw,relatime - nfs4 server:/export/data\040sets rw,vers=4.2
41 27 0:41 / /home/u/remote rw,nosuid - fuse.sshfs u@h:/ rw,user_id=0
42 27 0:42 / /var/lib/lxcfs rw,nosuid - fuse.lxcfs lxcfs rw
43 27 259:3 / /image ro,relatime - ext4 /dev/nvme0n1p3 ro
a broken line
"""


def test_mountinfo() -> None:
    found = parse_mountinfo(MOUNTINFO)
    assert [mount.path for mount in found] == [
        "/proc",
        "/",
        "/data sets",
        "/home/u/remote",
        "/var/lib/lxcfs",
        "/image",
    ]
    assert found[2].source == "server:/export/data sets"
    assert [mount.path for mount in found if mounts.can_hang(mount)] == ["/data sets", "/home/u/remote"]


def test_only_the_kernels_own_read_only_is_meant() -> None:
    by_path = {mount.path: mount for mount in parse_mountinfo(MOUNTINFO)}
    assert disk.emergency_read_only(by_path["/"])
    assert not disk.emergency_read_only(by_path["/image"])
    assert not disk.emergency_read_only(by_path["/data sets"])
    assert not disk.emergency_read_only(None)


def test_the_mount_of_a_path_is_the_longest_and_the_last() -> None:
    made = [
        Mount(path=p, device=p, fstype=t, source="", options=frozenset())
        for p, t in (("/", "a"), ("/data", "b"), ("/data", "c"))
    ]
    found = disk.mount_of("/data/x", mounts=tuple(made))
    assert found is not None
    assert found.fstype == "c"
    other = disk.mount_of("/database", mounts=tuple(made))
    assert other is not None
    assert other.fstype == "a"


def test_meminfo() -> None:
    assert parse_key_values("MemTotal:  1024 kB\nHugePages_Total: 3\nodd line\n") == {
        "MemTotal": 1 << 20,
        "HugePages_Total": 3,
    }


def test_cgroup_of_both_versions() -> None:
    assert parse_cgroup("0::/user.slice\n") == {"": "/user.slice"}
    assert parse_cgroup("4:memory:/a\n1:cpu,cpuacct:/b:c\nbad\n") == {
        "memory": "/a",
        "cpu": "/b:c",
        "cpuacct": "/b:c",
    }


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000", None),
        ("150000 100000", 1.5),
        ("-1 100000", None),
        ("", None),
        ("5 0", None),
        ("x y", None),
    ],
)
def test_cpu_quota(text: str, cpus: float | None) -> None:
    assert host.parse_cpu_quota(text) == cpus


def test_the_tightest_group_limits_tasks() -> None:
    assert limits.tasks_left((("max", "5"), ("100", "40"), ("1000", "10"))) == 60
    assert limits.tasks_left((("10", "40"),)) == 0
    assert limits.tasks_left(()) is None


KERNEL_LINES = {
    "oom_kill": [
        "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
        "Memory cgroup out of memory: Killed process 99 (python3) total-vm:9kB",
    ],
    "machine_check": [
        "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 1: Uncorrected",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#0_DIMM#0",
    ],
    "machine_check_corrected": [
        "mce: [Hardware Error]: Machine check events logged",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#0_DIMM#0",
    ],
    "io_error": [
        "blk_update_request: I/O error, dev sda, sector 12 op 0x0:(READ)",
        "Buffer I/O error on dev dm-0, logical block 7, lost async page write",
        "nvme nvme0: I/O 12 QID 3 timeout, aborting",
    ],
    "file_system": [
        "EXT4-fs error (device sda1): ext4_lookup:1816: inode #2: comm ls: deleted inode referenced",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "XFS (dm-1): Corruption detected. Unmount and run xfs_repair",
    ],
    "network_file_system": ["nfs: server store1 not responding, still trying"],
    "hung_task": [
        "INFO: task python:77 blocked for more than 120 seconds.",
        "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [python:7]",
    ],
}


@pytest.mark.parametrize(
    ("kind", "line"), [(kind, line) for kind, lines in KERNEL_LINES.items() for line in lines]
)
def test_kernel_lines_are_told_apart(kind: str, line: str) -> None:
    assert kernel.classify(line) == kind


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (vda): mounted filesystem with ordered data mode. Opts: errors=remount-ro",
        "usb 1-1: new high-speed USB device number 2",
        "nfs: server store1 OK",
        "EDAC MC: Ver: 3.0.0",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "systemd[1]: Started Killed process accounting.",
    ],
)
def test_ordinary_kernel_lines_are_no_trouble(line: str) -> None:
    assert kernel.classify(line) is None


def test_only_young_kernel_messages_count_and_the_last_is_kept() -> None:
    def record(at_s: float, text: str) -> str:
        return f"3,1,{int(at_s * 1e6)},-;{text}\n SUBSYSTEM=x\n"

    first, last = KERNEL_LINES["oom_kill"]
    records = [record(5, first), record(90_000, first), record(99_000, last), "garbage", "6,2,x,-;y"]
    facts = kernel.summarise(records, uptime_s=100_000.0)
    (trouble,) = facts.troubles
    assert (trouble.kind, trouble.count, trouble.newest_age_s) == ("oom_kill", 2, 1000.0)
    assert trouble.newest == last
    assert facts.records == 5


def test_torch_version_file() -> None:
    text = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert software.parse_torch_version_file(text) == {"version": "2.13.0+cu130", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48 UTC 2024",
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)",
            "580.65.06",
        ),
        ("", ""),
    ],
)
def test_driver_version(line: str, version: str) -> None:
    assert software.parse_driver(line) == version


def test_a_fingerprint_is_equal_on_equal_nodes_whatever_the_order() -> None:
    assert software.digest({"a": "1", "b": "2"}) == software.digest({"b": "2", "a": "1"})
    assert software.digest({"a": "1"}) != software.digest({"a": "2"})


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, None),
        ("", 0),
        ("0,1,2", 3),
        ("GPU-8ab,GPU-9cd", 2),
        ("0,-1,2", 1),
        ("NoDevFiles", 0),
        ("MIG-GPU-1/2/3", 1),
    ],
)
def test_visible_devices(value: str | None, count: int | None) -> None:
    assert gpu.parse_visible(value) == count


def test_devices_on_the_bus_count_when_the_driver_has_them(tmp_path: Path) -> None:
    (tmp_path / "drivers" / "nvidia").mkdir(parents=True)
    (tmp_path / "drivers" / "vfio-pci").mkdir()
    for name, vendor, kind, driver in (
        ("gpu", "0x10de", "0x030200", "nvidia"),
        ("passed-on", "0x10de", "0x030200", "vfio-pci"),
        ("audio", "0x10de", "0x040300", "nvidia"),
        ("other", "0x1002", "0x030000", "nvidia"),
    ):
        place = tmp_path / "devices" / name
        place.mkdir(parents=True)
        (place / "vendor").write_text(vendor + "\n")
        (place / "class").write_text(kind + "\n")
        (place / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert gpu.pci_gpus(str(tmp_path / "devices")) == 1
    assert gpu.pci_gpus(str(tmp_path / "nowhere")) == 0


def test_containers_are_known_by_their_marks() -> None:
    def kind(environment: dict[str, str], cgroup: str = "", *files: str) -> str:
        return container_of(environment=environment, cgroup=cgroup, marker_files=files)

    assert kind({"KUBERNETES_SERVICE_HOST": "1"}) == "kubernetes"
    assert kind({"container": "podman"}) == "podman"
    assert kind({}, "0::/docker/abc") == "docker"
    assert kind({}, "", "/.dockerenv") == "docker"
    assert kind({}, "0::/init.scope") == ""


def test_peers() -> None:
    assert clock.split_peer("host") == ("host", 123)
    assert clock.split_peer("host:1") == ("host", 1)
    assert clock.split_peer("::1") == ("::1", 123)
    assert clock.split_peer("[::1]:5") == ("::1", 5)


def answer(
    arrived_unix_s: float, left_unix_s: float, *, first: int = 0b00_100_100, stratum: int = 2
) -> bytes:
    def stamp(unix_s: float) -> bytes:
        whole = int(unix_s // 1)
        return struct.pack("!II", whole + clock.NTP_UNIX_S, int((unix_s - whole) * 2**32))

    return bytes([first, stratum]) + bytes(30) + stamp(arrived_unix_s) + stamp(left_unix_s)


@given(st.floats(-1e6, 1e6), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_the_offset_is_right_within_half_the_round_trip(off_s: float, there_s: float, back_s: float) -> None:
    sent = 1_800_000_000.0
    arrived = sent + there_s - off_s  # the server's clock is behind ours by the offset
    packet = answer(arrived, arrived)
    offset, uncertainty = clock.parse_reply(packet, sent_unix_s=sent, received_unix_s=sent + there_s + back_s)
    assert abs(offset - off_s) <= uncertainty + 1e-5


@pytest.mark.parametrize(
    "packet", [b"", bytes(48), answer(1.0, 1.0, stratum=0), answer(1.0, 1.0, first=0b11_100_100)]
)
def test_answers_that_are_none_are_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"SNTP|synchronised"):
        clock.parse_reply(packet, sent_unix_s=0.0, received_unix_s=0.0)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError(errno.ENOSPC, "x"), "no_space"),
        (OSError(errno.EDQUOT, "x"), "no_space"),
        (OSError(errno.EROFS, "x"), "read_only"),
        (OSError(errno.EACCES, "x"), "not_permitted"),
        (PermissionError("denied by the store"), "not_permitted"),
        (NotADirectoryError(), "not_a_folder"),
        (ImportError("install s3fs"), "backend_missing"),
        (ValueError("Protocol not known: foo"), "backend_missing"),
        (OSError(errno.EIO, "x"), "unreachable"),
        (TimeoutError(), "unreachable"),
    ],
)
def test_store_errors_by_kind(error: Exception, problem: str) -> None:
    assert store.classify_error(error) == problem


def test_no_credential_of_a_url_is_shown() -> None:
    assert store.without_secrets("s3://key:secret@bucket/a?token=1") == "s3://bucket/a"
    assert store.without_secrets("/plain/a?b@c") == "/plain/a?b@c"
    request = Request(check="x", options=Options(ckpt_path="nosuch://key:secret@bucket/a?token=1"))
    facts = store.collect(request)
    assert facts.problem == "backend_missing"
    assert "secret" not in str(encode(facts))
    assert "token" not in str(encode(facts))


def test_a_store_in_memory_is_used_like_any_other() -> None:
    import fsspec

    before = fsspec.filesystem("memory").find("/")  # one store for the whole process, other tests use it too
    facts = store.collect(
        Request(check="x", level=Level.INSTANT, options=Options(ckpt_path="memory://ckpt/run"))
    )
    assert (facts.problem, facts.left_behind, facts.local) == ("", "", False)
    assert fsspec.filesystem("memory").find("/") == before


def test_the_checkpoint_folder_is_not_made(tmp_path: Path) -> None:
    facts = store.collect(
        Request(check="x", level=Level.INSTANT, options=Options(ckpt_path=str(tmp_path / "a" / "b")))
    )
    assert (facts.problem, facts.tried_at) == ("", str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/deeper"):
        facts = store.collect(Request(check="x", options=Options(ckpt_path=str(tmp_path / path))))
        assert facts.problem == "not_a_folder"


def test_without_a_path_there_is_nothing_to_try() -> None:
    with pytest.raises(NotApplicableError):
        store.collect(Request(check="x"))


@pytest.mark.parametrize("check", [check.id for check in CHECKS])
def test_facts_survive_the_way_from_the_probe(check: str) -> None:
    facts = next(one.facts for one in CHECKS if one.id == check)(**({"path": "/"} if check == "x" else {}))
    assert decode(type(facts), encode(facts)) == facts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outer:
    number: float = 0.0
    inner: tuple[_Inner, ...] = ()
    maybe: int | None = None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "expected an object"),
        ({"other": 1}, "unknown field 'other'"),
        ({"number": "1"}, r"_Outer\.number"),
        ({"number": True}, r"_Outer\.number"),
        ({"inner": {}}, r"_Outer\.inner"),
        ({"inner": [{}]}, r"_Outer\.inner\[0\]"),
        ({"inner": [{"name": 1}]}, r"_Outer\.inner\[0\]\.name"),
        ({"maybe": 1.5}, r"_Outer\.maybe"),
    ],
)
def test_a_wrong_shape_is_named(value: Any, where: str) -> None:
    with pytest.raises(CodecError, match=where):
        decode(_Outer, value)


def test_whole_numbers_are_numbers() -> None:
    assert decode(_Outer, {"number": 1, "inner": [{"name": "a"}], "maybe": None}) == _Outer(
        number=1.0, inner=(_Inner(name="a"),)
    )


@pytest.mark.parametrize(
    "collect",
    [host.collect_cpu_mem, host.collect_boot, limits.collect, disk.collect, mounts.collect, software.collect],
)
def test_this_machine_can_be_looked_at(collect: Any) -> None:
    facts = collect(Request(check="x"))
    assert decode(type(facts), encode(facts)) == facts
