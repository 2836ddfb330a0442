"""A group of workers: one process a rank, driven in lockstep.

`group.call("step", batch, what="learner step 3")` runs a method on every rank and returns the results in rank order.
A group of torch.distributed ranks lives and dies as one: when a rank is lost the others cannot re-initialise in place,
so `restart()` ends them all and starts anew in the same placement. Independent workers (`distributed=False`, for
example rollout engines) may be called and restarted one by one.
"""

import faulthandler
import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from launch import reaper
from launch.cluster import Cluster
from launch.signals import STOP_FILE_VARIABLE, ask
from launch.watchdog import DeadlineError, Waiter, WorkerDied, wait

log = logging.getLogger(__name__)

START_S = 180.0  # to start a bare Python process, on a busy machine
STACK_LEAD_S = 1.0  # a worker writes its stacks this long before the driver gives up


class _Host:
    """The Ray actor around a worker: directs its output to a file, builds it, runs its methods.

    Processes that the worker starts end with it, also after a SIGKILL (see `reaper.py`).
    The worker's class is named, not pickled, so that its modules are imported here, after the environment is set and
    under a deadline.
    """

    def __init__(self, log_file: str, mark: str):
        self._log = _redirect_output(Path(log_file))
        faulthandler.enable(self._log)
        signal.signal(signal.SIGUSR1, _ask_for_a_stop)
        reaper.start(f"{reaper.WORKER_MARK}={mark}", grace_s=0.5, detach=True)
        self._worker: Any = None

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(self, limit_s: float, module: str, name: str, environment: dict[str, str], kwargs: dict) -> None:
        os.environ.update(environment)
        with _StacksAfter(limit_s, self._log):
            cls = importlib.import_module(module)
            for part in name.split("."):
                cls = getattr(cls, part)
            self._worker = cls(**kwargs)

    def run(self, limit_s: float, method: str, *args: Any, **kwargs: Any) -> Any:
        with _StacksAfter(limit_s, self._log):
            return getattr(self._worker, method)(*args, **kwargs)


class Pending:
    """A call under way on some ranks; `wait()` gives its results in rank order."""

    def __init__(self, refs: list, waiters: list[Waiter], what: str, end: float, group: "WorkerGroup"):
        self.refs, self._waiters, self._what, self._end, self._group = refs, waiters, what, end, group

    def wait(self) -> list[Any]:
        """Results; raises as `launch.watchdog.wait` does. The deadline counts from the submission."""
        import ray

        try:
            return wait(self.refs, max(self._end - time.monotonic(), 0.0), self._what, self._waiters)
        except Exception as error:
            unfinished = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[1]  # stuck in a collective
            if unfinished or isinstance(error, DeadlineError | WorkerDied):
                self._group.broken = f"{self._what}: {str(error).splitlines()[0]}"
            raise


