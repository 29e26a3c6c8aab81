"""English text that every machine has, a BPE tokenizer trained on it, and samples in a fixed order.

Theory of operation: CPython ships the texts behind ``help("topics")`` in ``pydoc_data.topics``. They are the
corpus. The tokenizer is trained on it once and kept in a cache folder together with the token ids, so that a
restarted worker reads two files instead of computing them; both are a pure function of the text and of the
vocabulary size, so the cache changes no result. (Byte-level BPE is; the WordPiece trainer of ``tokenizers``
numbers its alphabet in the order of a randomly seeded hash map: another vocabulary in every process.)
Samples are windows of the id stream.

`ResumableSampler` is what makes a resume exact: its state is one number, how many samples all ranks together
have taken, and the order of an epoch is a function of the seed and the epoch alone.
"""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, MASK = "[PAD]", "[MASK]"
_SPECIAL = (PAD, MASK)
IGNORED_LABEL = -100  # torch's cross entropy leaves these positions out


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text, and how large it is on disk and in memory."""

    name: str
    text: str
    file_bytes: int
    text_bytes: int


def corpus() -> Corpus:
    """The documentation topics of the running Python, joined in alphabetical order."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text_bytes = len(text.encode())
    file = Path(pydoc_data.topics.__file__)
    file_bytes = file.stat().st_size if file.suffix == ".py" and file.exists() else text_bytes
    return Corpus(name="pydoc_data.topics", text=text, file_bytes=file_bytes, text_bytes=text_bytes)


def train_tokenizer(text: str, *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer for ``text``; the same text gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def load_or_build(cache: Path, *, vocab_size: int) -> tuple[Tokenizer, torch.Tensor]:
    """The tokenizer and the corpus as one stream of ids, from ``cache`` if it holds them.

    Several ranks may come at once: each writes under a name of its own and renames, so that a reader sees a
    whole file or none, and since the content is the same, it does not matter which one is last.
    """
    source = corpus()
    key = hashlib.sha256(f"{vocab_size}\n{source.text}".encode()).hexdigest()[:16]
    tokenizer_file, ids_file = cache / f"tokenizer-{key}.json", cache / f"ids-{key}.npy"
    if tokenizer_file.exists() and ids_file.exists():
        return Tokenizer.from_file(str(tokenizer_file)), torch.from_numpy(np.load(ids_file).astype(np.int64))
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(source.text, vocab_size=vocab_size)
    ids = np.asarray(tokenizer.encode(source.text).ids, dtype=np.int32)
    own = f".{os.getpid()}.tmp"
    tokenizer.save(str(tokenizer_file) + own)
    with open(str(ids_file) + own, "wb") as file:
        np.save(file, ids)
    os.replace(str(tokenizer_file) + own, tokenizer_file)
    os.replace(str(ids_file) + own, ids_file)
    return tokenizer, torch.from_numpy(ids.astype(np.int64))


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of ``length`` ids, one after the other."""

    def __init__(self, ids: torch.Tensor, *, length: int) -> None:
        self._rows = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class ResumableSampler(torch.utils.data.Sampler[list[int]]):
    """Endless batches of one rank; every rank takes its own part of each global batch.

    Use it as ``batch_sampler`` with ``num_workers=0``: the state counts the batches that were handed out.
    """

    def __init__(self, samples: int, *, batch: int, rank: int, world_size: int, seed: int) -> None:
        if samples < batch * world_size:
            raise ValueError(f"{samples} samples are fewer than one global batch of {batch * world_size}")
        self._samples, self._batch, self._rank, self._world_size = samples, batch, rank, world_size
        self._seed = seed
        self._taken = 0  # by all ranks together

    def __iter__(self) -> Iterator[list[int]]:
        global_batch = self._batch * self._world_size
        while True:
            epoch, index = divmod(self._taken // global_batch, self._samples // global_batch)
            order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._samples)
            for begin in range(index * global_batch, self._samples - global_batch + 1, global_batch):
                mine = begin + self._rank * self._batch
                self._taken += global_batch
                yield order[mine : mine + self._batch].tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = int(state["taken"])


class MaskTokens:
    """Collate function of masked-language-model training: 15 % of the ids, of which 80 % become ``[MASK]``,
    10 % another id and 10 % stay (Devlin et al. 2018, section 3.1).

    It draws from torch's global generator, so that resuming exactly depends on restoring that generator.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._mask = tokenizer.token_to_id(MASK)
        self._vocab_size = tokenizer.get_vocab_size()

    def __call__(self, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack(rows)
        draw = torch.rand(ids.shape)
        labels = torch.where(draw < 0.15, ids, IGNORED_LABEL)
        other = torch.randint(len(_SPECIAL), self._vocab_size, ids.shape)
        ids = torch.where(draw < 0.12, self._mask, ids)
        ids = torch.where((draw >= 0.12) & (draw < 0.135), other, ids)
        return {"input_ids": ids, "labels": labels}
