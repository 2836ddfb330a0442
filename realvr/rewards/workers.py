"""A pool of killable processes: code that hangs, crashes or eats memory costs its own call and nothing else."""

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

START_S = 180.0  # for a worker to start and import what it was asked for: a busy machine is not the reward's fault


@dataclass(frozen=True)
class Call:
    """One call of a function, named by its dotted path, with keyword arguments (they must pickle) and a limit."""

    path: str
    arguments: dict[str, Any]
    limit_s: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a call: its value, or the reason why there is none."""

    status: Literal["ok", "raised", "timeout", "crashed"]
    value: Any = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass
class Worker:
    process: subprocess.Popen
    connection: Connection
    job: int = -1  # index of the call it works on; −1 is idle
    ready: bool = False
    deadline: float = field(default=0.0)

    @classmethod
    def start(cls) -> "Worker":
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "realvr.rewards.worker", str(theirs.fileno())]
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        connection = Connection(ours.detach())
        connection.send(list(sys.path))
        return cls(process, connection)

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """Runs calls in `size` processes, which start when first needed and are replaced when they had to be killed.

    Safe to use from several threads (one `run` at a time). Closed by `close`, by `with`, or at exit.
    """

    def __init__(self, size: int = 1):
        self.size = size
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker. The pool may be used again: it then starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """All calls, each within its own limit; outcomes in the order of the calls. Raises only if pickling fails."""
        with self._lock:
            messages = [pickle.dumps((c.path, c.arguments, c.limit_s)) for c in calls]
            waiting, outcomes = deque(range(len(calls))), [Outcome("crashed")] * len(calls)
            try:
                while waiting or any(w.job >= 0 for w in self._workers):
                    self._hand_out(waiting, messages)
                    self._collect(calls, outcomes)
            except BaseException:  # interrupted: a worker left in the middle of a call would answer the next one
                self.close()
                raise
            return outcomes

    def _hand_out(self, waiting: deque[int], messages: Sequence[bytes]) -> None:
        failures = 0
        while waiting:
            worker = next((w for w in self._workers if w.job < 0), None)
            if worker is None:
                if len(self._workers) >= self.size:
                    return
                worker = Worker.start()
                self._workers.append(worker)
            try:
                worker.connection.send_bytes(messages[waiting[0]])
            except OSError:  # it died while idle: not this call's fault
                self._discard(worker)
                failures += 1
                if failures > 3:
                    raise RuntimeError(f"reward workers end as soon as they start: {sys.executable}") from None
                continue
            worker.job, worker.ready, worker.deadline = waiting.popleft(), False, time.monotonic() + START_S

    def _collect(self, calls: Sequence[Call], outcomes: list[Outcome]) -> None:
        busy = [w for w in self._workers if w.job >= 0]
        patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())
        heard = wait([w.connection for w in busy], timeout=patience)
        for worker in busy:
            call = calls[worker.job]
            if worker.connection in heard:
                try:
                    status, *rest = worker.connection.recv()
                except (EOFError, OSError):
                    code = worker.process.wait()
                    outcomes[worker.job] = Outcome("crashed", reason=f"the process ended with status {code}")
                    self._discard(worker)
                    continue
                if status == "ready":
                    worker.ready, worker.deadline = True, time.monotonic() + call.limit_s
                    continue
                outcomes[worker.job] = Outcome("ok", rest[0]) if status == "ok" else Outcome("raised", None, rest[0])
                worker.job = -1
            elif time.monotonic() >= worker.deadline:
                what = f"longer than {call.limit_s:g} s" if worker.ready else f"no start within {START_S:g} s"
                outcomes[worker.job] = Outcome("timeout", reason=what)
                self._discard(worker)

    def _discard(self, worker: Worker) -> None:
        worker.stop()
        self._workers.remove(worker)


_shared: WorkerPool | None = None
_shared_lock = threading.Lock()


def shared() -> WorkerPool:
    """The process's own pool of one worker, for single gradings; started when first used."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = WorkerPool(1)
        return _shared
