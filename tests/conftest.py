"""Fixtures that every test may use: a clean environment, a seed that a failure prints, no leftovers.

No test sees the variables of the shell that started it: a rank, a job id or a checkpoint folder left over
from somebody's training must not decide what a test does. After each test, what it started and left behind is
named, is ended, and fails the test (`tests.leftovers`).
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.cluster import cluster_reason, make_cluster
from tests.leftovers import Watcher

__all__ = ["cluster_reason", "make_cluster"]  # fixtures

CLEAN_PREFIXES = (
    "AIMASTER_",
    "EASYCKPT_",
    "SANITYCHECK_",
    "PET_",
    "TORCHELASTIC_",
    "SLURM_",
    "NCCL_",
    "GLOO_",
)
CLEAN_NAMES = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHON_EXEC",
        "PBS_JOBID",
        "LSB_JOBID",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONWARNINGS",
    )
)


def pytest_configure() -> None:
    """A shell ignores SIGINT for what it puts in the background, and every process below inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_ours(name: str) -> bool:
    """Whether a variable could change what the product does."""
    return name in CLEAN_NAMES or name.startswith(CLEAN_PREFIXES)


@pytest.fixture(autouse=True)
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without variables that the product reads; children of the test inherit it."""
    for name in [name for name in os.environ if is_ours(name)]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind. Runs last of all fixtures, so theirs may clean up first."""
    watcher = Watcher.start()
    yield
    left = watcher.end_leftovers()
    if left:
        pytest.fail(f"left behind by {request.node.nodeid}: " + "; ".join(left), pytrace=False)


SEED_VARIABLE = "TEST_SEED"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for tests that draw: printed if the test fails; `TEST_SEED` draws the same again."""
    given = os.environ.get(SEED_VARIABLE)
    value = int(given) if given else random.SystemRandom().randrange(2**31)
    request.node.user_properties.append((SEED_VARIABLE, value))
    print(f"{SEED_VARIABLE}={value}")  # pytest shows what a failed test printed
    return value
