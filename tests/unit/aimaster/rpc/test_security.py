"""Secrets, and what connects with what: every pair of right, wrong and no secret."""

from __future__ import annotations

import asyncio
import datetime
import os
import stat
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest

from aimaster.errors import CredentialsMissing, FolderUnusable, SecretDiffers
from aimaster.ids import JobId
from aimaster.rpc import security
from aimaster.rpc.gen import contract
from aimaster.rpc.security import (
    Credentials,
    Secret,
    load_secret,
    make_secret_file,
    read_secret_fd,
    read_secret_file,
)
from aimaster.rpc.transport import Endpoint, Trouble, diagnose
from tests.unit.aimaster.rpc.recording_master import JOB, PATIENCE_S, Agent, RecordingMaster, serving, until

SECRET = b"a secret that is long enough"


def ours() -> Credentials:
    """Derived anew each time, as each process does."""
    return Credentials.from_secret(SECRET, job=JOB)


def test_holders_of_the_secret_talk() -> None:
    async def scenario() -> None:
        async with serving(RecordingMaster(), credentials=ours()) as (
            _,
            endpoint,
        ):
            agent = Agent(endpoint, credentials=ours()).start()
            await until(lambda: agent.connected)
            await agent.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("server", "client", "error", "sentence"),
    [
        ((SECRET, "job-1"), (b"another secret, also long", "job-1"), SecretDiffers, "secret differs"),
        ((SECRET, "job-2"), (SECRET, "job-1"), SecretDiffers, "another job"),
        ((SECRET, "job-1"), None, CredentialsMissing, "asks for the job secret"),
        (None, (SECRET, "job-1"), SecretDiffers, "does not ask for a job secret"),
    ],
)
def test_others_do_not_and_hear_why(
    server: tuple[bytes, str] | None,
    client: tuple[bytes, str] | None,
    error: type[Exception],
    sentence: str,
) -> None:
    def made(given: tuple[bytes, str] | None) -> Credentials:
        return (
            Credentials.insecure()
            if given is None
            else Credentials.from_secret(given[0], job=JobId(given[1]))
        )

    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master, credentials=made(server)) as (_, endpoint):
            with pytest.raises(error, match=sentence) as caught:
                await asyncio.wait_for(Agent(endpoint, credentials=made(client)).link.run(), PATIENCE_S)
            assert "--" in str(caught.value)
        assert master.hellos == []

    asyncio.run(scenario())


def test_a_caller_without_a_certificate_is_not_served() -> None:
    """It may know the authority, which every handshake shows; it does not hold the key."""

    async def scenario() -> None:
        master = RecordingMaster()
        authority = ours()._authority
        assert authority is not None
        async with serving(master, credentials=ours()) as (_, endpoint):
            trusting = grpc.ssl_channel_credentials(authority.certificate)
            options = (("grpc.ssl_target_name_override", security.SERVER_NAME),)
            async with grpc.aio.secure_channel(str(endpoint), trusting, options=options) as channel:
                call = channel.unary_unary(contract.GETSTATUS_METHOD)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=PATIENCE_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_leaf_of_a_caller_cannot_serve() -> None:
    """A member that only calls must not be able to pose as the master with its own certificate."""

    class Turned(Credentials):
        def _server_configuration(self):  # type: ignore[no-untyped-def]
            assert self._authority is not None
            leaf = self._authority.leaf(security.ExtendedKeyUsageOID.CLIENT_AUTH)
            self._server_leaf = leaf
            return security.grpc.ssl_server_certificate_configuration(
                [(leaf.key, leaf.certificate)], root_certificates=self._authority.certificate
            )

    async def scenario() -> None:
        credentials = ours()
        async with serving(RecordingMaster(), credentials=Turned.from_secret(SECRET, job=JOB)) as (
            _,
            endpoint,
        ):
            found = await diagnose(endpoint, credentials)
            assert found.trouble is Trouble.SECRET_DIFFERS

    asyncio.run(scenario())


def test_a_clock_that_is_days_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        future = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=30)
        monkeypatch.setattr(security, "_utc_now", lambda: future)
        async with serving(RecordingMaster(), credentials=ours()) as (
            _,
            endpoint,
        ):
            found = await diagnose(endpoint, ours())
            assert found.trouble is Trouble.CLOCK

    asyncio.run(scenario())


def test_leaves_are_renewed_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that lives for a month still lets agents in: its first leaf has expired by then."""

    async def scenario() -> None:
        server_side = ours()
        real_now = security._utc_now
        month = datetime.timedelta(days=30)
        monkeypatch.setattr(security, "_utc_now", lambda: real_now() - month)
        async with serving(RecordingMaster(), credentials=server_side) as (_, endpoint):
            monkeypatch.setattr(security, "_utc_now", real_now)
            agent = Agent(endpoint, credentials=ours()).start()
            await until(lambda: agent.connected)
            await agent.close()

    asyncio.run(scenario())


def test_nobody_there_is_told_apart() -> None:
    async def scenario() -> None:
        insecure = Credentials.insecure()
        async with serving(RecordingMaster()) as (_, endpoint):
            assert (await diagnose(endpoint, insecure)).trouble is Trouble.NONE
        assert (await diagnose(endpoint, insecure)).trouble is Trouble.UNREACHABLE
        missing = Endpoint(host="no-such-host.invalid", port=1)
        assert (await diagnose(missing, insecure)).trouble is Trouble.NAME

    asyncio.run(scenario())


def test_a_secret_is_never_shown() -> None:
    credentials = Credentials.from_secret(Secret(value=SECRET, source="test"), job=JOB)
    assert "secret that" not in repr(Secret(value=SECRET, source="test"))
    assert "secret that" not in repr(credentials)


def test_order_of_sources(tmp_path: Path) -> None:
    file, run_dir = tmp_path / "file", tmp_path / "run"
    run_dir.mkdir()
    file.write_bytes(b"  secret of the file, long\n")
    file.chmod(0o600)
    environ = {"AIMASTER_JOB_SECRET": "secret of the variable"}
    made = make_secret_file(run_dir)
    assert load_secret(secret_file=file, environ=environ, run_dir=run_dir) == Secret(
        value=b"secret of the file, long", source=str(file)
    )
    from_variable = load_secret(secret_file=None, environ=environ, run_dir=run_dir)
    assert from_variable is not None
    assert from_variable.value == b"secret of the variable"
    from_run_dir = load_secret(secret_file=None, environ={}, run_dir=run_dir)
    assert from_run_dir is not None
    assert from_run_dir.source == str(made)
    assert load_secret(secret_file=None, environ={}) is None


@pytest.mark.parametrize("content", [b"", b"short", b" \n" * 40])
def test_a_weak_secret_is_refused_with_a_way_to_make_one(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(CredentialsMissing, match="/dev/urandom") as caught:
        read_secret_file(file)
    assert str(file) in str(caught.value)


def test_a_secret_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CredentialsMissing, match="cannot be read"):
        read_secret_file(tmp_path / "nothing")


def test_a_file_for_everybody_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o644)
    read_secret_file(file)
    assert "chmod 600" in capsys.readouterr().err


def test_a_made_secret_is_private_and_made_once(tmp_path: Path) -> None:
    made: list[bytes] = []
    starts = threading.Barrier(8)

    def make() -> None:
        starts.wait()
        made.append(read_secret_file(make_secret_file(tmp_path)).value)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnusable):
        make_secret_file(tmp_path / "file")


def test_a_secret_from_a_descriptor() -> None:
    reader, writer = os.pipe()
    os.write(writer, SECRET + b"\n")
    os.close(writer)
    assert read_secret_fd(reader).value == SECRET
