"""What a remote store's refusal means, whatever library said it.

fsspec's file systems raise what their client library raises: `OSError` with an errno that somebody chose, the
library's own tree, a bare time-out. Here each becomes one of six kinds, by error codes and class names; no
client library is imported. Only `Trouble.PASSING` is worth another try.

Texts of client libraries go to logs and terminals, so what looks like a credential is cut out of them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from enum import Enum
from typing import Any

from easyckpt.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
)

__all__ = ["RemoteTrouble", "Trouble", "trouble_of", "without_secrets"]

SAID_MAX = 300
"""Characters of a library's own words in a message."""


class Trouble(Enum):
    """What to do about it."""

    MISSING = "missing"
    CONFLICT = "conflict"
    DENIED = "denied"
    FULL = "full"
    PASSING = "passing"
    """Busy, slow, or the answer was lost: try again."""
    REFUSED = "refused"
    """Anything else: trying again changes nothing."""


_CODES = {
    "PreconditionFailed": Trouble.CONFLICT,
    "412": Trouble.CONFLICT,
    # S3: another conditional request for this key is on its way; its documentation says to try again.
    "ConditionalRequestConflict": Trouble.PASSING,
    "OperationAborted": Trouble.PASSING,
    "SlowDown": Trouble.PASSING,
    "ServiceUnavailable": Trouble.PASSING,
    "InternalError": Trouble.PASSING,
    "RequestTimeout": Trouble.PASSING,
    "Throttling": Trouble.PASSING,
    "ThrottlingException": Trouble.PASSING,
    "TooManyRequests": Trouble.PASSING,
    "IncompleteBody": Trouble.PASSING,
    "BadDigest": Trouble.PASSING,
    "429": Trouble.PASSING,
    "500": Trouble.PASSING,
    "502": Trouble.PASSING,
    "503": Trouble.PASSING,
    "504": Trouble.PASSING,
    "NoSuchBucket": Trouble.MISSING,
    "NoSuchKey": Trouble.MISSING,
    "NoSuchUpload": Trouble.MISSING,
    "404": Trouble.MISSING,
    "QuotaExceeded": Trouble.FULL,
    "XMinioAdminBucketQuotaExceeded": Trouble.FULL,
    "XMinioStorageFull": Trouble.FULL,
    "507": Trouble.FULL,
    "InvalidRange": Trouble.REFUSED,
    "401": Trouble.DENIED,
    "403": Trouble.DENIED,
}
"""Codes of S3's error answers, and of stores that speak its protocol; numbers are HTTP's."""

_DENIED_CLASSES = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
)
_PASSING_ERRNOS = frozenset(
    {
        errno.EBUSY, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE,
        errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN,
        getattr(errno, "EREMOTEIO", errno.EIO),
    }
)  # fmt: skip
_PASSING_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "fsspec.exceptions", "http.client", "urllib3")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(
    r"([?&](?:X-Amz-[\w-]+|AWSAccessKeyId|Signature|sig|token|se|sp|sv)=)[^&\s'\"]+", re.IGNORECASE
)
_SECRET_VARIABLES = re.compile(
    r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING|SAS", re.IGNORECASE
)


def _error_code(error: BaseException) -> str:
    """The store's own code for what went wrong, if it gave one."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        response: Any = getattr(here, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            if code:
                return str(code)
        status = (
            getattr(here, "status", None) or getattr(here, "status_code", None) or getattr(here, "code", None)
        )
        if isinstance(status, int):
            return str(status)
        here = here.__cause__
    return ""


def trouble_of(error: BaseException) -> Trouble:
    """Which kind it is."""
    known = _CODES.get(_error_code(error))
    if known is not None:
        return known
    if isinstance(error, FileNotFoundError):
        return Trouble.MISSING
    if isinstance(error, FileExistsError):
        return Trouble.CONFLICT
    if isinstance(error, PermissionError) or type(error).__name__ in _DENIED_CLASSES:
        return Trouble.DENIED
    if isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)):
        return Trouble.PASSING
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Trouble.FULL
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return Trouble.PASSING
    module = type(error).__module__
    if module.startswith(_PASSING_LIBRARIES) and not _error_code(error):
        return Trouble.PASSING
    return Trouble.REFUSED


def without_secrets(text: str) -> str:
    """The text without credentials, as far as they can be told: those of the environment, and those in
    URLs."""
    text = _QUERY.sub(r"\1…", _USERINFO.sub("…@", text))
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_VARIABLES.search(name):
            text = text.replace(value, "…")
    return text


_HINTS = {
    Trouble.DENIED: "look at the credentials and at what they may do: list, read, write and delete here",
    Trouble.FULL: "raise the quota, or keep fewer checkpoints: `easyckpt prune`",
    Trouble.PASSING: "it may pass: it is tried again with pauses that grow",
    Trouble.REFUSED: "look at the address, the options of this store and its own log",
}


class RemoteTrouble(Exception):
    """What a client library raised, judged. Stays inside `easyckpt.storage`, which makes an error of our
    tree of it.

    Args:
        error: what was raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.kind = trouble_of(error)
        self.code = _error_code(error)
        said = " ".join(without_secrets(str(error) or type(error).__name__).split())[:SAID_MAX]
        self.said = f"{said} ({self.code})" if self.code and self.code not in said else said
        super().__init__(self.said)

    def as_storage_error(self, *, doing: str, where: str) -> StorageError:
        """The error of our tree.

        Args:
            doing: what we were at: ``write``, ``read``, ``list``, ``delete``.
            where: the object's URL.
        """
        if self.kind is Trouble.CONFLICT:
            return StorageConflict("it is there already, and is not replaced", where=where)
        if self.kind is Trouble.MISSING:
            if self.code == "NoSuchBucket" or doing == "write":
                hint = "make it, or mend the URL"
                return StorageMissing("there is no such bucket or folder", where=where, hint=hint)
            return StorageMissing("it is not there", where=where, hint="`easyckpt ls` shows what is")
        branch = {Trouble.DENIED: StorageDenied, Trouble.FULL: StorageFull}.get(self.kind, StorageUnavailable)
        return branch(f"cannot {doing}: {self.said}", where=where, hint=_HINTS[self.kind])
