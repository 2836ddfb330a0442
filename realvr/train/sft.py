"""Stage 1: teach the latent span by the ROI's visual tokens, teacher forcing, tower frozen (`realvr sft`)."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cluster import open_cluster
from launch.errors import UserError
from launch.group import WorkerGroup
from launch.runs import Run
from realvr.config import SftSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder, usable
from realvr.data.sampler import Sampler
from realvr.data.sources import open_source
from realvr.learner.export import export_checkpoint
from realvr.rollout.fleet import split
from realvr.train.sft_worker import SftWorker

log = logging.getLogger(__name__)


def run_sft(settings: SftSettings, run: Run) -> None:
    """Train until `run` says that it is over, then write the model to `<run folder>/model`."""
    data = SftData.open(settings)
    with learners(settings, run) as ranks:
        judge = Validation(ranks, data.validation)
        run.configure(
            save=ranks.save,
            validate=judge if data.validation else None,
            validate_every=settings.validation.every,
            best_metric=settings.validation.metric,
            headline=("sft/loss", "sft/cosine_tf"),
        )
        over = run.start_step > 0 and is_over(settings, run, run.start_step, judge)
        for step in range(run.start_step, settings.steps + settings.extension.max_steps):
            if over:
                break
            stats = ranks.step(step, [data.train[i] for i in data.sampler.batch(step)], extension_lr(settings, step))
            is_over(settings, run, step + 1, judge)
            over = run.finish(step, stats)
    if run.finished:
        export_checkpoint(run.folder, run.folder / "model")


def is_over(settings: SftSettings, run: Run, done: int, validate: "Validation") -> bool:
    """Whether stage 1 may end after `done` steps; tells the run how many steps are planned.

    The schedule's steps come first. Where the guards (free-running cosine, replacement drop) are not met then, a round
    of the extension follows, and so on. A model whose own latents are far from the evidence, or that does not read
    them, gives stage 2 nothing to work on.
    """
    extension = settings.extension
    limit = settings.steps + extension.max_steps
    if done < settings.steps:
        run.plan(settings.steps)
        return False
    into_round = (done - settings.steps) % extension.round_steps
    if done >= limit:
        met = True
    elif into_round:
        met = False
    else:
        found = validate(done)
        cosine, drop = found["validation/cosine"], found["validation/replacement_drop"]
        met = cosine >= extension.min_cosine and drop >= extension.min_drop
        log.info("after %d steps: free-running cosine %.3f, replacement drop %.3f", done, cosine, drop)
    run.plan(done if met else min(done - into_round + extension.round_steps, limit))
    return met


def extension_lr(settings: SftSettings, step: int) -> float | None:
    """Learning rate of a step beyond the schedule: it falls in a line in each round; None within the schedule."""
    extension = settings.extension
    if step < settings.steps:
        return None
    left = 1 - (step - settings.steps) % extension.round_steps / extension.round_steps
    return settings.optimizer.lr * extension.lr_fraction * left


@dataclass(frozen=True)
class SftData:
    """train: usable examples; sampler: which of them a step takes; validation: a fixed head of that set, or empty."""

    train: Sequence[Example]
    validation: Sequence[Example]
    sampler: Sampler

    @classmethod
    def open(cls, settings: SftSettings) -> "SftData":
        """Open both sets; unusable records are left out and counted. UserError where they do not fit the settings."""
        ranks, data = settings.learner.ranks, settings.data
        if settings.examples_per_step < ranks:
            raise UserError(
                f"examples_per_step is {settings.examples_per_step}: give each of {ranks} ranks one at least"
            )
        if settings.extension.max_steps and data.validation is None:
            raise UserError("extension.max_steps needs a validation set to look at the guards: set data.validation")
        builder = PromptBuilder(settings.model.path, settings.model.min_visual_tokens, settings.model.max_visual_tokens)
        train = _keep(open_source(data.train, data.max_bad_records), builder, settings)
        validation: list[Example] = []
        if data.validation is not None:
            held_out = open_source(data.validation, data.max_bad_records)
            validation = _keep(held_out[: data.validation_size], builder, settings)
            if len(validation) < ranks:
                raise UserError(f"data.validation has {len(validation)} usable examples for {ranks} ranks: add some")
        return cls(train, validation, Sampler(len(train), settings.examples_per_step, settings.seed))


def _keep(source: Sequence[Example], builder: PromptBuilder, settings: SftSettings) -> list[Example]:
    indices, counts = usable(source, builder, settings.data.max_prompt_tokens, settings.data.max_bad_records)
    if not indices:
        raise UserError(f"data: no usable example of {len(source)} is left ({counts}); see the log for each reason")
    log.info("%d of %d examples are usable; left out: %s", len(indices), len(source), counts)
    return [source[i] for i in indices]


class Validation:
    """Validation metrics after `done` steps; asked twice for the same step it remembers."""

    def __init__(self, ranks: "Ranks", examples: Sequence[Example]) -> None:
        self.ranks, self.examples = ranks, examples
        self._last: tuple[int, dict[str, float]] | None = None

    def __call__(self, done: int) -> dict[str, float]:
        if self._last is None or self._last[0] != done:
            self._last = done, self.ranks.validate(self.examples)
        return self._last[1]


class Ranks:
    """The ranks of stage 1: a worker group, or with one rank a worker in this process (no Ray to start)."""

    def __init__(self, settings: SftSettings, group: WorkerGroup | None) -> None:
        self.settings, self.group = settings, group
        self.worker = SftWorker(settings) if group is None else None

    def step(self, step: int, examples: Sequence[Example], lr: float | None) -> dict[str, float]:
        """One optimizer step on a global batch."""
        return self._call("step", lr, per_rank=split(examples, self.settings.learner.ranks), what=f"step {step}")

    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Free-running metrics of the validation set."""
        return self._call("validate", per_rank=split(examples, self.settings.learner.ranks), what="validation")

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state of every rank below `folder`."""
        self._call("save", str(folder), what=f"saving {folder.name}")
        return {"model": self.settings.model.path, "ranks": self.settings.learner.ranks}

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._call("load", str(folder), what=f"loading {folder.name}")

    def _call(self, method: str, *args: Any, per_rank: Sequence[Any] | None = None, what: str) -> Any:
        if self.group is None:
            first = () if per_rank is None else (per_rank[0],)
            return getattr(self.worker, method)(*first, *args)
        seconds = self.settings.cluster.step_deadline_s
        return self.group.call(method, *args, per_rank=per_rank, what=what, seconds=seconds)[0]


@contextmanager
def learners(settings: SftSettings, run: Run) -> Iterator[Ranks]:
    """The ranks, at the checkpoint that the run continues; everything ends with the block."""
    learner = settings.learner
    if learner.ranks == 1:
        with _alone():
            yield _resumed(Ranks(settings, None), run)
        return
    bundles = [{"CPU": learner.cpus, "GPU": learner.gpus}] * learner.ranks
    with open_cluster(settings.cluster, bundles, run.logs / "workers") as cluster:
        group = WorkerGroup(
            cluster,
            SftWorker,
            learner.ranks,
            {"settings": settings},
            cpus=learner.cpus,
            gpus=learner.gpus,
            deadline_s=settings.cluster.deadline_s,
            name="learner",
        )
        yield _resumed(Ranks(settings, group), run)


def _resumed(ranks: Ranks, run: Run) -> Ranks:
    if run.resumed:
        ranks.load(run.resumed.path)
    return ranks


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of one, in this process, as torch.distributed reads it from the environment.

    It stays for a later run of the same process: DeepSpeed keeps hold of the first one it sees.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    former = {name: os.environ.get(name) for name in (*ours, "MASTER_PORT")}
    os.environ.update(ours, MASTER_PORT=str(port))
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
