"""Every import against the arrows of docs/explain/architecture.md.

A row says what the modules below a prefix may import: of our own packages and of others. The longest prefix
that fits a module counts. The standard library is free, except in the pure core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from tests.tidy.source import PACKAGES, Source, imports, sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the modules below a prefix may import."""

    prefix: str
    own: tuple[str, ...]
    """Prefixes of our modules; what lies below the row's own prefix is always allowed."""
    others: tuple[str, ...] = ()
    stdlib: frozenset[str] = frozenset(sys.stdlib_module_names)


LEAVES = ("aimaster.clock", "aimaster.config", "aimaster.errors", "aimaster.ids")

PURE_STDLIB = frozenset(
    (
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "statistics",
        "types",
        "typing",
    )
)
"""What the core may use: nothing that reads a clock, a file, the network, or draws a number."""

ROWS = (
    # aimaster
    Row(prefix="aimaster.ids", own=(), stdlib=PURE_STDLIB | {"re"}),
    Row(prefix="aimaster.errors", own=()),
    Row(prefix="aimaster.clock", own=()),
    Row(prefix="aimaster.config", own=("aimaster.ids",)),
    Row(prefix="aimaster.core", own=("aimaster.ids",), stdlib=PURE_STDLIB),
    Row(prefix="aimaster.journal", own=(*LEAVES, "aimaster.core")),
    Row(prefix="aimaster.simulation", own=(*LEAVES, "aimaster.core", "aimaster.journal")),
    Row(
        prefix="aimaster.rpc",
        own=(*LEAVES, "aimaster.core"),
        others=("grpc", "google", "cryptography"),
    ),
    Row(
        prefix="aimaster.master",
        own=(*LEAVES, "aimaster.core", "aimaster.journal", "aimaster.rpc"),
        others=("grpc", "psutil"),
    ),
    Row(
        prefix="aimaster.master.tensorboard",
        own=("aimaster.errors", "aimaster.rpc"),
        others=("tensorboard",),
    ),
    Row(prefix="aimaster.worker", own=(), others=("torch",)),
    Row(
        prefix="aimaster.agent",
        own=(
            *LEAVES,
            "aimaster.core",
            "aimaster.rpc",
            "aimaster.worker",
            "aimaster.integrations",
            "sanitycheck",
        ),
        others=("psutil",),
    ),
    Row(
        prefix="aimaster.agent.template",
        own=("aimaster.agent", "aimaster.worker"),
        others=("torch", "numpy", "sitecustomize"),
    ),
    Row(prefix="aimaster.integrations", own=(*LEAVES, "aimaster.core", "aimaster.rpc.messages", "easyckpt")),
    Row(prefix="aimaster.schedulers", own=LEAVES),
    Row(prefix="aimaster.rules", own=(*LEAVES, "aimaster.core"), others=("yaml",)),
    Row(
        prefix="aimaster.cli",
        own=("aimaster",),
        others=("typer", "click", "rich", "grpc", "psutil", "yaml"),
    ),
    Row(prefix="aimaster", own=()),
    # easyckpt
    Row(
        prefix="easyckpt",
        own=(),
        others=("torch", "numpy", "psutil", "fsspec", "xxhash", "msgspec", "safetensors"),
    ),
    Row(
        prefix="easyckpt.saver",
        own=("easyckpt",),
        others=("numpy", "psutil", "fsspec", "xxhash", "msgspec", "safetensors"),
    ),
    Row(
        prefix="easyckpt.storage",
        own=("easyckpt",),
        others=("fsspec", "xxhash"),
    ),
    Row(
        prefix="easyckpt.adapters.deepspeed",
        own=("easyckpt",),
        others=("torch", "deepspeed", "numpy"),
    ),
    Row(
        prefix="easyckpt.interop.universal",
        own=("easyckpt",),
        others=("torch", "deepspeed"),
    ),
    *(
        Row(prefix=f"easyckpt.integrations.{name}", own=("easyckpt",), others=("torch", framework))
        for name, framework in (
            ("accelerate", "accelerate"),
            ("huggingface", "transformers"),
            ("lightning", "lightning"),
        )
    ),
    Row(
        prefix="easyckpt.cli",
        own=("easyckpt",),
        others=("typer", "click", "rich", "numpy", "safetensors", "xxhash", "fsspec"),
    ),
    # sanitycheck
    Row(
        prefix="sanitycheck",
        own=(),
        others=("psutil", "pynvml", "fsspec", "yaml"),
    ),
    Row(prefix="sanitycheck.cli", own=("sanitycheck",), others=("typer", "click", "rich", "yaml")),
    Row(prefix="sanitycheck.render", own=("sanitycheck",), others=("rich",)),
)

