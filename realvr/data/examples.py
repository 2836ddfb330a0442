"""What a data set gives: one question about images, with the boxes that hold the evidence."""

from dataclasses import dataclass, field
from typing import Any, Literal

BoxSpace = Literal["normalised", "pixel", "thousand", "square"]


@dataclass(frozen=True)
class Box:
    """A region of one image.

    `coords` are (x0, y0, x1, y1) in `space`: `normalised` 0–1 of the original image, `pixel` of the original image,
    `thousand` 0–1000 of the original image, `square` 0–1 of the image padded to a square (Visual-CoT's gpt turn:
    S = max(W, H), x_px = x·S − (S−W)/2). The reader declares the space; nobody guesses it.
    """

    coords: tuple[float, float, float, float]
    space: BoxSpace = "normalised"
    image: int = 0  # index into Example.images


@dataclass(frozen=True)
class Example:
    """One record. Images are references (paths, `shapes:…` or `digits:…` recipes), never pixels."""

    id: str
    images: tuple[str, ...]
    question: str
    answer: str
    boxes: tuple[Box, ...] = ()
    source: str = ""
    kind: Literal["text", "choice", "math"] = "text"
    options: tuple[str, ...] = ()
    negative_key: str = ""
    """Examples with equal keys never serve as each other's negatives; empty means the first image's reference."""
    meta: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def key(self) -> str:
        return self.negative_key or (self.images[0] if self.images else self.id)
