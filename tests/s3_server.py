"""A real S3 protocol server in a process of its own, with faults to switch on.

moto speaks the protocol; this adds what a store in trouble does. `POST /__faults__` with a JSON object sets:

* ``refuse``: answer the next so many requests with 503 SlowDown (-1: all of them, until it is set to 0);
* ``deny``: answer with 403, as to a wrong key;
* ``delay_s``: answer that late;
* ``lose_answers``: carry out the next so many writes, then hang up without an answer;
* ``ignore_conditions``: leave out ``If-None-Match``, as some stores do;
* ``only``: touch only requests whose path contains this text.

`GET /__requests__` tells what was asked since the last time. moto looks and puts in two moves, so conditional
requests are let in one at a time here: a real store makes them one move.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["S3Server", "s3_process", "s3_server"]

BUCKET = "training"
KEY_ID, SECRET = "AKIATESTTESTTESTTEST", "not-a-real-secret-0123456789"
START_S = 120.0


class Faulty:
    """WSGI middleware: see the module."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._faults: dict[str, Any] = {}
        self._requests: list[str] = []
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == "/__faults__":
            self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            return _answer(start, b"{}")
        if path == "/__requests__":
            with self._lock:
                asked, self._requests = self._requests, []
            return _answer(start, json.dumps(asked).encode())
        touched = self._faults.get("only", "") in path
        with self._lock:
            self._requests.append(f"{method} {path}")
            refuse = touched and self._take("refuse")
        if refuse:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error(start, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if touched and self._faults.get("deny"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error(start, "403 Forbidden", "InvalidAccessKeyId", f"The key {KEY_ID} is not known.")
        if touched and self._faults.get("delay_s"):
            time.sleep(self._faults["delay_s"])
        if self._faults.get("ignore_conditions"):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self._one_at_a_time:
            answer = list(self._app(environ, start))
        with self._lock:
            lose = touched and method in ("PUT", "POST") and self._take("lose_answers")
        if lose:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("the answer is lost")
        return answer

    def _take(self, name: str) -> bool:
        left = self._faults.get(name, 0)
        if left > 0:
            self._faults[name] = left - 1
        return left != 0


def _answer(start: Callable[..., Any], body: bytes) -> list[bytes]:
    start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def _error(start: Callable[..., Any], status: str, code: str, message: str) -> list[bytes]:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def main() -> None:
    """Serve on a free port of loopback, and print it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None: ...

    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)  # type: ignore[arg-type]
    print(server.server_port, flush=True)
    server.serve_forever()


@dataclass
class S3Server:
    """A server that runs."""

    endpoint: str

    def url(self, folder: str) -> str:
        """A checkpoint folder in its bucket."""
        return f"s3://{BUCKET}/{folder}"

    @property
    def environment(self) -> dict[str, str]:
        """How a user points a client at it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def faults(self, **faults: Any) -> None:
        """Switch them on; none switches all off."""
        self._talk("/__faults__", json.dumps(faults).encode())

    def requests(self) -> list[str]:
        """``METHOD /path`` of each request since the last call."""
        return list(json.loads(self._talk("/__requests__", None)))

    def make_bucket(self) -> None:
        """Create the bucket that `url` is in."""
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def _talk(self, path: str, data: bytes | None) -> bytes:
        with urllib.request.urlopen(self.endpoint + path, data=data, timeout=60) as answer:
            return bytes(answer.read())


@contextmanager
def running_server() -> Iterator[S3Server]:
    """Start one, and end it."""
    env = {**os.environ, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.s3_server"], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip(), "the S3 server did not start"
        server = S3Server(endpoint=f"http://127.0.0.1:{int(line)}")
        server.make_bucket()
        yield server
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def s3_process() -> Iterator[S3Server]:
    """A server for the tests of one file."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    with running_server() as server:
        yield server


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server without faults; this process's environment points at it."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    s3_process.faults()
    s3_process.requests()
    yield s3_process
    s3_process.faults()


if __name__ == "__main__":
    main()
