"""The public face: `Checkpointer`, and the same as functions with a default checkpointer.

A save copies the state into the saver's memory before it returns; hashing, copying to a peer and writing to
storage happen in the saver process, whatever becomes of this one. Trouble in the background is never raised
from `Checkpointer.save`: it is in the handle, at `SaveHandle.wait`, at `Checkpointer.close` and in the log.
`save` itself raises only what the calling code has to change.

A checkpointer is used by one thread, in the process that made it.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, SupportsIndex

from easyckpt.bootstrap import Mooring, moor
from easyckpt.errors import EasyckptError, EnvironmentFault, Misuse, SaveNotDone, SaverUnavailable
from easyckpt.handle import SaveHandle
from easyckpt.layout import Layout, layout_to_dict
from easyckpt.link import Grant, RankLink
from easyckpt.only import Selection
from easyckpt.resume import resume
from easyckpt.saver.protocol import Closed, Open, StageInfo
from easyckpt.snapshot import fit_layout, write
from easyckpt.state import Capture, capture, check_state

__all__ = ["Checkpointer", "close", "init", "load", "save"]

RETRY_SAVER_S = 1.0
"""How often a lost saver is looked for, at most."""

CLOSE_TIMEOUT_S = 600.0

_LOG = logging.getLogger("easyckpt")


class Checkpointer:
    """Saves a training state to memory, a peer and storage, and brings it back.

    Args:
        root: the checkpoint folder, or a URL; None takes ``EASYCKPT_DIR``.
        disk_interval: how often a step goes to storage: whenever the last one is done (None), every so many
        steps
            (int) or seconds (float).
        keep: how many durable steps stay.

    Raises:
        Misuse: no folder is named, or an argument is not possible.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        disk_interval: int | float | None = None,
        keep: int = 2,
    ) -> None:
        self._root = _absolute(root)
        self._open_options = _options(self._root, disk_interval, keep)
        # Only reads the environment: where an agent started us, a missing variable is seen here and not
        # later.
        self._mooring: Mooring | None = moor(self._root) if os.environ.get("EASYCKPT_SAVER") else None
        self._link: RankLink | None = None
        self._layout: Layout | None = None
        self._layout_wire = b""
        self._loads = 0
        self._continuing = False
        self._closed = False
        self._lost = False
        self._retry_at = 0.0
        self.restored_from: str | None = None
        """Tier that the last load came from: ``memory``, ``peer`` or ``disk``."""

    @property
    def root(self) -> str:
        """The checkpoint folder."""
        return self._root

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
        link = self._connected()
        index = self._loads
        self._loads += 1
        wanted = None if step is None else _step(step)
        found = resume(link, state, index=index, step=wanted, strict=strict, only=Selection(only))
        self._continuing = True
        self.restored_from = None if found is None else found.tier
        if found is None:
            return None
        _LOG.info("resumed from step %d (%s)", found.step, found.tier)
        return found.step

    def save(
        self,
        state: dict[str, Any],
        *,
        step: SupportsIndex,
        metrics: Mapping[str, float] | None = None,
        block: bool = False,
    ) -> SaveHandle:
        """Save a state as it is now. Returns when it is copied; the rest happens in the saver.

        Every rank has to call it for the same steps; there is no collective in it.

        Args:
            state: a dict of modules, optimizers, objects with ``state_dict``, tensors and plain values.
            step: training step, growing from save to save.
            metrics: numbers that are kept with the checkpoint.
            block: wait for a slot instead of skipping the step when both are in use.

        Returns:
            The save on its way; it may be skipped already, and says why.

        Raises:
            Misuse: the state or the step cannot be saved; the key path is named.
        """
        self._check_open()
        number = _step(step)
        captured = capture(state)
        self._fit_layout(captured)
        try:
            link = self._connected()
            return self._save(link, captured, number, metrics=dict(metrics or {}), block=block)
        except EnvironmentFault as error:
            self._lose_saver(error)
            return SaveHandle(
                number, seat=None, info=StageInfo(step=number, stage="failed", reason=str(error))
            )

    def _fit_layout(self, captured: Capture) -> None:
        layout = fit_layout(captured, self._layout)
        if layout is not self._layout:
            self._layout = layout
            self._layout_wire = json.dumps(layout_to_dict(layout)).encode()

    def _save(
        self, link: RankLink, captured: Capture, step: int, *, metrics: dict[str, float], block: bool
    ) -> SaveHandle:
        layout = self._layout
        assert layout is not None
        answer = link.stage(
            step,
            layout=self._layout_wire,
            layout_digest=layout.digest,
            body_bytes=layout.body_bytes,
            block=block,
            metrics=metrics,
        )
        self._continuing = True
        if not isinstance(answer, Grant):
            _LOG.info("step %d is not saved: %s", step, answer.reason)
            return SaveHandle(step, seat=link.seat, info=answer)
        try:
            write(answer.slot, layout, captured=captured, fresh=answer.last_layout != layout.digest)
        except BaseException as error:
            link.abort(step, f"the copy failed: {type(error).__name__}: {error}"[:500])
            raise
        link.seal(step, layout.digest)
        return SaveHandle(step, seat=link.seat, info=StageInfo(step=step, stage="staging"))

    def _connected(self) -> RankLink:
        if self._link is not None:
            return self._link
        if self._lost and time.monotonic() < self._retry_at:
            raise SaverUnavailable("the saver process is gone", hint="it is looked for again in a moment")
        options = self._open_options
        if self._continuing:
            options = Open(
                root=options.root,
                disk_interval_steps=options.disk_interval_steps,
                disk_interval_s=options.disk_interval_s,
                keep=options.keep,
                continuing=True,
            )
        if self._mooring is None:
            self._mooring = moor(self._root)
        elif self._lost:
            self._mooring.revive()
        self._link = RankLink(self._mooring.seat, options)
        if self._lost:
            _LOG.warning("the saver process is back; saving goes on")
            self._lost = False
        return self._link

    def _lose_saver(self, error: EasyckptError) -> None:
        if not self._lost:
            _LOG.warning("steps are not saved: %s", error)
        if not self._lost or time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_SAVER_S
        self._lost = True
        if self._link is not None:
            self._link.close()
            self._link = None

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
        if self._link is not None:
            self._link.close()
            self._link = None


