"""Words and variables to a `RunConfig`: precedence, the kinds of program, where nodes meet, bad values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.cli.devices import _visible, workers_for
from aimaster.cli.meeting import _as_job_id
from aimaster.cli.run import config_from
from aimaster.config import (
    CheckLevel,
    CheckMode,
    CommandOn,
    JobIdSource,
    ProgramKind,
    RunConfig,
    Std,
)
from aimaster.errors import AimasterError, CredentialsMissing, ExitCode, SetupError, UsageError
from aimaster.ids import is_valid_id
from aimaster.journal.codec import decode_policy


def resolved(*words: str, **env: str) -> RunConfig:
    config = config_from(list(words), env)
    assert config is not None
    return config


def refused(*words: str, **env: str) -> AimasterError:
    with pytest.raises(AimasterError) as caught:
        config_from(list(words), env)
    return caught.value


class TestPrecedence:
    def test_argument_before_variable_before_default(self) -> None:
        assert resolved("t.py").nodes.max == 1
        assert resolved("t.py", PET_NNODES="2:3").nodes.max == 3
        assert resolved("--nnodes", "4", "t.py", PET_NNODES="2:3").nodes.max == 4

    def test_own_variables(self) -> None:
        assert resolved("t.py", AIMASTER_CKPT_DIR="/a", EASYCKPT_DIR="/b").checkpoint.ckpt_dir == "/a"
        assert resolved("t.py", EASYCKPT_DIR="/b").checkpoint.ckpt_dir == "/b"
        assert not resolved("t.py", AIMASTER_NO_WARM="1").warm
        assert resolved("t.py", AIMASTER_NO_WARM="0").warm

    def test_variables_of_the_worker_contract_are_not_read(self) -> None:
        config = resolved("t.py", AIMASTER_NODE_ID="n1", AIMASTER_JOB_ID="j1", RANK="3", MASTER_PORT="1")
        assert config.nodes.node_id is None
        assert config.rendezvous.job_id_source is JobIdSource.NEW
        assert config.rendezvous.standalone

    def test_bad_variable_is_named(self) -> None:
        error = refused("t.py", PET_MAX_RESTARTS="lots")
        assert isinstance(error, UsageError)
        assert "PET_MAX_RESTARTS" in str(error)

    def test_kubeflow_variables_beside_a_command(self) -> None:
        """A training operator sets PET_NPROC_PER_NODE for every pod; that is not the user's word."""
        assert resolved("--", "deepspeed", "t.py", PET_NPROC_PER_NODE="8").nodes.nproc == 1


class TestProgram:
    @pytest.mark.parametrize(
        ("words", "kind", "target"),
        [
            (("t.py", "-x"), ProgramKind.SCRIPT, "t.py"),
            (("--", "t.py", "-x"), ProgramKind.SCRIPT, "t.py"),
            (("-m", "pkg.mod", "-x"), ProgramKind.MODULE, "pkg.mod"),
            (("-m", "--", "pkg.mod", "-x"), ProgramKind.MODULE, "pkg.mod"),
            (("--no-python", "./run.sh", "-x"), ProgramKind.NO_PYTHON, "./run.sh"),
            (("--run-path", "t.py", "-x"), ProgramKind.RUN_PATH, "t.py"),
            (("--run-path", "--no-python", "t.py", "-x"), ProgramKind.RUN_PATH, "t.py"),
            (("--", "deepspeed", "-x"), ProgramKind.COMMAND, "deepspeed"),
            (("script_without_suffix", "-x"), ProgramKind.SCRIPT, "script_without_suffix"),
        ],
    )
    def test_kinds(self, words: tuple[str, ...], kind: ProgramKind, target: str) -> None:
        program = resolved(*words).program
        assert (program.kind, program.target, program.args) == (kind, target, ("-x",))

    def test_separator_behind_the_script_is_the_scripts(self) -> None:
        assert resolved("t.py", "--", "x").program.args == ("--", "x")

    def test_worker_flags_beside_a_command(self) -> None:
        error = refused("--nproc-per-node", "2", "--role", "r", "--", "deepspeed", "t.py")
        assert error.exit_code is ExitCode.USAGE
        assert "--nproc-per-node, --role" in str(error)
        assert "deepspeed" in str(error)

    def test_restart_scope(self) -> None:
        assert not resolved("t.py").restart.by_node
        assert resolved("--restart-scope", "node", "t.py").restart.by_node
        with pytest.raises(UsageError, match="exclude each other"):
            resolved("--restart-scope", "node", "--command-on", "first", "--", "mpirun")

    def test_command_on(self) -> None:
        assert resolved("--command-on", "first", "--", "mpirun").program.command_on is CommandOn.FIRST
        assert refused("--command-on", "first", "t.py").exit_code is ExitCode.USAGE

    def test_warm_only_where_a_template_can_help(self) -> None:
        assert resolved("t.py").warm
        assert not resolved("--no-warm", "t.py").warm
        assert not resolved("--no-python", "./a").warm
        assert not resolved("--", "deepspeed").warm
        assert not resolved("t.py", PYTHON_EXEC="/usr/bin/pypy").warm

    def test_no_program_and_contradictions(self) -> None:
        assert "no script" in str(refused())
        assert "exclude" in str(refused("-m", "--no-python", "t.py"))

    def test_help_is_not_a_run(self) -> None:
        assert config_from(["--help"], {}) is None
        assert config_from(["--nnodes", "1", "-h", "--nonsense"], {}) is None


