"""A process that runs reward and grading code for a `WorkerPool`, and that anybody may kill.

Started as `python -m realvr.rewards.worker FD`; FD is its end of a socket pair. It ends when the other end closes.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

INSIDE = False
"""True in a worker: code that would otherwise hand its work to a worker does it here."""
GRACE_S = 5.0


def resolve(path: str) -> Callable[..., Any]:
    """Import `package.module.function`. Raises ImportError or AttributeError."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def serve(connection: Connection) -> None:
    """Answer calls (path, arguments, limit_s) by ("ready",) and then ("ok", value) or ("raised", reason).

    "ready" follows the imports, so that they are not counted against the limit; a module that needs more than its
    imports may define `warm_up()`.
    """
    functions: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            path, arguments, limit_s = connection.recv()
        except EOFError:
            return
        try:
            if path not in functions:
                functions[path] = resolve(path)
                warm_up = getattr(sys.modules[path.rpartition(".")[0]], "warm_up", None)
                if warm_up is not None:
                    warm_up()
            connection.send(("ready",))
            # The parent kills a slow worker; this alarm, whose default action is to end the process without asking
            # Python, does it when the parent has died meanwhile.
            signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
            answer = ("ok", functions[path](**arguments))
        except Exception as error:
            answer = ("raised", f"{type(error).__name__}: {error}".splitlines()[0][:500])
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
        except Exception as error:  # the value does not pickle
            connection.send(("raised", f"{type(error).__name__}: {error}".splitlines()[0][:500]))


def main() -> None:
    global INSIDE
    INSIDE = True
    sys.modules["realvr.rewards.worker"] = sys.modules["__main__"]  # one INSIDE, whichever name imports it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what reward code prints goes to the log
    sys.path[:] = connection.recv()
    serve(connection)


if __name__ == "__main__":
    main()
