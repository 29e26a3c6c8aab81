"""A training in small: ``train.mini_gpt``.

Two ranks train a small transformer on the same seeded data, each on its half of the batch, with gradients
averaged over gloo. One thread each and fixed seeds, so that the same software on the same kind of processor
gives the same bits: the digest of the final weights can be compared between ranks, runs and nodes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sanitycheck.errors import ChildFailedError, NotApplicableError, ToolMissingError
from sanitycheck.facts.forked import run_forked
from sanitycheck.facts.request import Request

__all__ = ["TrainingFacts", "collect"]

RANKS = 2
STEPS = 12
SEED = 20240229
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 64, 64, 2, 4, 32, 8
LEARNING_RATE = 3e-3
RESERVE_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Outcome of the small training.

    Attributes:
        losses: Of rank 0, one per step.
        digests: Of the final weights, one per rank.
        key: Software and processor that the digest holds for.
        problem: The library's own error, when the ranks could not train.
    """

    losses: tuple[float, ...] = (4.2, 3.9, 3.5)
    digests: tuple[str, ...] = ("0", "0")
    key: str = ""
    tokens_per_s: float = 1000.0
    problem: str = ""


def _model(torch: Any) -> Any:
    nn = torch.nn

    class Small(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
            self.out = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, text: Any) -> Any:
            mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
            hidden = self.tokens(text) + self.places
            for block in self.blocks:
                hidden = block(hidden, src_mask=mask, is_causal=True)
            return self.out(hidden)

    return Small()


def _text(torch: Any, step: int) -> Any:
    """Sequences that count upwards from a random start: learnable within a few steps."""
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    return (starts + torch.arange(LENGTH + 1)).remainder(VOCABULARY)


def _train(torch: Any, rank: int, folder: str, deadline_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    dist = torch.distributed
    try:
        store = dist.FileStore(os.path.join(folder, "store"), RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=deadline_s)
        )
        model = _model(torch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        begin = time.perf_counter()
        for step in range(STEPS):
            text = _text(torch, step)[rank::RANKS]
            scores = model(text[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
            losses.append(round(float(loss.detach()), 6))
        took_s = time.perf_counter() - begin
    except RuntimeError as error:  # what torch raises for everything that fails below it
        return {"problem": (str(error).splitlines() or ["no message"])[0][:300]}
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(bytes(parameter.detach().contiguous().untyped_storage()))
    tokens = STEPS * BATCH * LENGTH / took_s
    return {"losses": losses, "digest": hasher.hexdigest()[:32], "tokens_per_s": round(tokens, 1)}


def collect(request: Request) -> TrainingFacts:
    """Fork two ranks and train."""
    request.tell("importing torch")
    try:
        import torch
        import torch.distributed
    except ModuleNotFoundError as error:
        raise NotApplicableError("torch is not installed here") from error
    except (ImportError, OSError) as error:
        raise ToolMissingError(f"torch cannot be imported: {error}") from error
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise NotApplicableError("this torch has no gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline_s = max(2.0, request.deadline_s - RESERVE_S)
    request.tell("training")
    with tempfile.TemporaryDirectory(prefix="sanitycheck-") as folder:
        answers = run_forked(
            lambda rank: _train(torch, rank, folder, deadline_s), count=RANKS, deadline_s=deadline_s
        )
    problems = [str(answer["problem"]) for answer in answers if answer and "problem" in answer]
    lost = [rank for rank, answer in enumerate(answers) if answer is None]
    if lost and not problems:
        raise ChildFailedError(f"rank {lost[0]} gave no answer")
    if problems:
        return TrainingFacts(losses=(), digests=(), tokens_per_s=0.0, problem="; ".join(problems))
    good = [answer for answer in answers if answer is not None]
    return TrainingFacts(
        losses=tuple(good[0]["losses"]),
        digests=tuple(answer["digest"] for answer in good),
        key=f"torch {torch.__version__}, {platform.machine()}, {_instructions(torch)}",
        tokens_per_s=min(answer["tokens_per_s"] for answer in good),
    )


def _instructions(torch: Any) -> str:
    """Which instructions torch picked: another set rounds in another order."""
    return str(torch.backends.cpu.get_cpu_capability())
