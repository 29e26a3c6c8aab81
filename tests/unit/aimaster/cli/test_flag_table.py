"""The flag table against the installed torch: names, aliases, defaults, choices, variables."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aimaster.cli.flags import OWN_FLAGS, render_help
from aimaster.cli.words import parse_words
from aimaster.errors import EXIT_CODES, UsageError
from aimaster.integrations.torchrun import DIFFERS_FROM_TORCHRUN, TORCHRUN_FLAGS, Flag, Kind, split_list

torch_run = pytest.importorskip("torch.distributed.run")

POSITIONAL = {"training_script", "training_script_args"}
NEWER_THAN_TORCH_2_6 = {
    "duplicate_stderr_filters",
    "duplicate_stdout_filters",
    "event_log_handler",
    "numa_binding",
    "shutdown_timeout",
    "signals_to_handle",
    "virtual_local_rank",
}


@pytest.fixture
def actions(clean_env: pytest.MonkeyPatch) -> dict[str, argparse.Action]:
    parser = torch_run.get_args_parser()
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def by_dest() -> dict[str, Flag]:
    return {flag.dest: flag for flag in TORCHRUN_FLAGS}


def test_same_flags(actions: dict[str, argparse.Action]) -> None:
    theirs = set(actions) - POSITIONAL
    assert theirs <= set(by_dest()), "torch has a flag that the table lacks"
    assert set(by_dest()) - theirs <= NEWER_THAN_TORCH_2_6


def test_same_names_kinds_and_choices(actions: dict[str, argparse.Action]) -> None:
    for dest, flag in by_dest().items():
        if dest not in actions:
            continue
        action = actions[dest]
        assert set(flag.names) == set(action.option_strings), dest
        assert (flag.kind is Kind.SWITCH) == (action.nargs == 0), dest
        assert flag.choices == tuple(action.choices or ()), dest


def test_defaults_differ_only_where_said(actions: dict[str, argparse.Action]) -> None:
    for dest, flag in by_dest().items():
        if dest not in actions:
            continue
        theirs = actions[dest].default
        ours = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        if dest in DIFFERS_FROM_TORCHRUN:
            assert ours != theirs, f"{dest} is the same now: take it off the list"
        else:
            assert ours == theirs, dest


def test_same_variables(actions: dict[str, argparse.Action], clean_env: pytest.MonkeyPatch) -> None:
    """A variable moves torchrun's default exactly if the table names it."""
    for dest in set(by_dest()) & set(actions):
        variable = f"PET_{dest.upper()}"
        clean_env.setenv(variable, "1")
        changed = {a.dest: a.default for a in torch_run.get_args_parser()._actions}[dest]
        clean_env.delenv(variable)
        assert (changed in ("1", True)) == (variable in by_dest()[dest].env), dest


def test_own_flags_share_no_name_with_torchrun() -> None:
    theirs = {name for flag in TORCHRUN_FLAGS for name in flag.names}
    ours = [name for flag in OWN_FLAGS for name in flag.names]
    assert len(set(ours)) == len(ours)
    assert not theirs & set(ours)


def test_own_flags_break_no_abbreviation(actions: dict[str, argparse.Action]) -> None:
    """Whatever prefix torchrun understands means the same here."""
    for flag in TORCHRUN_FLAGS:
        for name in flag.names:
            for length in range(3, len(name) + 1):
                words = [name[:length]] + ([] if flag.kind is Kind.SWITCH else [sample(flag)])
                theirs = torchrun_values([*words, "train.py"])
                if theirs is not None:
                    parsed = parse_words([*words, "train.py"], torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)
                    assert parsed.given, words
                    assert {k: theirs[k] for k in parsed.given} == as_argparse(parsed.given), words


def sample(flag: Flag) -> str:
    return flag.choices[0] if flag.choices else "1"


def as_argparse(given: object) -> dict[str, object]:
    assert isinstance(given, dict)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


