"""Which modules a template imports ahead: those that the last attempt had loaded, but for the user's own.

The user's own modules may read ``RANK``, connect or draw numbers when they are imported, so each worker
imports them afresh. What is not the user's is told by place: the standard library and the folders that
packages are installed to. A package that is installed in editable mode lies elsewhere and counts as the
user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import site
import sysconfig
from collections.abc import Sequence
from pathlib import Path

LIST_NAME = "modules.txt"
LIST_BYTES_MAX = 8 * 1024 * 1024
ALWAYS = ("torch._dynamo",)
"""Without a list too: every optimizer and DistributedDataParallel import it late, some 800 modules."""
GROWTH_MIN = 20
"""So many new modules are worth another template."""
MEMORIES_MAX = 100
"""Lists of so many programs are kept; those not used for longest go first."""
_NOT_AHEAD = ("__main__", "__mp_main__", "sitecustomize", "usercustomize")


def library_roots() -> tuple[str, ...]:
    """Folders whose modules are nobody's own, resolved, each ending with a separator."""
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    if site.ENABLE_USER_SITE:
        roots.add(site.getusersitepackages())
    return tuple(sorted(os.path.join(os.path.realpath(root), "") for root in roots))


def read_list(path: Path, roots: tuple[str, ...]) -> tuple[str, ...]:
    """Names to import ahead, in the order in which the worker had loaded them; `ALWAYS` without a list."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(LIST_BYTES_MAX).splitlines()
    except OSError:
        return ALWAYS
    names = list(ALWAYS)
    for line in lines:
        name, _, origin = line.partition("\t")
        if name not in ALWAYS and _is_ahead(name, origin, roots):
            names.append(name)
    return tuple(names)


def memory_path(folder: Path, words: Sequence[str]) -> Path:
    """Where the list of a program is kept from one job to the next.

    Args:
        folder: Of all such lists of this user.
        words: What the program is started with, interpreter first.
    """
    named = "\0".join([*words[:-1], os.path.realpath(words[-1])])
    return folder / f"{hashlib.blake2s(os.fsencode(named), digest_size=12).hexdigest()}.txt"


def recall(memory: Path, path: Path) -> None:
    """Begin with the list that the last job of this program has left, if there is one and none is here."""
    with contextlib.suppress(OSError):  # without it the first template is merely less warm
        if not path.exists():
            shutil.copyfile(memory, path)
            os.utime(memory)


def remember(path: Path, memory: Path) -> None:
    """Keep the list for the next job of this program."""
    with contextlib.suppress(OSError):  # a full or read-only disk costs the next job's warmth, nothing else
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = memory.with_suffix(f".{os.getpid()}")
        shutil.copyfile(path, draft)
        draft.replace(memory)
        kept = sorted(memory.parent.iterdir(), key=lambda entry: entry.stat().st_mtime)
        for old in kept[:-MEMORIES_MAX]:
            old.unlink()


def _is_ahead(name: str, origin: str, roots: tuple[str, ...]) -> bool:
    top = name.partition(".")[0]
    if name in _NOT_AHEAD or top == "aimaster" or not all(part.isidentifier() for part in name.split(".")):
        return False
    # A second path component may itself be a link into the user's folder, so only the real place counts.
    return top == "easyckpt" or os.path.realpath(origin).startswith(roots)
