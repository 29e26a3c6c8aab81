"""The documentation against the tree: links, paths, commands, flags, variables, exit codes, generated blocks.

`python tests/tidy/test_docs.py` writes the generated blocks anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aimaster.cli.flags import OWN_FLAGS, render_help
from aimaster.cli.words import parse_words
from aimaster.errors import EXIT_CODES
from aimaster.integrations.torchrun import TORCHRUN_FLAGS
from tests.tidy.source import ROOT, files, sources, text_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.M | re.S)
TREES = ("aimaster", "easyckpt", "sanitycheck", "protos", "docs", "tests", "tools", "examples", "benchmarks")
COMMANDS = ("aimaster", "easyckpt", "sanitycheck")
VARIABLE = re.compile(r"\b(?:AIMASTER|EASYCKPT|SANITYCHECK)_[A-Z_]+\b")


def pages() -> list[str]:
    return [name for name in files() if name.endswith(".md")]


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target in LINK.findall(text_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert not broken, broken


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages())
def test_paths_in_the_text_exist(page: str) -> None:
    quoted = re.findall(r"`([\w./-]+/[\w./-]*)`", FENCE.sub("", text_of(page)))
    named = [path for path in quoted if path.split("/")[0] in TREES]
    assert [path for path in named if not (ROOT / path).exists()] == []


def lines_to_type() -> list[tuple[str, str]]:
    """Page and command line of every line in a console block, comments taken off."""
    found = []
    for page in pages():
        for language, block in FENCE.findall(text_of(page)):
            if language in ("console", "bash", "sh"):
                found += [
                    (page, line.removeprefix("$ ").split("  #")[0].strip()) for line in block.splitlines()
                ]
    return [(page, line) for page, line in found if line and not line.startswith("#")]


def typed(command: str) -> list[tuple[str, list[str]]]:
    return [(page, shlex.split(line)) for page, line in lines_to_type() if line.split()[0] == command]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.M))
    used = {word for _, words in typed("make") for word in words[1:] if "=" not in word}
    used |= {match for page in pages() for match in re.findall(r"`make ([a-z-]+)`", text_of(page))}
    assert used <= targets, used - targets


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    """Every subcommand that a page shows is in the command's help."""
    used = {words[1] for _, words in typed(command) if len(words) > 1 and not words[1].startswith("-")}
    used |= {sub for page in pages() for sub in re.findall(rf"`{command} ([a-z]+)[` ]", text_of(page))}
    used -= planned(command)
    done = subprocess.run(
        [sys.executable, "-c", f"from {command}.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "COLUMNS": "200", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    missing = {sub for sub in used if not re.search(rf"\b{sub}\b", done.stdout)}
    assert not missing


def planned(command: str) -> set[str]:
    """Subcommands that only the roadmap speaks of."""
    pattern = rf"`{command} ([a-z]+)[` ]"
    elsewhere = "".join(text_of(page) for page in pages() if not page.endswith("roadmap.md"))
    return set(re.findall(pattern, text_of("docs/contribute/roadmap.md"))) - set(
        re.findall(pattern, elsewhere)
    )


def test_flags_of_run_exist() -> None:
    for page, words in typed("aimaster"):
        if words[1:2] == ["run"]:
            parse_words(words[2:], torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)  # raises and names the flag
            assert page


def test_every_variable_is_documented_and_none_is_invented() -> None:
    in_code = {name for source in sources(*COMMANDS) for name in VARIABLE.findall(source.text)}
    in_code = {name for name in in_code if not name.endswith("_")}
    documented = set(VARIABLE.findall(text_of("docs/reference/environment.md")))
    assert in_code - documented == set(), "not in docs/reference/environment.md"
    assert documented - in_code == set(), "documented, but nothing reads or sets it"


def help_block() -> str:
    return f"```text\n{render_help()}```"


def exit_block() -> str:
    again = {True: "yes", False: "no", None: "–"}
    rows = [f"| {int(row.code)} | {row.meaning} | {again[row.requeue]} |" for row in EXIT_CODES]
    return "\n".join(["| code | means | requeue |", "| --- | --- | --- |", *rows])


def flag_block() -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in flag.env)} | `{flag.long}` |" for flag in OWN_FLAGS if flag.env
    ]
    return "\n".join(["| variable | flag |", "| --- | --- |", *rows])


GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "docs/reference/cli.md": {"help": help_block},
    "docs/reference/exit-codes.md": {"exit codes": exit_block},
    "docs/reference/environment.md": {"flags": flag_block},
}


def renew(text: str, title: str, block: str) -> str:
    """`text` with the block between its two marks exchanged."""
    begin, end = f"<!-- generated: {title} -->\n", f"\n<!-- end: {title} -->"
    head, _, rest = text.partition(begin)
    assert end in rest, f"no marks for {title}"
    return head + begin + block + end + rest.partition(end)[2]


@pytest.mark.parametrize("page", GENERATED)
def test_generated_blocks_are_fresh(page: str) -> None:
    text = text_of(page)
    for title, block in GENERATED[page].items():
        assert renew(text, title, block()) == text, "run: python tests/tidy/test_docs.py"


if __name__ == "__main__":
    for name, blocks in GENERATED.items():
        renewed = (ROOT / name).read_text()
        for heading, make in blocks.items():
            renewed = renew(renewed, heading, make())
        (ROOT / name).write_text(renewed)
