"""Sizes: functions, files, parameters, groups of a configuration. Exceptions are listed with a reason."""

from __future__ import annotations

import ast

from tests.tidy.source import PACKAGES, Source, sources

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 600
PARAMETERS_MAX = 7
POSITIONAL_MAX = 2
ALL_BY_POSITION_MAX = 3
"""A function that takes no more than these may take all of them by position: its order is easily known."""
CONFIG_FIELDS_MAX = 12

LONG_FUNCTIONS: dict[str, str] = {}
"""`path::function` → why it may be longer."""
LONG_FILES: dict[str, str] = {
    "aimaster/integrations/torchrun.py": "a table: one row per flag of torchrun",
}
POSITIONAL_BY_NATURE = {
    "__exit__": "given by the language",
    "__aexit__": "given by the language",
    "__setattr__": "given by the language",
    "__setitem__": "given by the language",
    "__new__": "given by the language",
}
MANY_POSITIONAL: dict[str, str] = {
    "easyckpt/integrations/deepspeed.py::save_checkpoint": "stands in the place of DeepSpeed's method",
    "easyckpt/integrations/lightning.py::on_train_batch_end": "Lightning calls it",
    "easyckpt/integrations/lightning.py::on_train_batch_start": "Lightning calls it",
}
"""`path::function` → why its order of parameters is clear, or is given by somebody else."""


def own_and_tests() -> tuple[Source, ...]:
    return sources(*PACKAGES, "tests", "examples", "benchmarks", "protos")


def name_of(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{source.path}::{node.name}"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], list[str]]:
    """Positional and keyword-only parameters, without self and cls."""
    positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    if positional and positional[0] in ("self", "cls", "mcs"):
        positional = positional[1:]
    return positional, [arg.arg for arg in node.args.kwonlyargs]


def test_functions_are_short() -> None:
    long = {
        f"{name_of(source, node)}: {lines} lines"
        for source in own_and_tests()
        for node in source.functions()
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
        and name_of(source, node) not in LONG_FUNCTIONS
    }
    assert not long, "\n".join(sorted(long))


def test_files_are_short() -> None:
    long = []
    for source in own_and_tests():
        limit = TEST_FILE_LINES_MAX if source.path.startswith("tests/") else FILE_LINES_MAX
        lines = source.text.count("\n")
        if lines > limit and source.path not in LONG_FILES:
            long.append(f"{source.path}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_functions_take_few_parameters() -> None:
    wrong = []
    for source in sources(*PACKAGES):
        for node in source.functions():
            positional, keyword = parameters(node)
            if len(positional) + len(keyword) > PARAMETERS_MAX:
                wrong.append(
                    f"{name_of(source, node)}:{node.lineno}: {len(positional) + len(keyword)} parameters"
                )
    assert not wrong, "\n".join(wrong)


def test_parameters_are_keyword_only_after_the_second() -> None:
    wrong = []
    for source in sources(*PACKAGES):
        for node in source.functions():
            positional, keyword = parameters(node)
            if len(positional) + len(keyword) <= ALL_BY_POSITION_MAX:
                continue
            if any(ast.unparse(call).startswith("app.command") for call in node.decorator_list):
                continue  # typer reads the signature; nobody else calls it
            exempt = node.name in POSITIONAL_BY_NATURE or name_of(source, node) in MANY_POSITIONAL
            if len(positional) > POSITIONAL_MAX and not node.name.startswith("_") and not exempt:
                wrong.append(f"{name_of(source, node)}:{node.lineno}: {', '.join(positional)}")
    assert not wrong, "\n".join(wrong)


def test_groups_of_a_configuration_are_small() -> None:
    wrong = []
    for source in sources(*PACKAGES):
        for node in source.classes():
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            is_group = node.name.endswith(("Config", "Options", "Policy"))
            if is_group and len(fields) > CONFIG_FIELDS_MAX:
                wrong.append(f"{source.path}::{node.name}: {len(fields)} fields")
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_still_needed() -> None:
    """A list of exceptions that only grows stops being one."""
    paths = {source.path for source in own_and_tests()}
    functions = {name_of(source, node) for source in own_and_tests() for node in source.functions()}
    assert set(LONG_FILES) <= paths
    assert set(LONG_FUNCTIONS) <= functions
    assert set(MANY_POSITIONAL) <= functions
