"""Example → prompt: text for vLLM, tensors for the learner, from one chat template and one resize."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from launch.errors import UserError
from realvr.data.boxes import checked, normalised, roi_tokens
from realvr.data.examples import Box, Example
from realvr.data.images import fit, image_size, load_image, resized
from realvr.families import family_of
from realvr.families.base import SYSTEM

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt as tensors on the CPU.

    input_ids Long [P], image tokens expanded. pixels float [patches, c], None without images. grid_thw Long
    [images, 3] in patches. positions Long [3, P]; next_position: of the first completion token. visual_mask bool [P].
    roi: per box, Long indices into the prompt's visual tokens (all images concatenated). image_counts: visual tokens
    of each image.
    """

    input_ids: torch.Tensor
    pixels: torch.Tensor | None
    grid_thw: torch.Tensor
    positions: torch.Tensor
    next_position: int
    visual_mask: torch.Tensor
    roi: tuple[torch.Tensor, ...]
    image_counts: tuple[int, ...]


class PromptBuilder:
    """Builds prompts for one checkpoint. Learner, rollout engines and evaluation all go through it."""

    def __init__(self, model_path: str | Path, min_visual_tokens: int = 4, max_visual_tokens: int = 2560):
        from transformers import AutoConfig, AutoProcessor  # slow to import

        if min_visual_tokens > max_visual_tokens:
            raise UserError(
                f"model.min_visual_tokens: {min_visual_tokens} exceeds max_visual_tokens {max_visual_tokens}; swap them"
            )
        model_path = str(model_path)
        self.family = family_of(model_path)
        try:
            self.processor = AutoProcessor.from_pretrained(model_path)
            self.config = AutoConfig.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{model_path}: processor or config cannot be loaded ({reason}); complete it") from error
        self.tokenizer = self.processor.tokenizer
        self.ids = self.family.token_ids(self.tokenizer, model_path)
        self.min_tokens, self.max_tokens = min_visual_tokens, max_visual_tokens
        self.unit = self.family.image_unit(self.processor)
        self.processor_kwargs: dict[str, Any] = self.family.processor_kwargs(
            self.processor, min_visual_tokens, max_visual_tokens
        )
        """vLLM's `mm_processor_kwargs`: with them its processor leaves the pictures of `images` as they are."""

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """Strings that no question or answer may contain."""
        return self.family.reserved_tokens(self.tokenizer)

    def check(self, example: Example) -> None:
        """UserError naming record and token when question, answer or options hold a control token."""
        for name, text in (("question", example.question), ("answer", example.answer), *_named(example.options)):
            typed = next((token for token in self.reserved if token in text), None)
            if typed is not None:
                raise UserError(
                    f"record {example.id}: the {name} contains the reserved token {typed}; "
                    f"it would be read as control, not text: reword or drop the record"
                )

    def images(self, example: Example) -> list[Image.Image]:
        """The pictures, upright RGB, resized to the family's grid within the bounds on visual tokens."""
        pictures = [load_image(ref, example.id) for ref in example.images]
        return [resized(p, self._fit(*p.size)) for p in pictures]

    def text(self, example: Example) -> str:
        """Chat-template text with one placeholder an image: what vLLM takes together with `images`."""
        self.check(example)
        content: list[dict[str, str]] = [{"type": "image"} for _ in example.images]
        content.append({"type": "text", "text": example.question})
        messages = [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": content},
        ]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def token_ids(self, example: Example) -> list[int]:
        """Ids of `text`, placeholders not expanded."""
        ids = self.tokenizer(self.text(example), add_special_tokens=False)["input_ids"]
        if ids.count(self.ids.image) != len(example.images):
            raise UserError(
                f"record {example.id}: the chat template gives {ids.count(self.ids.image)} placeholders for "
                f"{len(example.images)} images; use the chat template of the checkpoint's family"
            )
        return ids

    def length(self, example: Example) -> int:
        """Prompt tokens with images expanded, from the pictures' headers alone."""
        visual = sum(self._tokens(*image_size(ref, example.id)) for ref in example.images)
        return len(self.token_ids(example)) - len(example.images) + visual

    def build(self, example: Example) -> Prompt:
        """The whole prompt. Bad pictures, boxes and reserved tokens raise UserError naming the record."""
        ids = self.token_ids(example)
        sizes = [image_size(ref, example.id) for ref in example.images]
        pixels, grid = self._pixels(self.images(example))
        grids = [self.family.merged_grid(self.config, tuple(row)) for row in grid.tolist()]
        counts = tuple(rows // merge * (columns // merge) for rows, columns, merge in grids)
        remaining = iter(counts)
        expanded = [i for t in ids for i in ([t] * next(remaining) if t == self.ids.image else [t])]
        input_ids = torch.tensor(expanded, dtype=torch.long)
        positions, following = self.family.positions(self.config, input_ids, grid)
        roi = []
        for box, _ in self.boxes(example, sizes):
            tokens = roi_tokens(box.coords, *grids[box.image])
            roi.append(torch.tensor(tokens, dtype=torch.long) + sum(counts[: box.image]))
        visual = input_ids == self.ids.image
        return Prompt(input_ids, pixels, grid, positions, following, visual, tuple(roi), counts)

    def boxes(self, example: Example, sizes: Sequence[tuple[int, int]]) -> list[tuple[Box, bool]]:
        """The example's boxes, checked against its pictures' (width, height), normalised; whether one was clamped."""
        found = []
        for box in example.boxes:
            where = f"record {example.id}"
            if not 0 <= box.image < len(sizes):
                raise UserError(f"{where}: a box names image {box.image} of {len(sizes)}; count images from 0")
            width, height = self._annotated_size(example, box, sizes[box.image])
            inside, clamped = checked(box, width, height, where)
            found.append((Box(normalised(inside, width, height), "normalised", box.image), clamped))
        return found

    def _annotated_size(self, example: Example, box: Box, size: tuple[int, int]) -> tuple[int, int]:
        """Size that pixel boxes refer to: the record's own where it states one of the same shape, else the file's."""
        stated = example.meta.get("size")
        if stated is None or box.image != 0 or tuple(stated) == size:
            return size
        if abs(stated[0] * size[1] / (stated[1] * size[0]) - 1) > 0.02:
            raise UserError(
                f"record {example.id}: it says {stated[0]}x{stated[1]} but {example.images[0]} is {size[0]}x{size[1]} "
                f"upright; its boxes would miss: mend the size or the picture"
            )
        return stated[0], stated[1]

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        return fit(width, height, self.unit, self.min_tokens, self.max_tokens)

    def _tokens(self, width: int, height: int) -> int:
        columns, rows = (side // self.unit for side in self._fit(width, height))
        return columns * rows

    def _pixels(self, pictures: list[Image.Image]) -> tuple[torch.Tensor | None, torch.Tensor]:
        if not pictures:
            return None, torch.zeros(0, 3, dtype=torch.long)
        batch = self.processor.image_processor(images=pictures, return_tensors="pt", **self.processor_kwargs)
        return batch["pixel_values"], batch["image_grid_thw"].long()


def usable(
    dataset: Sequence[Example], builder: PromptBuilder, max_tokens: int, max_bad_records: int = 0
) -> tuple[list[int], dict[str, int]]:
    """Indices of the examples that can be trained on, and counts: left out as `too_long` or `bad`, `clamped_boxes`.

    Reads picture headers, decodes nothing. Prompts longer than `max_tokens` are never cut. Records with a bad picture,
    box or token are logged; more than `max_bad_records` of them raise UserError.
    """
    indices, counts = [], Counter(too_long=0, bad=0, clamped_boxes=0)
    for index in range(len(dataset)):
        example = dataset[index]
        try:
            sizes = [image_size(ref, example.id) for ref in example.images]
            clamped = sum(clamped for _, clamped in builder.boxes(example, sizes)) + example.meta.get("clamped", 0)
            length = builder.length(example)
        except UserError as error:
            counts["bad"] += 1
            log.warning("left out: %s", error)
            if counts["bad"] > max_bad_records:
                raise UserError(_too_many(error, counts["bad"], max_bad_records)) from error
            continue
        counts["clamped_boxes"] += clamped
        if length > max_tokens:
            counts["too_long"] += 1
        else:
            indices.append(index)
    if counts["too_long"]:
        log.warning("left out: %d prompts above %d tokens", counts["too_long"], max_tokens)
    return indices, dict(counts)


def _too_many(error: UserError, found: int, allowed: int) -> str:
    return str(error) if not allowed else f"{error} (bad record {found}, data.max_bad_records allows {allowed})"


def _named(options: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"option {chr(ord('A') + i)}", text) for i, text in enumerate(options)]
