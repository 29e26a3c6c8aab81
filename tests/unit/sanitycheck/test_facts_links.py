"""Reading ports, links and other machines: folders that look like sysfs, and real sockets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts import dcgm, links, rdma, reach
from sanitycheck.facts.request import Request
from sanitycheck.options import Known, Options


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def asked(**known: object) -> Request:
    return Request(check="x", options=Options(known=Known(**known)))  # type: ignore[arg-type]


# --- PCIe ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "generation"),
    [
        ("32.0 GT/s PCIe", 5),
        ("16.0 GT/s PCIe", 4),
        ("2.5 GT/s PCIe", 1),
        ("Unknown", 0),
        ("", 0),
        ("64.0 GT/s", 6),
    ],
)
def test_generations(speed: str, generation: int) -> None:
    assert links.generation_of(speed) == generation


def test_the_way_is_as_good_as_its_narrowest_bridge(tmp_path: Path) -> None:
    bridge = tmp_path / "devices/pci0000:00/0000:00:01.0"
    card = bridge / "0000:3b:00.0"
    tree(card, {"vendor": "0x10de", "max_link_speed": "32.0 GT/s PCIe\n", "max_link_width": "16\n"})
    tree(bridge, {"vendor": "0x8086", "max_link_speed": "16.0 GT/s PCIe\n", "max_link_width": "8\n"})
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus/0000:3b:00.0").symlink_to(card)
    assert links.path_limits("0000:3b:00.0", root=str(tmp_path / "bus")) == (4, 8)
    (bridge / "max_link_width").write_text("255\n")
    assert links.path_limits("0000:3b:00.0", root=str(tmp_path / "bus")) == (4, 16)
    assert links.path_limits("0000:99:00.0", root=str(tmp_path / "bus")) == (0, 0)


def test_addresses_and_error_counts() -> None:
    assert links.sysfs_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert links.parse_aer("RxErr 0\nBadTLP 3\nTOTAL_ERR_COR 3\n") == 3
    assert links.parse_aer(None) is None
    assert links.parse_aer("nonsense") is None


# --- RDMA ---------------------------------------------------------------------------------------------------

PORTS = {
    "mlx5_0/ports/1/state": "4: ACTIVE\n",
    "mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "mlx5_0/ports/1/counters/link_downed": "2\n",
    "mlx5_0/ports/1/counters/symbol_error": "odd\n",
    "mlx5_1/ports/1/state": "1: DOWN\n",
    "mlx5_1/ports/1/phys_state": "3: Disabled\n",
    "mlx5_1/ports/1/rate": "10 Gb/sec\n",
}


def test_ports_and_their_counters(tmp_path: Path) -> None:
    root = tree(tmp_path, PORTS)
    first, second = rdma.collect_ports(asked(), root=root).ports
    assert (first.name, first.state, first.physical) == ("mlx5_0/1", "ACTIVE", "LinkUp")
    assert first.rate_gbit == 400.0
    assert (second.state, second.physical) == ("DOWN", "Disabled")
    assert rdma.collect_counters(asked(), root=root).counters == {"mlx5_0/1.link_downed": 2}


def test_without_devices_it_does_not_apply_unless_ports_are_expected(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError):
        rdma.collect_ports(asked(), root=tmp_path / "none")
    assert rdma.collect_ports(asked(rdma_ports=8), root=tmp_path / "none").ports == ()
    with pytest.raises(NotApplicableError):
        rdma.collect_counters(asked(), root=tmp_path)


# --- other machines -----------------------------------------------------------------------------------------


def test_a_machine_that_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (target,) = reach.collect(asked(reach=(f"127.0.0.1:{port}",))).targets
    assert (target.problem, target.address) == ("", "127.0.0.1")
    assert target.mtu > 1000


def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (target,) = reach.collect(asked(reach=(f"127.0.0.1:{taken.getsockname()[1]}",))).targets
    assert target.problem == "refused"


@pytest.mark.parametrize("target", ["no.such.host.invalid:80", "127.0.0.1", "127.0.0.1:http"])
def test_what_is_no_address_is_said(target: str) -> None:
    assert reach.collect(asked(reach=(target,))).targets[0].problem == "name"


def test_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full answers to nobody, as a firewall that drops."""
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
            waiting.append(sock)
        (target,) = reach.collect(asked(reach=(f"127.0.0.1:{server.getsockname()[1]}",))).targets
        for sock in waiting:
            sock.close()
    assert target.problem == "timeout"


# --- DCGM ---------------------------------------------------------------------------------------------------

DCGM_OLD = """noise before
{"DCGM GPU Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [
 {"name": "GPU Memory", "results": [{"gpu_id": "0", "status": "PASS"},
                                    {"gpu_id": "1", "status": "FAIL", "warnings": "page retired"}]},
 {"name": "Pulse Test", "results": [{"gpu_id": "0", "status": "SKIP"}]}]}]}}"""
DCGM_NEW = """{"DCGM Diagnostic": {"test_categories": [{"tests": [
 {"name": "memory", "results": [{"entity_id": 0, "status": "Pass"}]}]}]}}"""


def test_both_forms_of_dcgms_answer_are_read() -> None:
    old = dcgm.parse_dcgm(DCGM_OLD)
    assert old.tests == 2
    (failed,) = old.failed
    assert (failed.name, failed.subject, failed.info) == ("GPU Memory", "1", "page retired")
    new = dcgm.parse_dcgm(DCGM_NEW)
    assert (new.tests, new.failed) == (1, ())


@pytest.mark.parametrize("text", ["{}", "no json", '{"a": ['])
def test_an_answer_that_says_nothing_is_no_pass(text: str) -> None:
    with pytest.raises(ValueError):
        dcgm.parse_dcgm(text)
