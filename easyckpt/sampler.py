"""Batches of a dataset whose position can be saved: a resume inside an epoch sees each sample exactly once.

Theory of operation. An epoch is one order of all samples, given by (seed, epoch), the same on every rank. The
position is a number of samples of that order, counted over all ranks together: every step takes the next
``batch_size × ranks`` of them, and each rank every ranks-th of these. So the position means the same at any
number of ranks, and a job that resumes with another number goes on where the others stopped.

What counts is what training took, not what the loader's workers have read ahead: `ResumableSampler.watch`
iterates the loader and moves the position when it hands a batch out. A save after the step of that batch then
holds the right position, whatever is still in the workers' queues.

All ranks make the same number of steps. The last batch of an epoch may be smaller; where fewer samples than
ranks are left, the ranks without one repeat one of the epoch's first samples (``drop_last=True`` leaves the
rest of the epoch out instead).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from easyckpt.bootstrap import read_placement
from easyckpt.digest import bytes_digest
from easyckpt.errors import Misuse, StateMismatch

__all__ = ["ResumableSampler"]

Batch = TypeVar("Batch")

ORDER_CHECKED_MAX = 4096
"""Indices of an epoch's order that go into its check value: enough to tell two orders apart."""

_SEED_MAX = 1 << 32


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader` with a state that `Checkpointer.save` can hold.

    ::

        sampler = easyckpt.ResumableSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        state = {"model": model, "sampler": sampler}
        while sampler.epoch < epochs:
            for batch in sampler.watch(loader):
                ...

    Args:
        data: the dataset, or how many samples it has.
        batch_size: samples per rank and step.
        shuffle: draw a new order for every epoch; else the order of the dataset.
        seed: of the orders; the same on every rank.
        drop_last: leave out what does not fill a batch on every rank.
        replicas: rank and number of ranks; None takes those of `torch.distributed`, else of the launcher's
            variables, else one rank.

    Raises:
        Misuse: an argument is not possible.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        replicas: tuple[int, int] | None = None,
    ) -> None:
        self.samples = data if isinstance(data, int) else len(data)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.rank, self.ranks = _replicas() if replicas is None else replicas
        if self.samples < 1 or batch_size < 1 or not 0 <= self.rank < self.ranks:
            raise Misuse(
                f"{self.samples} samples in batches of {batch_size} on rank {self.rank} of {self.ranks}",
                hint="all are at least 1, and ranks count from 0",
            )
        if not 0 <= seed < _SEED_MAX:
            raise Misuse(f"seed={seed} is not possible", hint=f"a whole number from 0 to {_SEED_MAX - 1}")
        if self._steps_from(0) < 1:
            raise Misuse(
                f"{self.samples} samples are less than one batch on each of {self.ranks} ranks",
                hint="a smaller batch_size, or drop_last=False",
            )
        self._epoch = 0
        self._position = 0
        self._handed_out = False
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have taken."""
        return self._position

    def __len__(self) -> int:
        """Steps that are left in this epoch."""
        return self._steps_from(self._position)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position on. Reading ahead changes nothing."""
        order = self._indices()
        self._handed_out = True
        for position in range(self._position, self.samples, self._stride):
            if self.drop_last and position + self._stride > self.samples:
                return
            taken = order[position + self.rank : min(position + self._stride, self.samples) : self.ranks]
            if not len(taken):  # fewer samples than ranks are left
                taken = order[self.rank % self.samples : self.rank % self.samples + 1]
            yield taken.tolist()

    def watch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches of the rest of this epoch; counts each when it is handed to training.

        Args:
            loader: made with this sampler as its ``batch_sampler``.

        Yields:
            What the loader gives.
        """
        epoch = self._epoch
        for batch in self._begin(loader):
            self._handed_out = False
            self._position = min(self._position + self._stride, self.samples)
            yield batch
            if self._epoch != epoch:  # a load within the loop: what the workers hold is of another place
                return
        self._handed_out = False
        self._settle(force=True)

    def _begin(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's iterator. Making one draws a random number, which an undisturbed run did not here."""
        if self._position == 0:
            return iter(loader)
        with torch.random.fork_rng(devices=[]):
            return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, and what they only make sense with. Equal on all ranks.

        Raises:
            Misuse: batches were taken around `watch`, so that nobody counted them.
        """
        if self._handed_out:
            raise Misuse(
                "the loader is iterated directly, so its position is not known",
                hint="for batch in sampler.watch(loader): ...",
            )
        return {
            "epoch": self._epoch,
            "position": self._position,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": self._order_check(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, at any number of ranks and any batch size.

        Raises:
            StateMismatch: the dataset, the seed or the shuffling differ, so that the position means nothing.
        """
        now = {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
        changed = tuple(f"{key}: saved {state[key]}, now {now[key]}" for key in now if state[key] != now[key])
        if changed:
            raise StateMismatch(
                f"a position in another order of samples; {'; '.join(changed)}",
                changed=changed,
                where="sampler",
                hint="use the dataset, seed and shuffle that it was saved with",
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._handed_out = False
        if self._order_check() != state["order"]:
            raise StateMismatch(
                "this torch draws another order of samples from the same seed than the one that saved",
                where="sampler",
                hint="use that version of torch, or begin the epoch anew with another seed",
            )
        self._settle()

    @property
    def _stride(self) -> int:
        return self.batch_size * self.ranks

    def _steps_from(self, position: int) -> int:
        left = self.samples - position
        return left // self._stride if self.drop_last else -(-left // self._stride)

    def _settle(self, *, force: bool = False) -> None:
        """Go to the next epoch when nothing of this one is left."""
        if force or self._steps_from(self._position) == 0:
            self._epoch, self._position = self._epoch + 1, 0

    def _indices(self) -> torch.Tensor:
        if self._order is None or self._order[0] != self._epoch:
            generator = torch.Generator()
            # The CPU generator takes 32 bits of a seed and drops the others, so the two are mixed.
            generator.manual_seed(int(bytes_digest(f"{self.seed} {self._epoch}".encode())[:8], 16))
            order = (
                torch.randperm(self.samples, generator=generator)
                if self.shuffle
                else torch.arange(self.samples)
            )
            self._order = (self._epoch, order)
        return self._order[1]

    def _order_check(self) -> str:
        return bytes_digest(self._indices()[:ORDER_CHECKED_MAX].numpy().tobytes())


def _replicas() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    placement = read_placement(os.environ)
    return placement.rank, placement.world_size
