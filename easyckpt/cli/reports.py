"""What each command has found, as plain values: the JSON output, and what the text is made of.

Every report has ``schema`` (raised when a field changes its meaning or goes), ``command``, ``exit_code`` and
``root``; the rest is documented beside each function.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from easyckpt.commit import next_generation, read_fragment
from easyckpt.diff import diff_steps
from easyckpt.errors import CheckpointFault, Misuse, NothingToLoad, StorageMissing
from easyckpt.keep import KeepPolicy
from easyckpt.layout import Chunk
from easyckpt.manifest import Manifest
from easyckpt.paths import DATA_FOLDER, StepName, parse_data
from easyckpt.pins import pinned_steps
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.scrub import read_proofs
from easyckpt.storage import Storage, open_storage
from easyckpt.survey import HiddenStep, Survey, VisibleStep, survey
from easyckpt.verify import StepVerdict, verify_step
from easyckpt.why import explain_step

__all__ = [
    "SCHEMA",
    "diff",
    "inspect_step",
    "list_steps",
    "make_report",
    "open_folder",
    "prune",
    "verdict_rows",
    "verify",
    "why",
]

SCHEMA = 1

Report = dict[str, Any]
OnBytes = Callable[[int, int], None]


def make_report(command: str, storage: Storage, *, exit_code: int = 0, **fields: Any) -> Report:
    return {"schema": SCHEMA, "command": command, "exit_code": exit_code, "root": storage.where(), **fields}


def open_folder(root: str) -> tuple[Storage, Survey]:
    """The store and what it offers.

    Raises:
        StorageMissing: the folder is empty, or not there.
        CheckpointFault: it is no checkpoint folder, or its own record is damaged.
    """
    storage = open_storage(root)
    found = survey(storage)
    if found.root is None and not found.visible and not found.hidden and not found.lives:
        raise StorageMissing(
            "there is no checkpoint folder here",
            where=storage.where(),
            hint="name the folder that was given to Checkpointer() or --ckpt-dir",
        )
    return storage, found


def _choose(storage: Storage, found: Survey, step: int | None) -> VisibleStep:
    """The step that was asked for, or the newest.

    Raises:
        NothingToLoad: it is not offered.
    """
    if step is None:
        if found.visible:
            return found.visible[0]
        raise NothingToLoad(
            "no step can be loaded", where=storage.where(), hint="`easyckpt ls --all` shows what is there"
        )
    chosen = found.find(step)
    if chosen is None:
        raise NothingToLoad(
            f"step {step} is not offered",
            where=storage.where(),
            hint=f"`easyckpt why {storage.where()} {step}` says why; `easyckpt ls` shows those that are",
        )
    return chosen


def _sizes(storage: Storage) -> dict[StepName, int]:
    sizes: dict[StepName, int] = {}
    for entry in storage.list(DATA_FOLDER):
        data = parse_data(entry.path)
        if data is not None:
            sizes[data.name] = sizes.get(data.name, 0) + entry.bytes
    return sizes


def _date(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.datetime.fromtimestamp(unix_s, tz=datetime.timezone.utc).isoformat(timespec="seconds")


def _unix(date: str) -> float:
    return datetime.datetime.fromisoformat(date).timestamp()


def list_steps(root: str, *, show_all: bool, now_unix_s: float) -> Report:
    """``steps``: each with step, generation, state (``offered``, a hidden reason, ``never_committed``),
    detail, world_size, bytes, saved_at, age_s, metrics, verified (verdict, at: by the last scrub; null),
    pinned. ``store``: kind of storage. ``not_shown``: how many there are besides. ``troubles``: damaged
    files."""
    storage, found = open_folder(root)
    sizes = _sizes(storage)
    rows = [_row(item.name, "offered", "", item.manifest, sizes) for item in found.visible]
    others = [_hidden_row(item, sizes) for item in found.hidden]
    known = {item.name for item in found.visible} | {item.name for item in found.hidden}
    others += [
        _row(name, "never_committed", "data without a manifest", None, sizes)
        for name in sizes
        if name not in known
    ]
    rows += others if show_all else []
    rows.sort(key=lambda row: (row["step"], row["generation"]), reverse=True)
    proofs, pinned = read_proofs(storage), pinned_steps(storage)
    for row in rows:
        proof = proofs.get(StepName(step=row["step"], generation=row["generation"]))
        row["verified"] = None if proof is None else {"verdict": proof.verdict, "at": _date(proof.unix_s)}
        row["pinned"] = row["step"] in pinned
        saved = row["saved_at"]
        row["age_s"] = None if saved is None else round(now_unix_s - _unix(saved))
    return make_report(
        "ls",
        storage,
        run_id=found.root.run_id if found.root else None,
        generation=found.generation,
        store=storage.properties.name,
        free_bytes=storage.free_bytes(),
        steps=rows,
        not_shown=0 if show_all else len(others),
        troubles=[{"path": storage.where(item.path), "detail": item.detail} for item in found.troubles],
    )


def _hidden_row(item: HiddenStep, sizes: dict[StepName, int]) -> Report:
    return _row(item.name, item.reason.value, item.detail, item.manifest, sizes)


def _row(
    name: StepName, state: str, detail: str, manifest: Manifest | None, sizes: dict[StepName, int]
) -> Report:
    return {
        "step": name.step,
        "generation": name.generation,
        "state": state,
        "detail": detail,
        "world_size": manifest.world_size if manifest else None,
        "bytes": sizes.get(name, 0),
        "saved_at": _date(manifest.created_unix_s) if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
    }


def inspect_step(root: str, *, step: int | None) -> Report:
    """``step`` … as in ls, then ``pieces`` (rank, node_rank, file, bytes, stored_bytes, digest, state_bytes)
    and ``tensors`` (name, dtype, shape, kind, chunks, bytes, tied_to)."""
    storage, found = open_folder(root)
    chosen = _choose(storage, found, step)
    manifest = chosen.manifest
    pieces: list[Report] = []
    chunks: dict[str, list[Chunk]] = {}
    for ref in manifest.fragments:
        fragment = read_fragment(storage, ref, manifest)
        for record in fragment.pieces:
            layout = fragment.layout_of(record).layout
            pieces.append(
                {
                    "rank": record.rank,
                    "node_rank": ref.node_rank,
                    "file": record.file,
                    "bytes": record.bytes,
                    "stored_bytes": record.length_of_file,
                    "digest": record.digest,
                    "state_bytes": layout.state_end - layout.state_begin,
                }
            )
            for chunk in layout.chunks:
                chunks.setdefault(chunk.name, []).append(chunk)
    pieces.sort(key=lambda piece: int(piece["rank"]))
    return make_report(
        "inspect",
        storage,
        **_row(chosen.name, "offered", "", manifest, _sizes(storage)),
        run_id=manifest.run_id,
        resumed_step=manifest.resumed_step,
        software=manifest.software,
        manifest=chosen.path,
        pieces=pieces,
        tensors=[_tensor(name, chunks[name]) for name in sorted(chunks)],
    )


def _tensor(name: str, chunks: list[Chunk]) -> Report:
    first = chunks[0]
    return {
        "name": name,
        "dtype": first.dtype,
        "shape": list(first.global_shape),
        "kind": first.kind.value,
        "chunks": len(chunks),
        "bytes": sum(chunk.end - chunk.begin for chunk in chunks if chunk.alias_of is None),
        "tied_to": first.alias_of,
    }


def verify(
    root: str, *, step: int | None, every: bool, quick: bool, on_bytes: OnBytes | None = None
) -> Report:
    """``verdicts``: each with step, generation, verdict (``good``, ``index_good`` where not every byte was
    read, ``damaged``, ``unknown``), bytes_proved, bytes_total, findings (kind, where, detail, ranks).
    Damaged is exit code 4, unknown 3."""
    storage, found = open_folder(root)
    chosen = list(found.visible) if every else [_choose(storage, found, step)]
    if not chosen:
        _choose(storage, found, None)
    budget = 0 if quick else None
    verdicts = [verify_step(storage, item.manifest, byte_budget=budget, on_bytes=on_bytes) for item in chosen]
    rows, exit_code = verdict_rows(verdicts)
    return make_report("verify", storage, exit_code=exit_code, verdicts=rows)


def verdict_rows(verdicts: Sequence[StepVerdict]) -> tuple[list[Report], int]:
    """The rows of `verify`, and the exit code that goes with them."""
    words = [_verdict_word(verdict) for verdict in verdicts]
    exit_code = 4 if "damaged" in words else 3 if "unknown" in words else 0
    return [_verdict_row(verdict, word) for verdict, word in zip(verdicts, words, strict=True)], exit_code


def _verdict_word(verdict: StepVerdict) -> str:
    if verdict.is_good:
        return "good" if verdict.is_whole else "index_good"
    return "unknown" if verdict.is_unknown else "damaged"


def _verdict_row(verdict: StepVerdict, word: str) -> Report:
    return {
        "step": verdict.name.step,
        "generation": verdict.name.generation,
        "verdict": word,
        "bytes_proved": verdict.bytes_proved,
        "bytes_total": verdict.bytes_total,
        "findings": [
            {
                "kind": finding.kind.value,
                "where": finding.where,
                "detail": finding.detail,
                "ranks": list(finding.ranks),
            }
            for finding in verdict.findings
        ],
    }


def why(root: str, *, step: int, on_bytes: OnBytes | None = None) -> Report:
    """``loadable``, ``reasons`` (kind, generation, where, detail), ``others`` (steps that are offered)."""
    storage, _ = open_folder(root)
    answer = explain_step(storage, step, on_bytes=on_bytes)
    return make_report(
        "why",
        storage,
        exit_code=0 if answer.loadable else 3 if answer.is_unknown else 4,
        step=step,
        loadable=answer.loadable,
        reasons=[
            {
                "kind": reason.kind.value,
                "generation": reason.generation,
                "where": reason.where,
                "detail": reason.detail,
            }
            for reason in answer.reasons
        ],
        others=list(answer.others),
    )


def diff(a: str, b: str) -> Report:
    """``a``, ``b`` (root, step, generation), ``bit_equal``, ``tensors_equal``, ``bytes_compared``,
    ``differences``
    (kind, name, detail, ranks). Exit code 1 if they differ."""
    sides = [_side(a), _side(b)]
    found = diff_steps((sides[0][0], sides[0][1].manifest), (sides[1][0], sides[1][1].manifest))
    described = [
        {"root": storage.where(), "step": item.step, "generation": item.generation} for storage, item in sides
    ]
    return make_report(
        "diff",
        sides[0][0],
        exit_code=0 if found.bit_equal else 1,
        a=described[0],
        b=described[1],
        bit_equal=found.bit_equal,
        tensors_equal=found.tensors_equal,
        bytes_compared=found.bytes_compared,
        differences=[
            {"kind": item.kind.value, "name": item.name, "detail": item.detail, "ranks": list(item.ranks)}
            for item in found.differences
        ],
    )


def _side(text: str) -> tuple[Storage, VisibleStep]:
    """``FOLDER`` or ``FOLDER@STEP``."""
    root, at, number = text.rpartition("@")
    step: int | None = None
    if at and number.isdecimal():
        step = int(number)
    else:
        root = text
    if not root:
        raise Misuse("no folder before the @", where=text)
    storage, found = open_folder(root)
    return storage, _choose(storage, found, step)


def prune(
    root: str,
    *,
    keep: KeepPolicy,
    grace_s: float,
    dry_run: bool,
    now_unix_s: float,
    on_bytes: OnBytes | None = None,
) -> Report:
    """``dry_run``, ``removed`` (kind, path, step, generation, bytes), ``freed_bytes``, ``kept`` and
    ``damaged``
    (step, generation), ``anchor``. Exit code 4 if older steps had to stay because no newer one is good."""
    storage, _ = open_folder(root)
    generation = next_generation(storage) - 1
    if generation < 1:
        raise CheckpointFault(
            "no generation has a record, so nobody may remove anything",
            where=storage.where(),
            hint="`easyckpt ls --all` shows what is there",
        )
    done = prune_report(
        storage,
        keep=keep,
        generation=generation,
        now_unix_s=now_unix_s,
        options=PruneOptions(grace_s=grace_s, read_back_bytes=None, dry_run=dry_run),
        on_bytes=on_bytes,
    )
    return make_report(
        "prune",
        storage,
        exit_code=4 if done.damaged else 0,
        dry_run=dry_run,
        removed=[
            {
                "kind": item.kind.value,
                "path": item.path,
                "step": item.name.step if item.name else None,
                "generation": item.name.generation if item.name else None,
                "bytes": item.bytes,
            }
            for item in done.removed
        ],
        freed_bytes=sum(item.bytes for item in done.removed),
        kept=_names(done.kept),
        damaged=_names(done.damaged),
        anchor=_names([done.anchor])[0] if done.anchor else None,
    )


def _names(names: Iterable[StepName]) -> list[Report]:
    return [{"step": name.step, "generation": name.generation} for name in names]
