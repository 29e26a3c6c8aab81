"""What a refusal or a failed handshake means for whoever asked: one error each."""

from __future__ import annotations

from aimaster.errors import (
    AimasterError,
    AlreadyRunning,
    CredentialsMissing,
    JobMismatch,
    PeerRefused,
    ProtocolMismatch,
    SecretDiffers,
    SetupError,
)
from aimaster.rpc.messages import RefusalKind, Refused
from aimaster.rpc.transport import Diagnosis, Endpoint, Trouble


def refusal_error(refused: Refused, endpoint: Endpoint) -> AimasterError:
    """The error that a refusal becomes."""
    kinds: dict[RefusalKind, type[SetupError]] = {
        RefusalKind.PROTOCOL: ProtocolMismatch,
        RefusalKind.JOB: JobMismatch,
        RefusalKind.MISMATCH: JobMismatch,
        RefusalKind.ENDED: PeerRefused,
        RefusalKind.NODE_ID: AlreadyRunning,
    }
    facts = {"kind": refused.kind.value}
    return kinds[refused.kind](refused.message, where=f"master at {endpoint}", facts=facts)


def permanent_error(found: Diagnosis, endpoint: Endpoint) -> AimasterError | None:
    """The error of a trouble that trying again does not mend; None for the others."""
    where = f"master at {endpoint}"
    if found.trouble is Trouble.TLS_THERE:
        return CredentialsMissing(
            found.sentence,
            where=where,
            next_step="give the job's secret with --secret-file or AIMASTER_JOB_SECRET",
        )
    if found.trouble in (Trouble.SECRET_DIFFERS, Trouble.NO_TLS_THERE):
        return SecretDiffers(
            found.sentence, where=where, next_step="give every node the same --secret-file and --rdzv-id"
        )
    if found.trouble is Trouble.CLOCK:
        return SetupError(found.sentence, where=where, next_step="set the clock of both machines")
    return None
