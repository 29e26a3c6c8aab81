"""The `easyckpt` command, as a user runs it: output, exit codes, and no traceback."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easyckpt.cli import main
from easyckpt.cli.app import EXIT_CODES
from easyckpt.errors import EasyckptError
from easyckpt.storage import LocalStorage
from easyckpt.testing import SampleRun

SCRIPT = "import sys; from easyckpt.cli import main; sys.exit(main())"


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120, **options,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    run = SampleRun(storage=LocalStorage(tmp_path / "run"), nodes=2)
    run.begin(1)
    for step in (10, 20, 30):
        run.save(step, metrics={"loss": step / 10})
    run.begin(2, resumed_step=20)
    run.save(25)
    run.persist(40)
    return run


def root_of(run: SampleRun) -> str:
    return run.storage.where()


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([*map(str, arguments)])
    out = capsys.readouterr()
    assert "Traceback" not in out.err + out.out
    return code, out.out, out.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = call(capsys, *arguments, "--json")
    report = json.loads(out)
    assert report["schema"] == 1
    assert report["command"] == arguments[0]
    assert report["exit_code"] == code
    return code, report


def body(run: SampleRun, step: int, rank: int, *, generation: int = 1) -> Path:
    folder = f"data/g{generation:08d}/s{step:012d}/node{rank:05d}"
    return Path(root_of(run), folder, f"rank{rank:05d}.safetensors")


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-200] ^= 1
    path.write_bytes(raw)


def test_ls(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "ls", root_of(run))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["25", "20", "10"]
    assert "2 more" in err
    code, out, err = call(capsys, "ls", root_of(run), "--all")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["40", "30", "25", "20", "10"]
    assert "never committed" in out
    assert "generation 2 resumed from step 20" in out
    assert err == ""
    code, report = call_json(capsys, "ls", root_of(run), "--all")
    assert report["run_id"] == "sample-run"
    assert report["generation"] == 2
    assert {row["state"] for row in report["steps"]} == {"offered", "fenced", "never_committed"}
    assert report["steps"][-1]["metrics"] == {"loss": 1.0}
    assert all(row["bytes"] > 30_000 for row in report["steps"])


def test_inspect(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "inspect", root_of(run), "--step", 20)
    assert code == 0
    assert "step 20, generation 1 (a new beginning)" in out
    assert "optimizer.moments" in out
    assert "tied to model.weight" in out
    code, report = call_json(capsys, "inspect", root_of(run))
    assert report["step"] == 25
    assert report["resumed_step"] == 20
    assert [piece["rank"] for piece in report["pieces"]] == [0, 1]
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert tensors["optimizer.moments"]["kind"] == "flat"
    assert tensors["model.tied"]["tied_to"] == "model.weight"
    code, _, err = call(capsys, "inspect", root_of(run), "--step", 30)
    assert code == 4
    assert "easyckpt why" in err


def test_verify(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", root_of(run))
    assert code == 0
    assert "step 25 (generation 2): good" in out
    damage(body(run, 20, 1))
    code, report = call_json(capsys, "verify", root_of(run), "--all")
    assert code == 4
    verdicts = {row["step"]: row["verdict"] for row in report["verdicts"]}
    assert verdicts == {25: "good", 20: "damaged", 10: "good"}
    (finding,) = report["verdicts"][1]["findings"]
    assert finding["kind"] == "corrupt"
    assert finding["ranks"] == [1]
    assert finding["where"] == str(body(run, 20, 1))
    code, report = call_json(capsys, "verify", root_of(run), "--step", 20, "--quick")
    assert code == 0
    assert report["verdicts"][0]["verdict"] == "index_good", "no byte was read, so it is not called good"
    assert report["verdicts"][0]["bytes_proved"] == 0
    assert call(capsys, "verify", root_of(run), "--all", "--step", 20)[0] == 2


def test_unknown_is_never_good(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = body(run, 25, 0, generation=2)
    path.unlink()
    path.symlink_to(path.name)  # a loop: the system refuses to say what is there
    code, report = call_json(capsys, "verify", root_of(run))
    assert code == 3
    assert report["verdicts"][0]["verdict"] == "unknown"
    assert call(capsys, "why", root_of(run), 25)[0] == 3


def test_why(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "why", root_of(run), 20)
    assert code == 0
    assert out.startswith("step 20 can be loaded")
    for step, kind, words in (
        (30, "fenced", "resumed from step 20"),
        (40, "never_committed", "all ranks finished"),
        (99, "never_saved", "nothing of this step"),
    ):
        code, report = call_json(capsys, "why", root_of(run), step)
        assert code == 4
        assert not report["loadable"]
        assert [reason["kind"] for reason in report["reasons"]] == [kind]
        assert words in report["reasons"][0]["detail"]
        assert report["others"] == [25, 20, 10]


def test_diff(run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(run)
    other = SampleRun(storage=LocalStorage(tmp_path / "other"), nodes=2)
    other.begin(1)
    other.save(77, seed=25)
    code, out, _ = call(capsys, "diff", root, tmp_path / "other")
    assert code == 0
    assert "bit-equal" in out
    code, report = call_json(capsys, "diff", f"{root}@10", f"{root}@20")
    assert code == 1
    assert not report["bit_equal"]
    assert {item["name"] for item in report["differences"]} == {
        "model.weight", "model.bias", "model.tied", "optimizer.moments"
    }  # fmt: skip
    path = body(other, 77, 1)
    raw = bytearray(path.read_bytes())
    raw[-4096 - 64] ^= 1
    assert call(capsys, "diff", f"{root}@99", root)[0] == 4
    assert call(capsys, "diff", "@5", root)[0] == 2


def test_diff_over_world_sizes_compares_logical_tensors(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SampleRun(storage=LocalStorage(tmp_path / "other"), nodes=1, ranks_per_node=3)
    other.begin(1)
    other.save(25)
    code, report = call_json(capsys, "diff", root_of(run), tmp_path / "other")
    assert code == 1
    assert [item["kind"] for item in report["differences"]] == ["world_size"]
    assert report["tensors_equal"] == 4
    other.save(26)
    _, report = call_json(capsys, "diff", root_of(run), tmp_path / "other")
    assert len(report["differences"]) == 5


def test_diff_finds_one_changed_bit(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SampleRun(storage=LocalStorage(tmp_path / "other"), nodes=2)
    other.begin(1)
    other.save(25)
    _, report = call_json(capsys, "inspect", tmp_path / "other")
    path = body(other, 25, 1)
    raw = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    raw[begin + 4 * 5 + 1] ^= 0x40
    path.write_bytes(raw)
    code, report = call_json(capsys, "diff", root_of(run), tmp_path / "other")
    assert code == 1
    assert [(item["name"], item["ranks"]) for item in report["differences"]] == [
        ("model.tied", [1]),
        ("model.weight", [1]),
    ]
    assert "element 5 of its chunk on rank 1" in report["differences"][0]["detail"]


def test_prune(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(run)
    code, out, _ = call(capsys, "prune", root, "--keep-latest", 1, "--pin", 10, "--dry-run")
    assert code == 0
    assert "would go" in out
    assert call_json(capsys, "ls", root)[1]["steps"][1]["step"] == 20
    code, report = call_json(capsys, "prune", root, "--keep-latest", 1, "--pin", 10, "--grace", 0)
    assert code == 0
    assert report["kept"] == [{"step": 25, "generation": 2}, {"step": 10, "generation": 1}]
    assert report["anchor"] == {"step": 25, "generation": 2}
    assert report["freed_bytes"] > 30_000
    assert not body(run, 20, 0).exists()
    damage(body(run, 25, 0, generation=2))
    code, _, err = call(capsys, "prune", root, "--keep-latest", 1)
    assert code == 4
    assert "step 25 is damaged" in err
    assert body(run, 10, 0).exists()
    code, _, err = call(capsys, "prune", root)
    assert code == 2
    assert "--keep-latest 3" in err


def test_trouble_is_one_message_on_stderr(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = root_of(run)
    (tmp_path / "file").write_text("x")
    for arguments, expected in (
        (("ls", tmp_path / "nowhere"), 3),
        (("ls", tmp_path / "file"), 3),
        (("verify", tmp_path), 3),
        (("ls", ""), 2),
        (("ls", "s3://key:secret@bucket/run"), 2),
        (("why", root), 2),
        (("why", root, "-1"), 2),
        (("why", root, "ten"), 2),
        (("ls", root, "--colour"), 2),
        (("frobnicate", root), 2),
        (("prune", root, "--keep-latest", "0"), 2),
    ):
        code, out, err = call(capsys, *arguments)
        assert code == expected, (arguments, err)
        assert out == ""
        assert err.strip()
    Path(root, "easyckpt.json").write_text("{}")
    code, _, err = call(capsys, "ls", root)
    assert code == 4
    assert "easyckpt.json" in err


def test_scrub_and_what_ls_says_of_it(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(run)
    assert all(row["verified"] is None for row in call_json(capsys, "ls", root)[1]["steps"])
    damage(body(run, 20, 1))
    code, report = call_json(capsys, "scrub", root)
    assert code == 4
    assert {row["step"]: row["verdict"] for row in report["verdicts"]} == {
        25: "good",
        20: "damaged",
        10: "good",
    }
    rows = {row["step"]: row for row in call_json(capsys, "ls", root)[1]["steps"]}
    assert rows[20]["verified"]["verdict"] == "damaged"
    assert rows[25]["age_s"] > 0
    code, out, _ = call(capsys, "ls", root)
    assert (code, "damaged 20" in out, " disk " in out) == (0, True, True)
    code, report = call_json(capsys, "scrub", root, "--budget", "1KiB")
    assert len(report["verdicts"]) == 1
    assert call(capsys, "scrub", root, "--budget", "much")[0] == 2
    assert "easyckpt repair" in call(capsys, "scrub", root)[1]


def test_repair(run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(run)
    code, out, _ = call(capsys, "repair", root)
    assert (code, out) == (0, "nothing is damaged\n")
    shutil.copytree(root, tmp_path / "copy")
    body(run, 20, 1).unlink()
    code, report = call_json(capsys, "repair", root, "--dry-run")
    assert (code, [item["kind"] for item in report["done"]]) == (4, ["set_aside"])
    code, out, _ = call(capsys, "repair", root, "--step", 20, "--from", tmp_path / "copy")
    assert code == 0
    assert "step 20 (generation 1): written anew" in out
    assert call(capsys, "verify", root, "--all")[0] == 0
    body(run, 20, 1).unlink()
    code, out, _ = call(capsys, "repair", root)
    assert code == 4
    assert "set aside" in out
    code, report = call_json(capsys, "why", root, 20)
    assert (code, report["reasons"][0]["kind"]) == (4, "set_aside")
    assert "set aside" in call(capsys, "ls", root, "--all")[1]


def test_pin_and_unpin(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(run)
    assert call_json(capsys, "pin", root, 10, "--note", "for the paper")[1]["changed"]
    assert "pinned" in call(capsys, "ls", root)[1]
    call(capsys, "prune", root, "--keep-latest", 1, "--grace", 0)
    assert [row["step"] for row in call_json(capsys, "ls", root)[1]["steps"]] == [25, 10]
    assert call(capsys, "pin", root, 30)[0] == 4
    assert "is not pinned any more" in call(capsys, "unpin", root, 10)[1]
    assert "was not pinned" in call(capsys, "unpin", root, 10)[1]


def test_no_steps_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path / "run"))
    run.begin(1)
    code, out, err = call(capsys, "ls", root_of(run))
    assert (code, out) == (0, "")
    assert "no step can be loaded" in err
    for name in ("inspect", "verify"):
        assert call(capsys, name, root_of(run))[0] == 4
    assert call(capsys, "verify", root_of(run), "--all")[0] == 4


def test_help_names_commands_and_exit_codes() -> None:
    done = command("--help")
    assert done.returncode == 0
    for name in ("ls", "inspect", "verify", "why", "diff", "prune", "scrub", "repair", "pin", "unpin"):
        assert name in done.stdout
    for code, meaning in EXIT_CODES:
        assert f"{code}  {meaning.split()[0]}" in done.stdout


def test_exit_codes_cover_the_error_tree() -> None:
    documented = {code for code, _ in EXIT_CODES}
    waiting = [EasyckptError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        # 5 is of saves that did not finish: no command saves.
        assert kind.exit_code in documented | {5}, kind


def test_the_command_imports_no_torch_and_survives_a_closed_pipe(run: SampleRun) -> None:
    check = "code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    script = SCRIPT.replace("sys.exit(main())", check)
    line = f'{sys.executable} -c "{script}" ls {root_of(run)} --all --json | head -c 1'
    shell = ["bash", "-c", f"set -o pipefail; {line}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "{"


def test_no_colour_in_a_pipe_and_the_same_words_on_a_terminal(run: SampleRun) -> None:
    assert "\x1b" not in command("ls", root_of(run), "--all").stdout
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "verify", root_of(run)],
            stdin=follower, stdout=follower, stderr=follower, check=False, timeout=120,
        )  # fmt: skip
        os.close(follower)
        text = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
    assert done.returncode == 0
    assert "step 25 (generation 2): good" in text


def test_a_bug_of_ours_is_70(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> dict[str, Any]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("easyckpt.cli.reports.list_steps", broken)
    assert main(["ls", root_of(run)]) == 70
    assert "please report" in capsys.readouterr().err
