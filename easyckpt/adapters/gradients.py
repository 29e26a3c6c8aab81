"""Do gradients wait for an optimizer's step? Then they are part of the state.

Between the first backward of an accumulation and the step, the gradients are as needed for going on as the
parameters are, so a save stores them. At all other times they are spent: most programs leave them lying until
the next backward. The two are told apart by what the gradient of one parameter per group was when the
optimizer's last step ended: if it is another tensor now, or has another version, a backward has come since,
unless it is all zeros. That errs to one side: gradients that nobody needs may be stored (a discriminator's,
after the generator's backward). "Another tensor" is asked of a weak reference: an address is given anew as
soon as a gradient is set to None, so equal addresses prove nothing.

A load says which of the two the checkpoint was.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["are_pending", "expect", "watch_steps"]

_Mark = tuple[tuple["weakref.ref[torch.Tensor]", int], ...]
"""Gradients, and the version that each had."""

_marks: weakref.WeakKeyDictionary[Optimizer, _Mark | None] = weakref.WeakKeyDictionary()
"""What gradients were when the last step ended; None: they were loaded, and wait."""

_installing = threading.Lock()
_is_watching = False


def watch_steps() -> None:
    """Have the end of every optimizer step in this process noted. Once is enough."""
    global _is_watching
    with _installing:
        if not _is_watching:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(_after_step)
            _is_watching = True


def are_pending(optimizer: Optimizer) -> bool:
    """Whether gradients wait for the optimizer's next step. False as long as steps are not watched."""
    if not _is_watching:
        return False
    chosen = _chosen(optimizer)
    mark = _marks.get(optimizer, ())
    if mark is None:
        return bool(chosen)
    if _is_as_marked(chosen, mark):
        return False
    return any(bool(gradient.count_nonzero()) for gradient in chosen)


def expect(optimizer: Optimizer, *, pending: bool) -> None:
    """A load: whether gradients came with the checkpoint."""
    _marks[optimizer] = None if pending else _mark_of(_chosen(optimizer))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    _marks[optimizer] = _mark_of(_chosen(optimizer))


# torch.compile must not trace it (the attribute is what torch.compiler.disable sets).
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _chosen(optimizer: Optimizer) -> list[torch.Tensor]:
    """One gradient of each group."""
    found = (
        next((p.grad for p in group["params"] if p.grad is not None), None)
        for group in optimizer.param_groups
    )
    return [gradient for gradient in found if gradient is not None]


def _mark_of(gradients: list[torch.Tensor]) -> _Mark:
    return tuple((weakref.ref(gradient), _version_of(gradient)) for gradient in gradients)


def _is_as_marked(gradients: list[torch.Tensor], mark: _Mark) -> bool:
    return len(gradients) == len(mark) and all(
        known() is gradient and version == _version_of(gradient)
        for gradient, (known, version) in zip(gradients, mark, strict=True)
    )


def _version_of(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version
