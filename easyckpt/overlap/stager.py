"""One save, from the state to the seal.

Within ``save``, on the training thread: compare the state with what is known of it, ask the saver for a slot,
copy what cannot wait, take the witness of the rest, and begin the rest. Behind it, on the copying thread: the
rest, the proof, and the seal. The step is sealed only if every tensor that was copied later is what it was
when ``save`` was called; else it is given up, and the tensor that changed is copied at once from then on.

A small rest is copied within ``save`` as well: handing it over costs more.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from easyckpt.adapters import gradients
from easyckpt.errors import EasyckptError, EnvironmentFault, Misuse
from easyckpt.handle import SaveHandle
from easyckpt.layout import Layout, encode_layout
from easyckpt.link import Grant, RankLink
from easyckpt.overlap import fence
from easyckpt.overlap.job import CopyThread, Job
from easyckpt.overlap.pace import Pace
from easyckpt.overlap.plan import CopyPlan, Piece
from easyckpt.overlap.touch import PageTable
from easyckpt.overlap.witness import Verify, Witness, make_witness
from easyckpt.rates import RateLog
from easyckpt.saver.protocol import StageInfo
from easyckpt.snapshot import as_bytes, fit_layout, fits_plain, write_frame, write_plain
from easyckpt.state import Capture
from easyckpt.track import Tracker

__all__ = ["Stager"]

INLINE_BYTES_MAX = 2 << 20
"""Of the rest: copying it takes less than two tenths of a millisecond, about what a thread's start costs."""

NAMES_SHOWN_MAX = 3

_LOG = logging.getLogger("easyckpt")