class TestMeeting:
    def test_one_node_keeps_its_master_to_itself(self) -> None:
        assert resolved("t.py").rendezvous.standalone
        assert resolved("--master-port", "12345", "t.py").rendezvous.standalone
        assert resolved("--standalone", "--rdzv-endpoint", "h:1", "t.py").rendezvous.standalone

    def test_standalone_says_what_it_ignores(self) -> None:
        config = resolved("--standalone", "--rdzv-id", "a", "t.py")
        assert config.rendezvous.job_id != "a"
        assert any("--rdzv-id" in notice for notice in config.notices)

    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("node1", "node1", 29400),
            ("node1:5", "node1", 5),
            ("10.0.0.1:0", "10.0.0.1", 0),
            ("[fe80::1]:77", "fe80::1", 77),
            ("[::1]", "::1", 29400),
            ("::1", "::1", 29400),
        ],
    )
    def test_endpoint(self, text: str, host: str, port: int) -> None:
        meeting = resolved("--rdzv-endpoint", text, "t.py").rendezvous
        assert (meeting.host, meeting.port) == (host, port)

    @pytest.mark.parametrize("text", ["a b:1", "h:port", "h:70000", "[::1", ":5"])
    def test_bad_endpoint(self, text: str) -> None:
        assert refused("--rdzv-endpoint", text, "t.py").exit_code is ExitCode.USAGE

    def test_several_nodes_need_a_port_that_all_can_know(self) -> None:
        assert "port" in str(refused("--nnodes", "2", "--rdzv-endpoint", "localhost:0", "t.py"))

    def test_static_rendezvous(self) -> None:
        words = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--insecure", "t.py")
        config = resolved(*words)
        assert (config.rendezvous.host, config.rendezvous.port) == ("10.0.0.1", 29500)
        assert config.nodes.node_rank == 1
        assert resolved("--nnodes", "2", "t.py").nodes.node_rank is None

    def test_dynamic_rendezvous_ignores_the_node_rank(self) -> None:
        config = resolved("--nnodes", "2", "--rdzv-backend", "c10d", "--node-rank", "1", "t.py")
        assert config.nodes.node_rank is None
        assert config.rendezvous.host == "127.0.0.1"
        assert any("--node-rank" in notice for notice in config.notices)

    def test_foreign_backends_are_refused(self) -> None:
        error = refused("--rdzv-backend", "etcd", "--rdzv-endpoint", "e:2379", "t.py")
        assert error.exit_code is ExitCode.USAGE
        assert "c10d" in error.next_step

    def test_conf(self) -> None:
        words = ("--rdzv-conf", "join_timeout=9,last_call_timeout=2,is_host=true,odd=1", "t.py")
        config = resolved(*words)
        assert config.rendezvous.join_timeout_s == 9
        assert config.rendezvous.last_call_s == 2
        assert config.rendezvous.is_host is True
        assert any("odd" in notice for notice in config.notices)
        assert refused("--rdzv-conf", "join_timeout", "t.py").exit_code is ExitCode.USAGE
        assert refused("--rdzv-conf", "join_timeout=soon", "t.py").exit_code is ExitCode.USAGE


class TestJobId:
    def test_sources_in_order(self) -> None:
        slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
        given = resolved("--rdzv-id", "mine", "t.py", **slurm).rendezvous
        assert (given.job_id, given.job_id_source) == ("mine", JobIdSource.FLAG)
        scheduled = resolved("t.py", **slurm).rendezvous
        assert (scheduled.job_id, scheduled.job_id_source) == ("slurm-77.0", JobIdSource.SCHEDULER)
        met = resolved("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:5", "t.py").rendezvous
        assert (met.job_id, met.job_id_source) == ("127.0.0.1-5", JobIdSource.ENDPOINT)
        assert resolved("--rdzv-id", "none", "t.py").rendezvous.job_id_source is JobIdSource.NEW

    def test_new_ids_differ(self) -> None:
        assert resolved("t.py").rendezvous.job_id != resolved("t.py").rendezvous.job_id

    def test_run_id_stays_as_given(self) -> None:
        meeting = resolved("--rdzv-id", "my job: 1", "t.py").rendezvous
        assert meeting.run_id == "my job: 1"
        assert is_valid_id(meeting.job_id)

    @given(st.text(min_size=1, max_size=300))
    def test_any_text_makes_a_valid_id(self, text: str) -> None:
        assert is_valid_id(_as_job_id(text))
        assert _as_job_id(text) == _as_job_id(text)

    @given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
    def test_different_texts_make_different_ids(self, one: str, other: str) -> None:
        assert (one == other) == (_as_job_id(one) == _as_job_id(other))


