"""The typer commands of `aimaster`. Each imports what it needs only when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fault tolerance for distributed PyTorch training.",
    epilog="Exit codes: 0 done, 2 usage, 3 this machine or its set-up, 70 a bug; see `aimaster run --help`.",
)

RunDir = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation when it runs, also on Python 3.10
    typer.Option(metavar="DIR", help="Run directory of a node, of a job, or of all jobs."),
]
Secret = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", help="The job's secret; AIMASTER_JOB_SECRET holds it instead if set."),
]


def _say_version(wanted: bool) -> None:
    if wanted:
        from aimaster.rpc.version import software

        typer.echo(software())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Say the version and end.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; there is none but the version."""


@app.command(
    short_help="Run this node's part of a job.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
def run(words: Annotated[list[str], typer.Argument(metavar="[FLAGS] SCRIPT|-- COMMAND ...")]) -> None:
    """Run this node's part of a job: torchrun's flags, and its own (`aimaster run --help`)."""
    from aimaster.cli.run import run as run_words

    raise typer.Exit(run_words(words))


@app.command(short_help="Show a job: nodes, ranks, steps, processes.")
def status(
    as_json: Annotated[bool, typer.Option("--json", help="JSON with a schema number.")] = False,
    run_dir: RunDir = None,
    endpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST:PORT", help="Ask this master; needs --job-id where a secret is used."),
    ] = None,
    job_id: Annotated[Optional[str], typer.Option(metavar="ID", help="Which job, if several run.")] = None,  # noqa: UP045
    secret_file: Secret = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until the job is over.")] = False,
) -> None:
    """Show a job: nodes, ranks, steps, processes, incidents, budgets.

    Asks the job's master. If that does not answer, shows what the agents of this machine have written down,
    and says so.
    """
    from aimaster.cli.status import Wanted, show

    wanted = Wanted(run_dir=run_dir, endpoint=endpoint, job_id=job_id, secret_file=secret_file)
    if watch:
        from aimaster.cli.watch import watch as keep_watching

        keep_watching(wanted, as_json=as_json)
        return
    typer.echo(show(wanted, as_json=as_json), nl=False)


StateDir = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="State directory of the job, where its journal is."),
]
JobName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="ID", help="Which job; else the one that wrote last."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON with a schema number.")]


@app.command(short_help="Tell what went wrong, why, and what was done.")
def explain(
    incident: Annotated[
        Optional[int],  # noqa: UP045
        typer.Argument(metavar="[INCIDENT]", help="Number of the incident; else the newest one."),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    job_id: JobName = None,
    rules: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Diagnosis rules of your own, which go first."),
    ] = None,
) -> None:
    """Tell one incident as a report: first culprit, evidence, rule, decision, downtime, what to do.

    Reads the journal on this machine, while the job runs or long after.
    """
    from aimaster.cli.explain import explain as told

    typer.echo(told(incident, state_dir=state_dir, job_id=job_id, rules=rules, as_json=as_json), nl=False)


@app.command(short_help="Show a job's journal: what was seen, what was decided.")
def events(
    as_json: AsJson = False,
    state_dir: StateDir = None,
    job_id: JobName = None,
    last: Annotated[Optional[int], typer.Option(metavar="N", help="Only the newest N.")] = None,  # noqa: UP045
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes, to the job's end.")
    ] = False,
) -> None:
    """Show a job's journal, a line per event: number, time, seconds of the job, event, node, decision.

    JSON is one object a line.
    """
    from aimaster.cli.explain import follow_events, show_events

    if follow:
        follow_events(state_dir=state_dir, job_id=job_id, last=last, as_json=as_json)
        return
    typer.echo(show_events(state_dir=state_dir, job_id=job_id, last=last, as_json=as_json), nl=False)


@app.command(short_help="Ask in virtual time what a policy does to a cluster.")
def simulate(
    nodes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="N[+SPARES]", help="Nodes that train, and nodes that wait; default 64."),
    ] = None,
    minutes: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="M", help="How long, in virtual time; default 10."),
    ] = None,
    faults: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE|mtbf=T", help="A scenario, or a mean time: mtbf=8h, mtbf=2000h/node."),
    ] = None,
    seed: Annotated[Optional[int], typer.Option(metavar="S", help="Where chance begins; default 0.")] = None,  # noqa: UP045
    seeds: Annotated[int, typer.Option(metavar="K", help="Run this seed and the K-1 after it.")] = 1,
    policy: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="FILE", help="Policy in YAML; give several to compare them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the master's own decisions over a simulated cluster, in virtual time, with faults.

    Checkers that share nothing with the core watch every event; a broken promise ends the command with 70 and
    the last events.
    """
    from aimaster.cli.simulate import Asked
    from aimaster.cli.simulate import simulate as simulated

    asked = Asked(
        nodes=nodes,
        minutes=minutes,
        faults=faults,
        seed=seed,
        seeds=seeds,
        policies=tuple(policy or ()),
        as_json=as_json,
    )
    typer.echo(simulated(asked), nl=False)


@app.command(short_help="Lead a job from this machine, without workers.")
def master(
    job_id: Annotated[str, typer.Option(metavar="ID", help="The job, as in `aimaster run --rdzv-id ID`.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where agents connect.")
    ] = "127.0.0.1:29400",
    state_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Folder of the journal, on a local disk."),
    ] = None,
    secret_file: Secret = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain connections on a network, without a secret.")
    ] = False,
    heartbeat_interval: Annotated[float, typer.Option(metavar="SECONDS")] = 1.0,
    metrics: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST:PORT", help="Serve /metrics for Prometheus there."),
    ] = None,
) -> None:
    """Lead a job from this machine; agents come with `aimaster run --rdzv-endpoint HOST:PORT`.

    Notices and TensorBoard are variables here: AIMASTER_NOTIFY_WEBHOOK, AIMASTER_NOTIFY_COMMAND and
    AIMASTER_TENSORBOARD.
    """
    from aimaster.cli.master import Alone, lead_alone, watch_words

    lead_alone(
        Alone(
            job_id=job_id,
            listen=listen,
            state_dir=state_dir,
            secret_file=secret_file,
            insecure=insecure,
            heartbeat_interval_s=heartbeat_interval,
            watch=watch_words(metrics, os.environ),
        )
    )
