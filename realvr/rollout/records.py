"""What the fleet gives: completions with their latents, by group; and the interface that both engines have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from realvr.data.examples import Example


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn (defaults: the paper's rollout, stage 2)."""

    n: int = 8
    temperature: float = 0.6  # 0 is greedy
    top_p: float = 1.0
    max_new_tokens: int = 192  # latents counted
    stop: tuple[str, ...] = ()  # evaluation stops at "</answer>" (kept in the text)
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Rollout:
    """One completion.

    tokens: ids [N], latent positions hold the `<|lvr|>` id, EOS included when sampled.
    logprobs: float32 [N], log-probability under the sampling distribution (temperature, bans); 0 where forced.
    latents: float32 [n, d], the states fed back, in order. latent_positions: [n] indices into `tokens`.
    versions: int32 [N], version of the weights that produced each token.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    latents: np.ndarray
    latent_positions: np.ndarray
    versions: np.ndarray
    text: str  # decoded with special tokens kept, so that rewards see the markers
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Group:
    """One example and its G rollouts: the unit of scoring, packing and data parallelism.

    On the driver the rollouts carry no latents (arrays [0, d]): `latents_ref` is the Ray object with them, one [n, d]
    array a rollout, which only the learner rank that trains on the group fetches.
    """

    example: Example
    rollouts: tuple[Rollout, ...]
    latents_ref: Any = None

    def without_latents(self, latents_ref: Any) -> "Group":
        """The light form that the driver holds."""
        empty = [replace(r, latents=r.latents[:0]) for r in self.rollouts]
        return replace(self, rollouts=tuple(empty), latents_ref=latents_ref)

    def with_latents(self, latents: Sequence[np.ndarray]) -> "Group":
        """The full form; `latents`: one [n, d] array a rollout."""
        full = [replace(r, latents=z) for r, z in zip(self.rollouts, latents, strict=True)]
        return replace(self, rollouts=tuple(full), latents_ref=None)


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its rewards. rewards: by name, float32 [G]; total, advantages: float32 [G].

    wrong_answers: distinct (case-folded) parseable wrong answers of the group, in order of first appearance.
    """

    group: Group
    rewards: dict[str, np.ndarray]
    total: np.ndarray
    advantages: np.ndarray
    wrong_answers: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Weights:
    """New weights on their way to the fleet: a safetensors file with checkpoint names and the file's checksum, or
    `send(actors, version)`, which has the learners send them through vLLM's native back end.
    """

    path: str = ""
    checksum: str = ""
    send: Callable[[Sequence[Any], int], None] | None = None


class RolloutEngine(Protocol):
    """`vllm` (real) and `hf` (the short obvious loop that `vllm` is tested against)."""

    version: int

    def generate(self, examples: Sequence[Example], sampling: Sampling, seeds: Sequence[int]) -> list[Group]:
        """One group per example; rollout i of example e draws from a stream seeded by (seeds[e], i) alone."""
        ...

    def load_weights(self, path: Path, version: int, checksum: str) -> None:
        """Replace the weights by those of a safetensors file (checkpoint names), prove it, reset every cache."""
        ...

    def close(self) -> None: ...
