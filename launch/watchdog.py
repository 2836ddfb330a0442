"""Waiting with a deadline and a reason. Nothing in the project waits for a remote worker in any other way."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UserError

log = logging.getLogger(__name__)

# After the first failure the other workers get this long to tell theirs: when a rank dies, its peers report
# "connection closed" and may do so before Ray reports the death, which is the true cause.
GRACE_S = 6.0
NOTE_EVERY_S = 60.0
STACK_MARK = "Timeout ("  # how faulthandler begins the dump that a worker writes just before its deadline
LOG_TAIL_LINES = 12


class DeadlineError(RuntimeError):
    """A wait was given up. The message says what was waited for, how long, who is missing and where they stand."""


class WorkerDied(RuntimeError):
    """A worker process is gone (killed, crashed, out of memory, node lost). `rank` is its index in the group."""

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.rank)


@dataclass(frozen=True)
class Waiter:
    """Whom a reference belongs to, for messages: a name such as `learner rank 1`, its rank, its log file."""

    name: str
    rank: int = -1
    log_file: Path | None = None


def wait(refs: Sequence[Any], seconds: float, what: str, waiters: Sequence[Waiter] | None = None) -> list[Any]:
    """Results of Ray references, in order, within a deadline.

    Args:
        refs: object references.
        seconds: the deadline for all of them together.
        what: what is done, completing "waiting for …", for example `learner step 12`.
        waiters: one for each reference; `task i` where not given.

    Raises:
        UserError: a worker raised one; the same one line, without the remote traceback.
        WorkerDied: a worker process is gone.
        DeadlineError: time is up.
        Exception: whatever else a worker raised (with Ray's remote traceback, of the original type too).
    """
    import ray

    refs = list(refs)
    waiters = list(waiters) if waiters is not None else [Waiter(f"task {i}", i) for i in range(len(refs))]
    index = {ref: i for i, ref in enumerate(refs)}
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    start = time.monotonic()
    end, pending, noted = start + seconds, refs, start
    while pending and (left := end - time.monotonic()) > 0:
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, NOTE_EVERY_S))
        for ref in ready:
            try:
                results[index[ref]] = ray.get(ref, timeout=max(end - time.monotonic(), 1.0))
            except Exception as error:  # kept and raised below, once the true cause is known
                failures[index[ref]] = error
                end = min(end, time.monotonic() + GRACE_S)
        if not ready and not failures and time.monotonic() - noted >= NOTE_EVERY_S:
            noted = time.monotonic()
            missing = ", ".join(waiters[index[ref]].name for ref in pending)
            log.warning("waiting for %s since %.0f s (limit %.0f s): %s", what, noted - start, seconds, missing)
    if failures:
        _raise_cause(failures, what, waiters)
    if pending:
        raise DeadlineError(_give_up(what, seconds, [waiters[index[ref]] for ref in pending], len(refs)))
    return [results[i] for i in range(len(refs))]


def log_tail(path: Path | None, stack: bool = False, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a worker's log, or with `stack` its newest stack dump if it wrote one; "" without a log."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    mark = text.rfind(STACK_MARK)
    if stack and mark >= 0:
        return text[mark:].strip()
    return "\n".join(text.strip().splitlines()[-lines:])


def _raise_cause(failures: dict[int, BaseException], what: str, waiters: Sequence[Waiter]) -> None:
    """Raise the failure that explains the others: bad input, then a dead process, then anything else."""
    from ray import exceptions as ray_errors

    dead = (
        ray_errors.RayActorError,
        ray_errors.WorkerCrashedError,
        ray_errors.OutOfMemoryError,
        ray_errors.NodeDiedError,
        ray_errors.OwnerDiedError,
        ray_errors.ActorPlacementGroupRemoved,
    )
    for error in failures.values():
        cause = getattr(error, "cause", error)
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from None
    for i, error in failures.items():
        if isinstance(error, dead):
            tail = log_tail(waiters[i].log_file)
            message = f"{waiters[i].name} died during {what}: {_why_dead(error)}"
            where = f"\nlast lines of {waiters[i].log_file}:\n{tail}" if tail else ""
            raise WorkerDied(message + where, waiters[i].rank) from None
    first = min(failures)
    failures[first].add_note(f"{waiters[first].name} failed during {what}; its log: {waiters[first].log_file}")
    raise failures[first]


def _why_dead(error: BaseException) -> str:
    """Ray's reason for a death, without its boilerplate (ids, addresses, advice)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "exit" in line.lower() and ("type" in line.lower() or "detail" in line.lower()):
            return line
    return lines[0] if lines else type(error).__name__


def _give_up(what: str, seconds: float, missing: Sequence[Waiter], total: int) -> str:
    """The message of a DeadlineError, with the stack of each missing worker where its log holds one."""
    names = ", ".join(waiter.name for waiter in missing)
    parts = [f"gave up waiting for {what} after {seconds:g} s: {len(missing)} of {total} missing ({names})"]
    for waiter in missing:
        tail = log_tail(waiter.log_file, stack=True)
        if tail:
            parts.append(f"{waiter.name}, from {waiter.log_file}:\n{tail}")
    return "\n".join(parts)
