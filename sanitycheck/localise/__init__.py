"""Finding the bad one: which node or link of a fleet is slow or broken, from tests of nodes and of pairs.

Theory of operation. Everything here is pure: :func:`~sanitycheck.localise.search.plan` takes the evidence so
far and says which pairs to test next, :func:`~sanitycheck.localise.search.conclude` says what the evidence
proves. Whoever runs the tests (``sanitycheck run --nnodes``, a scheduler, a simulation) adds the outcome to
the evidence and asks again.

1. Each node alone, all at the same time. One that fails, or is far below the fleet's median, is bad and
   leaves.
2. Two rounds of disjoint pairs from a round-robin tournament, so that nobody meets the same partner twice.
3. Each suspect (a node with a bad pair) is tested with different partners that have passed everything so far:
   three with which it is good clear it, and two more for each with which it is bad. Two independent partners
   that agree, and are the majority, make it bad; so do three in any case, since a fault may come and go.
4. A pair that was bad although both nodes are fine is tested once more: bad again, it is the link.
5. Nobody passed, or most nodes look bad: a common cause. Then nobody is called bad.

A pair that hangs is a bad pair for both, and never stops other pairs. The number of rounds does not grow with
the fleet, only with the number of suspects for each node that passed.
"""
