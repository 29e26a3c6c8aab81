"""Judging: one pure function per check, from its facts and the run's options to findings with reasons.

Nothing here looks at the machine, reads a clock or prints. *fail* means that the rule of the check is broken;
``blocking`` is set only where training would fail or compute wrongly on this node. A machine that trains
under torchrun must not get a blocking finding.
"""
