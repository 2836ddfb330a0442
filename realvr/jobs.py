"""The jobs this pipeline offers to `launch`: settings, run function, footprint. Importing it loads no torch."""

from typing import Any

from launch.jobs import Job
from realvr.config import BaseSettings, EvaluateSettings, RLSettings, SftSettings


def _run_base(settings: BaseSettings, run: Any) -> None:
    from realvr.train.base import run_base

    run_base(settings, run)


def _run_sft(settings: SftSettings, run: Any) -> None:
    from realvr.train.sft import run_sft

    run_sft(settings, run)


def _run_rl(settings: RLSettings, run: Any) -> None:
    from realvr.train.rl import collect_rollouts, run_rl

    (collect_rollouts if settings.debug == "rollout-only" else run_rl)(settings, run)


def _run_evaluate(settings: EvaluateSettings, run: Any) -> None:
    from realvr.evaluate.evaluate import run_evaluate

    run_evaluate(settings, run)


def _one_process(settings: Any) -> dict[str, float]:
    return {"learner_ranks": 0, "rollout_workers": 0, "cpus": 1, "gpus": 0}


def _learners_only(settings: SftSettings) -> dict[str, float]:
    ranks = settings.learner.ranks
    return {
        "learner_ranks": ranks,
        "rollout_workers": 0,
        "cpus": ranks * settings.learner.cpus,
        "gpus": ranks * settings.learner.gpus,
    }


def _learners_and_fleet(settings: RLSettings) -> dict[str, float]:
    ranks, workers = settings.learner.ranks, settings.rollout.workers
    return {
        "learner_ranks": ranks,
        "rollout_workers": workers,
        "cpus": ranks * settings.learner.cpus + workers * settings.rollout.cpus,
        "gpus": ranks * settings.learner.gpus + workers * settings.rollout.gpus * settings.rollout.tensor_parallel,
    }


def _inputs(settings: Any) -> dict[str, str]:
    """Model and data files, by the name of their field."""
    found = {"model": settings.model.path}
    sources = {"data": settings.data} if hasattr(settings.data, "kind") else dict(settings.data)
    for name, source in sources.items():
        for field in ("path", "image_root"):
            if value := getattr(source, field, None):
                found[f"{name}.{field}"] = value
    return found


base = Job("realvr.base", BaseSettings, _run_base, _one_process, lambda s: s.probe.steps + s.steps, inputs=_inputs)
sft = Job(
    "realvr.sft", SftSettings, _run_sft, _learners_only, lambda s: s.steps + s.extension.max_steps, inputs=_inputs
)
rl = Job("realvr.rl", RLSettings, _run_rl, _learners_and_fleet, inputs=_inputs)
evaluate = Job("realvr.evaluate", EvaluateSettings, _run_evaluate, _one_process, inputs=_inputs)
