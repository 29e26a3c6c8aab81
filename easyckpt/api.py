"""The public face: `Checkpointer`, and the same as functions with a default checkpointer.

A save copies into the saver's memory what may change before it returns, and the rest (parameters, optimizer
state) while the next forward and backward run; an optimizer's step waits for it (`easyckpt.overlap`).
Hashing, copying to a peer and writing to storage happen in the saver process, whatever becomes of this one.
Trouble in the background is never raised from `Checkpointer.save`: it is in the handle, at `SaveHandle.wait`,
at `Checkpointer.close` and in the log. `save` itself raises only what the calling code has to change.

A checkpointer is used by one thread, in the process that made it.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, SupportsIndex

import msgspec

from easyckpt import watched
from easyckpt.bootstrap import Mooring, moor
from easyckpt.errors import (
    EasyckptError,
    EnvironmentFault,
    Misuse,
    SaveNotDone,
    SaverUnavailable,
    Unprotected,
)
from easyckpt.gate import Gate
from easyckpt.handle import SaveHandle
from easyckpt.keep import KeepPolicy
from easyckpt.link import RankLink
from easyckpt.only import Selection
from easyckpt.options import Interval, absolute_root, open_options
from easyckpt.overlap.fence import fence
from easyckpt.overlap.stager import Stager
from easyckpt.overlap.witness import VERIFY_KINDS, Verify
from easyckpt.resume import resume
from easyckpt.saver.protocol import Closed, StageInfo
from easyckpt.state import check_state

__all__ = ["Checkpointer", "close", "fence", "init", "load", "save"]

RETRY_SAVER_S = 1.0
"""How often a lost saver is looked for, at most."""
CLOSE_TIMEOUT_S = 600.0

_LOG = logging.getLogger("easyckpt")


class Checkpointer:
    """Saves a training state to memory, a peer and storage, and brings it back.

    Args:
        root: the checkpoint folder, or a URL; None takes ``EASYCKPT_DIR``.
        interval: which steps are saved at all: each one (None), every so many steps (int) or seconds
            (float), or ``"auto"``, what loses least. With ``block=True`` a step is saved whatever the
            interval.
        disk_interval: which of them go to storage: whenever the last one is done (None), steps or seconds.
        keep: how many durable steps stay, or a policy: ``KeepLatest(2) | KeepEvery(1000)``.
        overlap: whether the copy goes on behind `save`; None measures what costs training less.
        verify: how a copy that goes on behind `save` is proved: ``sample`` compares version counters and a
            sample of the bytes, ``full`` a digest of every byte, which is taken within `save`.
        max_unprotected_s: `save` raises when nothing became durable for so long; choose several times what
            lies between two durable steps. None: it never does, whatever becomes of the storage.

    Raises:
        Misuse: no folder is named, or an argument is not possible.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        interval: Interval = None,
        disk_interval: int | float | None = None,
        keep: int | KeepPolicy = 2,
        overlap: bool | None = None,
        verify: Verify = "sample",
        max_unprotected_s: float | None = None,
    ) -> None:
        self._root = absolute_root(root)
        if verify not in VERIFY_KINDS:
            raise Misuse(f"verify={verify!r} is not possible", hint=f"one of {', '.join(VERIFY_KINDS)}")
        self._open_options = open_options(
            self._root,
            interval=interval,
            disk_interval=disk_interval,
            keep=keep,
            max_unprotected_s=max_unprotected_s,
        )
        self._gate = Gate(interval if isinstance(interval, int) else 1)
        # Only reads the environment: where an agent started us, a missing variable is seen here and not
        # later.
        self._mooring: Mooring | None = moor(self._root) if os.environ.get("EASYCKPT_SAVER") else None
        self._link: RankLink | None = None
        self._stager = Stager(overlap=overlap, verify=verify)
        self._loads = 0
        self._continuing = False
        self._closed = False
        self._lost = False
        self._lost_at = 0.0
        self._retry_at = 0.0
        self.restored_from: str | None = None
        """Tier that the last load came from: ``memory``, ``peer`` or ``disk``."""

    @property
    def root(self) -> str:
        """The checkpoint folder."""
        return self._root

    @watched.during("loading")
    def load(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Iterable[str] | None = None,
    ) -> int | None:
        """Bring a saved state back, in place. Every rank has to call it.

        The number of ranks and the way in which the state is cut may be others than when it was saved.

        Args:
            state: as given to `save`; tensors keep their memory, plain values are replaced.
            step: which; None is the newest that all ranks can have.
            strict: whether missing, unexpected, reshaped or retyped keys are errors.
            only: key paths or patterns (``"model.encoder"``, ``"*.bias"``): nothing else is loaded or
                compared.

        Returns:
            The step, or None if there never was a checkpoint here.

        Raises:
            StateMismatch: the state differs from what was saved; nothing was changed.
            NothingToLoad: there was progress, and none of it can be loaded.
            SaverUnavailable: the saver is gone or does not answer.
        """
        self._check_open()
        check_state(state)
        self._settle()
        self._stager.forget()
        self._gate.forget()
        link, index = self._connected(), self._loads
        self._loads += 1
        wanted = None if step is None else _step(step)
        begin_s = time.monotonic()
        found = resume(link, state, index=index, step=wanted, strict=strict, only=Selection(only))
        watched.loaded(time.monotonic() - begin_s)
        self._continuing = True
        self.restored_from = None if found is None else found.tier
        if found is None:
            return None
        size = ""
        if found.body_bytes:
            self._stager.prepare(link, found.body_bytes)
            size = f": {found.body_bytes / 1e9:.3g} GB in {time.monotonic() - begin_s:.2f} s"
        _LOG.info("resumed from step %d (%s)%s", found.step, found.tier, size)
        return found.step

    @watched.holding
    def save(
        self,
        state: dict[str, Any],
        *,
        step: SupportsIndex,
        metrics: Mapping[str, float] | None = None,
        block: bool = False,
    ) -> SaveHandle:
        """Save a state as it is now. Parameters and optimizer state are copied until the next optimizer step.

        Every rank has to call it for the same steps; there is no collective in it. Code that changes
        parameters or optimizer state by hand, and not in an optimizer's step, calls `fence` first.

        Args:
            state: a dict of modules, optimizers, objects with ``state_dict``, tensors and plain values.
            step: training step, growing from save to save.
            metrics: numbers that are kept with the checkpoint.
            block: wait for a slot instead of skipping the step when both are in use.

        Returns:
            The save on its way; it may be skipped already, and says why.

        Raises:
            Misuse: the state or the step cannot be saved; the key path is named.
            Unprotected: nothing became durable for longer than ``max_unprotected_s``.
        """
        self._check_open()
        number = _step(step)
        early = self._gate.early(number, block=block)
        if early is not None:
            return early
        self._settle()
        began = time.monotonic()
        self._stager.capture(state)
        try:
            link = self._connected()
            link.cost_s = self._gate.cost_s
            handle = self._stager.stage(link, number, metrics=dict(metrics or {}), block=block)
        except EnvironmentFault as error:
            self._lose_saver(error)
            self._check_protected(error)
            info = StageInfo(step=number, stage="failed", reason=str(error))
            return SaveHandle(number, seat=None, info=info)
        self._continuing = True
        self._gate.told(handle, time.monotonic() - began)
        return handle

    def fence(self) -> None:
        """Wait until the last save reads nothing of the state any more. See `easyckpt.fence`."""
        fence()

    def _settle(self) -> None:
        """Wait until the last save is sealed or given up."""
        trouble = self._stager.settle()
        if trouble is not None:
            self._lose_saver(trouble)

    def _connected(self) -> RankLink:
        if self._link is not None:
            return self._link
        if self._lost and time.monotonic() < self._retry_at:
            raise SaverUnavailable("the saver process is gone", hint="it is looked for again in a moment")
        options = self._open_options
        if self._continuing:
            options = msgspec.structs.replace(options, continuing=True)
        if self._mooring is None:
            self._mooring = moor(self._root)
        elif self._lost:
            self._mooring.revive()
        self._link = RankLink(self._mooring.seat, options)
        if self._lost:
            _LOG.warning("the saver process is back; saving goes on")
            self._lost = False
        return self._link

    def _check_protected(self, error: EasyckptError) -> None:
        """Without a saver nothing gets durable either."""
        limit = self._open_options.max_unprotected_s
        if limit and time.monotonic() - self._lost_at > limit:
            raise Unprotected(
                f"no saver process for {limit:g} s", where=self._root, hint=str(error)
            ) from error

    def _lose_saver(self, error: EasyckptError) -> None:
        if not self._lost:
            self._lost_at = time.monotonic()
            _LOG.warning("steps are not saved: %s", error)
        if not self._lost or time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_SAVER_S
        self._lost = True
        if self._link is not None:
            self._link.close()
            self._link = None

    @watched.during("saving")
    def close(self, *, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Make the newest step durable, and take leave. May be called twice.

        Args:
            timeout: seconds that the last write may take.

        Raises:
            SaveNotDone: the newest step is in memory only; it says why.
            StaleGeneration: another life of the job has taken over; it has the steps.
        """
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._stager.close()
        link, self._link = self._link, None
        if link is None:
            return
        try:
            closed = link.goodbye(timeout)
        except SaverUnavailable as error:
            raise SaveNotDone(
                "the saver process ended before it said what is durable", hint="`easyckpt ls` shows what is"
            ) from error
        finally:
            link.close()
        self._check_closed(closed)

    def _check_closed(self, closed: Closed) -> None:
        if closed.memory_step is None or closed.durable_step == closed.memory_step:
            return
        durable = "no step" if closed.durable_step is None else f"step {closed.durable_step}"
        raise SaveNotDone(
            f"step {closed.memory_step} was saved in memory, and {durable} is durable: {closed.degraded}",
            where=self._root,
            hint="mend the storage and save again; `easyckpt ls` shows what is there",
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse("this checkpointer is closed", hint="make a new one")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # The saver lingers, so that the next attempt finds its memory; waiting here would only delay it.
        self._closed = True
        self._settle()
        self._stager.close()
        if self._link is not None:
            self._link.close()
            self._link = None


def _step(value: SupportsIndex) -> int:
    try:
        step = operator.index(value)
    except TypeError:
        raise Misuse(f"a step is a whole number, not {value!r}") from None
    if isinstance(value, bool) or not 0 <= step < 10**15:
        raise Misuse(f"step={value!r} is not possible", hint="a whole number from 0 on")
    return step


_default: Checkpointer | None = None


def init(
    root: str | os.PathLike[str] | None = None,
    *,
    interval: Interval = None,
    disk_interval: int | float | None = None,
    keep: int | KeepPolicy = 2,
    overlap: bool | None = None,
    verify: Verify = "sample",
    max_unprotected_s: float | None = None,
) -> Checkpointer:
    """Make the default checkpointer, which `save` and `load` use. See `Checkpointer` for the arguments.

    Raises:
        Misuse: there is one already.
    """
    global _default
    if _default is not None:
        raise Misuse("there is a default checkpointer already", hint="call easyckpt.close() first")
    _default = Checkpointer(
        root,
        interval=interval,
        disk_interval=disk_interval,
        keep=keep,
        overlap=overlap,
        verify=verify,
        max_unprotected_s=max_unprotected_s,
    )
    return _default


def _get_default() -> Checkpointer:
    return _default if _default is not None else init()


def save(
    state: dict[str, Any],
    *,
    step: SupportsIndex,
    metrics: Mapping[str, float] | None = None,
    block: bool = False,
) -> SaveHandle:
    """`Checkpointer.save` of the default checkpointer."""
    return _get_default().save(state, step=step, metrics=metrics, block=block)


def load(
    state: dict[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    only: str | Iterable[str] | None = None,
) -> int | None:
    """`Checkpointer.load` of the default checkpointer."""
    return _get_default().load(state, step=step, strict=strict, only=only)


def close(*, timeout: float = CLOSE_TIMEOUT_S) -> None:
    """`Checkpointer.close` of the default checkpointer; nothing if there is none."""
    global _default
    checkpointer, _default = _default, None
    if checkpointer is not None:
        checkpointer.close(timeout=timeout)
