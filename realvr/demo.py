"""`realvr demo`: base, stage 1, GRPO alone and ReaLVR, evaluation, report: each stage a job with its own run folder.

Stages run one after the other in processes of their own, so each can be stopped and continued: the same command takes
up where it was.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.checkpoints import CheckpointStore
from launch.config import load_config
from launch.console import say
from launch.errors import UserError
from launch.files import write_json

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "demo"
WORLDS = ("shapes", "digits")
ARMS = ("base", "sft", "grpo", "realvr")
TITLES = {"base": "base", "sft": "LVR-SFT", "grpo": "LVR-RL", "realvr": "ReaLVR"}
SMOKE = {
    "base": ("steps=150", "probe.steps=20", "target_accuracy=0", "data.train.size=2048", "data.validation_size=32"),
    "sft": (
        "steps=40",
        "examples_per_step=64",
        "extension.max_steps=0",
        "data.train.size=512",
        "validation_batch=8",
        "data.validation_size=8",
    ),
    "rl": ("steps=2", "rollout.prompts_per_step=8", "data.train.size=64", "validation.every=0"),
    "evaluate": ("n=16", "twins_per_edit=2"),
}


@dataclass(frozen=True)
class Demo:
    """Where the demo's runs go and what they share."""

    world: str
    folder: Path
    smoke: bool

    def config(self, stage: str) -> Path:
        """The stage's configuration, or the world's own where it has one."""
        own = CONFIGS / f"{stage}_{self.world}.yaml"
        return own if own.exists() else CONFIGS / f"{stage}.yaml"

    def overrides(self, stage: str) -> list[str]:
        """World, run folder and (for a smoke) sizes of a stage: `base`, `sft`, `rl` or `evaluate`."""
        kinds = {"evaluate": ("data", "twins")}.get(stage, ("data.train", "data.validation"))
        shared = [f"runs_dir={self.folder}", *(f"{kind}.kind={self.world}" for kind in kinds)]
        return shared + list(SMOKE[stage] if self.smoke else ())

    def model(self, arm: str) -> Path:
        """Checkpoint that an arm is evaluated on."""
        return self.folder / arm / "model"


def run_demo(world: str, folder: Path, smoke: bool = False) -> None:
    """Run what is not done yet and write `folder`/report.html."""
    if world not in WORLDS:
        raise UserError(f"--data is {world!r}; choose one of {', '.join(WORLDS)}")
    demo = Demo(world, folder, smoke)
    seconds = _Seconds(folder / "seconds.json")
    if not (folder / "tiny" / "config.json").exists():
        with seconds("tiny checkpoint"):
            _realvr("init-tiny", str(folder / "tiny"))
    with seconds("base"):
        _job("base", demo, "base", [f"model.path={folder / 'tiny'}"])
    with seconds("stage 1"):
        _job("sft", demo, "sft", [f"model.path={demo.model('base')}"])
    start = f"model.path={demo.model('sft')}"
    with seconds("stage 2, GRPO alone"):
        _job("rl", demo, "grpo", [start, "evidence.weight=0"])
    with seconds("stage 2, ReaLVR"):
        _job("rl", demo, "realvr", [start])
    with seconds("evaluation"):
        _evaluate(demo)
    _report(demo, seconds.taken)


def _job(command: str, demo: Demo, name: str, overrides: Sequence[str]) -> None:
    """One training stage, then its checkpoint as a model; what is there already is kept."""
    if (demo.model(name) / "config.json").exists():
        say(f"{name}: done already ({demo.model(name)})")
        return
    _realvr(command, str(demo.config(command)), f"name={name}", *demo.overrides(command), *overrides)
    if not (demo.model(name) / "config.json").exists():
        # The last checkpoint, not the best by validation: the arms are compared after equally many steps.
        last = CheckpointStore(demo.folder / name / "checkpoints").latest()
        _realvr("export", str(last.path), str(demo.model(name)))


def _realvr(*arguments: str) -> None:
    """A realvr command in a process of its own. A failed one has told why: stop with its status."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # the models are tiny: more threads only wait for each other
    done = subprocess.run([sys.executable, "-m", "realvr.cli", *arguments], env=one_thread | dict(os.environ))
    if done.returncode:
        raise UserError(
            f"demo: `realvr {' '.join(arguments[:2])}` ended with status {done.returncode}; its message stands above; "
            f"the same command goes on from there"
        )


def _evaluate(demo: Demo) -> None:
    """Evaluate every arm with one vLLM engine that is given each arm's weights."""
    todo = [arm for arm in ARMS if not (demo.folder / "evaluate" / arm / "evaluation.json").exists()]
    if not todo:
        return
    from realvr.evaluate.evaluate import evaluate_checkpoint, start_engine
    from realvr.rollout.weights_file import file_checksum

    engine = None
    for version, arm in enumerate(todo, 1):
        overrides = [*demo.overrides("evaluate"), f"model.path={demo.model(arm)}", f"label={TITLES[arm]}"]
        settings = load_config(CONFIGS / "evaluate.yaml", overrides, "realvr.evaluate")
        weights = demo.model(arm) / "model.safetensors"
        engine = engine or start_engine(settings)
        engine.load_weights(weights, version, file_checksum(weights))
        say(f"evaluating {TITLES[arm]}")
        evaluate_checkpoint(settings, demo.folder / "evaluate" / arm, engine)
    engine.close()


def _report(demo: Demo, seconds: dict[str, float]) -> None:
    from rich.console import Console

    from realvr.evaluate.report import build_report, terminal_table
    from realvr.evaluate.report_data import Arm, ReportInputs
    from realvr.evaluate.report_demo import expectations, limits

    arms = tuple(
        Arm(TITLES[arm], demo.folder / "evaluate" / arm, _metrics(demo.folder / arm / "metrics.jsonl", arm))
        for arm in ARMS
    )
    inputs = ReportInputs(
        f"ReaLVR demo: {demo.world}", arms, seconds=seconds, expectations=expectations(arms), limits=limits(demo.smoke)
    )
    out = build_report(inputs, demo.folder / "report.html")
    Console().print(terminal_table(arms))
    say(f"{out}: open it in a browser; `realvr demo` again rebuilds it, another --folder starts anew")


def _metrics(path: Path, arm: str) -> Path | None:
    return path if arm in ("grpo", "realvr") else None


class _Seconds:
    """Wall-clock by stage, kept over attempts in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, stage: str) -> "_Seconds":
        self.stage = stage
        return self

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.taken[self.stage] = round(self.taken.get(self.stage, 0) + time.monotonic() - self.begun, 1)
        write_json(self.path, self.taken)
