"""Checkpoints in Google's object store: a real protocol server, and a cable that is cut."""

from __future__ import annotations

import logging
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from easyckpt.errors import StorageConflict, StorageMissing, StorageUnavailable
from easyckpt.storage import open_storage
from easyckpt.storage.fsspec import FsspecStorage
from easyckpt.storage.patience import Patience, RetryLimits
from easyckpt.testing import ConformanceCase, conformance_cases
from tests.ckpt_nodes import make_nodes
from tests.gcs_server import GcsServer, gcs_process, gcs_server
from tests.store_tools import protocol_and_tools

__all__ = ["gcs_process", "gcs_server"]  # fixtures

# gcsfs hands aiohttp whole objects as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

WRITERS = 4


@pytest.fixture
def url(gcs_server: GcsServer) -> str:
    return gcs_server.url(f"runs/{uuid.uuid4().hex}")


@pytest.mark.parametrize("case", conformance_cases(), ids=lambda case: case.name)
def test_conformance(case: ConformanceCase, url: str) -> None:
    case.run(lambda: open_storage(url))


def test_of_many_committers_exactly_one_wins(url: str, caplog: pytest.LogCaptureFixture) -> None:
    stores = [FsspecStorage(url) for _ in range(WRITERS)]
    together = threading.Barrier(WRITERS)

    def commit(writer: int, name: str) -> bool:
        together.wait(60)
        try:
            stores[writer].write_durable(name, f"writer{writer}".encode() * 100, if_absent=True)
        except StorageConflict:
            return False
        return True

    with caplog.at_level(logging.WARNING, "easyckpt.storage"), ThreadPoolExecutor(WRITERS) as pool:
        for name in ("a", "b", "c"):
            won = list(pool.map(commit, range(WRITERS), [name] * WRITERS))
            assert won.count(True) == 1
            assert stores[0].read(name) == f"writer{won.index(True)}".encode() * 100
    assert "claimed" not in caplog.text, "it is the store that decides, by the condition"


@pytest.mark.parametrize("fault", ["cut", "deafen"])
def test_a_connection_that_ends_in_the_middle(url: str, gcs_server: GcsServer, fault: str) -> None:
    store = FsspecStorage(url)
    store.write_durable("warm", b"1", if_absent=True)
    data = random.Random(fault).randbytes(3 << 20)
    setattr(gcs_server.cable, fault, 1)
    store.write_durable("once", data, if_absent=True)
    assert getattr(gcs_server.cable, fault) == 0, "it happened"
    assert store.read("once") == data
    setattr(gcs_server.cable, fault, 1)
    with pytest.raises(StorageConflict):
        store.write_durable("once", data[1:], if_absent=True)
    assert store.read("once") == data
    assert [entry.path for entry in store.list()] == ["once", "warm"]


def test_an_upload_that_is_cut_off_for_good_is_no_object(url: str, gcs_server: GcsServer) -> None:
    limits = RetryLimits(attempts=2, first_pause_s=0.01, request_s=0.5)
    store = FsspecStorage(url, patience=Patience(limits))
    gcs_server.cable.cut = 1000
    with pytest.raises(StorageUnavailable, match="cannot write"):
        store.write_durable("data/body", bytes(1 << 20))
    sound = FsspecStorage(url)  # what is read is not cut
    assert sound.list() == ()
    assert sound.stat("data/body") is None


@pytest.mark.parametrize("if_absent", [False, True], ids=["in pieces", "in one request"])
def test_a_long_object(url: str, if_absent: bool) -> None:
    """gcsfs sends what is 50 MiB or longer in several requests, and then a condition may get lost."""
    store = FsspecStorage(url)
    data = random.Random(1).randbytes((51 << 20) + 17)
    store.write_durable("body", data, if_absent=if_absent)
    buffer = bytearray(len(data))
    assert store.read_into("body", memoryview(buffer)) == len(data)
    assert buffer == data
    with pytest.raises(StorageConflict):
        store.write_durable("body", memoryview(data)[1:], if_absent=True)
    assert store.read("body", 0, 100) == data[:100]


def test_a_bucket_that_is_not_there(gcs_server: GcsServer) -> None:
    store = FsspecStorage("gs://no-such-bucket/run")
    with pytest.raises(StorageMissing):
        store.write_durable("a", b"1")


def test_the_commit_protocol_and_the_tools(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    protocol_and_tools(url, capsys)


def test_a_saver_saves_there_and_another_loads(
    url: str, tmp_path: Path, clean_env: pytest.MonkeyPatch, gcs_server: GcsServer
) -> None:
    for name, value in gcs_server.environment.items():
        clean_env.setenv(name, value)
    saved = {"weight": torch.randn(5000), "step": 7}
    with make_nodes(tmp_path, clean_env, root=url) as nodes:
        node = nodes.start()
        nodes.begin(1, [node])
        (worker,) = nodes.workers()
        worker.save(saved, step=7, block=True).wait("durable", 120)
        node.kill()
        nodes.begin(1, [nodes.start()], progress=True)
        (worker,) = nodes.workers()
        state = {"weight": torch.zeros(5000), "step": 0}
        assert worker.load(state) == 7
        assert worker.restored_from == "disk"
    assert torch.equal(state["weight"], saved["weight"])
