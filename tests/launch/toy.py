"""A small job for tests of the launcher: installed as a real entry point, trains one number, dies where it is told."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

from launch.config import JobSettings, Settings
from launch.jobs import Job
from launch.runs import Run

REPOSITORY = Path(__file__).parents[2]


class BlockSettings(Settings):
    lr: float = 0.1
    """Step size."""
    decay: float | None = None
    """Weight decay."""


class ToySettings(JobSettings):
    job: Literal["toy.train"] = "toy.train"
    steps: int = 10
    """Steps of the run."""
    block: BlockSettings = BlockSettings()
    validate_every: int = 0
    """Steps between validations."""
    step_s: float = 0.0
    """Seconds that a step takes."""
    needs: float = 0.0
    """A required thing has a docstring."""

    may_change = JobSettings.may_change | {"step_s"}


def run_toy(settings: ToySettings, run: Run) -> None:
    """Gradient descent on (x − noise)², with a generator and a momentum that a resume must restore.

    The environment variable TOY_DIE says where the process kills itself or fails: `step:4`, `save:4`, `saved:4`,
    `raise:4`.
    """
    x, momentum, generator = 1.0, 0.0, random.Random(settings.seed)
    if run.resumed:
        kept = json.loads((run.resumed.path / "weights.json").read_text())
        x, momentum = kept["x"], kept["momentum"]
        version, internal, gauss = run.resumed.state["rng"]
        generator.setstate((version, tuple(internal), gauss))
    place, _, at = os.environ.get("TOY_DIE", ":-1").partition(":")

    def die(here: str, done: int) -> None:
        if place == here and int(at) == done:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(folder: Path) -> dict[str, Any]:
        (folder / "weights.json").write_text(json.dumps({"x": x, "momentum": momentum}))
        die("save", run.done)  # between writing and renaming
        return {"rng": generator.getstate()}

    def validate(done: int) -> dict[str, float]:
        return {"validation/score": -abs(done - 4)}  # best after 4 steps

    run.configure(save, validate, settings.validate_every, "validation/score", headline=("learner/x",))
    print("ready", flush=True)
    for step in range(run.start_step, settings.steps):
        die("step", step)
        if place == "raise" and int(at) == step:
            raise RuntimeError("the toy broke")
        time.sleep(settings.step_s)
        momentum = 0.9 * momentum + settings.block.lr * (x - generator.gauss(0, 1))
        x -= momentum
        if run.samples_due(step):
            run.samples(step, [{"x": x}])
        if run.finish(step, {"learner/x": x, "learner/momentum": momentum}):
            break
        die("saved", step + 1)


def job() -> Job:
    """The entry point."""
    return Job(
        name="toy.train",
        settings=ToySettings,
        run=run_toy,
        footprint=lambda settings: {"learner_ranks": 1, "cpus": 1, "gpus": 0},
        next=lambda settings, run: "now `toy evaluate`",
    )


def install(folder: Path) -> Path:
    """Make a distribution in `folder` that offers the jobs of this file; put the folder on the path to have them."""
    info = folder / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[launch.jobs]\ntoy.train = tests.launch.toy:job\ntoy.broken = no_such_package.jobs:job\n"
        "toy.wrong = tests.launch.toy:install_nothing\n"
    )
    return folder


def install_nothing() -> str:
    """An entry point that gives no job."""
    return "nothing"


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """Environment of a subprocess that has the toy jobs."""
    path = os.pathsep.join([str(install(folder / "site")) if not (folder / "site").exists() else str(folder / "site")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(REPOSITORY)]), **extra}


def command(*arguments: str) -> list[str]:
    """`launch …` in a subprocess."""
    return [sys.executable, "-m", "launch.cli", *arguments]
