"""Checkpoints in S3: a real S3 protocol server in its own process, sound and in trouble."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import uuid

import pytest

from easyckpt.cli import main
from easyckpt.errors import StorageConflict, StorageDenied, StorageMissing, StorageUnavailable
from easyckpt.storage import open_storage
from easyckpt.storage.claims import ClaimLimits
from easyckpt.storage.fsspec import FsspecStorage
from easyckpt.storage.patience import Patience, RetryLimits
from easyckpt.testing import ConformanceCase, conformance_cases
from tests.s3_server import KEY_ID, SECRET, S3Server, s3_process, s3_server
from tests.store_tools import protocol_and_tools

__all__ = ["s3_process", "s3_server"]  # fixtures

QUICK = RetryLimits(attempts=4, first_pause_s=0.01, pause_max_s=0.05, request_s=30.0)


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return s3_server.url(f"runs/{uuid.uuid4().hex}")


@pytest.fixture
def store(url: str) -> FsspecStorage:
    return FsspecStorage(url, patience=Patience(QUICK))


@pytest.mark.parametrize("case", conformance_cases(), ids=lambda case: case.name)
def test_conformance(case: ConformanceCase, url: str) -> None:
    case.run(lambda: open_storage(url))


def test_a_long_object_goes_in_parts_and_comes_in_ranges(store: FsspecStorage, s3_server: S3Server) -> None:
    data = random.Random(1).randbytes((33 << 20) + 17)
    store.write_durable("body", memoryview(data), if_absent=True)
    asked = s3_server.requests()
    assert sum(line.startswith("PUT") and line.endswith("/body") for line in asked) == 3, "three parts"
    buffer = bytearray(len(data))
    assert store.read_into("body", memoryview(buffer)) == len(data)
    assert buffer == data
    assert sum(line.startswith("GET") for line in s3_server.requests()) == 5
    with pytest.raises(StorageConflict):
        store.write_durable("body", memoryview(data)[1:], if_absent=True)
    assert store.read("body") == data
    assert store.unfinished() == (), "the upload that lost was ended"


RACER = """
import sys
from easyckpt.errors import StorageConflict
from easyckpt.storage.claims import ClaimLimits
from easyckpt.storage.fsspec import FsspecStorage
url, name, settle_s = sys.argv[1:4]
store = FsspecStorage(url, claims=ClaimLimits(settle_s=float(settle_s)))
store.exists("warm")
print("ready", flush=True)
sys.stdin.readline()
try:
    store.write_durable("race", name.encode() * 100, if_absent=True)
except StorageConflict:
    print("lost", flush=True)
else:
    print("won", flush=True)
