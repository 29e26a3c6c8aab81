"""Words of the checks of several nodes."""

from __future__ import annotations

from collections.abc import Mapping

from sanitycheck.reasons import Reason
from sanitycheck.render.texts.wording import Text

__all__ = ["FLEET"]

FLEET: Mapping[Reason, Text] = {
    Reason.FLEET_EQUAL: Text("the same versions on {count} nodes", "nothing to do"),
    Reason.FLEET_DIFFERS: Text("{differences}", "install the same versions on all nodes"),
    Reason.PAIRS: Text("{count} pairs, usually {rate_mb_s}", "nothing to do"),
    Reason.PAIR_NONE: Text("no pairs were tested", "nothing to do"),
    Reason.PAIR_SLOW: Text(
        "{rate_mb_s}, others have {typical_mb_s}", "see coll.localise for whose fault it is"
    ),
    Reason.PAIR_FAILED: Text("failed: {problem}", "see coll.localise for whose fault it is"),
    Reason.ALL_TOGETHER: Text("values correct on {nodes} nodes together, {rate_mb_s}", "nothing to do"),
    Reason.ALL_NOT_RUN: Text("not run: fewer than two nodes are good", "nothing to do"),
    Reason.ALL_FAILED: Text(
        "{nodes} nodes that are good in pairs fail together: {problem}",
        "look at what only a larger group uses: switches, firewall between racks, number of connections",
    ),
    Reason.FLEET_CLEAR: Text("{count} nodes clear after {rounds} rounds", "nothing to do"),
    Reason.NODE_BAD: Text(
        "is bad ({why}): {score}, usual is {typical}; agreed by {witnesses}",
        "leave this node out, and run sanitycheck run --level deep on it",
    ),
    Reason.LINK_BAD: Text(
        "the way between {first} and {second} is bad, both are good with others",
        "check cables, switch ports and routes between the two; neither node has to leave",
    ),
    Reason.NODE_DOUBTFUL: Text(
        "was bad once and good otherwise: a fault that comes and goes, or a disturbance",
        "run it again; do not use it as a spare until it is clear",
    ),
    Reason.COMMON_CAUSE: Text(
        "most of {count} nodes look bad, so that it is not the nodes; versions: {differences}",
        "look for what they share: network, switch, settings, software; no node has to leave",
    ),
    Reason.GROUP_MISSING: Text(
        "{count} of {expected} nodes came; never came: {missing}",
        "look at those nodes; nothing is known of them",
    ),
    Reason.GROUP_LEFT: Text("rank {rank} went away before the end", "look at what ended it there"),
    Reason.GROUP_ENDED: Text("the group ended early: {why}", "see the report of node rank 0; run it again"),
    Reason.GROUP_UNTESTED: Text("met nobody: {nodes}", "run it again"),
}
