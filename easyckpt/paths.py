"""Names of everything inside a checkpoint folder: made here, and read back here, strictly.

::

    easyckpt.json                                                   the folder's own identity
    generations/00000003.json                                       one life of the job
    data/g00000003/s000000000100/node00000/rank00000.safetensors    one rank's bytes
    data/g00000003/s000000000100/node00000.json                     one node's fragment
    manifests/s000000000100-g00000003.json                          a committed step
    tombstones/s000000000100-g00000003-by00000004.json              a step that retention took back
    latest.json                                                     a hint
    scrub.json                                                      what was read back, and when
    pins/s000000000100.json                                         a step that a person keeps
    quarantine/s000000000100-g00000003.json                         the manifest of a step beyond repair

Numbers are padded with zeros to a least width, so that names sort by number; a longer number is valid. The
data of a step lies under its generation and step, so that two lives never write to the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "DATA_FOLDER",
    "GENERATIONS_FOLDER",
    "LATEST_PATH",
    "MANIFESTS_FOLDER",
    "PINS_FOLDER",
    "QUARANTINE_FOLDER",
    "ROOT_PATH",
    "SCRUB_PATH",
    "TOMBSTONES_FOLDER",
    "DataName",
    "StepName",
    "TombstoneName",
    "body_path",
    "fragment_path",
    "generation_path",
    "manifest_path",
    "parse_data",
    "parse_generation",
    "parse_manifest",
    "parse_pin",
    "parse_quarantine",
    "parse_tombstone",
    "pin_path",
    "quarantine_path",
    "step_folder",
    "tombstone_path",
]

ROOT_PATH = "easyckpt.json"
LATEST_PATH = "latest.json"
GENERATIONS_FOLDER = "generations/"
MANIFESTS_FOLDER = "manifests/"
TOMBSTONES_FOLDER = "tombstones/"
DATA_FOLDER = "data/"
PINS_FOLDER = "pins/"
QUARANTINE_FOLDER = "quarantine/"
SCRUB_PATH = "scrub.json"

_MANIFEST = re.compile(r"manifests/s(\d{12,18})-g(\d{8,18})\.json\Z", re.ASCII)
_PIN = re.compile(r"pins/s(\d{12,18})\.json\Z", re.ASCII)
_GENERATION = re.compile(r"generations/(\d{8,18})\.json\Z", re.ASCII)
_TOMBSTONE = re.compile(r"tombstones/s(\d{12,18})-g(\d{8,18})-by(\d{8,18})\.json\Z", re.ASCII)
_DATA = re.compile(
    r"data/g(\d{8,18})/s(\d{12,18})/(?:node(\d{5,9})\.json|node(\d{5,9})/rank(\d{5,9})\.safetensors)\Z",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepName:
    """A step of one generation: what a manifest's name says. Sorts by step, then generation."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TombstoneName:
    """What a tombstone's name says."""

    target: StepName
    by_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """What the name of a body or a fragment says; a fragment has no rank."""

    name: StepName
    node_rank: int
    rank: int | None


def step_folder(name: StepName) -> str:
    """Where all data of a step lies; ends with a slash."""
    return f"{DATA_FOLDER}g{name.generation:08d}/s{name.step:012d}/"


def body_path(name: StepName, *, node_rank: int, rank: int) -> str:
    """One rank's bytes."""
    return f"{step_folder(name)}node{node_rank:05d}/rank{rank:05d}.safetensors"


def fragment_path(name: StepName, *, node_rank: int) -> str:
    """One node's list of its bodies."""
    return f"{step_folder(name)}node{node_rank:05d}.json"


def manifest_path(name: StepName) -> str:
    """The file whose being there makes a step."""
    return f"{MANIFESTS_FOLDER}s{name.step:012d}-g{name.generation:08d}.json"


def quarantine_path(name: StepName) -> str:
    """Where the manifest of a step goes that is beyond repair."""
    return QUARANTINE_FOLDER + manifest_path(name)[len(MANIFESTS_FOLDER) :]


def pin_path(step: int) -> str:
    """The mark that a person keeps a step."""
    return f"{PINS_FOLDER}s{step:012d}.json"


def generation_path(generation: int) -> str:
    """The record of one life."""
    return f"{GENERATIONS_FOLDER}{generation:08d}.json"


def tombstone_path(target: StepName, *, by_generation: int) -> str:
    """The mark that a step was taken back."""
    return f"{TOMBSTONES_FOLDER}s{target.step:012d}-g{target.generation:08d}-by{by_generation:08d}.json"


def parse_manifest(path: str) -> StepName | None:
    """What the name says, or None if it is not exactly the name of a manifest."""
    found = _MANIFEST.match(path)
    if found is None:
        return None
    name = StepName(step=int(found[1]), generation=int(found[2]))
    return name if manifest_path(name) == path else None


def parse_quarantine(path: str) -> StepName | None:
    """What the name says, or None."""
    if not path.startswith(QUARANTINE_FOLDER):
        return None
    return parse_manifest(MANIFESTS_FOLDER + path[len(QUARANTINE_FOLDER) :])


def parse_pin(path: str) -> int | None:
    """The step's number, or None."""
    found = _PIN.match(path)
    return int(found[1]) if found is not None and pin_path(int(found[1])) == path else None


def parse_generation(path: str) -> int | None:
    """The generation's number, or None."""
    found = _GENERATION.match(path)
    return int(found[1]) if found is not None and generation_path(int(found[1])) == path else None


def parse_tombstone(path: str) -> TombstoneName | None:
    """What the name says, or None."""
    found = _TOMBSTONE.match(path)
    if found is None:
        return None
    target = StepName(step=int(found[1]), generation=int(found[2]))
    by_generation = int(found[3])
    if tombstone_path(target, by_generation=by_generation) != path:
        return None
    return TombstoneName(target=target, by_generation=by_generation)


def parse_data(path: str) -> DataName | None:
    """What the name of a body or a fragment says, or None."""
    found = _DATA.match(path)
    if found is None:
        return None
    name = StepName(step=int(found[2]), generation=int(found[1]))
    if found[3] is not None:
        node_rank = int(found[3])
        data = DataName(name=name, node_rank=node_rank, rank=None)
        expected = fragment_path(name, node_rank=node_rank)
    else:
        data = DataName(name=name, node_rank=int(found[4]), rank=int(found[5]))
        expected = body_path(name, node_rank=int(found[4]), rank=int(found[5]))
    return data if expected == path else None
