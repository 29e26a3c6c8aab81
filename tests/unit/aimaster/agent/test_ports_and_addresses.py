"""The held port is ours until the store listens on it; addresses are judged by this machine's own list."""

from __future__ import annotations

import socket

import pytest

from aimaster.agent.address import address_towards, is_this_machine
from aimaster.agent.ports import HeldPort
from aimaster.errors import MasterUnreachable


def test_nobody_else_gets_a_held_port_and_nobody_can_connect_to_it() -> None:
    with HeldPort() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.port), timeout=5)


@pytest.mark.parametrize("libuv", [True, False])
def test_torch_store_listens_on_a_held_port(libuv: bool) -> None:
    distributed = pytest.importorskip("torch.distributed")
    with HeldPort() as held:
        store = distributed.TCPStore("127.0.0.1", held.port, 1, is_master=True, use_libuv=libuv)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_held_ports_differ() -> None:
    with HeldPort() as one, HeldPort() as two:
        assert one.port != two.port


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "127.1.2.3", socket.gethostname()])
def test_own_names(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_foreign_names(host: str) -> None:
    assert not is_this_machine(host)


def test_address_towards_loopback_and_towards_nowhere() -> None:
    assert address_towards("localhost", 1) == "127.0.0.1"
    with pytest.raises(MasterUnreachable, match="cannot be resolved"):
        address_towards("no-such-host.invalid", 1)