def torchrun_values(words: list[str]) -> dict[str, object] | None:
    """What torchrun's parser makes of the words; None if it refuses them."""
    parser = torch_run.get_args_parser()
    parser.exit_on_error = False
    parser.error = _refuse  # type: ignore[method-assign]
    try:
        return vars(parser.parse_args(words))
    except (argparse.ArgumentError, _RefusedError):
        return None


class _RefusedError(Exception):
    pass


def _refuse(message: str) -> None:
    raise _RefusedError(message)


WORDS = st.one_of(
    st.sampled_from([name for flag in TORCHRUN_FLAGS for name in flag.names]),
    st.sampled_from(["1", "2", "-1", "0:3", "train.py", "x", "-", "-m", "-r3", "-mr", "-t=1", "--nnodes=2"]),
    st.sampled_from(["--nproc_per_node=gpu", "--rdzv", "--max-r", "--standalone=1", "--nope", "-z", ""]),
)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(WORDS, max_size=6))
def test_same_meaning_as_torchrun(words: list[str]) -> None:
    """Words that torchrun takes are taken, with the same values and the same program."""
    words = [*words, "train.py", "--lr", "0.1"]
    theirs = torchrun_values(words)
    if theirs is None:
        return
    parsed = parse_words(words, torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)
    program = (theirs["training_script"], *theirs["training_script_args"])  # type: ignore[misc]
    assert parsed.rest == program
    assert {key: theirs[key] for key in parsed.given} == as_argparse(parsed.given)
    defaults = torchrun_values(["train.py"])
    assert defaults is not None
    changed = {k for k, v in theirs.items() if k not in POSITIONAL and v != defaults[k]}
    assert changed <= set(parsed.given)


@pytest.mark.parametrize(
    ("words", "rest", "separator"),
    [
        (["train.py", "--", "x"], ("train.py", "--", "x"), False),
        (["--nproc-per-node", "2", "--", "train.py", "--lr", "1"], ("train.py", "--lr", "1"), True),
        (["--", "deepspeed", "--", "train.py"], ("deepspeed", "--", "train.py"), True),
        (["--ckpt-dir", "c", "train.py", "--ckpt-dir", "d"], ("train.py", "--ckpt-dir", "d"), False),
        ([], (), False),
    ],
)
def test_where_the_program_starts(words: list[str], rest: tuple[str, ...], separator: bool) -> None:
    parsed = parse_words(words, torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)
    assert (parsed.rest, parsed.separator) == (rest, separator)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ckptdir", "x", "t.py"], "did you mean --ckpt-dir"),
        (["--nproc-pr-node", "2", "t.py"], "--nproc-per-node"),
        (["--rdzv", "x", "t.py"], "ambiguous"),
        (["--ckpt", "x", "t.py"], "unknown flag --ckpt"),
        (["--max-restarts", "many", "t.py"], "a whole number"),
        (["--max-restarts"], "needs a value"),
        (["--nnodes", "--standalone", "t.py"], "needs a value"),
        (["--nnodes", "--", "t.py"], "needs a value"),
        (["--standalone=1", "t.py"], "takes no value"),
        (["--start-method", "magic", "t.py"], "one of spawn, fork, forkserver"),
        (["-q", "t.py"], "unknown flag -q"),
    ],
)
def test_bad_words_are_named(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_words(words, torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "a", "a,b", "a,,b", ",", "a,,,b", ",,,,", "x,"])
def test_lists_are_split_as_torchrun_does(text: str, clean_env: pytest.MonkeyPatch) -> None:
    theirs = torchrun_values(["--duplicate-stdout-filters", text, "t.py"])
    assert theirs is not None
    assert list(split_list(text)) == theirs["duplicate_stdout_filters"]


def test_help_shows_every_flag_and_exit_code() -> None:
    text = render_help()
    for flag in (*TORCHRUN_FLAGS, *OWN_FLAGS):
        assert flag.long in text
    for row in EXIT_CODES:
        assert f"\n  {int(row.code)} " in text
    assert max(len(line) for line in text.splitlines()) <= 110
