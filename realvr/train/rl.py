"""Stage 2: GRPO on text, evidence on latents. `run_rl` is the algorithm; the rest of the page sets it up."""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from launch.cluster import Cluster, open_cluster
from launch.errors import UserError, did_you_mean
from launch.runs import Run
from realvr.config import DEFAULT_REWARDS, RLSettings, SourceSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder, usable
from realvr.data.sampler import Sampler
from realvr.data.sources import open_source
from realvr.learner.group import Learners
from realvr.rollout.fleet import Fleet
from realvr.rollout.records import Group
from realvr.rollout.storage import Replay, load_groups, save_groups
from realvr.train.score import Scorer, reward_metrics

log = logging.getLogger(__name__)


def run_rl(settings: RLSettings, run: Run) -> None:
    """Train until `run` says that it is over (job `realvr.rl`)."""
    data = RLData.open(settings)
    _check(settings)
    judge = Scorer(DEFAULT_REWARDS, settings.grpo, workers=1)
    with Scorer(settings.rewards, settings.grpo) as score, judge, machinery(settings, run, data) as (fleet, learners):
        run.configure(
            save=learners.save,
            validate=(lambda _: validate(fleet, data, judge)) if data.validation else None,
            validate_every=settings.validation.every,
            best_metric=settings.validation.metric,
            headline=("reward/mean", "evidence/loss"),
        )
        clock = Clock()
        for step, groups in fleet.stream(data.sampler, run.start_step, settings.steps, ahead=settings.rollout.overlap):
            clock.lap("rollout")
            scored = score(groups)
            clock.lap("score")
            stats, rows = learners.step(step, scored, samples=run.samples_due(step))
            clock.lap("learn")
            fleet.load(learners.weights(), version=step + 1)
            clock.lap("sync")
            if rows:
                run.samples(step, rows)
            if run.finish(step, {**reward_metrics(scored, score.failed), **stats, **clock.read(groups)}):
                break


def collect_rollouts(settings: RLSettings, run: Run) -> None:
    """`debug: rollout-only`: sample and score with the starting weights, train nothing, keep the rollouts."""
    data = RLData.open(settings)
    workers = open_cluster(settings.cluster, fleet_bundles(settings), run.logs / "workers")
    with Scorer(settings.rewards, settings.grpo) as score, workers as cluster:
        fleet = Fleet(cluster, settings, data.train, bundle_offset=0)
        run.configure(headline=("reward/mean",))
        for step, groups in fleet.stream(data.sampler, run.start_step, settings.steps, ahead=0):
            full = [group.with_latents(ray.get(group.latents_ref)) for group in groups]
            save_groups(run.folder / "rollouts", step, full)
            if run.finish(step, reward_metrics(score(groups))):
                break


@dataclass(frozen=True)
class RLData:
    """train: usable examples; sampler: which of them a step takes; validation: a fixed head of that set, or empty."""

    train: Sequence[Example]
    validation: Sequence[Example]
    sampler: Sampler

    @classmethod
    def open(cls, settings: RLSettings) -> "RLData":
        """Open both sets; unusable records are left out and counted (see `usable`)."""
        builder = PromptBuilder(settings.model.path, settings.model.min_visual_tokens, settings.model.max_visual_tokens)
        train = _read(settings.data.train, builder, settings)
        held = settings.data.validation
        validation = _read(held, builder, settings)[: settings.data.validation_size] if held else []
        return cls(train, validation, Sampler(len(train), settings.rollout.prompts_per_step, settings.seed))


def _read(kind: SourceSettings, builder: PromptBuilder, settings: RLSettings) -> list[Example]:
    data = settings.data
    source = open_source(kind, data.max_bad_records)
    left = data.max_bad_records - len(source.bad.messages) if hasattr(source, "bad") else data.max_bad_records
    indices, counts = usable(source, builder, data.max_prompt_tokens, left)
    examples = [source[i] for i in indices]
    if settings.evidence.text_only == "skip":
        with_images = [e for e in examples if e.images]
        counts["text_only"] = len(examples) - len(with_images)
        examples = with_images
    if not examples:
        raise UserError(f"data: no usable example of {len(source)} is left ({counts}); see the log for each reason")
    log.info("%d of %d examples are usable; left out: %s", len(examples), len(source), counts)
    return examples


