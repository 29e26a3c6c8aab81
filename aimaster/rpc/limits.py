"""Named limits of the wire. Whoever sends clips to them, whoever receives refuses what is beyond."""

from __future__ import annotations

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
"""Protocol versions that this software speaks. 1 is package `aimaster.v1`."""

MESSAGE_BYTES_MAX = 1024 * 1024
"""Largest message between agent and master, either way. The lists below fit in it at their longest."""
STATUS_BYTES_MAX = 64 * 1024 * 1024
"""Largest status reply: 10,000 nodes of eight workers need about 8 MiB."""

RANKS_PER_NODE_MAX = 1024
PROCESSES_PER_NODE_MAX = 4096
STACKS_MAX = 16
"""Distinct stacks in one heartbeat; ranks beyond it have none."""
NODES_MAX = 100_000
NOTES_MAX = 16
NOTE_CHARS_MAX = 512
TEXT_CHARS_MAX = 4096
"""Longest free text: error reports, sentences, refusals. Longer ones lose their middle."""
ADDRESS_CHARS_MAX = 300
"""A host name has at most 253 characters; a port and brackets come on top."""
DIGEST_CHARS_MAX = 128
PORT_MAX = 65_535
EXIT_CODE_MAX = 255
SIGNAL_MAX = 64

INT32_MAX = 2**31 - 1
INT63_MAX = 2**63 - 1
"""Steps, generations and numbers of facts stay below it, so that a signed field can hold any of them."""

CUT = "\n[… cut …]\n"


def clip(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Make free text fit for the wire: valid UTF-8, and beyond the limit only its two ends.

    The first lines of an error say what was done and the last ones what went wrong, so the middle goes.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= chars_max:
        return text
    head = (chars_max - len(CUT)) // 3
    tail = chars_max - len(CUT) - head
    return text[:head] + CUT + text[-tail:]
