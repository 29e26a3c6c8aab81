"""The repository as the tidy tests see it: its files, and the syntax tree of each Python file, read once."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aimaster", "easyckpt", "sanitycheck")
GENERATED = "aimaster/rpc/gen/"
_SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the root, with slashes."""
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node


@functools.cache
def files() -> tuple[str, ...]:
    """Every file of the repository that is not ignored, relative to the root."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return tuple(
        sorted(
            name
            for name in listed
            if name and not _SKIPPED_FOLDERS & set(Path(name).parts) and _is_file(name)
        )
    )


def _is_file(name: str) -> bool:
    return (ROOT / name).is_file()


@functools.cache
def text_of(name: str) -> str:
    """A file's text; empty for what is not text."""
    try:
        return (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Python files below the folders (all without an argument), generated ones left out."""
    chosen = tuple(f"{folder}/" for folder in folders) or ("",)
    names = [name for name in files() if name.endswith(".py") and not name.startswith(GENERATED)]
    return tuple(
        Source(path=name, text=text_of(name), tree=tree_of(name)) for name in names if name.startswith(chosen)
    )


@functools.cache
def tree_of(name: str) -> ast.Module:
    """A file's syntax tree; an empty one for a file that does not parse, which `broken` lists."""
    try:
        return ast.parse(text_of(name), filename=name)
    except SyntaxError as error:
        _broken[name] = str(error)
        return ast.Module(body=[], type_ignores=[])


_broken: dict[str, str] = {}


def broken() -> dict[str, str]:
    """Files that do not parse, and why."""
    sources()
    return dict(_broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module."""

    module: str
    line: int
    at_top: bool
    """Whether it stands outside every function, and so happens when the file is imported."""


@functools.cache
def imports(source: Source) -> tuple[Import, ...]:
    """What a file imports, at its top and inside functions; not what only a type checker sees.

    `from package import name` counts as `package.name` where that is a module of ours, else as `package`.
    """
    found: list[Import] = []
    for node, at_top in _walk_runtime(source.tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name if name in _modules() else base for name in names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                modules = [first.value]
        found += [Import(module=module, line=node.lineno, at_top=at_top) for module in modules]
    return tuple(found)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    above = source.module.split(".")
    above = above[: len(above) - node.level + (1 if source.is_package else 0)]
    return ".".join([*above, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _walk_runtime(tree: ast.AST, at_top: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that runs, and whether it does so when the file is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield child, at_top
                yield from _walk_runtime(child, at_top)
            continue
        yield node, at_top
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk_runtime(node, at_top and not inside)


@functools.cache
def _modules() -> frozenset[str]:
    return frozenset(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files()
        if name.endswith(".py")
    )
