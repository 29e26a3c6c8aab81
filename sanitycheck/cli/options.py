"""From arguments to the options of a run, the record of this node included."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence

from sanitycheck.baseline import Baseline, Standing, default_path, identity_of_node, read_baseline
from sanitycheck.cli.slurm import slurm_place
from sanitycheck.errors import BadFileError, UsageError
from sanitycheck.group.lead import Schedule
from sanitycheck.group.run import GroupPlace
from sanitycheck.localise.evidence import Limits
from sanitycheck.options import Known, Options

__all__ = ["group_place", "make_options", "options_without_group"]


def _ids(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(",") if part)


def _json_object(path: str | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise BadFileError(path, problem=str(error)) from error
    if not isinstance(data, dict):
        raise BadFileError(path, problem="a JSON object is expected")
    return data


def _standing(path: str | None) -> Standing:
    """What the record says of this node as it is now; nothing where there is none."""
    if path is None:
        usual = default_path()
        if not usual.exists():
            return Standing()
        return read_baseline(str(usual)).standing(identity_of_node())
    data = _json_object(path)
    if "schema" in data:
        return Baseline.from_dict(data, path=path).standing(identity_of_node())
    figures = {
        name: float(value)
        for name, value in data.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if len(figures) != len(data):
        raise BadFileError(path, problem="every figure must be a number")
    return Standing(medians=figures)


def options_without_group(args: argparse.Namespace, *, nnodes: int = 1) -> Options:
    """The options of a node by itself."""
    fingerprint = _json_object(args.fingerprint)
    if not all(isinstance(value, str) for value in fingerprint.values()):
        raise BadFileError(args.fingerprint, problem="every version must be a string")
    standing = _standing(args.baseline)
    return Options(
        only=_ids(args.only),
        skip=_ids(args.skip),
        expect_gpus=args.expect_gpus,
        local_workers=args.workers,
        nnodes=max(1, nnodes),
        ckpt_path=args.ckpt_path,
        ckpt_bytes=args.ckpt_bytes,
        clock_peer=args.clock_peer,
        fingerprint={name: str(value) for name, value in fingerprint.items()},
        baseline=standing.medians,
        known=Known(
            last_boot_id=standing.boot_id,
            noise=standing.mads,
            digests=standing.digests,
            counters=standing.counters,
            mig=None if args.mig is None else args.mig == "on",
            rdma_ports=args.rdma_ports,
            reach=tuple(args.reach),
            good_until_unix_s=standing.good_until_unix_s,
        ),
    )


def make_options(args: argparse.Namespace) -> Options:
    """The options of ``run``."""
    if args.nnodes == 1 or args.nnodes == 0:
        return options_without_group(args)
    return options_without_group(args, nnodes=args.nnodes)


def group_place(args: argparse.Namespace) -> GroupPlace | None:
    """This node's place in a group; None where it is checked by itself."""
    nnodes, rank, endpoint = args.nnodes, args.node_rank, args.rdzv_endpoint
    if nnodes == 0:
        nnodes, rank, endpoint = slurm_place(os.environ)
        if nnodes < 2:
            return None
    if endpoint is None:
        if rank is not None:
            raise UsageError("--node-rank needs --rdzv-endpoint HOST:PORT, where node rank 0 leads")
        return None
    if rank is None:
        raise UsageError("--rdzv-endpoint needs --node-rank, the index of this node")
    return GroupPlace(
        nnodes=nnodes,
        rank=rank,
        endpoint=endpoint,
        group=args.rdzv_id,
        limits=Limits(pair_share=args.pair_share, alone_share=args.alone_share),
        schedule=Schedule(join_s=args.join_timeout, round_s=args.round_timeout),
    )
