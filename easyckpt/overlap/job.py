"""One copy on its way: pieces of work, the proof after the last of them, and what follows it.

A job is begun on the training thread and run by the checkpointer's one copying thread; whoever waits for it
helps. ``copied`` is set when every byte is in the slot and the witness has been asked, from where on the
state may change; ``finished`` when the saver has been told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["CopyThread", "Job"]

THREAD_NAME = "easyckpt-copy"


class Job:
    """See the module.

    Args:
        pieces: what is to be copied.
        prove: called once after the last piece, before the state may change.
        finish: called once after that, with the job and the error of a piece or of the proof, or None.
    """

    def __init__(
        self,
        pieces: Iterable[Callable[[], None]],
        *,
        prove: Callable[[], None],
        finish: Callable[[Job, Exception | None], None],
    ) -> None:
        self._pieces = deque(pieces)
        self._prove = prove
        self._finish = finish
        self._at_work = 0
        self.copy_s = 0.0
        """Processor time that the pieces took."""
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._copied = threading.Event()
        self._finished = threading.Event()

    def work(self) -> None:
        """Copy pieces until none is left; whoever copies the last one asks for the proof."""
        with self._lock:
            self._at_work += 1
        last = False
        began_at = time.thread_time()
        try:
            while self._error is None:
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    break
                piece()
        except Exception as error:  # noqa: BLE001 - the step is given up with it
            self._error = error
        except BaseException as error:  # an interrupt of the training thread, which was helping
            self._error = RuntimeError(f"interrupted by {type(error).__name__}")
            raise
        finally:
            with self._lock:
                self._at_work -= 1
                self.copy_s += time.thread_time() - began_at
                last = self._at_work == 0 and not self._copied.is_set()
            if last:
                self._end_copy()

    def _end_copy(self) -> None:
        """Only one thread gets here with pieces gone and nobody at work; a late helper finds it done."""
        with self._lock:
            if self._copied.is_set() or self._at_work:
                return
            try:
                if self._error is None:
                    self._prove()
            except Exception as error:  # noqa: BLE001 - the step is given up with it
                self._error = error
            finally:
                self._pieces.clear()
                self._copied.set()

    def run(self) -> None:
        """On the copying thread: to the end."""
        try:
            self.wait_copied()
            self._finish(self, self._error)
        finally:
            # They hold the slot, and an error's traceback may hold this job.
            self._prove = self._finish = _nothing
            self._finished.set()

    def wait_copied(self) -> None:
        """Help until the state may change."""
        if not self._copied.is_set():
            self.work()
            self._copied.wait()

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Wait until the saver has been told."""
        return self._finished.wait(timeout_s)

    @property
    def is_copied(self) -> bool:
        """Whether the state may change."""
        return self._copied.is_set()


def _nothing(*_: object) -> None:
    """What a job that is over still does."""


class CopyThread:
    """The one thread that copies for a checkpointer; it lives while there is something to do, and a moment
    longer."""

    IDLE_S = 10.0
    """Then the thread ends; the next save starts one."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have something done on the thread, after what was submitted before."""
        with self._changed:
            self._jobs.append(work)
            if self._thread is None:
                self._start()
            else:
                self._changed.notify()

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _has_news(self) -> bool:
        return bool(self._jobs) or self._closed

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_news, self.IDLE_S)
                    if not self._jobs:
                        return
                    work = self._jobs.popleft()
                work()
                del work  # it holds the slot
        finally:
            with self._changed:
                self._thread = None
                if self._jobs:  # only after a bug, whose traceback the interpreter prints
                    self._start()
