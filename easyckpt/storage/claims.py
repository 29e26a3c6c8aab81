"""Creating an object only once on a store that cannot: neither conditional requests nor an exclusive rename.

A writer puts a *claim* beside the object (a commit object of its own name), waits until every claim that
could compete is to be seen, and looks. The oldest claim wins, by the store's own clock; of equally old ones
the one that sorts first. Losers withdraw. The winner writes the object, and withdraws its claim after that::

    1  look whether the object is there          else conflict
    2  put .claim-<name>-<token>                 if that took longer than half the settling time: withdraw
    3  wait for the settling time
    4  list the claims                           another one is before ours: withdraw, conflict
    5  look whether the object is there          else somebody won meanwhile: withdraw, conflict
    6  write the object, withdraw

Why it holds: two that are both past 1 before either is at 6 put their claims within the time that 2
allows, so each sees the other's at 4 and both judge alike. One that comes later finds the earlier claim,
which is older, or the object. It is Fischer's algorithm over a store, and like that it rests on time: a
winner that is stopped for minutes between 5 and 6 and then goes on could overwrite. It looks at its clock
before it writes, so what is left is a request that the network itself delivers minutes late. Stores with
conditional requests have no such gap; this is for those that have none.

A claim whose writer died is passed over when it is older than ``stale_s`` against our own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from easyckpt.errors import StorageConflict, StorageUnavailable

__all__ = ["CLAIM_PREFIX", "Claimed", "ClaimLimits", "ClaimStore", "create_by_claim", "wins"]

CLAIM_PREFIX = ".claim-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLimits:
    """Times of the protocol."""

    settle_s: float = 2.0
    """Longer than a claim takes from being asked for to being listed; S3-like stores need milliseconds."""
    stale_s: float = 300.0
    """A writer that has not come further in this time has died, or is told to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """One claim as a listing shows it."""

    token: str
    mtime_s: float


class ClaimStore(Protocol):
    """The plain operations that are needed."""

    def exists(self) -> bool: ...

    def put_claim(self, token: str) -> None: ...

    def claims(self) -> tuple[Claimed, ...]: ...

    def withdraw(self, token: str) -> None: ...

    def write(self) -> None: ...


def wins(ours: Claimed, others: tuple[Claimed, ...], *, stale_s: float) -> bool:
    """Whether our claim is before all others that still count. Pure."""
    living = [claim for claim in others if ours.mtime_s - claim.mtime_s < stale_s]
    return all((ours.mtime_s, ours.token) <= (claim.mtime_s, claim.token) for claim in living)


def create_by_claim(
    store: ClaimStore,
    *,
    where: str,
    limits: ClaimLimits,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Create the object, or raise that it is there.

    Raises:
        StorageConflict: it is there, or another writer is before us.
        StorageUnavailable: the store was too slow for the claim to be worth anything.
    """
    if store.exists():
        raise _conflict(where)
    token = secrets.token_hex(16)
    began = clock()
    try:
        store.put_claim(token)
        if clock() - began > limits.settle_s / 2:
            raise _slow(where, clock() - began)
        sleep(limits.settle_s)
        found = store.claims()
        ours = next((claim for claim in found if claim.token == token), None)
        if ours is None:
            raise _slow(where, clock() - began)
        others = tuple(claim for claim in found if claim.token != token)
        if not wins(ours, others, stale_s=limits.stale_s) or store.exists():
            raise _conflict(where)
        if clock() - began > limits.stale_s / 2:
            raise _slow(where, clock() - began)
        store.write()
    finally:
        store.withdraw(token)


def _conflict(where: str) -> StorageConflict:
    return StorageConflict("it is there already, or another writer is making it", where=where)


def _slow(where: str, took_s: float) -> StorageUnavailable:
    return StorageUnavailable(
        f"the store took {took_s:.1f} s to show a claim, too long to rely on it",
        where=where,
        hint="it is tried again; a store with conditional requests needs no claims",
    )
