"""Ragged groups for the learner's tests: every kind of completion, answer and prompt that a batch may hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from realvr.config import EvidenceSettings, GrpoSettings, LatentSettings, LoraSettings, ModelSettings
from realvr.data.examples import Box, Example
from realvr.data.prompts import PromptBuilder
from realvr.families.base import VisualFeatures
from realvr.learner.batching import (
    LearnerGroup,
    MicroBatch,
    build_micro_batch,
    latent_sums,
    local_counts,
    prepare_group,
)
from realvr.learner.step import LearnerModule, StepSettings
from realvr.objectives.grpo import GlobalCounts
from realvr.policy.model import Policy, load_policy
from realvr.rollout.records import Group, Rollout, ScoredGroup
from tests.realvr.learner.reference import Reference

K = 3
TEMPERATURE = 0.6
MAX_NEW_TOKENS = 20
EVIDENCE = EvidenceSettings(weight=0.7, negatives=3)


class World:
    """A tiny checkpoint in float64, its prompt builder, and what one step needs."""

    def __init__(self, checkpoint: Path, folder: Path, lora: LoraSettings | None = None, double: bool = True):
        self.folder = folder
        settings = ModelSettings(path=str(checkpoint), dtype="float32", lora=lora)
        self.policy: Policy = load_policy(settings)
        if double:
            self.policy.root.double()
        self.builder = PromptBuilder(str(checkpoint))
        self.tokens = self.builder.ids
        self.latent = LatentSettings(k=K)
        self.random = np.random.default_rng(5)

    @property
    def width(self) -> int:
        return self.policy.config.text_config.hidden_size

    def words(self, text: str) -> list[int]:
        return self.builder.tokenizer(text, add_special_tokens=False)["input_ids"]

    def picture(self, name: str, width: int, height: int) -> str:
        path = self.folder / f"{name}.png"
        pixels = self.random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return str(path)

    def span(self, latents: int = K, end: bool = True) -> list[int]:
        return [self.tokens.start, *[self.tokens.latent] * latents, *[self.tokens.end] * end]

    def rollout(self, ids: list[int]) -> Rollout:
        ids = np.array(ids)
        positions = np.flatnonzero(ids == self.tokens.latent)
        latents = self.random.normal(size=(len(positions), self.width)).astype(np.float32)
        logprobs = -self.random.random(len(ids)).astype(np.float32)
        return Rollout(ids, logprobs, latents, positions, np.zeros(len(ids), np.int32), "", "stop")

    def completions(self) -> list[list[int]]:
        """Closed, text first, no span, unclosed, cut inside the latents, closed without EOS, a single token."""
        eos = self.tokens.eos[0]
        tagged = self.words("<answer>red circle</answer>")
        return [
            [*self.span(), *tagged, eos],
            [*self.words("the star is"), *self.span(), *self.words(" <answer>2</answer>"), eos],
            [*tagged, eos],
            [*self.span(end=False), *self.words("blue square of the")],
            [*self.words("a"), *self.span(2, end=False)],
            [*self.span(), *self.words("<answer>green</answer> and more text")],
            self.words("no"),
            [*self.span(end=False), *self.words("to"), self.tokens.end, *tagged, eos],
        ]

    def example(self, name: str, images: tuple[str, ...], boxes: tuple[Box, ...], question: str) -> Example:
        return Example(name, images, question, " red circle ", boxes)

    def group(self, example: Example, completions: list[list[int]], wrong: tuple[str, ...], evidence=EVIDENCE):
        rollouts = tuple(self.rollout(ids) for ids in completions)
        advantages = self.random.normal(size=len(rollouts)).astype(np.float32)
        scored = ScoredGroup(Group(example, rollouts), {}, advantages, advantages, wrong)
        prompt = self.builder.build(example)
        if prompt.pixels is None:
            features = VisualFeatures(torch.zeros(0, self.width))
        else:
            features = self.policy.visual_features(prompt.pixels, prompt.grid_thw)
        return prepare_group(scored, prompt, features, self.builder.tokenizer, self.tokens, self.latent, evidence)

    def groups(self, evidence: EvidenceSettings = EVIDENCE) -> list[LearnerGroup]:
        """One box, two wrong; no box, none wrong; two boxes, seven wrong; text only, one wrong. Always the same."""
        self.random = np.random.default_rng(5)
        c = self.completions()
        small, wide, tall = self.picture("small", 56, 56), self.picture("wide", 140, 64), self.picture("tall", 64, 100)
        first, second = Box((0.1, 0.1, 0.5, 0.6)), Box((0.3, 0.2, 0.9, 0.9))
        many = ("blue", "no", "green star ring", "1", "2", "three of them", "grey square")
        return [
            self.group(self.example("one", (small,), (first,), "What colour is it?"), c[:5], many[:2], evidence),
            self.group(self.example("none", (wide,), (), "How many red ring of the left"), c[3:], (), evidence),
            self.group(self.example("two", (tall, small), (first, second), "Is?"), c[2:6], many, evidence),
            self.group(self.example("text", (), (), "Is one yes?"), c[:3], many[:1], evidence),
        ]

    def negatives(self, groups: list[LearnerGroup], number: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        """Random prototypes, the last of them missing in the second row."""
        generator = torch.Generator().manual_seed(9)
        table = torch.randn(len(groups), number, self.width, generator=generator)
        mask = torch.ones(len(groups), number, dtype=torch.bool)
        if number > 1:
            mask[1:2, number - 1 :] = False
        return table, mask

    def micro_batch(
        self, groups: list[LearnerGroup], everything: list[LearnerGroup] | None = None, negatives: int = 3
    ) -> MicroBatch:
        """Of `groups`, normalised over `everything` (None: these groups are the whole batch)."""
        everything = everything or groups
        counts = local_counts(everything)
        total, number = latent_sums(everything, K, self.width)
        table, mask = self.negatives(everything, negatives)
        places = {id(g): i for i, g in enumerate(everything)}
        rows = [places.get(id(g), 0) for g in groups]  # a filler's row is never read
        return build_micro_batch(
            groups,
            GlobalCounts(counts["completions"], counts["tokens"], MAX_NEW_TOKENS),
            counts["evidence_rows"],
            self.tokens,
            negatives=(table[rows], mask[rows]) if negatives else None,
            latent_mean=total / number.clamp(min=1)[:, None],
        )

    def settings(self, **changes) -> StepSettings:
        base = StepSettings(GrpoSettings(), EVIDENCE, K, TEMPERATURE, recompute=False)
        return replace(base, **changes)

    def learner(self, **changes) -> LearnerModule:
        return LearnerModule(self.policy, self.settings(**changes), self.tokens)

    def compare(
        self, groups: list[LearnerGroup], split: list[list[LearnerGroup]] | None = None, negatives: int = 3, **changes
    ) -> tuple[float, float]:
        """Learner against reference on `groups` as one batch, in micro-batches `split` (None: all in one).

        Returns the relative difference of the loss and the largest one of a parameter's gradient.
        """
        learner = self.learner(**changes)
        losses = [learner(self.micro_batch(part, groups, negatives))[0] for part in split or [groups]]
        ours = gradients(self.policy.root, sum(losses))
        theirs = self.reference(groups, negatives, **changes)
        slopes = gradients(self.policy.root, theirs)
        return abs(sum(losses).item() - theirs.item()) / abs(theirs.item()), worst(ours, slopes)

    def reference(self, groups: list[LearnerGroup], negatives: int = 3, **changes) -> torch.Tensor:
        """The reference's loss on `groups`."""
        settings = self.settings(**changes)
        root = self.policy.root
        reference = Reference(
            root.language_model,
            root.lm_head.weight,
            self.tokens,
            K,
            TEMPERATURE,
            settings.grpo,
            settings.evidence,
            MAX_NEW_TOKENS,
        )
        table, mask = self.negatives(groups, negatives)
        total, number = latent_sums(groups, K, self.width)
        mean = total / number.clamp(min=1)[:, None]
        others = [row[m] for row, m in zip(table, mask, strict=True)]
        return reference.loss(groups, others, self.builder.tokenizer, mean)


def gradients(module: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of every trainable parameter of a root after loss.backward(); zeros where none arrived."""
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad.clone())
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a parameter's gradient, ‖a − b‖ / ‖b‖ (absolute where b is 0)."""
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).norm() / (theirs[n].norm() + 1e-12)).item() for n in ours)