def fleet_bundles(settings: RLSettings) -> list[dict[str, float]]:
    """Resources of the rollout workers, one bundle each."""
    rollout = settings.rollout
    return [{"CPU": rollout.cpus, "GPU": rollout.gpus * rollout.tensor_parallel}] * rollout.workers


def learner_bundles(settings: RLSettings) -> list[dict[str, float]]:
    """Resources of the learner ranks, one bundle each."""
    return [{"CPU": settings.learner.cpus, "GPU": settings.learner.gpus}] * settings.learner.ranks


@contextmanager
def machinery(settings: RLSettings, run: Run, data: RLData) -> Iterator[tuple[Fleet | Replay, Learners]]:
    """Ray, learners and fleet, at the checkpoint that the run continues; everything ends with the block."""
    replay = settings.debug == "replay"
    bundles = learner_bundles(settings) + ([] if replay else fleet_bundles(settings))
    with open_cluster(settings.cluster, bundles, run.logs / "workers") as cluster:
        with ThreadPoolExecutor(2) as pool:  # both take most of a minute to import and load: side by side
            learning = pool.submit(Learners, cluster, settings, sync_folder(cluster, run))
            rolling = pool.submit(_fleet, cluster, settings, data)
            learners, fleet = learning.result(), rolling.result()
        try:
            if run.resumed:
                learners.load(run.resumed.path)
            fleet.load(learners.weights(), version=run.start_step)
            yield fleet, learners
        finally:
            learners.close()


def _fleet(cluster: Cluster, settings: RLSettings, data: RLData) -> Fleet | Replay:
    if settings.debug != "replay":
        return Fleet(cluster, settings, data.train, bundle_offset=settings.learner.ranks)
    if settings.replay_from is None:
        raise UserError("debug is replay but replay_from is empty; name the run folder that has rollouts/")
    load_groups(Path(settings.replay_from) / "rollouts", 0)  # fails now rather than after the learners are up
    return Replay(Path(settings.replay_from))


def sync_folder(cluster: Cluster, run: Run) -> Path:
    """Where weights pass from learners to fleet: memory on one node, the run's shared file system on several."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return Path("/dev/shm") if len(nodes) == 1 else run.folder


VALIDATED = {f"validation/{name}": f"reward/{name}" for name in ("accuracy", "format")} | {
    f"validation/{name}": f"rollout/{name}" for name in ("closed_span_rate", "answered_rate", "completion_tokens")
}


def validate(fleet: Fleet, data: RLData, judge: Scorer) -> dict[str, float]:
    """Greedy completions of the validation set. judge: the paper's two rewards, whatever the run is rewarded for."""
    metrics = reward_metrics(judge(fleet.evaluate(data.validation)))
    return {name: metrics[source] for name, source in VALIDATED.items()}


def _check(settings: RLSettings) -> None:
    """What no single field shows to be wrong."""
    longest, k = settings.rollout.max_new_tokens, settings.latent.k
    if longest < k + 3:
        raise UserError(
            f"rollout.max_new_tokens is {longest}: a span of latent.k {k} takes {k + 2} tokens, so no answer has room; "
            f"raise it to {k + 16} or more"
        )
    name = settings.validation.metric
    if name not in VALIDATED:
        raise UserError(f"validation.metric is {name!r}, which is not measured; {did_you_mean(name, VALIDATED)}")


class Clock:
    """Seconds of each stage of a step, and tokens a second over all of it."""

    def __init__(self) -> None:
        self.last, self.laps = time.monotonic(), {}

    def lap(self, stage: str) -> None:
        """The stage that ends now."""
        now = time.monotonic()
        self.laps[stage], self.last = now - self.last, now

    def read(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics `time/<stage>` and `rollout/tokens_per_second`; begins a new step."""
        tokens = sum(len(r.tokens) for g in groups for r in g.rollouts)
        metrics = {f"time/{stage}": seconds for stage, seconds in self.laps.items()}
        metrics["rollout/tokens_per_second"] = tokens / max(self.laps["rollout"], 1e-9)
        self.last, self.laps = time.monotonic(), {}
        return metrics
