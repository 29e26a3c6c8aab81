"""Checks across nodes: ``sanitycheck run --nnodes N --node-rank R --rdzv-endpoint HOST:PORT``.

Theory of operation. Node rank 0 opens the endpoint and leads (:mod:`sanitycheck.group.lead`, one thread, one
loop); every node, rank 0 too, joins it as a member (:mod:`sanitycheck.group.member`) before it checks
itself, so that the lead knows early who came. After its own checks a member reports its figure alone and its
versions. The lead then asks :mod:`sanitycheck.localise` for pairs, has them tested, and at the end gives
everybody the same facts, which are judged on every node like those of any check.

A test of two nodes runs in a child of a child: the members' worker process imports torch once
(:mod:`sanitycheck.group.worker`) and forks for each test, with a deadline, so that a pair that hangs costs
its deadline and nothing else. Messages are JSON lines of bounded length over TCP; the lead listens on the
address of the endpoint alone, only while the group meets, and takes only nodes that name the same group.
"""

from __future__ import annotations

from sanitycheck.group.run import GroupPlace, run_group

__all__ = ["GroupPlace", "run_group"]
