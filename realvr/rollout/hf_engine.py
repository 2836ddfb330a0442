"""The reference engine: the short obvious loop on a transformers model that the vLLM engine is tested against.

One group is one batch: G copies of the prompt are prefilled, then every row takes one token a step, fed as an embedding
so that a latent can stand in for it. Nothing is shared with the vLLM plug-in but the data classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realvr.config import LatentSettings, ModelSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.data.prompts import Prompt, PromptBuilder
from realvr.families.base import TokenIds
from realvr.rollout.completions import check_request, completion_seed, completion_text
from realvr.rollout.records import Group, Rollout, Sampling
from realvr.rollout.weights_file import check_weights, checkpoint_folder, checkpoint_shapes


@dataclass
class Row:
    """One completion as it grows."""

    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    latents: list[torch.Tensor] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True)
class Rule:
    """What the grammar says about a row's next token: forced to one, or all but the banned."""

    forced: int | None = None
    banned: tuple[int, ...] = ()


def next_rule(tokens: Sequence[int], ids: TokenIds, latent: LatentSettings) -> Rule:
    """The latent grammar for a completion with these tokens so far; one span a completion."""
    if not tokens and latent.open == "forced":
        return Rule(forced=ids.start)
    if ids.start not in tokens:
        return Rule(banned=(*ids.banned, ids.latent, ids.end))
    if ids.end in tokens:
        return Rule(banned=(*ids.banned, ids.latent, ids.end, ids.start))
    if list(tokens).count(ids.latent) < latent.k:
        return Rule(forced=ids.latent)
    if latent.close == "forced":
        return Rule(forced=ids.end)
    return Rule(banned=(*ids.banned, ids.latent, ids.start, *ids.eos))


