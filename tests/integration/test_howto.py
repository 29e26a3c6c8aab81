"""Every program and every easyckpt command on the how-to pages, run as it stands, in the order of the page.

A page is one program: its blocks share their names. ``<!-- ranks: N -->`` has it run by that many ranks under
torchrun. A command runs after the blocks that stand before it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extensions import DEEPSPEED

PAGES = Path(__file__).parents[2] / "docs/how-to"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.M | re.S)
RANKS = re.compile(r"<!-- ranks: (\d+) -->")
NEEDS = {
    "deepspeed": "deepspeed",
    "huggingface": "accelerate",
    "lightning": "lightning",
    "data": "torchdata",
}
"""Word in a page's name → what it needs."""
WAIT_S = 500
NOT_RUN = {"s3.md": "it needs a store; the tests of S3 run against a server of their own"}

HEAD = """
import warnings
warnings.simplefilter("ignore")
def easyckpt_command(*words):
    from easyckpt.cli import main
    assert main(list(words)) == 0, words
"""


def program(page: str) -> tuple[str, int]:
    """The page as one program, and how many ranks run it (0: no launcher)."""
    parts = [HEAD]
    for language, block in FENCE.findall(page):
        if language == "python":
            parts.append(block)
        elif language == "console":
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["easyckpt"]:
                    parts.append(f"easyckpt_command(*{words[1:]!r})\n")
    ranks = RANKS.search(page)
    return "\n".join(parts), int(ranks[1]) if ranks else 0


def split_commands(text: str) -> tuple[str, str]:
    """Commands at the end of a page with ranks are run once, after the ranks have ended."""
    head, mark, tail = text.partition("\neasyckpt_command(*")
    return head, HEAD + mark + tail if mark else ""


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            **DEEPSPEED,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.name for path in PAGES.glob("*.md")))
def test_a_page_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    if name in NOT_RUN:
        pytest.skip(NOT_RUN[name])
    for word, module in NEEDS.items():
        if word in name:
            pytest.importorskip(module)
    text, ranks = program((PAGES / name).read_text())
    if text == HEAD:
        pytest.skip("no program on this page")
    after = ""
    if ranks:
        text, after = split_commands(text)
    (tmp_path / "page.py").write_text(text)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    )
    run([sys.executable, *launcher, "page.py"], tmp_path)
    if after:
        (tmp_path / "after.py").write_text(after)
        run([sys.executable, "after.py"], tmp_path)
