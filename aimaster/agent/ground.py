"""What an agent stands on before anything is started: folders, secret, names.

Done once, synchronously, before the event loop: everything here either works at once or ends the command with
a sentence that says what to do.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aimaster.agent.address import LOOPBACK, address_towards, is_this_machine
from aimaster.agent.rundir import (
    RULES_FILE,
    RunDir,
    claim_run_dir,
    default_base,
    default_state_dir,
    folder_error,
    make_private,
    prune_states,
)
from aimaster.config import RendezvousConfig, RunConfig
from aimaster.ids import Incarnation
from aimaster.rpc.messages import Identity
from aimaster.rpc.security import Credentials, Secret, load_secret, make_secret_file

INCARNATION_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Folders, secret and names of one life of an agent."""

    run_dir: RunDir
    state_dir: Path
    identity: Identity
    credentials: Credentials
    secret_file: Path | None
    """Where helpers of ours read the secret; None when connections are plain."""
    address: str
    """At which other nodes reach this one."""
    listen_host: str
    """Where helpers of ours listen: loopback unless other nodes must reach them."""


def prepare_ground(config: RunConfig, env: Mapping[str, str]) -> Ground:
    """Claim folders and names.

    Raises:
        SetupError: A folder, the secret or the route to the master cannot be used.
    """
    job = config.rendezvous.job_id
    base = config.paths.run_dir or default_base(env)
    run_dir = claim_run_dir(base, job, wanted=config.nodes.node_id, env=env)
    try:
        state_dir = _state_dir(config, env)
        secret_file, secret = _secret(config, run_dir, env)
        loopback = config.rendezvous.loopback
        return Ground(
            run_dir=run_dir,
            state_dir=state_dir,
            identity=Identity(
                job=job,
                node=run_dir.node,
                incarnation=Incarnation(secrets.token_hex(INCARNATION_BYTES)),
            ),
            credentials=Credentials.insecure()
            if secret is None
            else Credentials.from_secret(secret, job=job),
            secret_file=secret_file,
            address=_address(config),
            listen_host=LOOPBACK if loopback else "0.0.0.0",
        )
    except BaseException:
        run_dir.remove()
        raise


def hosts_master(rendezvous: RendezvousConfig, node_rank: int | None) -> bool:
    """Whether this agent is to try to host the master.

    As under torchrun: ``is_host`` decides where it is given, node rank 0 of a static rendezvous hosts, and
    else the machine that the endpoint names.
    """
    if rendezvous.standalone:
        return True
    if rendezvous.is_host is not None:
        return rendezvous.is_host
    assert rendezvous.host is not None
    return is_this_machine(rendezvous.host) and node_rank in (None, 0)


def _state_dir(config: RunConfig, env: Mapping[str, str]) -> Path:
    given = config.paths.state_dir
    state_dir = (given or default_state_dir(env, config.rendezvous.job_id)).absolute()
    make_private(state_dir)
    if config.paths.rules is not None:
        # Beside the journal, where `aimaster explain` finds them long after the job.
        try:
            shutil.copyfile(config.paths.rules, state_dir / RULES_FILE)
        except shutil.SameFileError:
            pass
        except OSError as error:
            raise folder_error(error, state_dir) from error
    if given is None:
        prune_states(state_dir.parent, keep=state_dir)
    return state_dir


def _secret(config: RunConfig, run_dir: RunDir, env: Mapping[str, str]) -> tuple[Path | None, Secret | None]:
    """The job's secret and a file that holds it, so that it is on no command line."""
    paths = config.paths
    if paths.insecure:
        return None, None
    secret = load_secret(secret_file=paths.secret_file, environ=env)
    if paths.secret_file is not None:
        return paths.secret_file.absolute(), secret
    if secret is not None:
        return _write_secret(run_dir.path / "secret", secret), secret
    # Loopback only (the command line has seen to that): all agents of the job on this machine share one.
    shared = make_secret_file(run_dir.shared)
    return shared, load_secret(secret_file=shared, environ=env)


def _write_secret(path: Path, secret: Secret) -> Path:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secret.value)
    except OSError as error:
        raise folder_error(error, path.parent) from error
    return path


def _address(config: RunConfig) -> str:
    if config.nodes.local_addr is not None:
        return config.nodes.local_addr
    rendezvous = config.rendezvous
    if rendezvous.host is None or rendezvous.port is None:
        return LOOPBACK
    return address_towards(rendezvous.host, rendezvous.port)
