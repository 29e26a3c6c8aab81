"""All checks, in the order of the report. Adding one means one entry in a module here, a ``collect`` and a
``judge``."""

from __future__ import annotations

from sanitycheck.catalogue.devices import DEVICE_CHECKS
from sanitycheck.catalogue.fleet import FLEET_CHECKS
from sanitycheck.catalogue.measures import MEASURE_CHECKS
from sanitycheck.catalogue.network import NETWORK_CHECKS
from sanitycheck.catalogue.node import NODE_CHECKS
from sanitycheck.check import Check
from sanitycheck.errors import UnknownCheckError, UsageError
from sanitycheck.result import Level

__all__ = ["CHECKS", "by_id", "choose"]

_FAMILIES = (
    "env",
    "gpu",
    "link",
    "host",
    "net",
    "sw",
    "store",
    "cpu",
    "num",
    "perf",
    "mem",
    "train",
    "coll",
    "deep",
)

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (*NODE_CHECKS, *DEVICE_CHECKS, *NETWORK_CHECKS, *MEASURE_CHECKS, *FLEET_CHECKS),
        key=lambda check: _FAMILIES.index(check.id.split(".", 1)[0]),
    )
)

_BY_ID = {check.id: check for check in CHECKS}


def by_id(check: str) -> Check:
    """The check of this id.

    Raises:
        UnknownCheckError: There is none.
    """
    if check not in _BY_ID:
        raise UnknownCheckError(check, known=tuple(_BY_ID))
    return _BY_ID[check]


def choose(level: Level, *, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """The checks of a run, in the order of the catalogue.

    Args:
        level: All of it and of the levels before it, unless ``only`` says which.
        only: Ids, whatever their level.
        skip: Ids to leave out.

    Raises:
        UnknownCheckError: An id that does not exist.
        UsageError: Nothing is left to run.
    """
    wanted = {by_id(check).id for check in only}
    unwanted = {by_id(check).id for check in skip}
    chosen = tuple(
        check
        for check in CHECKS
        if (check.id in wanted if wanted else level.includes(check.level)) and check.id not in unwanted
    )
    if not chosen:
        raise UsageError("no check is left to run; see --only and --skip")
    return chosen
