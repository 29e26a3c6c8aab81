"""Way into the worker template: Python imports it before the script, as this folder leads PYTHONPATH.

The agent starts the template as ``python -u train.py …``, exactly as a worker would be started, with this
folder in front of ``PYTHONPATH``. `aimaster.agent.template` then imports torch and waits. Only in a process
that is forked to be a worker does control come back here, and the interpreter goes on to run the script by
itself: ``__main__``, ``sys.path``, tracebacks and the end of the process are Python's own.

Whatever fails in here ends the process: control must never reach the script in the template itself.
"""

import importlib.util
import os
import sys


def _enter() -> bool:
    """Whether a `sitecustomize` of the user's own took this one's place. Returns in workers only."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    del sys.modules["sitecustomize"]
    # The package may be importable for the agent alone, which ran from the folder that holds it.
    root = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    known = importlib.util.find_spec("aimaster") is not None
    if not known:
        sys.path.insert(0, root)
    from aimaster.agent import template

    if not known:
        sys.path.remove(root)
    return template.main()


def _enter_or_end() -> bool:
    try:
        return _enter()
    except BaseException:  # noqa: BLE001 - site would go on, and run the script here
        try:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(70)


if not _enter_or_end():
    # site takes this one exception for "there is no such module", which is the truth in the worker.
    raise ImportError("no sitecustomize", name="sitecustomize")
