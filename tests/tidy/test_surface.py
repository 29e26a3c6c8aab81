"""What a reader meets first: exports, docstrings of modules, trees of errors, caught exceptions, names."""

from __future__ import annotations

import ast
import functools
import importlib
import re

import pytest

from tests.tidy.source import PACKAGES, Source, broken, files, sources, text_of

BROAD_EXCEPTS: dict[str, tuple[int, str]] = {
    "aimaster/agent/bootstrap/sitecustomize.py": (1, "the interpreter would go on and run the script here"),
    "aimaster/agent/template.py": (
        1,
        "imports other people's modules; the worker shows the error, if it does",
    ),
    "aimaster/cli/__init__.py": (1, "outer loop: an own bug ends with code 70 and a line that says so"),
    "aimaster/worker/again.py": (
        1,
        "calls the training again after the end of a peer: raises all else, tells the agent what it was",
    ),
    "aimaster/worker/hook.py": (
        6,
        "the hook in a training process: never raises into it, writes what it gave up",
    ),
    "easyckpt/cli/app.py": (1, "outer loop: an own error ends with the code of one"),
    "easyckpt/storage/patience.py": (
        1,
        "client libraries raise what they like",
    ),
    "easyckpt/overlap/job.py": (
        2,
        "outer loop of the copying thread: the step is given up with the error's text",
    ),
    "easyckpt/saver/service.py": (1, "outer loop of the saver: counted as trouble, shown by its status"),
    "sanitycheck/cli/__init__.py": (1, "outer loop: an own error must not look like a verdict"),
    "sanitycheck/probe.py": (1, "outer loop of the child: sends what broke to the engine"),
}
"""Path → how many handlers there catch everything, and why (a shell's outer loop, the training hook)."""

FOREIGN_ERRORS: dict[str, str] = {
    "aimaster/agent/warm.py::Unfit": "an answer inside one module: the reason to start cold, shown by status",
    "aimaster/core/transitions.py::IllegalEvent": "the core may not import the tree; the shell records it",
    "aimaster/worker/again.py::GenerationOver": "raised through the training to one place that takes it",
    "easyckpt/track.py::Changed": "an answer inside one module: the state is captured anew",
    "easyckpt/saver/holdings.py::SlotsBusy": "an answer inside the saver, which becomes a skipped save",
    "easyckpt/storage/trouble.py::RemoteTrouble": "inside the storage package, which maps it to the tree",
    "easyckpt/testing/crash.py::Crash": "a power cut in a test; nothing but the test may catch it",
}
"""`path::class` → why an exception lives outside its package's tree."""


def exported(source: Source) -> list[str] | None:
    """The names in `__all__`, or None where a module has none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def defined(source: Source) -> set[str]:
    """Public classes and functions of a module."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name for node in source.tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    }


def test_exports_are_sorted_and_complete() -> None:
    wrong = []
    for source in sources(*PACKAGES):
        names = exported(source)
        if names is None:
            continue
        if len(set(names)) != len(names):
            wrong.append(f"{source.path}: a name twice in __all__")
        if names != natural(names):
            wrong.append(f"{source.path}: __all__ is not sorted")
        missing = defined(source) & taken().get(source.module, set()) - set(names)
        if missing:
            wrong.append(f"{source.path}: used elsewhere, but not in __all__: {', '.join(sorted(missing))}")
    assert not wrong, "\n".join(wrong)


@functools.cache
def taken() -> dict[str, set[str]]:
    """Module → names that other modules of the packages import from it."""
    names: dict[str, set[str]] = {}
    for source in sources(*PACKAGES):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return names


def natural(names: list[str]) -> list[str]:
    """Any order that tools produce: by code point, or constants, classes, functions; with or without case."""

    def kind(name: str) -> int:
        return 0 if name.isupper() else 1 if name[:1].isupper() else 2

    orders = (
        sorted(names, key=str.lower),
        sorted(names, key=lambda name: (kind(name), name)),
        sorted(names, key=lambda name: (kind(name), name.lower())),
    )
    return names if names in orders else sorted(names)


