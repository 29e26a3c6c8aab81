"""Corpus, tokenizer, masking and the resumable sampler of the DeepSpeed example."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SOURCE = Path(__file__).parents[2] / "examples" / "hello_deepspeed" / "text_data.py"


@pytest.fixture(scope="module")
def text_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hello_text_data", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def batches(text_data: ModuleType, rank: int, *, world_size: int = 2, seed: int = 3) -> object:
    return text_data.ResumableSampler(21, batch=2, rank=rank, world_size=world_size, seed=seed)


def test_sampler_gives_each_sample_at_most_once_per_epoch_over_all_ranks(text_data: ModuleType) -> None:
    steps = 21 // 4
    for epoch in range(3):
        seen: Counter[int] = Counter()
        for rank in (0, 1):
            taken = list(islice(iter(batches(text_data, rank)), (epoch + 1) * steps))[epoch * steps :]
            seen.update(index for batch in taken for index in batch)
        assert max(seen.values()) == 1
        assert len(seen) == steps * 4


def test_sampler_orders_differ_by_epoch_and_seed(text_data: ModuleType) -> None:
    first, second = (
        list(islice(iter(batches(text_data, 0)), 10))[part] for part in (slice(0, 5), slice(5, 10))
    )
    assert first != second
    assert first != list(islice(iter(batches(text_data, 0, seed=4)), 5))


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 6, 13])
def test_sampler_resumes_with_the_next_batch(text_data: ModuleType, taken: int) -> None:
    straight = iter(batches(text_data, 1))
    sampler = batches(text_data, 1)
    list(islice(iter(sampler), taken))
    resumed = batches(text_data, 1)
    resumed.load_state_dict(sampler.state_dict())
    list(islice(straight, taken))
    assert list(islice(iter(resumed), 7)) == list(islice(straight, 7))


def test_sampler_refuses_fewer_samples_than_a_global_batch(text_data: ModuleType) -> None:
    with pytest.raises(ValueError, match="fewer than one global batch"):
        text_data.ResumableSampler(3, batch=2, rank=0, world_size=2, seed=1)


def test_cache_changes_nothing(text_data: ModuleType, tmp_path: Path) -> None:
    built, built_ids = text_data.load_or_build(tmp_path, vocab_size=600)
    read, read_ids = text_data.load_or_build(tmp_path, vocab_size=600)
    assert built.to_str() == read.to_str()
    assert torch.equal(built_ids, read_ids)
    assert built.get_vocab_size() == 600
    assert not list(tmp_path.glob("*.tmp"))
    assert "the" in built.decode(built_ids[:400].tolist())


def test_tokenizer_is_the_same_in_another_process(text_data: ModuleType, tmp_path: Path) -> None:
    """Hash maps of other processes are seeded otherwise; a tokenizer must not depend on that."""
    text_data.load_or_build(tmp_path / "one", vocab_size=600)
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import text_data, pathlib; "
    code += f"text_data.load_or_build(pathlib.Path({str(tmp_path / 'two')!r}), vocab_size=600)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_masking_draws_from_the_global_generator(text_data: ModuleType, tmp_path: Path) -> None:
    tokenizer, ids = text_data.load_or_build(tmp_path, vocab_size=600)
    collate = text_data.MaskTokens(tokenizer)
    rows = list(text_data.Windows(ids, length=64))[:64]
    torch.manual_seed(1)
    one = collate(rows)
    torch.manual_seed(1)
    again, other = collate(rows), collate(rows)
    assert torch.equal(one["input_ids"], again["input_ids"])
    assert not torch.equal(one["labels"], other["labels"])
    chosen = one["labels"] != text_data.IGNORED_LABEL
    masked = one["input_ids"] == tokenizer.token_to_id(text_data.MASK)
    assert 0.12 < chosen.float().mean() < 0.18
    assert 0.7 < (masked & chosen).sum() / chosen.sum() < 0.9
    assert torch.equal(one["input_ids"][~chosen], torch.stack(rows)[~chosen])
