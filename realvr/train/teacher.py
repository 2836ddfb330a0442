"""Stage 1's lessons: what a record teaches, as tensors, and the loss of a micro-batch of them.

The assistant turn is the span of each box (`<|lvr_start|>`, one `<|lvr|>` a visual token, `<|lvr_end|>`), a line break,
the answer, end of turn. At each `<|lvr|>` the input embedding is that token's visual embedding (teacher forcing), and
the state one position earlier should equal it. Loss = cross-entropy of start, end and text + weight · MSE. Source:
paper, stage 1.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realvr.config import SftSettings
from realvr.data.examples import Example
from realvr.data.prompts import Prompt
from realvr.families.base import Family, TokenIds, VisualFeatures
from realvr.learner.statistics import Sums, ratio
from realvr.objectives.prototypes import spread
from realvr.objectives.reconstruction import latent_mse, text_ce
from realvr.policy.kv import KVView, Plan
from realvr.policy.model import PolicyRoot

IGNORE = -100


@dataclass(frozen=True)
class Lesson:
    """One record. completion Long [N]; supervised bool [N], tokens with a text loss; sources Long [M], for each latent
    of the completion the visual token (index into the features) that it stands for.
    """

    example: Example
    prompt: Prompt
    features: VisualFeatures
    completion: torch.Tensor
    supervised: torch.Tensor
    sources: torch.Tensor

    @property
    def width(self) -> int:
        """Tokens fed to the model: the last one predicts nothing and is left out."""
        return len(self.prompt.input_ids) + len(self.completion) - 1

    @property
    def bytes(self) -> int:
        """Memory of its tensors, pixels excepted."""
        held = (self.features.embeds, *self.features.deepstack, self.prompt.positions)
        return sum(t.numel() * t.element_size() for t in held) + 64 * self.width


@dataclass(frozen=True)
class LessonBatch:
    """B lessons, left-padded to T. ids_BT Long; positions_3BT; visual_BT, latent_BT bool; labels_BT Long, the token
    that should come next, IGNORE where none is taught. features: all image tokens, row after row; targets_Md: visual
    embeddings of the latents in row-major order. starts: first real column of each row. tokens, elements: text labels
    and M·d of the global batch. real: False for a batch that only keeps ranks in step.
    """

    ids_BT: torch.Tensor
    positions_3BT: torch.Tensor
    visual_BT: torch.Tensor
    latent_BT: torch.Tensor
    labels_BT: torch.Tensor
    features: VisualFeatures
    targets_Md: torch.Tensor
    starts: tuple[int, ...]
    tokens: int
    elements: int
    real: bool = True


def roi_sources(prompt: Prompt, settings: SftSettings) -> list[list[int]]:
    """For each span the visual tokens it holds: a span a box; without boxes the whole image; none without an image."""
    visual = sum(prompt.image_counts)
    boxes = [roi.tolist() for roi in prompt.roi] or ([list(range(visual))] if visual else [])
    if settings.roi_tokens == "k":
        boxes = [[tokens[i] for i in spread(len(tokens), settings.latent.k)] for tokens in boxes]
    return boxes


def tagged(example: Example, settings: SftSettings) -> bool:
    """Whether the answer stands in tags: a fixed choice a record, in `1 - settings.untagged` of them."""
    return zlib.crc32(f"{settings.seed}:{example.id}".encode()) / 2**32 >= settings.untagged


def build_lesson(
    example: Example, prompt: Prompt, features: VisualFeatures, tokenizer: Any, tokens: TokenIds, settings: SftSettings
) -> Lesson:
    """Write the assistant turn of a record."""
    spans = roi_sources(prompt, settings)
    completion = [t for s in spans for t in (tokens.start, *[tokens.latent] * len(s), tokens.end)]
    text = f"<answer>{example.answer}</answer>" if tagged(example, settings) else example.answer
    if spans and settings.newline:
        text = "\n" + text
    completion += [*tokenizer(text, add_special_tokens=False).input_ids, tokens.eos[0]]
    ids = torch.tensor(completion)
    return Lesson(
        example, prompt, features, ids, ids != tokens.latent, torch.tensor([i for s in spans for i in s]).long()
    )


def counts(lessons: Sequence[Lesson]) -> tuple[int, int]:
    """Text labels and MSE elements of lessons: summed over ranks they are the normalisers."""
    elements = sum(len(lesson.sources) * lesson.features.embeds.shape[-1] for lesson in lessons)
    return sum(int(lesson.supervised.sum()) for lesson in lessons), elements


def collate(
    lessons: Sequence[Lesson], tokens: TokenIds, total: tuple[int, int], device: torch.device, real: bool = True
) -> LessonBatch:
    """Pad lessons into one batch; total: `counts` of the global batch."""
    width = max(lesson.width for lesson in lessons)
    shape = (len(lessons), width)
    ids, labels = torch.full(shape, tokens.pad), torch.full(shape, IGNORE)
    visual, latent = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(3, *shape, dtype=torch.long)
    starts = tuple(width - lesson.width for lesson in lessons)
    for b, (lesson, start) in enumerate(zip(lessons, starts, strict=True)):
        prompt, fed = lesson.prompt, lesson.completion[:-1]
        at = start + len(prompt.input_ids)
        ids[b, start:] = torch.cat([prompt.input_ids, fed])
        visual[b, start:at] = prompt.visual_mask
        latent[b, at:] = fed == tokens.latent
        labels[b, at - 1 :] = lesson.completion.masked_fill(~lesson.supervised, IGNORE)
        positions[:, b, start:at] = prompt.positions
        positions[:, b, at:] = prompt.next_position + torch.arange(len(fed))
    seen = [lesson.features for lesson in lessons]
    features = VisualFeatures(
        torch.cat([f.embeds for f in seen]).to(device),
        tuple(torch.cat(level).to(device) for level in zip(*(f.deepstack for f in seen if f.deepstack), strict=True)),
    )
    targets = torch.cat(
        [lesson.features.embeds[lesson.sources.to(lesson.features.embeds.device)] for lesson in lessons]
    )
    moved = (x.to(device) for x in (ids, positions, visual, latent, labels))
    return LessonBatch(*moved, features, targets.to(device), starts, *total, real)


def lesson_loss(
    root: PolicyRoot, family: Family, batch: LessonBatch, mse_weight: float, recompute: bool
) -> tuple[torch.Tensor, Sums]:
    """The micro-batch's share of the loss (a scalar with gradient) and statistics.

    One embedding, one forward, one call of the output layer, whatever the batch holds: ranks stay in step.
    """
    embeds = root.embed(batch.ids_BT)
    embeds = embeds.masked_scatter(batch.visual_BT[..., None], batch.features.embeds.to(embeds.dtype))
    embeds = embeds.masked_scatter(batch.latent_BT[..., None], batch.targets_Md.to(embeds.dtype))
    view = KVView(Plan(batch.starts, batch.ids_BT.shape[1], ()), [()] * root.layers)
    extra = family.language_inputs(batch.features, batch.visual_BT)
    states = root.run(embeds, batch.positions_3BT, view, recompute, **extra)
    row, column = (batch.labels_BT != IGNORE).nonzero(as_tuple=True)
    free = torch.zeros(1, root.lm_head.vocabulary, dtype=torch.bool, device=states.device)
    labels = batch.labels_BT[row, column]
    logprobs, _ = root.lm_head(states[row, column], labels, torch.zeros_like(labels), free, 1.0)
    ce = text_ce(logprobs, torch.ones_like(labels, dtype=torch.bool), batch.tokens)
    mse = latent_mse(states, batch.targets_Md, batch.latent_BT, batch.elements)
    loss = (ce + mse_weight * mse) * float(batch.real)
    cosine = _cosines(states, batch)
    share = float(batch.real)
    return loss, {
        "ce_sum": ce.detach().double() * share,
        "mse_sum": mse.detach().double() * share,
        "cosine_tf": ratio(cosine.sum() * share, int(len(cosine) * share)),
    }


def _cosines(states: torch.Tensor, batch: LessonBatch) -> torch.Tensor:
    """Cosine of each latent's predicting state with its target, [M]."""
    before = states[:, :-1][batch.latent_BT[:, 1:]].detach().float()
    return torch.cosine_similarity(before, batch.targets_Md.float(), dim=-1)
