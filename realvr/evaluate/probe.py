"""A checkpoint as a plain transformers model whose latents can be read and set.

The context is fixed: prompt, `<|lvr_start|>`, K latents (the model's own or any others), `<|lvr_end|>`, and then an
answer branch `<answer>y</answer>`. A prompt is computed once; what is changed after it runs on a fork of its KV cache.
Attention is read by forward hooks on the decoder layers' attention modules, for answer rows only, so that the full
maps of a prompt are never kept.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from launch.errors import UserError
from realvr.data.examples import Example
from realvr.data.prompts import Prompt, PromptBuilder
from realvr.families.base import VisualFeatures

OPEN, CLOSE = "<answer>", "</answer>"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Context:
    """Prompts of B examples, left-padded to P.

    mask: bool [B, P], True where there is a token. visual: bool [B, P], image tokens. next_position: int [B].
    features: merger outputs of each example, [N_b, d] each. cache: keys and values of the prompt.
    """

    examples: tuple[Example, ...]
    prompts: tuple[Prompt, ...]
    cache: Any
    mask: torch.Tensor
    visual: torch.Tensor
    next_position: torch.Tensor
    features: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Primed:
    """A context followed by start, K latents and end. state: [B, d], the state at `<|lvr_end|>`. k: latents."""

    context: Context
    cache: Any
    state: torch.Tensor
    k: int


@dataclass(frozen=True)
class Branches:
    """Answers y of B examples, n each. logp: float32 [B, n], log-probability of the answer's content tokens.

    latents: [B, n, K] and image: [B, n, P] (zero outside image tokens) hold the readout, the attention from the content
    tokens averaged over layers, heads and those tokens; both None unless asked for.
    """

    logp: torch.Tensor
    latents: torch.Tensor | None = None
    image: torch.Tensor | None = None


class Probe:
    """Latents of one checkpoint: free-running, replacement, answer probability, readout; without gradient."""

    def __init__(
        self, path: str, dtype: str, min_visual_tokens: int, max_visual_tokens: int, device: str | None = None
    ):
        from transformers import AutoModelForImageTextToText

        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.builder = PromptBuilder(path, min_visual_tokens, max_visual_tokens)
        self.family, self.tokenizer, self.ids = self.builder.family, self.builder.tokenizer, self.builder.ids
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=_DTYPES[dtype], attn_implementation="eager")
        self.model = model.to(self.device).eval()
        self.parts = self.family.parts(self.model)
        self.embed = self.parts.language_model.embed_tokens
        banned = {*self.ids.banned, self.ids.start, self.ids.latent, self.ids.end}
        self.banned = torch.tensor(sorted(banned), device=self.device)

    @torch.inference_mode()
    def context(self, examples: Sequence[Example]) -> Context:
        """Compute the prompts of `examples` once (their images included)."""
        prompts = tuple(self.builder.build(e) for e in examples)
        longest = max(len(p.input_ids) for p in prompts)
        rows, features, deepstack = [], [], []
        for prompt in prompts:
            row = self.embed(prompt.input_ids.to(self.device))
            seen = None
            if prompt.pixels is not None:
                seen = self.family.visual_features(
                    self.parts.tower, prompt.pixels.to(self.device), prompt.grid_thw.to(self.device)
                )
                row = row.masked_scatter(prompt.visual_mask.to(self.device)[:, None], seen.embeds.to(row.dtype))
                deepstack.append(seen.deepstack)
            features.append(row[:0] if seen is None else seen.embeds)
            rows.append(pad(row, (0, 0, longest - len(row), 0)))
        left = [longest - len(p.input_ids) for p in prompts]
        visual = torch.stack([pad(p.visual_mask, (gap, 0)) for p, gap in zip(prompts, left, strict=True)])
        mask = torch.arange(longest)[None] >= torch.tensor(left)[:, None]
        position = torch.stack([pad(p.positions, (gap, 0)) for p, gap in zip(prompts, left, strict=True)], dim=1)
        visual, mask, position = visual.to(self.device), mask.to(self.device), position.to(self.device)
        layers = tuple(torch.cat(layer) for layer in zip(*deepstack, strict=True))
        extra = self.family.language_inputs(VisualFeatures(torch.cat(features), layers), visual)
        out = self.parts.language_model(
            inputs_embeds=torch.stack(rows), attention_mask=mask.long(), position_ids=position, use_cache=True, **extra
        )
        following = torch.tensor([int(p.next_position) for p in prompts], device=self.device)
        return Context(tuple(examples), prompts, out.past_key_values, mask, visual, following, tuple(features))

    def _extend(self, context: Context, cache: Any, rows: torch.Tensor, repeat: int = 1) -> torch.Tensor:
        """Feed embeddings [B·repeat, T, d] after what `cache` holds (it grows in place); states [B·repeat, T, d]."""
        done = cache.get_seq_length() - context.mask.shape[1]  # tokens after the prompt so far
        length = rows.shape[1]
        mask = pad(context.mask.long(), (0, done + length), value=1).repeat_interleave(repeat, 0)
        position = context.next_position[:, None] + torch.arange(done, done + length, device=self.device)
        position = position.repeat_interleave(repeat, 0).expand(3, -1, -1)
        return self.parts.language_model(
            inputs_embeds=rows, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def _token(self, token: int, count: int) -> torch.Tensor:
        return self.embed(torch.full((count, 1), token, device=self.device))

    @torch.inference_mode()
    def latents(self, context: Context, k: int) -> torch.Tensor:
        """The model's own K latents right after prompt and start: float32 [B, K, d]."""
        cache = _fork(context.cache)
        state = self._extend(context, cache, self._token(self.ids.start, len(context.examples)))
        states = [state]
        for _ in range(k - 1):
            states.append(self._extend(context, cache, states[-1]))
        return torch.cat(states, dim=1).float()

    @torch.inference_mode()
    def prime(self, context: Context, latents: torch.Tensor | None) -> Primed:
        """Start, `latents` [B, K, d] and end after the prompt; None gives the two markers alone."""
        count = len(context.examples)
        start, end = self._token(self.ids.start, count), self._token(self.ids.end, count)
        middle = start[:, :0] if latents is None else latents.to(self.device, start.dtype)
        cache = _fork(context.cache)
        states = self._extend(context, cache, torch.cat([start, middle, end], dim=1))
        return Primed(context, cache, states[:, -1], middle.shape[1])

    @torch.inference_mode()
    def branches(self, primed: Primed, answers: Sequence[Sequence[str]], readout: bool = False) -> Branches:
        """Score n answers an example after the span (the same n for all)."""
        count, n = len(answers), len(answers[0])
        encoded = [self._branch(y) for row in answers for y in row]
        longest = max(len(ids) for ids, _ in encoded)
        ids = torch.tensor([[*ids, *[self.ids.pad] * (longest - len(ids))] for ids, _ in encoded], device=self.device)
        content = torch.tensor(
            [[*inside, *[False] * (longest - len(inside))] for _, inside in encoded], device=self.device
        )
        cache = _fork(primed.cache)
        cache.batch_repeat_interleave(n)
        with self._reading(content if readout else None) as maps:
            states = self._extend(primed.context, cache, self.embed(ids), repeat=n)
        before = torch.cat([primed.state.repeat_interleave(n, 0)[:, None], states[:, :-1]], dim=1)
        row, column = content.nonzero(as_tuple=True)
        token_logp = self._logits(before[row, column]).log_softmax(-1).gather(1, ids[row, column, None])[:, 0]
        logp = torch.zeros(count * n, device=self.device).index_add_(0, row, token_logp).view(count, n)
        if not readout:
            return Branches(logp)
        prompt = primed.context.mask.shape[1]
        attention = (sum(maps) / len(maps)).view(count, n, -1)
        image = attention[..., :prompt] * primed.context.visual[:, None]
        return Branches(logp, attention[..., prompt + 1 : prompt + 1 + primed.k], image)

    @torch.inference_mode()
    def answer(self, primed: Primed, limit: int = 24) -> list[str]:
        """Greedy content after `<answer>`, up to the closing tag; text without one is given as far as it went."""
        count = len(primed.context.examples)
        opening = self.tokenizer(OPEN, add_special_tokens=False).input_ids
        cache = _fork(primed.cache)
        feed = self.embed(torch.tensor([opening] * count, device=self.device))
        written: list[list[int]] = [[] for _ in range(count)]
        live = set(range(count))
        for _ in range(limit):
            state = self._extend(primed.context, cache, feed)[:, -1]
            chosen = self._logits(state).argmax(-1)
            for i in sorted(live):
                written[i].append(int(chosen[i]))
                if int(chosen[i]) in self.ids.eos or CLOSE in self.tokenizer.decode(written[i]):
                    live.discard(i)
            if not live:
                break
            feed = self.embed(chosen[:, None])
        texts = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in written)
        return [text.split(CLOSE)[0].strip() for text in texts]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 logits with the bans that hold after a span."""
        return self.parts.lm_head(states).float().index_fill(-1, self.banned, float("-inf"))

    def _branch(self, answer: str) -> tuple[list[int], list[bool]]:
        """Ids of `<answer>y</answer>` and which of them overlap y (an id may hold a piece of a tag as well)."""
        answer = answer.strip()
        if not answer:
            raise UserError("evaluation: an empty answer cannot be scored; give every record a gold answer")
        found = self.tokenizer(f"{OPEN}{answer}{CLOSE}", add_special_tokens=False, return_offsets_mapping=True)
        first, last = len(OPEN), len(OPEN) + len(answer)
        return found.input_ids, [a < last and b > first for a, b in found.offset_mapping]

    @contextmanager
    def _reading(self, content: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
        """Collect, per decoder layer, attention [rows, keys] averaged over heads and the rows' content tokens."""
        maps: list[torch.Tensor] = []
        if content is None:
            yield maps
            return
        weight = (content / content.sum(1, keepdim=True)).float()

        def hook(_module: Any, _args: Any, output: tuple) -> None:
            maps.append(torch.einsum("bhqk,bq->bk", output[1].float(), weight) / output[1].shape[1])

        handles = [layer.self_attn.register_forward_hook(hook) for layer in self.parts.language_model.layers]
        try:
            yield maps
        finally:
            for handle in handles:
                handle.remove()


def _fork(cache: Any) -> Any:
    """A cache that grows apart from `cache`: layers are shallow copies, and growing replaces their tensors."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
