"""A training script that describes itself in JSON: run warm and cold, the two descriptions must be equal.

Writes ``<out>.<rank>.json`` after its last line, from an exit handler that runs after a thread has used the
script's names.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import locale
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import warnings

OUT = sys.argv[1]
IMPORTED_BEFORE_TORCH = "torch" in sys.modules
FOUND: dict = {"argv": list(sys.argv), "path": list(sys.path), "main_names_first": sorted(globals())}

import numpy  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - every template has it


class Pickled:
    """Belongs to __main__, which a spawned child must find again."""

    def __init__(self, value):
        self.value = value


def double(item):
    """Run in a child."""
    return item.value * 2, __name__


def libc_env():
    """The environment as C sees it."""
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, index = {}, 0
    while environ[index]:
        name, _, value = environ[index].decode().partition("=")
        found[name] = value
        index += 1
    return found


def stream(file):
    """Everything that can be seen of a standard stream."""
    return {
        "type": type(file).__name__,
        "buffer": type(file.buffer).__name__,
        "encoding": file.encoding,
        "errors": file.errors,
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "newlines": repr(file.newlines),
        "mode": file.mode,
        "name": file.name,
        "tty": file.isatty(),
        "fileno": file.fileno(),
    }


def read(path):
    """A small file."""
    with open(path) as file:
        return file.read()


def descriptors():
    """What every open descriptor is."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
    return sorted(found)


def death_signal():
    """What the kernel will send when the parent ends."""
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0)
    return value.value


def describe():
    """The whole of it."""
    main = sys.modules["__main__"]
    # OpenBLAS starts its threads again at its first use after a fork.
    numpy.ones((300, 300)) @ numpy.ones((300, 300))
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    modules = [name for name in sys.modules if name.startswith(("aimaster", "sitecustom", "usercustom"))]
    FOUND.update(
        orig_argv=sys.orig_argv,
        flags=repr(sys.flags),
        executable=[sys.executable, sys.prefix, sys.base_prefix, sys._base_executable],
        warnoptions=sys.warnoptions,
        xoptions=sys._xoptions,
        warnings=sorted(repr(entry) for entry in warnings.filters),
        main={
            "file": main.__dict__.get("__file__"),
            "spec": main.__spec__ and main.__spec__.name,
            "package": main.__package__,
            "doc": (main.__doc__ or "")[:20],
            "name": main.__name__,
            "loader": type(main.__loader__).__name__,
            "builtins": type(main.__dict__["__builtins__"]).__name__,
            "same": main.__dict__ is globals(),
            "cached": main.__dict__.get("__cached__"),
        },
        depth=depth,
        modules=sorted(modules),
        hooks=[sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        env=dict(os.environ),
        env_in_c=libc_env() == dict(os.environ),
        cwd=os.getcwd(),
        umask=os.umask(0o22),
        signals={int(s): repr(signal.getsignal(s))[:40] for s in signal.valid_signals()},
        blocked=sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        limits={n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n[:7] == "RLIMIT_"},
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        scheduler=os.sched_getscheduler(0),
        affinity=sorted(os.sched_getaffinity(0)),
        leader=[os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        death_signal=death_signal(),
        comm=read("/proc/self/comm"),
        cmdline=read("/proc/self/cmdline").split("\0"),
        fds=descriptors(),
        threads=[threading.main_thread().name, threading.current_thread() is threading.main_thread()],
        native=threading.main_thread().native_id == os.getpid(),
        tasks=len(os.listdir("/proc/self/task")),
        streams=[stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        originals=[sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        gc=[gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        limit=sys.getrecursionlimit(),
        locale=[locale.setlocale(locale.LC_ALL, None), locale.getpreferredencoding(False)],
        torch={
            "threads": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "dtype": str(torch.get_default_dtype()),
            "grad": torch.is_grad_enabled(),
            "cuda": torch.cuda.is_initialized(),
            "fork": torch.cuda._is_in_bad_fork(),
        },
        method=multiprocessing.get_start_method(allow_none=True),
        pickled=pickle.loads(pickle.dumps(Pickled(4))).value,  # noqa: S301, TID251 - our own
        importable=os.environ.get("BESIDE") and __import__("beside").WHERE,
    )


def draws():
    """Different in every process."""
    import random

    key = multiprocessing.current_process().authkey
    values = [torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random()]
    return [repr(value) for value in values] + [key.hex()]


def children():
    """Both ways of making child processes work, and find what __main__ holds."""
    results = {}
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results[method] = pool.map(double, [Pickled(3)])
    return results


def late():
    """Runs when the script's last line is done."""
    done.wait()
    FOUND["in_thread"] = sorted(name for name in globals() if name.isupper())


def write():
    """The exit handler."""
    FOUND["main_names_last"] = sorted(globals())
    FOUND["exits_registered"] = "atexit" in sys.modules
    with open(f"{OUT}.{os.environ['RANK']}.json", "w") as file:
        json.dump({"same": FOUND, "draws": DRAWS}, file)


if __name__ == "__main__":
    atexit.register(write)
    describe()
    DRAWS = draws()
    FOUND["children"] = children()
    done = threading.Event()
    threading.Thread(target=late).start()
    threading.Timer(0.1, done.set).start()
    print("out of", os.environ["RANK"])
    sys.exit(5)