class TestSecret:
    MANY = ("--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:5")

    def test_several_nodes_need_one(self) -> None:
        error = refused(*self.MANY, "t.py")
        assert isinstance(error, CredentialsMissing)
        assert error.exit_code is ExitCode.SETUP
        lines = error.next_step.splitlines()
        assert len(lines) == 3
        assert "--insecure" in lines[-1]

    @pytest.mark.parametrize(
        "words",
        [("--secret-file", "/s"), ("--insecure",), ("--nnodes", "1"), ("--rdzv-endpoint", "localhost")],
    )
    def test_where_none_is_asked_for(self, words: tuple[str, ...]) -> None:
        resolved(*self.MANY, *words, "t.py")

    def test_secret_in_a_variable_stays_there(self) -> None:
        config = resolved(*self.MANY, "t.py", AIMASTER_JOB_SECRET="hush-hush")
        assert config.paths.secret_in_env
        assert "hush-hush" not in repr(config)


class TestValues:
    def test_streams(self) -> None:
        stdio = resolved("--redirects", "3", "--tee", "0:1,2:3", "--local-ranks-filter", "0,2", "t.py").stdio
        assert stdio.redirects.of(5) is Std.ALL
        assert [stdio.tee.of(rank) for rank in range(3)] == [Std.OUT, Std.NONE, Std.ALL]
        assert stdio.local_ranks_filter == {0, 2}
        assert not resolved("t.py").stdio.tee.any

    def test_check(self) -> None:
        assert resolved("t.py").check.mode is CheckMode.ENFORCE
        assert resolved("--sanity-check", "warn", "t.py").check.mode is CheckMode.WARN
        assert resolved("--sanity-check", "quick", "t.py").check.level is CheckLevel.QUICK
        assert refused("--sanity-check", "maybe", "t.py").exit_code is ExitCode.USAGE
        assert refused("t.py", AIMASTER_SANITY_CHECK="maybe").exit_code is ExitCode.USAGE

    def test_sizes(self) -> None:
        assert resolved("--saver-memory", "8G", "t.py").checkpoint.memory_limit_bytes == 8 << 30
        assert resolved("--saver-memory", "5", "t.py").checkpoint.memory_limit_bytes == 5
        assert refused("--saver-memory", "much", "t.py").exit_code is ExitCode.USAGE

    @pytest.mark.parametrize(
        "words",
        [
            ("--nnodes", "0"),
            ("--nnodes", "3:2"),
            ("--nnodes", "a"),
            ("--nnodes", "1:2:3"),
            ("--nproc-per-node", "0"),
            ("--nproc-per-node", "many"),
            ("--nproc-per-node", "xpu"),
            ("--max-restarts", "-1"),
            ("--suspect-after", "0.5"),
            ("--orphan-timeout", "2"),
            ("--node-id", "a/b"),
            ("--redirects", "4"),
            ("--tee", "0:9"),
            ("--local-ranks-filter", "a"),
            ("--standalone", "--nnodes", "2"),
        ],
    )
    def test_out_of_range(self, words: tuple[str, ...]) -> None:
        assert refused(*words, "t.py").exit_code is ExitCode.USAGE

    def test_flags_without_meaning_are_said_once(self) -> None:
        notices = resolved("--monitor-interval", "1", "--start-method", "fork", "t.py").notices
        assert [n.partition(":")[0] for n in notices] == ["--monitor-interval", "--start-method"]
        assert resolved("t.py", PET_MONITOR_INTERVAL="1").notices == ()


class TestWorkers:
    def test_processors_that_we_may_use(self) -> None:
        assert workers_for("cpu", env={}) == len(os.sched_getaffinity(0))

    def test_hidden_gpus(self) -> None:
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        assert workers_for("auto", env=hidden) == len(os.sched_getaffinity(0))
        with pytest.raises(SetupError, match="no GPU"):
            workers_for("gpu", env=hidden)

    @pytest.mark.parametrize(
        ("listed", "count"),
        [
            (None, 4),
            ("0,2", 2),
            ("3,-1,0", 1),
            ("7", 0),
            ("0,0", 0),
            ("GPU-a,GPU-b", 2),
            ("1, 2", 2),
            ("x", 0),
        ],
    )
    def test_visible_devices(self, listed: str | None, count: int) -> None:
        assert _visible(4, listed) == count


class TestPolicy:
    def test_it_travels_as_a_journal_has_it(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text("hangs: {limit: 3}\ntimeouts: {prepare_s: 20}")
        text = resolved("--policy", str(path), "t.py").restart.policy
        assert text is not None
        policy = decode_policy(text)
        assert (policy.hangs.limit, policy.timeouts.prepare_s) == (3, 20.0)
        assert resolved("t.py").restart.policy is None

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("hangs: {limits: 3}", "unknown fields limits"),
            ("detector: {dead_s: 20}", "--dead-after"),
            ("timeouts: {join_s: 20}", "--rdzv-conf"),
        ],
    )
    def test_what_is_wrong_or_has_a_flag_is_refused(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        error = refused("--policy", str(path), "t.py")
        assert said in str(error)
        assert error.exit_code == ExitCode.USAGE