class Stager:
    """See the module. Used by the training thread of the process that made it.

    Args:
        overlap: whether copies go on behind `save`; None has it measured and chosen.
        verify: what a copy that goes on behind `save` is proved with.
    """

    def __init__(self, *, overlap: bool | None = None, verify: Verify = "sample") -> None:
        self._verify: Verify = verify
        self._pace = Pace(overlap)
        self._rates = RateLog("copied into memory", _LOG)
        self._pid = os.getpid()
        self._tracker = Tracker()
        self._thread = CopyThread()
        self._at_once: set[str] = set()
        self._volatile: set[str] = set()
        self._layout: Layout | None = None
        self._layout_wire = b""
        self._plan: CopyPlan | None = None
        self._witness: Witness = make_witness((), "sample")
        self._captured: Capture | None = None
        self._job: Job | None = None
        self._hooks: list[Any] = []
        self._trouble: EasyckptError | None = None
        self._changed: tuple[str, ...] = ()
        self._prepared: tuple[RankLink, int] | None = None
        self._closing = threading.Event()
        fence.install()
        gradients.watch_steps()
        self._stop_listening = fence.listen(self._pace.stepped)

    # --- before the saver is asked ---

    def capture(self, state: dict[str, Any]) -> None:
        """Take the state apart, or see that it is what it was.

        Raises:
            Misuse: the state cannot be saved; the key path is named.
        """
        if os.getpid() != self._pid:
            raise Misuse(
                "a checkpointer cannot be used in a forked process",
                hint="save and load in the process that made it",
            )
        with _uncollected():
            self._capture(state)

    def _capture(self, state: dict[str, Any]) -> None:
        tracked = self._tracker.capture(state)
        captured = self._captured = tracked.capture
        layout = self._layout
        if layout is None or not tracked.same or not fits_plain(captured, layout):
            layout = fit_layout(captured, self._layout)
        if layout is not self._layout:
            self._layout = layout
            self._layout_wire = encode_layout(layout)
            self._plan = None
        swapped = {captured.tensors[place].spec.name for place in tracked.swapped}
        if not tracked.same or not swapped <= self._volatile:
            self._volatile |= swapped
            self._plan = None
        if self._plan is None:
            self._plan = CopyPlan(
                layout,
                captured.tensors,
                at_once=self._at_once,
                volatile=self._volatile,
                any_order=self._verify != "full",
            )
            self._witness = make_witness(self._plan.later, self._verify)

    # --- the save ---

    def stage(self, link: RankLink, step: int, *, metrics: dict[str, float], block: bool) -> SaveHandle:
        """Copy the captured state into a slot, or begin to.

        Raises:
            EnvironmentFault: the saver is gone.
        """
        layout, captured, plan = self._layout, self._captured, self._plan
        assert layout is not None
        assert captured is not None
        assert plan is not None
        answer = link.stage(
            step,
            layout=self._layout_wire,
            layout_digest=layout.digest,
            body_bytes=layout.body_bytes,
            block=block,
            metrics=metrics,
        )
        if not isinstance(answer, Grant):
            _LOG.info("step %d is not saved: %s", step, answer.reason)
            return SaveHandle(step, seat=link.seat, info=answer)
        try:
            whole = as_bytes(answer.slot, layout)
            if answer.last_layout != layout.digest:
                with _uncollected():
                    write_frame(answer.slot, layout)
            plan.copy_at_once(whole, captured.tensors)
            write_plain(answer.slot, layout, captured.plain)
            job = self._rest(link, step, whole=whole, pages=answer.pages)
        except BaseException as error:
            link.abort(step, f"the copy failed: {type(error).__name__}: {error}"[:500])
            raise
        if job is None:
            link.seal(step, layout.digest)
        else:
            self._begin(job)
        self.prepare(link, layout.body_bytes)
        return SaveHandle(step, seat=link.seat, info=StageInfo(step=step, stage="staging"))

    def _rest(self, link: RankLink, step: int, *, whole: torch.Tensor, pages: PageTable) -> Job | None:
        """Copy the rest if that is cheaper, else what has to be begun."""
        plan, layout, witness = self._plan, self._layout, self._witness
        assert plan is not None
        assert layout is not None
        pieces = _touched(plan, whole, pages)
        overlaps = plan.later_bytes > INLINE_BYTES_MAX and self._pace.overlaps
        if plan.later_bytes > INLINE_BYTES_MAX:
            self._pace.saved(overlapped=overlaps)
        if not overlaps:
            begin_s = time.thread_time()
            for piece in pieces:
                piece()
            self._note_rate(plan, time.thread_time() - begin_s, how="at once")
            return None
        witness.take()
        changed: list[str] = []

        def prove() -> None:
            changed.extend(witness.changed(whole))

        def finish(job: Job, error: Exception | None) -> None:
            self._pace.copied(job.copy_s)
            self._note_rate(plan, job.copy_s, how="behind the next step")
            self._finish(link, step, digest=layout.digest, error=error, changed=tuple(changed))
            fence.leave(job)

        return Job(pieces, prove=prove, finish=finish)

    def _note_rate(self, plan: CopyPlan, copy_s: float, *, how: str) -> None:
        if plan.later_bytes > INLINE_BYTES_MAX:
            self._rates.note(plan.later_bytes, copy_s, how=f"{how}, per processor second, not pinned")

    def _begin(self, job: Job) -> None:
        fence.enter(job)
        for value in self._tracker.objects:
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                self._hooks.append(value.register_load_state_dict_pre_hook(fence.before_load))
        self._job = job
        self._thread.submit(job.run)

    def _finish(
        self, link: RankLink, step: int, *, digest: str, error: Exception | None, changed: tuple[str, ...]
    ) -> None:
        """On the copying thread: tell the saver."""
        try:
            if error is not None:
                link.abort(step, f"the copy failed: {type(error).__name__}: {error}"[:500])
            elif changed:
                self._changed = changed
                link.abort(step, _reason(changed))
            else:
                link.seal(step, digest)
        except EasyckptError as trouble:
            self._trouble = trouble

    # --- between saves ---

    def prepare(self, link: RankLink, body_bytes: int) -> None:
        """Have the slot of the next save made and its pages present, behind training, if it is lacking.

        Args:
            link: to the saver.
            body_bytes: of the next save, as far as is known: that of the last one, or of what was loaded.
        """
        if self._prepared == (link, body_bytes):
            return
        self._prepared = (link, body_bytes)

        def work() -> None:
            try:
                pages = link.reserve(body_bytes)
            except EasyckptError as trouble:  # the next save meets it too, and says so
                _LOG.debug("no slot is made ahead: %s", trouble)
                return
            while pages is not None and pages.touch_one():
                if self._closing.is_set():
                    return

        self._thread.submit(work)

    def settle(self) -> EnvironmentFault | None:
        """Wait until the save before is sealed or given up.

        Returns:
            What kept the saver from being told, if it cannot be reached any more.

        Raises:
            EasyckptError: the saver refused for another reason.
        """
        job, self._job = self._job, None
        if job is not None:
            fence.fence()
            job.wait_finished()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._learn()
        if self._pace.news:
            _LOG.info("%s", self._pace.news)
            self._pace.news = ""
        trouble, self._trouble = self._trouble, None
        if trouble is None or isinstance(trouble, EnvironmentFault):
            return trouble
        raise trouble

    def _learn(self) -> None:
        """Tensors that changed during the copy are copied at once from now on."""
        changed, self._changed = self._changed, ()
        new = [name for name in changed if name not in self._at_once]
        if new:
            self._at_once.update(new)
            self._plan = None
            _LOG.warning("a step was given up: %s", _reason(tuple(new)))

    def forget(self) -> None:
        """Let go of the state: another one is loaded, or the end has come."""
        self._tracker.forget()
        self._plan = self._captured = None

    def close(self) -> None:
        """No save comes any more."""
        self._closing.set()
        self._prepared = None
        self._stop_listening()
        self._thread.close()
        self.forget()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Walking a state or a layout makes some objects for each tensor and no garbage cycles; the collector
    would look through all of them again and again, which takes longer than the walk."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _touched(plan: CopyPlan, whole: torch.Tensor, pages: PageTable) -> list[Piece]:
    """The pieces of the rest, each behind the making present of its pages, as long as any are missing."""
    if not pages.missing:
        return [piece for _, _, piece in plan.pieces(whole)]

    def with_pages(begin: int, end: int, piece: Piece) -> Callable[[], None]:
        def work() -> None:
            pages.touch(begin, end)
            piece()

        return work

    return [with_pages(begin, end, piece) for begin, end, piece in plan.pieces(whole)]


def _reason(changed: tuple[str, ...]) -> str:
    names = ", ".join(changed[:NAMES_SHOWN_MAX])
    if len(changed) > NAMES_SHOWN_MAX:
        names += f" and {len(changed) - NAMES_SHOWN_MAX} more"
    return (
        f"changed between save() and the end of the copy, outside of an optimizer's step: {names}; "
        "copied within save() from now on (call easyckpt.fence() before code that changes tensors by hand)"
    )
