"""Many short questions about one image in one row: the image's forward is shared, the questions do not see each other.

For the base phase of a tiny model only. Row layout: prompt up to the image's end, then for each question its own
segment (question, end of turn, `<answer>…</answer>`), every segment at the positions it would have alone. So the
numbers are those of separate prompts, at a fifth of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launch.errors import UserError
from realvr.data.examples import Example
from realvr.data.prompts import Prompt, PromptBuilder
from realvr.families.base import Family, ModelParts, VisualFeatures

IGNORE = -100


@dataclass(frozen=True)
class Packs:
    """S scenes with n questions each, in rows of L tokens.

    ids: [S, L]. labels: [S, L], the token that should follow, IGNORE where nothing is supervised. visual: bool [L].
    positions: [3, L]. mask: bool [1, 1, L, L], True where a row may look. segment: [L], −1 in the shared part.
    embeds: [S, N, d] and deepstack (one [S, N, d] a layer): what the frozen tower sees. counted: bool [S, n], False for
    questions that name a place: they help to learn but are not what accuracy is about.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    visual: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    segment: torch.Tensor
    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]
    counted: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Pictures:
    """Images of equal size: pixels [S, patches, c], grid_thw [S, 3]."""

    pixels: torch.Tensor
    grids: torch.Tensor


def load_pictures(builder: PromptBuilder, examples: Sequence[Example], batch: int = 128) -> Pictures:
    """The examples' images as their prompts would have them, processed many at a time."""
    pixels, grids = [], []
    for first in range(0, len(examples), batch):
        pictures = [picture for e in examples[first : first + batch] for picture in builder.images(e)]
        done = builder.processor.image_processor(images=pictures, return_tensors="pt", **builder.processor_kwargs)
        grids.append(done["image_grid_thw"].long())
        pixels.append(done["pixel_values"].view(len(pictures), -1, done["pixel_values"].shape[-1]))
    return Pictures(torch.cat(pixels), torch.cat(grids))


@torch.no_grad()
def see(family: Family, tower: torch.nn.Module, pictures: Pictures, batch: int = 64) -> VisualFeatures:
    """The tower's view of every picture: embeds [S, N, d], deepstack layers likewise."""
    parts = []
    for pixels, grids in zip(pictures.pixels.split(batch), pictures.grids.split(batch), strict=True):
        seen = family.visual_features(tower, pixels.flatten(0, 1), grids)
        parts.append([t.view(len(grids), -1, t.shape[-1]) for t in (seen.embeds, *seen.deepstack)])
    embeds, *deepstack = (torch.cat(layer) for layer in zip(*parts, strict=True))
    return VisualFeatures(embeds, tuple(deepstack))


def build_packs(examples: Sequence[Example], per_scene: int, seen: VisualFeatures, builder: PromptBuilder) -> Packs:
    """Pack consecutive examples, `per_scene` about each image; `seen`: the scenes' features in the same order.

    UserError if a group does not share its image.
    """
    groups = [examples[i : i + per_scene] for i in range(0, len(examples) - per_scene + 1, per_scene)]
    if any(e.images != g[0].images for g in groups for e in g):
        raise UserError(f"data: {per_scene} consecutive examples should ask about one image; set questions_per_scene")
    eos = builder.ids.eos[0]
    prefix, suffix, prompt = _template(groups[0], builder)
    segments = [[_segment(e, suffix, builder) for e in g] for g in groups]
    longest = max(len(ids) for g in segments for ids, _ in g)
    shared = len(prefix)

    def row(group: Sequence[tuple[list[int], list[int]]], which: int, fill: int, head: list[int]) -> list[int]:
        return head + [t for s in group for t in (*s[which], *[fill] * (longest - len(s[which])))]

    ids = torch.tensor([row(g, 0, eos, prefix) for g in segments])
    labels = torch.tensor([row(g, 1, IGNORE, [IGNORE] * shared) for g in segments])
    segment = torch.cat([torch.full((shared,), -1), torch.arange(per_scene).repeat_interleave(longest)])
    sees = (segment[:, None] == segment[None]) | (segment[None] < 0)
    after = prompt.positions[:, shared : shared + 1] + torch.arange(longest)
    visual = torch.zeros(len(segment), dtype=torch.bool)
    visual[:shared] = prompt.visual_mask[:shared]
    return Packs(
        ids=ids,
        labels=labels,
        visual=visual,
        positions=torch.cat([prompt.positions[:, :shared], *[after] * per_scene], dim=1),
        mask=(sees & torch.ones(len(segment), len(segment), dtype=torch.bool).tril())[None, None],
        segment=segment,
        embeds=seen.embeds,
        deepstack=seen.deepstack,
        counted=torch.tensor([[not e.meta["ask"].endswith("_at") for e in g] for g in groups]),
    )


def packed_states(
    family: Family, parts: ModelParts, packs: Packs, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward of the scenes `rows` [B]: states [M, d] of the supervised rows, their labels [M], their segment's number
    [M] counted through the batch (scene b, question q: b·n + q)."""
    lm = parts.language_model
    ids, labels = packs.ids[rows], packs.labels[rows]
    visual = packs.visual.expand(len(rows), -1)
    embeds = packs.embeds[rows].flatten(0, 1)
    x = lm.embed_tokens(ids).masked_scatter(visual[..., None], embeds)
    features = VisualFeatures(embeds, tuple(layer[rows].flatten(0, 1) for layer in packs.deepstack))
    states = lm(
        inputs_embeds=x,
        attention_mask=packs.mask,
        position_ids=packs.positions[:, None].expand(-1, len(rows), -1),
        use_cache=False,
        **family.language_inputs(features, visual),
    ).last_hidden_state
    b, t = (labels != IGNORE).nonzero(as_tuple=True)
    return states[b, t], labels[b, t], b * packs.counted.shape[1] + packs.segment[t]


def _template(group: Sequence[Example], builder: PromptBuilder) -> tuple[list[int], list[int], Prompt]:
    """Ids before and after the question, checked on every question of a scene, and the first question's prompt."""
    prompts = [builder.build(e) for e in group]
    prompt = prompts[0]
    ids = prompt.input_ids.tolist()
    if not bool(prompt.visual_mask.any()):
        raise UserError("data: the base phase needs examples with one image")
    question = _encode(builder, group[0].question)
    last_image = int(prompt.visual_mask.nonzero()[-1])
    starts = [i for i in range(last_image + 1, len(ids)) if ids[i : i + len(question)] == question]
    if not starts:
        raise RuntimeError("the question's tokens do not stand in the prompt; the chat template changes them")
    prefix, suffix = ids[: starts[0]], ids[starts[0] + len(question) :]
    for example, other in zip(group, prompts, strict=True):
        if other.input_ids.tolist() != prefix + _encode(builder, example.question) + suffix:
            raise RuntimeError("the chat template does not merely surround the question; packing would differ from it")
    return prefix, suffix, prompt


def _segment(example: Example, suffix: list[int], builder: PromptBuilder) -> tuple[list[int], list[int]]:
    """Input ids of a question's segment and the label of each."""
    question = [*_encode(builder, example.question), *suffix]
    answer = [*_encode(builder, f"<answer>{example.answer}</answer>"), builder.ids.eos[0]]
    return question + answer[:-1], [IGNORE] * (len(question) - 1) + answer


def _encode(builder: PromptBuilder, text: str) -> list[int]:
    return builder.tokenizer(text, add_special_tokens=False).input_ids