class HfEngine:
    """RolloutEngine on transformers: readable, slow, one group at a time."""

    def __init__(self, model: ModelSettings, latent: LatentSettings, rollout: RolloutSettings, seed: int) -> None:
        from transformers import AutoModelForImageTextToText

        self.builder = PromptBuilder(model.path, model.min_visual_tokens, model.max_visual_tokens)
        self.ids, self.latent, self.version = self.builder.ids, latent, 0
        self.shapes = checkpoint_shapes(checkpoint_folder(model.path))
        self.device = torch.device("cuda" if torch.cuda.is_available() and rollout.gpus > 0 else "cpu")
        dtype = getattr(torch, model.dtype)
        self.model = AutoModelForImageTextToText.from_pretrained(model.path, dtype=dtype, attn_implementation="sdpa")
        self.model = self.model.eval().to(self.device)
        self.parts = self.builder.family.parts(self.model)
        self.limit = self.model.config.get_text_config().max_position_embeddings

    def generate(self, examples: Sequence[Example], sampling: Sampling, seeds: Sequence[int]) -> list[Group]:
        lengths = [self.builder.length(e) for e in examples]
        check_request(examples, seeds, sampling, lengths, self.limit)
        return [self._group(e, sampling, seed) for e, seed in zip(examples, seeds, strict=True)]

    @torch.inference_mode()
    def _group(self, example: Example, sampling: Sampling, seed: int) -> Group:
        prompt = self.builder.build(example)
        rows = [Row(torch.Generator().manual_seed(completion_seed(seed, i))) for i in range(sampling.n)]
        hidden, cache = self._prefill(prompt, len(rows))
        for step in range(sampling.max_new_tokens):
            logits = self.parts.lm_head(hidden).float().cpu()
            for row, row_logits, state in zip(rows, logits, hidden, strict=True):
                if not row.finish:
                    self._extend(row, row_logits, state, prompt, sampling)
            if all(row.finish for row in rows):
                break
            hidden = self._forward(rows, cache, prompt.next_position + step)
        return Group(example, tuple(self._rollout(row, sampling) for row in rows))

    def _prefill(self, prompt: Prompt, n: int) -> tuple[torch.Tensor, Any]:
        """G copies of the prompt, pictures and all → states [G, d] after the final norm, KV cache."""
        from transformers import DynamicCache

        inputs: dict[str, Any] = {"input_ids": prompt.input_ids.repeat(n, 1).to(self.device)}
        if prompt.pixels is not None:
            inputs["pixel_values"] = prompt.pixels.repeat(n, 1).to(self.device)
            inputs["image_grid_thw"] = prompt.grid_thw.repeat(n, 1).to(self.device)
        positions = prompt.positions[:, None].expand(-1, n, -1).to(self.device)
        cache = DynamicCache(config=self.model.config.get_text_config())
        out = self.model.model(**inputs, position_ids=positions, past_key_values=cache, use_cache=True)
        return out.last_hidden_state[:, -1], cache

    def _forward(self, rows: Sequence[Row], cache: Any, position: int) -> torch.Tensor:
        """Feed each row's newest token (its latent where it is one); finished rows are fed along and ignored."""
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        embeds = self.parts.language_model.get_input_embeddings()(tokens)
        for i, row in enumerate(rows):
            if row.tokens[-1] == self.ids.latent:
                embeds[i, 0] = row.latents[-1]
        positions = torch.full((3, len(rows), 1), position, device=self.device)
        out = self.parts.language_model(
            inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state[:, -1]

    def _extend(self, row: Row, logits: torch.Tensor, state: torch.Tensor, prompt: Prompt, sampling: Sampling) -> None:
        """One more token for a row: logits [V] on the CPU and state [d] belong to its newest token."""
        rule = next_rule(row.tokens, self.ids, self.latent)
        if rule.forced is not None:
            if rule.forced == self.ids.latent:
                row.latents.append(state)
            token, logprob = rule.forced, 0.0
        else:
            token, logprob = draw(
                logits, rule.banned, [*prompt.input_ids.tolist(), *row.tokens], sampling, row.generator
            )
        row.tokens.append(token)
        row.logprobs.append(logprob)
        text = completion_text(self.builder.tokenizer, row.tokens, self.ids.eos, ()) if sampling.stop else ""
        if token in self.ids.eos or any(s in text for s in sampling.stop):
            row.finish = "stop"
        elif len(row.tokens) == sampling.max_new_tokens:
            row.finish = "length"

    def _rollout(self, row: Row, sampling: Sampling) -> Rollout:
        tokens = np.asarray(row.tokens, dtype=np.int64)
        width = self.model.config.get_text_config().hidden_size
        latents = torch.stack(row.latents).float().cpu().numpy() if row.latents else np.zeros((0, width), np.float32)
        return Rollout(
            tokens=tokens,
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            latents=latents,
            latent_positions=np.flatnonzero(tokens == self.ids.latent),
            versions=np.full(len(tokens), self.version, dtype=np.int32),
            text=completion_text(self.builder.tokenizer, row.tokens, self.ids.eos, sampling.stop),
            finish=row.finish,
        )

    def load_weights(self, path: str | Path, version: int, checksum: str) -> None:
        """Copy a checked weights file into the model, part by part; there is no cache to reset."""
        from safetensors.torch import load_file

        prefixes = self.builder.family.checkpoint_prefixes()
        check_weights(path, checksum, self.shapes, prefixes["tower"])
        tensors = load_file(str(path))
        for part, prefix in prefixes.items():
            held = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
            if held:
                getattr(self.parts, part).load_state_dict(held)
        self.version = version

    def close(self) -> None:
        self.model = self.parts = None


def draw(
    logits: torch.Tensor, banned: Sequence[int], context: Sequence[int], sampling: Sampling, generator: torch.Generator
) -> tuple[int, float]:
    """A token from logits [V] and its log-probability under the distribution it was drawn from.

    Order: repetition penalty over `context` (prompt and completion), bans, temperature (0: the most likely), top-p.
    """
    logits = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(context)))
        held = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(held > 0, held / penalty, held * penalty)
    logits[list(banned)] = float("-inf")
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logits = logits / sampling.temperature
    if sampling.top_p < 1:
        ranked, order = logits.sort(descending=True)
        probabilities = ranked.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= sampling.top_p  # the mass before it already suffices
        logits[order[beyond]] = float("-inf")
    token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return token, float(logits.log_softmax(-1)[token])
