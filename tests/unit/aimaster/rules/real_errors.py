"""Makes real failures, one after the other in one process, and prints what each said as JSON: name → text.

Run by `test_real_errors.py`; what needs no framework costs nothing here beyond the import of torch.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset[int]):
    """Raises in a data worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise KeyError("label")


class Leaves(Dataset[int]):
    """Ends its data worker without a word."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        os._exit(3)


def listen_twice() -> None:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        one.listen()
        two.bind(one.getsockname())


def store_at_a_taken_port() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        dist.TCPStore("127.0.0.1", one.getsockname()[1], 1, True, use_libuv=False)


def full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def open_too_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
    held: list[object] = []
    try:
        while True:
            held.append(open("/dev/null"))  # noqa: SIM115
    finally:
        del held
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def torn_archive() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        torch.save({"a": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
        torch.load(path)


def torn_safetensors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(b"\xff" * 100)
        safetensors.torch.load_file(path)


def pickled_function() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        torch.save({"a": Broken()}, path)
        torch.load(path)


def changed_in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def backward_twice() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    y.backward()


def nan_found() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        x = torch.zeros(1, requires_grad=True)
        (torch.sqrt(x) * 0).sum().backward()


def endless() -> None:
    endless()


def other_groups() -> None:
    one = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    two = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    two.load_state_dict(one.state_dict())


FAILURES: dict[str, Callable[[], object]] = {
    "address_in_use": listen_twice,
    "address_in_use store": store_at_a_taken_port,
    "disk_full": full_disk,
    "too_many_open_files": open_too_many,
    "torn_zip_archive": torn_archive,
    "safetensors_damaged": torn_safetensors,
    "weights_only_refused": pickled_function,
    "inplace_modified": changed_in_place,
    "backward_twice": backward_twice,
    "nan_detected": nan_found,
    "recursion": endless,
    "optimizer_state_mismatch": other_groups,
    "state_dict_mismatch": lambda: torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict()),
    "shape_mismatch": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "wrong_dtype": lambda: torch.ones(2, 3) @ torch.ones(3, 2, dtype=torch.float64),
    "host_cannot_allocate": lambda: torch.empty(10**15),
    "file_missing": lambda: Path("/nowhere/to/be/found").read_text(),
    "host_name_unknown": lambda: socket.getaddrinfo("no-such-host.invalid", 80),
    "module_missing": lambda: __import__("no_such_module_at_all"),
    "library_missing": lambda: __import__("ctypes").CDLL("libnowhere.so.1"),
    "syntax_error": lambda: compile("def f(:", "x.py", "exec"),
    "json_broken": lambda: json.loads(""),
    "group_not_initialised": lambda: dist.all_reduce(torch.ones(1)),
    "backend_missing": lambda: dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:1", rank=0, world_size=1
    ),
    "data_worker_exception": lambda: next(iter(DataLoader(Broken(), num_workers=1))),
    "data_worker_exited": lambda: next(iter(DataLoader(Leaves(), num_workers=1))),
    "library_key_error": lambda: {}["label"],
}


def main() -> None:
    """Print what every failure said, as its traceback ends."""
    said: dict[str, str] = {}
    for name, fail in FAILURES.items():
        try:
            fail()
        except Exception as error:
            said[name] = "".join(traceback.format_exception_only(error)).strip()
        else:
            said[name] = ""
    try:
        raise AssertionError("lengths differ")
    except AssertionError as error:
        said["assertion"] = "".join(traceback.format_exception_only(error)).strip()
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
