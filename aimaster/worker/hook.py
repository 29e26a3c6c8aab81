"""The zero-code hook: makes a training process visible to its node's agent, with no edit to the script.

Two ways in. A worker that was forked from the warm template calls `autoload` before its script runs; in every
other process torch calls it at the end of ``import torch``, since it is an entry point of the group
``torch.backends``. It therefore runs in **every** ``import torch`` of an environment that has this package,
in programs that never heard of it: it looks at one environment variable and returns. Where an agent watches
(``AIMASTER_AGENT``) and this process is a worker (``LOCAL_RANK``), it claims the rank's record of the
progress page and registers a global hook behind `torch.optim.Optimizer.step`. Nothing of it raises into
training, blocks, or makes a system call per step. ``AIMASTER_HOOK=0`` switches it off.

What goes wrong in here is written to ``hook.log`` in the agent's run directory and switches the hook off.

Launchers, wrappers and data workers import torch too; see `aimaster.worker.progress` for who gets the record.
A process that is forked from a worker never writes.

easyckpt and others may say what the training does without importing this package::

    hook = sys.modules.get("aimaster.worker.hook")
    if hook is not None:
        before = hook.phase("saving")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aimaster.worker.progress import ProgressWriter

MODULE_LIST_STEPS = (2, 20, 200)
"""After which steps local rank 0 writes the list of loaded modules: soon first, then whole."""
MODULES_MAX = 20_000
LOG_BYTES_MAX = 64 * 1024
PR_SET_PTRACER = 0x59616D61
"""prctl(2)."""

_writer: ProgressWriter | None = None
_claimed = False
_handle: Any = None
_module_list: str | None = None
_recording = False


def autoload() -> None:
    """Entry point of the group ``torch.backends``; never raises."""
    if "AIMASTER_AGENT" not in os.environ:
        return
    try:
        _install(os.environ)
    except Exception as error:  # noqa: BLE001 - an exception here breaks `import torch`
        _give_up(error)


def phase(name: str) -> str:
    """Say what the training does: ``training``, ``saving`` or ``loading``; returns what it did before.

    Does nothing and returns `name` where no agent watches. Never raises.
    """
    if _writer is None or not _claimed:
        return name
    try:
        from aimaster.worker.progress import Phase

        return _writer.enter(Phase[name.upper()]).name.lower()
    except Exception as error:  # noqa: BLE001 - never raises into training
        _give_up(error)
        return name


def saved(step: int) -> None:
    """Say the training's own step number, as a checkpoint names it. Never raises."""
    if _writer is None or not _claimed:
        return
    try:
        _writer.saved(step)
    except Exception as error:  # noqa: BLE001 - never raises into training
        _give_up(error)


def loaded(seconds: float) -> None:
    """Say that a checkpoint was loaded, and how long that took. Never raises."""
    writer = _writer  # another thread may give up meanwhile
    if writer is not None and _claimed:
        writer.loaded(seconds)


def held(seconds: float) -> None:
    """Say for how long saving has held the training. Costs a microsecond. Never raises."""
    writer = _writer  # another thread may give up meanwhile
    if writer is not None and _claimed:
        writer.held(seconds)


def renew() -> None:
    """A new attempt begins in the same process: its steps count from 0. Never raises."""
    if _writer is None or not _claimed:
        return
    try:
        _writer.renew()
    except Exception as error:  # noqa: BLE001 - never raises into training
        _give_up(error)


def _install(env: Mapping[str, str]) -> None:
    global _writer, _claimed, _handle, _module_list
    page = env.get("AIMASTER_PROGRESS_PAGE")
    # Where each worker sees its own device as number 0, LOCAL_RANK is 0 everywhere.
    local_rank = env.get("AIMASTER_LOCAL_RANK") or env.get("LOCAL_RANK")
    if env.get("AIMASTER_HOOK") == "0" or not page or not local_rank or _writer is not None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from aimaster.worker.progress import Phase, ProgressWriter

    rank = env.get("RANK")
    _let_be_read(page)
    writer = ProgressWriter(page, local_rank=int(local_rank), rank=int(rank) if rank else None)
    _writer, _claimed = writer, writer.claim(training=False)
    if _claimed:
        writer.enter(Phase.IMPORTING)
    if int(local_rank) == 0:
        _module_list = os.path.join(env["AIMASTER_AGENT"], "modules.txt")
    _handle = register_optimizer_step_post_hook(_after_step)
    os.register_at_fork(after_in_child=_forked)
    import atexit

    atexit.register(_exiting)


def _let_be_read(page: str) -> None:
    """Where Yama lets only ancestors read a process, allow the agent, whose children read stacks (prctl(2)).

    The agent's pid stands in the path of its page. Where there is no Yama the call fails, which changes
    nothing; so does a path of another form.
    """
    import ctypes

    parts = page.split("/")
    if len(parts) > 2 and parts[1] == "proc" and parts[2].isdigit():
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(int(parts[2])), 0, 0, 0)


def _after_step(optimizer: Any, args: object, kwargs: object) -> None:
    global _claimed
    writer = _writer
    if writer is None:
        return
    try:
        if not _claimed:
            if not writer.claim(training=True):
                _uninstall()
                return
            _claimed = True
        steps = writer.beat(_group_key(optimizer))
        if steps == 1 and not _recording:
            _record()
        if steps in MODULE_LIST_STEPS and _module_list is not None:
            _write_modules(_module_list, done=steps == MODULE_LIST_STEPS[-1])
    except Exception as error:  # noqa: BLE001 - never raises into training
        _give_up(error)


def _record() -> None:
    """Let the agent ask for collectives, if this rank has a process group."""
    global _recording
    _recording = True
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    from aimaster.worker import recorder

    recorder.listen(os.environ["AIMASTER_AGENT"])


# torch.compile must not trace it (the attribute is what torch.compiler.disable sets), and is not imported
# for it.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _group_key(optimizer: Any) -> tuple[int, int]:
    """Tells the parts of a step apart: DeepSpeed gives one optimizer one parameter group after the other."""
    for group in optimizer.param_groups:
        params = group["params"]
        if params:
            return id(optimizer), id(params[0])
    return id(optimizer), 0


def _exiting() -> None:
    if _claimed:
        phase("exiting")


def _forked() -> None:
    global _writer, _claimed
    _writer, _claimed = None, False


def _uninstall() -> None:
    global _writer, _claimed, _handle
    _writer, _claimed = None, False
    if _handle is not None:
        _handle.remove()
        _handle = None


def _write_modules(path: str, *, done: bool) -> None:
    """Write what is loaded, a name a line in the order of loading, for the next template to import."""
    global _module_list
    if done:
        _module_list = None
    lines = []
    for name, module in list(sys.modules.items())[:MODULES_MAX]:
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and "\n" not in name + origin:
            lines.append(f"{name}\t{origin}\n")
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)
    os.replace(temporary, path)


def _give_up(error: Exception) -> None:
    """Switch the hook off and say why in the agent's run directory."""
    try:
        _uninstall()
        path = os.path.join(os.environ.get("AIMASTER_AGENT", ""), "hook.log")
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < LOG_BYTES_MAX:
                os.write(fd, f"pid {os.getpid()}: {type(error).__name__}: {error}\n".encode()[:1000])
        finally:
            os.close(fd)
    except Exception:  # noqa: BLE001 - there is nowhere left to say it
        return
