"""The fleet: rollout engines in Ray actors that sample groups and are given new weights between steps."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray

from launch.cluster import Cluster
from launch.group import WorkerGroup
from realvr.config import RLSettings
from realvr.data.examples import Example
from realvr.data.sampler import Sampler
from realvr.rollout.records import Group, RolloutEngine, Sampling

VALIDATION_STREAM = 1_000_003  # keeps the seeds of validation apart from those of any training step


def build_engine(settings: RLSettings) -> RolloutEngine:
    """The engine that `rollout.engine` names."""
    if settings.rollout.engine == "vllm":
        from realvr.rollout.vllm_engine import VllmEngine as Engine
    else:
        from realvr.rollout.hf_engine import HfEngine as Engine
    return Engine(settings.model, settings.latent, settings.rollout, settings.seed)


class RolloutWorker:
    """One engine in one Ray actor. Latents stay in the object store; the driver gets references."""

    def __init__(self, rank: int, world: int, settings: RLSettings) -> None:
        self.engine = build_engine(settings)

    def ready(self) -> int:
        return self.engine.version

    def generate(self, examples: Sequence[Example], sampling: Sampling, seeds: Sequence[int]) -> list[Group]:
        groups = self.engine.generate(examples, sampling, seeds) if examples else []
        return [g.without_latents(ray.put([r.latents for r in g.rollouts])) for g in groups]

    def load_weights(self, path: str, version: int, checksum: str) -> int:
        self.engine.load_weights(path, version, checksum)
        return self.engine.version

    def close(self) -> None:
        self.engine.close()


def seed_of(seed: int, step: int, position: int) -> int:
    """The stream of one prompt of one step: a function of its address alone, so that a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, step, position]).generate_state(1)[0])


def split(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """Contiguous parts whose sizes differ by at most one."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


class Fleet:
    """All rollout workers of a run.

    `stream` yields (step, groups) with `ahead` batches in flight while the learners train; `load` replaces the weights
    everywhere and returns when every worker has proved version and checksum.
    """

    def __init__(self, cluster: Cluster, settings: RLSettings, dataset: Sequence[Example], bundle_offset: int) -> None:
        self.settings, self.dataset = settings, dataset
        self.deadline_s = settings.cluster.step_deadline_s
        rollout = settings.rollout
        self.sampling = Sampling(rollout.group_size, rollout.temperature, rollout.top_p, rollout.max_new_tokens)
        self.workers = WorkerGroup(
            cluster,
            RolloutWorker,
            ranks=rollout.workers,
            kwargs={"settings": settings},
            cpus=rollout.cpus,
            gpus=rollout.gpus * rollout.tensor_parallel,
            bundle_offset=bundle_offset,
            name="rollout",
            deadline_s=settings.cluster.deadline_s,
        )

    def stream(self, sampler: Sampler, start: int, stop: int, ahead: int) -> Iterator[tuple[int, list[Group]]]:
        """Groups of steps start … stop − 1, in order; ahead = 1 samples the next batch with weights one step old."""
        flying: list[Any] = []
        for step in range(start, stop):
            while len(flying) <= ahead and step + len(flying) < stop:
                flying.append(self._submit(sampler, step + len(flying)))
            yield step, self._collect(flying.pop(0), f"rollouts of step {step}")

    def _submit(self, sampler: Sampler, step: int) -> list[Any]:
        indices = sampler.batch(step)
        seeds = [seed_of(self.settings.seed, step, i) for i in range(len(indices))]
        return self._generate([self.dataset[i] for i in indices], self.sampling, seeds)

    def _generate(self, examples: Sequence[Example], sampling: Sampling, seeds: Sequence[int]) -> list[Any]:
        parts = len(self.workers)
        chunks = zip(split(examples, parts), split(seeds, parts), strict=True)
        return self.workers.submit("generate", per_rank=[(part, sampling, part_seeds) for part, part_seeds in chunks])

    def _collect(self, refs: list[Any], what: str) -> list[Group]:
        return [g for part in self.workers.wait(refs, what=what, seconds=self.deadline_s) for g in part]

    def evaluate(self, examples: Sequence[Example], max_new_tokens: int = 128) -> list[Group]:
        """Greedy completions, one an example, ended at `</answer>` (the evaluation decode)."""
        sampling = Sampling(n=1, temperature=0.0, max_new_tokens=max_new_tokens, stop=("</answer>",))
        seeds = [seed_of(self.settings.seed, VALIDATION_STREAM, i) for i in range(len(examples))]
        return self._collect(self._generate(examples, sampling, seeds), "validation rollouts")

    def load(self, weights: Any, version: int) -> None:
        """Give every worker the weights (learner.weights.Weights) and check that each now holds `version`."""
        held = self.workers.call(
            "load_weights", weights.path, version, weights.checksum, what=f"weights of version {version}"
        )
        if any(v != version for v in held):
            raise RuntimeError(f"weight sync: workers hold versions {held}, wanted {version} everywhere")

    def close(self) -> None:
        self.workers.call("close", what="closing the engines")