@pytest.mark.parametrize("package", ["easyckpt", "sanitycheck"])
def test_libraries_say_what_is_public(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert module.__doc__


def test_every_module_opens_with_its_theory() -> None:
    empty = [
        source.path
        for source in sources(*PACKAGES)
        if not ast.get_docstring(source.tree) and (source.tree.body or not source.is_package)
    ]
    assert not empty, "\n".join(empty)


@pytest.mark.parametrize("package", PACKAGES)
def test_tree_of_errors_is_drawn(package: str) -> None:
    """Every class stands in the drawing, below its parent and deeper by one level."""
    path = f"{package}/errors.py"
    if path not in files():
        pytest.skip(f"{path} is not there")
    source = next(source for source in sources(package) if source.path == path)
    drawing = (ast.get_docstring(source.tree) or "").splitlines()
    classes = {node.name: [ast.unparse(base) for base in node.bases] for node in source.classes()}
    errors = {name for name in classes if is_error(name, classes)}
    drawn: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in drawing:
        match = re.match(r"[\s│├└─|`+-]*([A-Z]\w+)", line)
        if match and match[1] in errors and match[1] not in drawn:
            column = match.start(1)
            above = [(at, name) for at, name in above if at < column]
            drawn[match[1]] = above[-1][1] if above else None
            above.append((column, match[1]))
    assert errors - set(drawn) == set(), "not drawn"
    wrong = [
        f"{name} below {parent}" for name, parent in drawn.items() if parent and parent not in classes[name]
    ]
    assert not wrong, wrong


def is_error(name: str, classes: dict[str, list[str]]) -> bool:
    return any(
        base in ("Exception", "BaseException") or is_error(base, classes) for base in classes.get(name, ())
    )


def test_no_errors_outside_the_trees() -> None:
    wrong = []
    for source in sources(*PACKAGES):
        if source.path.endswith("/errors.py"):
            continue
        for node in source.classes():
            bases = {ast.unparse(base) for base in node.bases}
            outside = bases & {
                "Exception",
                "BaseException",
                "RuntimeError",
                "ValueError",
                "OSError",
                "KeyError",
            }
            if outside and f"{source.path}::{node.name}" not in FOREIGN_ERRORS:
                wrong.append(f"{source.path}:{node.lineno}: {node.name}({', '.join(sorted(outside))})")
    assert not wrong, "\n".join(wrong)


def test_broad_excepts_are_counted() -> None:
    counted: dict[str, int] = {}
    for source in sources(*PACKAGES):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and is_broad(node) and not raises_again(node):
                counted[source.path] = counted.get(source.path, 0) + 1
    listed = {path: number for path, (number, _) in BROAD_EXCEPTS.items()}
    assert sorted(counted.items()) == sorted(listed.items()), "list it with its reason, or narrow it"


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether the handler ends by raising: it cleans up and swallows nothing."""
    return isinstance(handler.body[-1], ast.Raise)


def test_no_drawers_for_odds_and_ends() -> None:
    names = {"utils", "util", "common", "helpers", "misc"}
    wrong = [name for name in files() if names & set(name.removesuffix(".py").split("/"))]
    assert not wrong


FORBIDDEN = (
    (r"/wor[k]/", "a path of one machine"),
    (r"/roo[t]/", "a path of one machine"),
    (r"\.\./share[d]\b", "a folder outside the repository"),
    (r"\bfar[m]-\w", "a tool of one machine"),
    (
        r"(?i)\bcl[a]ude\b|\banthr[o]pic\b|\bchatg[p]t\b|\bcop[i]lot\b",
        "the repository speaks of the product alone",
    ),
    (r"(?i)\bsuba[g]ent|\bas an a[i]\b|\bllm (helper|session)", "the repository speaks of the product alone"),
    (r"https?://\S*(/simpl[e]\b|pyp[i]\.)|download\.pytorch\.or[g]", "the name of a package index"),
)


def test_nothing_speaks_of_one_machine_or_of_how_it_was_made() -> None:
    wrong = []
    for name in files():
        if name == "LICENSE":
            continue
        for number, line in enumerate(text_of(name).splitlines(), start=1):
            wrong += [
                f"{name}:{number}: {why}: {line.strip()[:80]}"
                for pattern, why in FORBIDDEN
                if re.search(pattern, line)
            ]
    assert not wrong, "\n".join(wrong)


def test_no_temporary_folder_by_name() -> None:
    """The product asks the system for its temporary folder; a fixed one meets other users' files."""
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources(*PACKAGES, "examples", "benchmarks")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"/tmp(/|\Z)", node.value)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_pickle() -> None:
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources(*PACKAGES)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {"pickle", "cloudpickle", "dill", "marshal"}
        & {*(alias.name for alias in node.names), getattr(node, "module", None)}
    ]
    assert not wrong, "\n".join(wrong)


def test_versions_are_pinned_for_every_dependency() -> None:
    """`constraints.txt` names everything that pyproject.toml asks for, torch by an exact version."""
    asked = re.findall(r'^\s*"([A-Za-z0-9_.-]+)[><=~;\[]?[^"]*",?$', text_of("pyproject.toml"), flags=re.M)
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in text_of("constraints.txt").splitlines()
    }
    wanted = {name.lower().replace("_", "-") for name in requirement_names()}
    assert wanted <= pinned, sorted(wanted - pinned)
    assert re.search(r"^torch==\d", text_of("constraints.txt"), flags=re.M)
    assert asked


def requirement_names() -> list[str]:
    text = text_of("pyproject.toml")
    blocks = re.findall(
        r"(?:^dependencies|^torch|^deepspeed|^demo|^dev) = \[(.*?)\]", text, flags=re.M | re.S
    )
    return [match for block in blocks for match in re.findall(r'"([A-Za-z0-9_-]+)', block)]


def test_every_file_parses() -> None:
    assert broken() == {}
