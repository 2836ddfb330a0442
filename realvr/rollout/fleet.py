"""The fleet: rollout engines in Ray actors that sample groups and are given new weights between steps."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from launch.cluster import Cluster
from launch.group import Pending, WorkerGroup
from realvr.config import RLSettings
from realvr.data.examples import Example
from realvr.data.sampler import Sampler
from realvr.rollout.records import Group, RolloutEngine, Sampling, Weights

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

    def __init__(self, settings: RLSettings) -> None:
        self.engine = build_engine(settings)

    def generate(self, batch: tuple[Sequence[Example], Sequence[int]], sampling: Sampling) -> list[Group]:
        """batch: examples and one seed each."""
        examples, seeds = batch
        groups = self.engine.generate(examples, sampling, seeds) if examples else []
        return [g.without_latents(ray.put([r.latents for r in g.rollouts])) for g in groups]

    def load_weights(self, path: str, version: int, checksum: str) -> int:
        self.engine.load_weights(Path(path), version, checksum)
        return self.engine.version

    def engine_call(self, method: str, *args: Any) -> None:
        """One of vLLM's weight-sync control calls, from the trainer side of its native back ends."""
        getattr(self.engine, method)(*args)

    def version(self) -> int:
        """Version of the weights that the engine holds."""
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
            rollout.workers,
            {"settings": settings},
            cpus=rollout.cpus,
            gpus=rollout.gpus * rollout.tensor_parallel,
            bundle_offset=bundle_offset,
            deadline_s=settings.cluster.deadline_s,
            name="rollout",
            distributed=False,
        )

    def stream(self, sampler: Sampler, start: int, stop: int, ahead: int) -> Iterator[tuple[int, list[Group]]]:
        """Groups of steps start … stop − 1, in order; ahead = 1 samples the next batch with weights one step old."""
        flying: list[Pending] = []
        for step in range(start, stop):
            while len(flying) <= ahead and step + len(flying) < stop:
                flying.append(self._submit(sampler, step + len(flying)))
            yield step, self._collect(flying.pop(0))

    def _submit(self, sampler: Sampler, step: int) -> Pending:
        indices = sampler.batch(step)
        seeds = [seed_of(self.settings.seed, step, i) for i in range(len(indices))]
        return self._generate([self.dataset[i] for i in indices], seeds, self.sampling, f"rollouts of step {step}")

    def _generate(self, examples: Sequence[Example], seeds: Sequence[int], sampling: Sampling, what: str) -> Pending:
        parts = self.workers.ranks
        batches = list(zip(split(examples, parts), split(seeds, parts), strict=True))
        return self.workers.submit("generate", sampling, per_rank=batches, what=what, seconds=self.deadline_s)

    @staticmethod
    def _collect(pending: Pending) -> list[Group]:
        return [group for part in pending.wait() for group in part]

    def evaluate(self, examples: Sequence[Example]) -> list[Group]:
        """Greedy completions, one an example, ended at `</answer>` (the evaluation decode, 128 tokens at most)."""
        longest = min(self.sampling.max_new_tokens, 128)
        sampling = Sampling(n=1, temperature=0.0, max_new_tokens=longest, stop=("</answer>",))
        seeds = [seed_of(self.settings.seed, VALIDATION_STREAM, i) for i in range(len(examples))]
        return self._collect(self._generate(examples, seeds, sampling, "validation rollouts"))

    def load(self, weights: Weights, version: int) -> None:
        """Give every worker the weights and check that each now holds `version`."""
        what = f"sync of weights {version}"
        if weights.send is not None:
            weights.send(self.workers.actors, version)
            held = self.workers.call("version", what=what, seconds=self.deadline_s)
        else:
            arguments = (weights.path, version, weights.checksum)
            held = self.workers.call("load_weights", *arguments, what=what, seconds=self.deadline_s)
        if any(v != version for v in held):
            raise RuntimeError(f"weight sync: workers hold versions {held}, wanted {version} everywhere")

    def close(self) -> None:
        """Shut the engines down; the cluster ends their processes anyway."""
        self.workers.call("close", what="closing the engines", seconds=60)