def _absolute(root: str | os.PathLike[str] | None) -> str:
    text = os.fspath(root) if root is not None else os.environ.get("EASYCKPT_DIR", "")
    if not text:
        raise Misuse(
            "no checkpoint folder is named",
            hint='pass one: Checkpointer("checkpoints/run1"), or set EASYCKPT_DIR',
        )
    if "://" in text:
        return text
    return os.path.abspath(os.path.expanduser(text))


def _options(root: str, disk_interval: int | float | None, keep: int) -> Open:
    if isinstance(disk_interval, bool) or (disk_interval is not None and not disk_interval > 0):
        raise Misuse(
            f"disk_interval={disk_interval!r} is not possible", hint="steps (int) or seconds (float)"
        )
    if type(keep) is not int or keep < 1:
        raise Misuse(f"keep={keep!r} is not possible", hint="at least one durable step stays")
    steps = disk_interval if isinstance(disk_interval, int) else 0
    seconds = disk_interval if isinstance(disk_interval, float) else 0.0
    return Open(root=root, disk_interval_steps=steps, disk_interval_s=seconds, keep=keep)


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
    disk_interval: int | float | None = None,
    keep: int = 2,
) -> Checkpointer:
    """Make the default checkpointer, which `save` and `load` use. See `Checkpointer` for the arguments.

    Raises:
        Misuse: there is one already.
    """
    global _default
    if _default is not None:
        raise Misuse("there is a default checkpointer already", hint="call easyckpt.close() first")
    _default = Checkpointer(root, disk_interval=disk_interval, keep=keep)
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
