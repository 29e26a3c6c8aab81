"""Checks of several nodes together; they run in a group only (``--rdzv-endpoint``)."""

from __future__ import annotations

from sanitycheck.check import Check
from sanitycheck.checks import fleet as rules
from sanitycheck.facts import fleet
from sanitycheck.reasons import Reason
from sanitycheck.result import Level

__all__ = ["FLEET_CHECKS"]

FLEET_CHECKS: tuple[Check, ...] = (
    Check(
        id="sw.fleet",
        level=Level.STANDARD,
        scope="fleet",
        title="the same software on all nodes",
        about="Compares the versions of all nodes of a group. Two drivers or two versions of NCCL in one "
        "fleet are a common cause of hangs that look like broken hardware.",
        rule="Every version that differs from the majority fails, one line per node.",
        source="Field: mixed drivers are the first thing to rule out when most nodes look bad",
        collect=fleet.collect,
        facts=fleet.GroupFacts,
        judge=rules.judge_fleet_software,
        reasons=(Reason.FLEET_EQUAL, Reason.FLEET_DIFFERS),
    ),
    Check(
        id="coll.pair",
        level=Level.STANDARD,
        scope="pair",
        title="pairs of nodes exchange values",
        about="Two nodes at a time do all_reduce in growing sizes and compare every value. Whose fault a bad "
        "pair is, coll.localise says.",
        rule="A pair that fails, hangs or stays below 0.75 of the median of all pairs warns.",
        source="nccl-tests (values checked, sizes doubled)",
        collect=fleet.collect,
        facts=fleet.GroupFacts,
        judge=rules.judge_pair,
        reasons=(Reason.PAIRS, Reason.PAIR_NONE, Reason.PAIR_SLOW, Reason.PAIR_FAILED),
    ),
    Check(
        id="coll.all",
        level=Level.STANDARD,
        scope="fleet",
        title="all good nodes together exchange values",
        about="The nodes that nothing is wrong with do all_reduce together, every value compared.",
        rule="A wrong value, an error or no answer fails.",
        source="nccl-tests",
        collect=fleet.collect,
        facts=fleet.GroupFacts,
        judge=rules.judge_all,
        reasons=(Reason.ALL_TOGETHER, Reason.ALL_NOT_RUN, Reason.ALL_FAILED),
    ),
    Check(
        id="coll.localise",
        level=Level.STANDARD,
        scope="fleet",
        title="which node or link is the bad one",
        about="Nodes alone, then disjoint pairs of a tournament, then every suspect with partners that "
        "passed: two independent partners must agree before a node is called bad. A pair that is bad "
        "twice between two good nodes is a link. When nobody passes, it is a common cause, and nobody is "
        "called bad.",
        rule="A bad node fails everywhere and blocks on itself; a bad link and a common cause fail; a node "
        "that never came, went away or met nobody is unknown.",
        source="Proved in simulated fleets of up to 10,000 nodes (benchmarks/localise.py)",
        collect=fleet.collect,
        facts=fleet.GroupFacts,
        judge=rules.judge_localise,
        reasons=(
            Reason.FLEET_CLEAR,
            Reason.NODE_BAD,
            Reason.LINK_BAD,
            Reason.NODE_DOUBTFUL,
            Reason.COMMON_CAUSE,
            Reason.GROUP_MISSING,
            Reason.GROUP_LEFT,
            Reason.GROUP_ENDED,
            Reason.GROUP_UNTESTED,
        ),
    ),
)