COMPUTES = {
    "sanitycheck.facts.gemm": ("torch", "numpy"),
    "sanitycheck.facts.bitwise": ("torch", "numpy"),
    "sanitycheck.facts.collective": ("torch",),
    "sanitycheck.facts.cuda": ("torch",),
    "sanitycheck.facts.links": ("torch",),
    "sanitycheck.facts.membw": ("numpy",),
    "sanitycheck.facts.training": ("torch",),
    "sanitycheck.group.worker": ("torch",),
}
"""Checks that compute, and so may use a framework in their own child process."""

WITHOUT_TORCH = (
    "easyckpt.saver",
    "easyckpt.storage",
    "easyckpt.manifest",
    "easyckpt.commit",
    "easyckpt.retention",
    "easyckpt.cli",
    "easyckpt.errors",
    "easyckpt.layout",
)
"""Modules that a process without torch loads: importing it would cost seconds and hundreds of megabytes."""


def below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def row_for(module: str) -> Row:
    return max((row for row in ROWS if below(module, row.prefix)), key=lambda row: len(row.prefix))


def complaint(source: Source, module: str) -> str:
    """Why a module may not be imported here; empty if it may."""
    row = row_for(source.module)
    top = module.partition(".")[0]
    if top in PACKAGES:
        fits = any(below(module, prefix) for prefix in (row.prefix, *row.own))
        return "" if fits else f"{row.prefix} may not import {module}"
    if top in sys.stdlib_module_names:
        return "" if top in row.stdlib else f"{row.prefix} is pure and may not import {top}"
    allowed = (*row.others, *COMPUTES.get(source.module, ()))
    return "" if top in allowed else f"{row.prefix} may not import {top}"


def test_every_arrow_is_drawn() -> None:
    wrong = [
        f"{source.path}:{found.line}: {why}"
        for source in sources(*PACKAGES)
        for found in imports(source)
        if (why := complaint(source, found.module))
    ]
    assert not wrong, "\n".join(wrong)


def test_generated_code_stays_inside_rpc() -> None:
    wrong = [
        f"{source.path}:{found.line}"
        for source in sources()
        for found in imports(source)
        if below(found.module, "aimaster.rpc.gen") and not below(source.module, "aimaster.rpc")
        if not source.path.startswith(("tests/unit/aimaster/rpc/", "tests/property/test_rpc", "protos/"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("prefix", WITHOUT_TORCH)
def test_no_way_leads_to_torch(prefix: str) -> None:
    """Not even through another module of ours, as long as imports at the top of modules are followed."""
    modules = {source.module: source for source in sources(*PACKAGES)}
    reached, todo = set(), [module for module in modules if below(module, prefix)]
    while todo:
        module = todo.pop()
        if module in reached or module not in modules:
            continue
        reached.add(module)
        top_level = [found for found in imports(modules[module]) if found.at_top]
        assert "torch" not in {found.module.partition(".")[0] for found in top_level}, module
        todo += [found.module for found in top_level if found.module in modules]


def test_rows_are_all_needed() -> None:
    """A row that fits no module is an arrow that nobody draws any more."""
    used = {row_for(source.module).prefix for source in sources(*PACKAGES)}
    unused = {row.prefix for row in ROWS} - used
    assert not unused, f"rows without a module: {sorted(unused)}"
