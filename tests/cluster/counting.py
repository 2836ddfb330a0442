"""A job that uses its cluster: a rank a node holds a share of a sum; installed as a real entry point."""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Literal

from launch.config import JobSettings
from launch.jobs import Job
from launch.runs import Run

REPOSITORY = Path(__file__).parents[2]


class CountingSettings(JobSettings):
    job: Literal["counting"] = "counting"
    steps: int = 10
    """Steps of the run."""
    ranks: int = 2
    """Ranks, a CPU each."""
    step_s: float = 0.0
    """Seconds that a step takes."""

    may_change = JobSettings.may_change | {"step_s"}


class Counter:
    """A rank's share of the sum."""

    def __init__(self, total: float, rank: int) -> None:
        self.total, self.rank = total, rank

    def add(self, step: int) -> tuple[float, str]:
        """The new share, and the node that Ray says this is."""
        import ray

        self.total += (step + 1) * (self.rank + 1)
        return self.total, ray.get_runtime_context().get_node_id()


def run_counting(settings: CountingSettings, run: Run) -> None:
    """Every step each rank adds to its share; a resumed run has the shares of its checkpoint."""
    from launch.cluster import open_cluster
    from launch.group import WorkerGroup

    shares = run.resumed.state["shares"] if run.resumed else [0.0] * settings.ranks

    def save(folder: Path) -> dict[str, Any]:
        (folder / "shares.json").write_text(json.dumps(shares))
        return {"shares": shares}

    with open_cluster(settings.cluster, [{"CPU": 1}] * settings.ranks, run.logs / "workers") as cluster:
        own = [{"total": share, "rank": rank} for rank, share in enumerate(shares)]
        group = WorkerGroup(cluster, Counter, settings.ranks, per_rank=own, deadline_s=120, distributed=False)
        run.configure(save)
        for step in range(run.start_step, settings.steps):
            time.sleep(settings.step_s)
            results = group.call("add", step)
            shares = [share for share, _ in results]
            nodes = len({node for _, node in results})
            if run.finish(step, {"sum/total": sum(shares), "sum/nodes": nodes}):
                break


def job() -> Job:
    """The entry point."""
    return Job("counting", CountingSettings, run_counting, _footprint)


def _footprint(settings: CountingSettings) -> dict[str, Any]:
    return {"learner_ranks": settings.ranks, "cpus": settings.ranks, "gpus": 0}


def install(folder: Path) -> str:
    """Make a distribution in `folder` that offers the job; returns the PYTHONPATH that has it."""
    info = folder / "counting-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[launch.jobs]\ncounting = tests.cluster.counting:job\n")
    return os.pathsep.join([str(folder), str(REPOSITORY)])


def command(*arguments: str) -> list[str]:
    """`launch …` in a subprocess."""
    return [sys.executable, "-m", "launch.cli", *arguments]


def expected_sum(steps: int, ranks: int = 2) -> float:
    """Sum of all shares after so many steps."""
    return steps * (steps + 1) / 2 * ranks * (ranks + 1) / 2


def host() -> str:
    """This machine's name, as SLURM wants it."""
    return socket.gethostname()
