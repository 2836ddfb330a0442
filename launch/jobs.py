"""Jobs: what a config's `job:` names. A pipeline registers its jobs in the entry-point group `launch.jobs`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from launch.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from launch.config import JobSettings
    from launch.runs import Run

GROUP = "launch.jobs"


@dataclass(frozen=True)
class Job:
    """One kind of run.

    An entry point gives a Job or a function without arguments that returns one. Loading it must stay cheap: `run` and
    `footprint` import torch, Ray and the like only when called, so that dry runs work without them.
    """

    name: str
    """The entry point's name, for example `realvr.rl`."""
    settings: "type[JobSettings]"
    """Model of its configuration."""
    run: "Callable[[Any, Run], None]"
    """`run(settings, run)` does the work; `launch.runs.Run` is its folder, log and checkpoints."""
    footprint: Callable[[Any], dict[str, Any]]
    """`footprint(settings)`: what it occupies (learner ranks, rollout workers, cpus, gpus). Needs no torch."""
    total_steps: Callable[[Any], int | None] = lambda settings: getattr(settings, "steps", None)
    """Steps of a run with these settings; None for a job without steps (an evaluation)."""
    inputs: Callable[[Any], dict[str, str]] = lambda settings: {}
    """What it reads, name → path, for `launch preflight`; a profile with `stage` copies `model` to each node."""
    next: "Callable[[Any, Run], str] | None" = None
    """One line for the end of a finished run: what to do with it now."""


def job_names() -> list[str]:
    """Names of all installed jobs."""
    return sorted(_entries())


def get_job(name: str) -> Job:
    """The installed job of this name.

    Raises:
        UserError: there is none (with the nearest name), or its package cannot be imported.
    """
    entries = _entries()
    if name not in entries:
        hint = did_you_mean(name, entries) if entries else "no package that offers jobs is installed"
        raise UserError(f"job '{name}' is unknown; {hint}")
    try:
        found = entries[name].load()
        job = found if isinstance(found, Job) else found()
    except ModuleNotFoundError as error:
        raise UserError(
            f"job '{name}' needs the package '{error.name}', which is not installed; install the extra of this "
            "machine (cpu, cuda or rocm)"
        ) from error
    if not isinstance(job, Job):
        raise TypeError(f"entry point '{name}' of group {GROUP} gives {type(job).__name__}, not a launch.jobs.Job")
    return job


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