class WorkerGroup:
    """Workers of one class, one process a rank, in the cluster's bundles `bundle_offset … bundle_offset + ranks - 1`.

    Args:
        cluster: where to run.
        worker_class: a class that can be imported by its module and name. It is built as `worker_class(**kwargs)`.
        ranks: number of processes.
        kwargs: constructor arguments, the same for every rank.
        cpus, gpus: Ray resources a rank; with a GPU the rank sees only its own.
        bundle_offset: the bundle of rank 0.
        env: environment variables set before the process starts.
        deadline_s: for starting the processes and building the workers; also the default for calls.
        name: in messages and log files (`<log_dir>/<name>-<rank>.log`).
        distributed: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torch.distributed reads them.
        per_rank: further constructor arguments, one mapping a rank.

    Attributes:
        broken: why the group can no longer be called before a restart, or None.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: type,
        ranks: int,
        kwargs: Mapping[str, Any] | None = None,
        *,
        cpus: float = 1,
        gpus: float = 0,
        bundle_offset: int = 0,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 600,
        name: str = "worker",
        distributed: bool = True,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
    ):
        if per_rank is not None and len(per_rank) != ranks:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {ranks} ranks")
        self.cluster, self.worker_class, self.ranks, self.name = cluster, worker_class, ranks, name
        self.kwargs = [{**(kwargs or {}), **(per_rank[rank] if per_rank else {})} for rank in range(ranks)]
        self.cpus, self.gpus, self.bundle_offset = cpus, gpus, bundle_offset
        self.env, self.deadline_s, self.distributed = dict(env or {}), deadline_s, distributed
        self.broken: str | None = None
        self._actors: list[Any] = [None] * ranks
        self._start(range(ranks))

    @property
    def actors(self) -> list[Any]:
        """Ray handles of all ranks, for workers that call each other directly (`handle.run.remote(limit, method)`)."""
        return list(self._actors)

    def log_file(self, rank: int) -> Path:
        """Where rank `rank` writes its standard output and error."""
        return self.cluster.log_dir / f"{self.name}-{rank}.log"

    def call(
        self,
        method: str,
        *args: Any,
        what: str | None = None,
        per_rank: Sequence[Any] | None = None,
        seconds: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run `worker.method(*args)` on all ranks (or `ranks`) and return the results in their order.

        With `per_rank`, rank i runs `worker.method(per_rank[i], *args)`. `what` names the work in messages; `seconds`
        is the deadline (default: the group's). Raises as `launch.watchdog.wait`; after a death or a missed deadline the
        group is broken until `restart()`.
        """
        return self.submit(method, *args, what=what, per_rank=per_rank, seconds=seconds, ranks=ranks).wait()

    def submit(
        self,
        method: str,
        *args: Any,
        what: str | None = None,
        per_rank: Sequence[Any] | None = None,
        seconds: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Pending:
        """Begin what `call` does and return at once; Ray object references among `args` arrive as their values."""
        ranks = list(range(self.ranks)) if ranks is None else list(ranks)
        if per_rank is not None and len(per_rank) != len(ranks):
            raise ValueError(f"{method}: per_rank has {len(per_rank)} entries for {len(ranks)} ranks")
        if self.broken and self.distributed:
            raise RuntimeError(f"{self.name} group is broken ({self.broken}); restart() it first")
        seconds = self.deadline_s if seconds is None else seconds
        firsts = [()] * len(ranks) if per_rank is None else [(item,) for item in per_rank]
        refs = [
            self._actors[rank].run.remote(seconds, method, *first, *args)
            for rank, first in zip(ranks, firsts, strict=True)
        ]
        what = what or f"{self.name}.{method}"
        return Pending(refs, self._waiters(ranks), what, time.monotonic() + seconds, self)

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """End the processes of all ranks (or `ranks`) at once."""
        for rank in range(self.ranks) if ranks is None else ranks:
            if self._actors[rank] is not None:
                self.cluster.kill_actor(self._actors[rank])
                self._actors[rank] = None

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Kill and build anew, in the same placement: all ranks, or some of an independent group.

        Raises:
            DeadlineError, WorkerDied, UserError: the workers could not be built again.
        """
        if ranks is not None and self.distributed:
            raise ValueError("ranks of a distributed group restart together")
        self.kill(ranks)
        self._start(range(self.ranks) if ranks is None else ranks)

    def _start(self, ranks: Sequence[int]) -> None:
        try:
            self._build(ranks)
        except BaseException:
            self.kill(ranks)
            raise
        self.broken = None

    def _build(self, ranks: Sequence[int]) -> None:
        end = time.monotonic() + self.deadline_s
        for rank in ranks:
            mark = secrets.token_hex(8)
            arguments = (str(self.log_file(rank)), mark)
            env = {**self.env, reaper.WORKER_MARK: mark}
            bundle = self.bundle_offset + rank
            self._actors[rank] = self.cluster.start_actor(_Host, arguments, bundle, self.cpus, self.gpus, env)
        waiters = self._waiters(ranks)
        start_s = min(START_S, self.deadline_s)
        started = wait([self._actors[r].address.remote() for r in ranks], start_s, f"{self.name} processes", waiters)
        module, name = self.worker_class.__module__, self.worker_class.__qualname__
        left = max(end - time.monotonic(), 1.0)
        refs = [
            self._actors[rank].build.remote(
                left, module, name, self._rank_environment(rank, started[0]), self.kwargs[rank]
            )
            for rank in ranks
        ]
        wait(refs, left, f"{self.name} set-up", waiters)

    def _rank_environment(self, rank: int, master: tuple[str, int]) -> dict[str, str]:
        """What torch.distributed reads. LOCAL_RANK is 0: Ray shows a rank its own devices only."""
        if not self.distributed:
            return {}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }

    def _waiters(self, ranks: Sequence[int]) -> list[Waiter]:
        return [Waiter(f"{self.name} rank {rank}", rank, self.log_file(rank)) for rank in ranks]


class _StacksAfter:
    """Within the block: after `limit_s` all threads' stacks go to the log, whatever the process hangs in."""

    def __init__(self, limit_s: float, file: TextIO):
        self._limit_s, self._file = max(limit_s - STACK_LEAD_S, 0.5 * limit_s, 0.1), file

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, file=self._file)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def _ask_for_a_stop(number: int, frame: object) -> None:
    """A scheduler may warn every process of a job: the driver is told, and all ranks stop at the same step."""
    if file := os.environ.get(STOP_FILE_VARIABLE):
        ask(Path(file), f"{signal.Signals(number).name} at process {os.getpid()} on {socket.gethostname()}", again=True)


def _redirect_output(path: Path) -> TextIO:
    """Send standard output and error of this process and its children to `path`, appending line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return file
