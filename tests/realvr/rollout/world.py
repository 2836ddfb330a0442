"""Small worlds for the engine tests: a tiny checkpoint that likes the latent tokens, pictures, examples, and a replay.

A random model emits `<|lvr_start|>` once in V tokens. Its states share a mean direction, so adding that direction to a
row of the output head raises the token's logit everywhere: `fluent` gives start, end and EOS a say.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from realvr.config import LatentSettings, ModelSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder
from realvr.rollout.hf_engine import HfEngine, next_rule
from realvr.rollout.records import Group, Rollout, Sampling

QUESTIONS = (
    "What colour is the circle?",
    "How many shapes?",
    "Is the star left of the red square?",
    "Which digit is it?",
)
FREE, FORCED = LatentSettings(), LatentSettings(open="forced", close="forced", k=4)
ROLLOUT = RolloutSettings(gpus=0)


def model_settings(folder: Path) -> ModelSettings:
    return ModelSettings(path=str(folder), dtype="float32")


def examples(folder: Path, count: int = 4) -> list[Example]:
    """Questions about noise pictures of different sizes; the last one has no picture."""
    rng, out = np.random.default_rng(0), []
    for i in range(count):
        path = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (60 + 28 * i, 84 + 14 * i, 3), dtype=np.uint8)).save(path)
        images = (str(path),) if i < count - 1 else ()
        out.append(Example(f"e{i}", images, QUESTIONS[i % len(QUESTIONS)], "red"))
    return out


def fluent(source: Path, target: Path, pictures: Sequence[Example]) -> Path:
    """Copy of a tiny checkpoint in which START, END and EOS have logits around 3.5, 4 and 2 (the others: 0 ± 1)."""
    reference = HfEngine(model_settings(source), FREE, ROLLOUT, 0)
    states: list[torch.Tensor] = []
    hook = reference.parts.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0].clone()))
    reference.generate(pictures, Sampling(n=2, temperature=1.0, max_new_tokens=12), range(len(pictures)))
    hook.remove()
    mean = torch.cat(states).mean(0)
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for token, logit in ((reference.ids.start, 3.5), (reference.ids.end, 4.0), (reference.ids.eos[0], 2.0)):
        tensors["lm_head.weight"][token] += logit * mean / mean.dot(mean)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def noisy_weights(folder: Path, seed: int, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors with noise on each: what a training step would send."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    return {name: t + scale * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


@dataclass(frozen=True)
class Gap:
    """Largest differences between two engines' rollouts of one batch."""

    tokens: bool
    latents: float
    logprobs: float
    latent_count: int
    closed: int


def gap(ours: Sequence[Group], theirs: Sequence[Group], end: int) -> Gap:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.rollouts, y.rollouts, strict=True)]
    same = all(np.array_equal(a.tokens, b.tokens) and a.finish == b.finish and a.text == b.text for a, b in pairs)
    if not same:
        return Gap(False, np.inf, np.inf, 0, 0)
    latents = max(float(np.abs(a.latents - b.latents).max(initial=0)) for a, b in pairs)
    logprobs = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs)
    return Gap(True, latents, logprobs, sum(len(a.latents) for a, _ in pairs), sum(end in a.tokens for a, _ in pairs))


class Replay:
    """Teacher forcing by plain transformers: a full forward over prompt and completion, latents inserted."""

    def __init__(self, folder: Path, latent: LatentSettings) -> None:
        from transformers import AutoModelForImageTextToText

        self.builder, self.latent = PromptBuilder(str(folder)), latent
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, example: Example, rollout: Rollout, temperature: float) -> tuple[float, float]:
        """Largest |Δ log-prob| over sampled tokens, and |Δ| between each latent and the state one position earlier.

        Also asserts that no token was sampled that the grammar bans there.
        """
        prompt, tokens = self.builder.build(example), rollout.tokens.tolist()
        ids = torch.tensor([[*prompt.input_ids.tolist(), *tokens]])
        start = len(prompt.input_ids)
        positions = torch.arange(len(tokens)) + prompt.next_position
        positions = torch.cat([prompt.positions, positions.expand(3, -1)], dim=1)[:, None]
        pictures = {} if prompt.pixels is None else {"pixel_values": prompt.pixels, "image_grid_thw": prompt.grid_thw}
        where = rollout.latent_positions + start

        def insert(_module: torch.nn.Module, _args: tuple, embeds: torch.Tensor) -> torch.Tensor:
            embeds = embeds.clone()
            embeds[0, where] = torch.from_numpy(rollout.latents)
            return embeds

        hook = self.model.get_input_embeddings().register_forward_hook(insert)
        try:
            states = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, **pictures)[0][0]
        finally:
            hook.remove()
        logits = self.model.lm_head(states[start - 1 : -1]).float()
        worst = 0.0
        for i, token in enumerate(tokens):
            rule = next_rule(tokens[:i], self.builder.ids, self.latent)
            assert token == rule.forced or (rule.forced is None and token not in rule.banned)
            if rule.forced is None:
                logits[i, list(rule.banned)] = float("-inf")
                own = (logits[i] / temperature).log_softmax(-1)[token]
                worst = max(worst, abs(float(own) - float(rollout.logprobs[i])))
            else:
                assert rollout.logprobs[i] == 0
        drift = np.abs(states[where - 1].numpy() - rollout.latents).max(initial=0)
        return worst, float(drift)
