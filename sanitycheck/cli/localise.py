"""``sanitycheck localise``: the search on tests that something else has run (nccl-tests, a scheduler)."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from sanitycheck.errors import BadFileError, CodecError
from sanitycheck.facts.codec import decode, encode
from sanitycheck.localise.evidence import Evidence, Verdicts
from sanitycheck.localise.search import conclude, plan
from sanitycheck.result import EXIT_FAILED, EXIT_OK, EXIT_UNKNOWN

__all__ = ["localise", "read_evidence"]

EVIDENCE_SCHEMA = 1


def read_evidence(path: str) -> Evidence:
    """Evidence from a JSON file, '-' for stdin: ``{"schema": 1, "nodes": [...], "alone": {node: score or
    null}, "rounds": [[{"first": node, "second": node, "score": number or null}, …], …]}``.

    Raises:
        BadFileError: It cannot be read, or is something else.
    """
    try:
        if path == "-":
            data = json.load(sys.stdin)
        else:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
        if not isinstance(data, dict) or data.pop("schema", None) != EVIDENCE_SCHEMA:
            raise BadFileError(path, problem=f"a JSON object with 'schema: {EVIDENCE_SCHEMA}' is expected")
        return decode(Evidence, data)
    except (OSError, ValueError, CodecError) as error:
        raise BadFileError(path, problem=str(error)) from error


def localise(args: argparse.Namespace) -> int:
    """Print who is bad, or which pairs to test next; the exit code is that of a check."""
    evidence = read_evidence(args.file)
    pairs, verdicts = plan(evidence), conclude(evidence)
    if args.json:
        data: dict[str, Any] = {"schema": EVIDENCE_SCHEMA, "next": [list(pair) for pair in pairs]}
        print(json.dumps({**data, **encode(verdicts)}, indent=2))
    else:
        print("\n".join(_lines(verdicts, pairs)))
    if verdicts.nodes or verdicts.links or (verdicts.common_cause and not pairs):
        return EXIT_FAILED
    return EXIT_UNKNOWN if pairs or verdicts.watch or verdicts.untested else EXIT_OK


def _lines(verdicts: Verdicts, pairs: tuple[tuple[str, str], ...]) -> list[str]:
    lines = [
        f"bad node   {one.first}: {one.why.value.replace('_', ' ')}"
        + (f", agreed by {', '.join(one.witnesses)}" if one.witnesses else "")
        for one in verdicts.nodes
    ]
    lines += [f"bad link   {one.first} - {one.second}: both are good with others" for one in verdicts.links]
    lines += [f"doubtful   {node}: bad once, good otherwise" for node in verdicts.watch]
    if verdicts.common_cause:
        lines.append("common cause: nobody passed; look for what the nodes share, evict none")
    if pairs:
        lines.append(f"test next  {', '.join(f'{first}+{second}' for first, second in pairs)}")
    return lines or [f"clear      all nodes, after {verdicts.rounds} rounds"]
