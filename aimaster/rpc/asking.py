"""Asks a master for its job's status, for commands of people: blocks, and says why there is no answer."""

from __future__ import annotations

import asyncio

import grpc

from aimaster.errors import AimasterError, BadMessage, JobMismatch, MasterUnreachable
from aimaster.ids import JobId
from aimaster.rpc.gen import contract
from aimaster.rpc.refusals import permanent_error
from aimaster.rpc.security import Credentials
from aimaster.rpc.status import JobStatus, decode_status, encode_status_request
from aimaster.rpc.transport import Endpoint, Trouble, diagnose, open_blocking_channel

__all__ = ["fetch_status"]


def fetch_status(
    endpoint: Endpoint, credentials: Credentials, *, job: JobId | None, timeout_s: float
) -> JobStatus:
    """Ask a master. Blocks; for commands of people.

    Raises:
        MasterUnreachable: if no master answers there in time.
        SecretDiffers, CredentialsMissing: if it does not believe us.
        JobMismatch: if it leads another job.
        BadMessage: if what answers is not a master of ours.
    """
    where = f"master at {endpoint}"
    with open_blocking_channel(endpoint, credentials) as channel:
        ask = channel.unary_unary(contract.GETSTATUS_METHOD, None, None)
        try:
            return decode_status(ask(encode_status_request(job), timeout=timeout_s))
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.NOT_FOUND:
                raise JobMismatch(details, where=where) from error
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise BadMessage("what answers is not a master", where=where) from error
            raise _no_answer(endpoint, credentials, details or code.name) from error


def _no_answer(endpoint: Endpoint, credentials: Credentials, details: str) -> AimasterError:
    """Why a master does not answer: found out by another connection, since gRPC only says that it did not."""
    found = asyncio.run(diagnose(endpoint, credentials))
    permanent = permanent_error(found, endpoint)
    if permanent is not None:
        return permanent
    sentence = details if found.trouble is Trouble.NONE else found.sentence
    return MasterUnreachable(
        f"the master does not answer: {sentence}",
        where=str(endpoint),
        next_step="check that the job runs and that this machine reaches its master's host and port",
    )
