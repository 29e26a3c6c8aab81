"""The real core in virtual time: real machine, detector, policy and journal codec; simulated everything else.

One seed decides all: sizes, delays, faults and when they strike. A run has two phases. *Safety*: faults
strike at any time, and after every single event checkers that do not share the core's code look whether
anything is wrong. *Liveness*: faults stop, enough nodes are healthy, and the job has to come to its end in
bounded time.

| module | is |
| --- | --- |
| `clock` | virtual time and what is due when |
| `network` | one link per node: ordered, delayed, cut or stuck |
| `nodes` | agents: healthy, slow, frozen, restarted, gone |
| `training` | what workers do: start together, step, commit, fail, finish |
| `master` | the shell around the core: journal, timers, detector, crash and recovery |
| `faults` | what goes wrong, drawn from the seed |
| `checkers` | what must never happen |
| `run` | one run from one seed |
"""