"""


def race(url: str, *, writers: int, settle_s: float = 2.0) -> list[str]:
    """Several processes create one object at the same moment; what each says."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, url, f"writer{number}", str(settle_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(writers)
    ]  # fmt: skip
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return [racer.communicate(timeout=120)[0].strip() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()


def test_of_two_committers_exactly_one_wins(url: str) -> None:
    said = race(url, writers=2)
    assert sorted(said) == ["lost", "won"]
    assert open_storage(url).read("race") == f"writer{said.index('won')}".encode() * 100


@pytest.mark.slow  # the claims settle for seconds
def test_without_conditional_requests_exactly_one_wins_too(url: str, s3_server: S3Server) -> None:
    s3_server.faults(ignore_conditions=True)
    said = race(url, writers=2, settle_s=4.0)
    assert sorted(said) == ["lost", "won"]
    store = FsspecStorage(url, claims=ClaimLimits(settle_s=0.01))
    assert store.read("race") == f"writer{said.index('won')}".encode() * 100
    with pytest.raises(StorageConflict):
        store.write_durable("race", b"late", if_absent=True)
    assert [entry.path for entry in store.list()] == ["race"]
    assert store.unfinished() == (), "no claim is left"


def test_a_busy_store_is_asked_again_a_bounded_number_of_times(
    store: FsspecStorage, s3_server: S3Server
) -> None:
    store.write_durable("warm", b"1", if_absent=True)
    s3_server.faults(refuse=3)
    store.write_durable("a", b"1" * 100)
    s3_server.faults(refuse=3)
    assert store.read("a") == b"1" * 100
    s3_server.faults(refuse=-1)
    s3_server.requests()
    for call in (lambda: store.write_durable("b", b"2"), lambda: store.read("a", 0, 10), store.list):
        with pytest.raises(StorageUnavailable, match="SlowDown"):
            call()
        assert len(s3_server.requests()) == QUICK.attempts
    s3_server.faults()
    assert [entry.path for entry in store.list()] == ["a", "warm"]


@pytest.mark.parametrize("length", [100, (16 << 20) + 5], ids=["put", "parts"])
def test_a_create_whose_answer_was_lost_is_ours(
    store: FsspecStorage, s3_server: S3Server, length: int
) -> None:
    store.write_durable("warm", b"1", if_absent=True)
    data = random.Random(length).randbytes(length)
    if length > 1000:
        s3_server.faults(lose_answers=4, only="/once")  # begin, both parts or one twice, or the completion
    else:
        s3_server.faults(lose_answers=1, only="/once")
    patient = FsspecStorage(store.where(), patience=Patience(RetryLimits(attempts=8, first_pause_s=0.01)))
    patient.write_durable("once", data, if_absent=True)
    assert store.read("once") == data
    s3_server.faults(lose_answers=1, only="/once")
    with pytest.raises(StorageConflict):
        store.write_durable("once", b"other", if_absent=True)
    assert store.read("once") == data


def test_a_store_that_does_not_answer_is_left_in_time(store: FsspecStorage, s3_server: S3Server) -> None:
    store.write_durable("a", b"1")
    s3_server.faults(delay_s=20.0, only="/a")
    limits = RetryLimits(attempts=2, first_pause_s=0.01, request_s=0.5)
    hasty = FsspecStorage(store.where(), patience=Patience(limits))
    with pytest.raises(StorageUnavailable, match="read"):
        hasty.read("a", 0, 1)
    s3_server.faults()
    assert store.read("a") == b"1"


def test_nobody_listens(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match="cannot list"):
        FsspecStorage(url, patience=Patience(QUICK)).list()


def test_refused_credentials_are_named_and_not_shown(
    url: str, s3_server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.faults(deny=True)
    s3_server.requests()
    with pytest.raises(StorageDenied, match="InvalidAccessKeyId") as caught:
        FsspecStorage(url).list()
    assert len(s3_server.requests()) == 1, "asking again would change nothing"
    assert "credentials" in caught.value.hint
    assert SECRET not in str(caught.value)
    assert main(["ls", url]) == 3
    out = capsys.readouterr()
    assert SECRET not in out.out + out.err
    assert KEY_ID not in out.out + out.err
    s3_server.faults()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(StorageDenied, match="credentials"):
        FsspecStorage(url, patience=Patience(QUICK)).list()


def test_a_bucket_that_is_not_there(s3_server: S3Server) -> None:
    store = FsspecStorage("s3://no-such-bucket/run")
    with pytest.raises(StorageMissing, match="no such bucket"):
        store.list()
    with pytest.raises(StorageMissing, match="no such bucket"):
        store.write_durable("a", b"1")


CUT_OFF = """
import os, signal, sys, threading
from easyckpt.storage import open_storage
from easyckpt.storage.s3 import S3Remote
call = S3Remote._call
def dying(self, method, **arguments):
    if method == "complete_multipart_upload":
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, method, **arguments)
S3Remote._call = dying
open_storage(sys.argv[1]).write_durable("data/body", bytes(17 << 20))
"""


def test_an_upload_that_was_cut_off_is_no_object_and_is_swept(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", CUT_OFF, url], check=False, capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    store = open_storage(url)
    assert store.list() == ()
    (left,) = store.unfinished()
    assert left.path.startswith("data/.new-")
    assert left.path.endswith("-body")
    store.delete(left.path)
    assert store.unfinished() == ()


def test_the_commit_protocol_and_the_tools(
    url: str, capsys: pytest.CaptureFixture[str], s3_server: S3Server
) -> None:
    protocol_and_tools(url, capsys)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET
