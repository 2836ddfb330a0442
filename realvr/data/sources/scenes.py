"""Generated scenes: four quadrants, two or three things of distinct noun and colour, and questions about one of them.

What `shapes` and `digits` share. An image is a recipe (text), rendered deterministically: the noise depends on the
recipe's noise key alone, so that two recipes with equal keys differ in no pixel outside the quadrants that differ.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field, ValidationError

from launch.config import Settings
from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Box, Example
from realvr.data.twins import Twin

SIZE, HALF = 64, 32  # pixels of a scene and of a quadrant
COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.75, 0.15),
    "blue": (0.15, 0.20, 0.90),
    "yellow": (0.95, 0.90, 0.10),
    "purple": (0.60, 0.15, 0.75),
}
PLACES = ("topleft", "topright", "bottomleft", "bottomright")
EDITS = ("recolour", "remove", "reshape", "swap")
Ask = Literal["colour", "noun", "side", "colour_at", "noun_at"]
_EXAMPLES, _TWINS = 0, 1  # streams of randomness


class SceneOptions(Settings):
    """`options` of a generated set."""

    questions_per_scene: int = Field(default=1, ge=1)
    """Consecutive examples that ask about the same image."""
    absent: float = Field(default=0.12, ge=0, le=1)
    """Share of the questions about colour and noun that name something absent: answer `none`, no box."""
    locations: float = Field(default=0.0, ge=0, le=1)
    """Share of questions that name a place (`what colour is the topleft?`): they help a tiny base model start."""
    split: Literal["train", "validation"] = "train"
    """Digits: whose handwriting. No writer is in both."""


@dataclass(frozen=True)
class Thing:
    """An object: what it is, its colour, and the numbers that fix its look (size, shift, which handwriting)."""

    noun: str
    colour: str
    look: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """cells: the four quadrants row by row. noise: seeds everything that is not a thing."""

    noise: tuple[int, ...]
    cells: tuple[Thing | None, ...]

    def find(self, ask: Ask, word: str) -> int | None:
        """Quadrant that a question with this word is about; None if there is no such thing."""
        if ask in ("colour_at", "noun_at"):
            return PLACES.index(word)
        wanted = [c is not None and word == (c.colour if ask == "noun" else c.noun) for c in self.cells]
        return wanted.index(True) if any(wanted) else None

    def answer(self, ask: Ask, word: str) -> str:
        """Gold answer: a colour, a noun, left/right, or none."""
        place = self.find(ask, word)
        if place is None:
            return "none"
        if ask == "side":
            return ("left", "right")[place % 2]
        thing = self.cells[place]
        if thing is None:
            return "none"
        return thing.colour if ask in ("colour", "colour_at") else thing.noun


def write_recipe(prefix: str, scene: Scene) -> str:
    """`shapes:0.3.17|circle.red.1.2.4|-|-|square.blue.0.0.1`: noise key, then a quadrant each."""
    cells = ["-" if c is None else ".".join([c.noun, c.colour, *map(str, c.look)]) for c in scene.cells]
    return f"{prefix}:{'|'.join(['.'.join(map(str, scene.noise)), *cells])}"


def read_recipe(ref: str, prefix: str) -> Scene:
    """Inverse of `write_recipe`; a recipe that is none raises UserError."""
    wanted = f"{prefix}:NOISE|CELL|CELL|CELL|CELL with CELL = - or noun.colour.number…"
    try:
        head, body = ref.split(":", 1)
        noise, *cells = body.split("|")
        if head != prefix or len(cells) != 4:
            raise ValueError
        key = tuple(int(n) for n in noise.split("."))
        if min(key) < 0:
            raise ValueError
        return Scene(key, tuple(_read_cell(c) for c in cells))
    except ValueError:
        raise UserError(f"image {ref!r}: not a recipe of the generator; it should read {wanted}") from None


def _read_cell(text: str) -> Thing | None:
    if text == "-":
        return None
    noun, colour, *look = text.split(".")
    if colour not in COLOURS:
        raise ValueError
    numbers = tuple(int(n) for n in look)
    if numbers and min(numbers) < 0:
        raise ValueError
    return Thing(noun, colour, numbers)


def paint(scene: Scene, masks: Sequence[np.ndarray | None]) -> Image.Image:
    """masks: per quadrant the thing's coverage [32, 32] in 0–1, None where empty. Gives an RGB image of 64 × 64."""
    rng = np.random.default_rng(scene.noise)
    background = 0.45 + 0.1 * rng.random()
    tints = 0.08 * rng.standard_normal((4, 3))
    noise = 0.03 * rng.standard_normal((SIZE, SIZE, 3))
    canvas = np.full((SIZE, SIZE, 3), background)
    for place, (thing, mask) in enumerate(zip(scene.cells, masks, strict=True)):
        if thing is None or mask is None:
            continue
        top, left = HALF * (place // 2), HALF * (place % 2)
        ink = np.array(COLOURS[thing.colour]) + tints[place]
        canvas[top : top + HALF, left : left + HALF] += mask[..., None] * (ink - background)
    return Image.fromarray(np.round((canvas + noise).clip(0, 1) * 255).astype(np.uint8))


def quadrant(place: int) -> Box:
    """The quadrant as a normalised box: a quarter of the visual tokens."""
    x, y = place % 2 / 2, place // 2 / 2
    return Box((x, y, x + 0.5, y + 0.5))


class SceneWorld(Sequence[Example]):
    """A generated set of `settings.size` examples; `settings.seed` separates sets (it is part of every noise key)."""

    prefix: ClassVar[str]
    noun_word: ClassVar[str]  # the word for what a thing is, in "what … is the red?"

    def __init__(self, settings: SourceSettings):
        try:
            self.options = SceneOptions(**settings.options)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            allowed = ", ".join(SceneOptions.model_fields)
            raise UserError(f"data: option {name!r} of {self.prefix}: {first['msg']}; options are {allowed}") from None
        self.seed, self.size = settings.seed % 2**32, settings.size

    @property
    @abstractmethod
    def nouns(self) -> tuple[str, ...]:
        """Every noun of the world."""

    @abstractmethod
    def look(self, rng: np.random.Generator, noun: str) -> tuple[int, ...]:
        """Draw the numbers that fix how a thing of this noun looks."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        """The example at an index; a slice gives a list."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        index = int(index) % self.size
        rng = np.random.default_rng((self.seed, 2, _EXAMPLES, index))
        scene = self._scene(index // self.options.questions_per_scene)
        ask, word = self._draw_question(rng, scene)
        return self.example(scene, ask, word, f"{self.prefix}-{self.seed}-{index}")

    def example(self, scene: Scene, ask: Ask, word: str, name: str, **meta: Any) -> Example:
        """The question about a scene, with its gold answer and the box of the thing it is about."""
        place, answer = scene.find(ask, word), scene.answer(ask, word)
        thing = None if place is None else scene.cells[place]
        subject = {"side": "which side", "colour": "what colour", "colour_at": "what colour"}.get(
            ask, f"what {self.noun_word}"
        )
        return Example(
            id=name,
            images=(write_recipe(self.prefix, scene),),
            question=f"{subject} is the {word}?",
            answer=answer,
            boxes=() if place is None else (quadrant(place),),
            source=self.prefix,
            # Equal things look alike: as each other's negatives they would push a latent away from its own evidence.
            negative_key=f"{self.prefix}:{'none' if thing is None else f'{thing.colour} {thing.noun}'}",
            meta={"ask": ask, "word": word, **meta},
        )

    def twins(self, n: int) -> list[Twin]:
        """n edit pairs, cycling through the four edits, four relevant pairs then four irrelevant ones.

        A relevant edit changes the thing asked about and the gold answer; an irrelevant one changes something else and
        leaves the answer. Pixels outside `after.meta["edited"]` (normalised boxes) are identical.
        """
        return [self._twin(i) for i in range(n)]

    def _scene(self, index: int, stream: int = _EXAMPLES, at_least: int = 2) -> Scene:
        rng = np.random.default_rng((self.seed, 1, stream, index))
        count = rng.integers(at_least, 4)
        cells: list[Thing | None] = [None] * 4
        nouns = rng.permutation(self.nouns)
        colours = rng.permutation(list(COLOURS))
        for place, noun, colour in zip(rng.permutation(4)[:count], nouns, colours, strict=False):
            cells[place] = Thing(str(noun), str(colour), self.look(rng, str(noun)))
        return Scene((self.seed, stream, index), tuple(cells))

    def _draw_question(self, rng: np.random.Generator, scene: Scene) -> tuple[Ask, str]:
        if rng.random() < self.options.locations:
            return ("colour_at", "noun_at")[rng.integers(2)], PLACES[rng.integers(4)]
        ask: Ask = ("colour", "noun", "side")[rng.integers(3)]
        here = [c for c in scene.cells if c is not None]
        known = [c.colour if ask == "noun" else c.noun for c in here]
        if ask != "side" and rng.random() < self.options.absent:
            every = COLOURS if ask == "noun" else self.nouns
            return ask, str(rng.choice([w for w in every if w not in known]))
        return ask, str(rng.choice(known))

    def _twin(self, index: int) -> Twin:
        edit, relevant = EDITS[index % 4], index // 4 % 2 == 0
        rng = np.random.default_rng((self.seed, 2, _TWINS, index))
        scene = self._scene(index, _TWINS, at_least=3 if edit == "remove" or not relevant else 2)
        target = int(rng.choice([p for p, c in enumerate(scene.cells) if c is not None]))
        asks: dict[str, tuple[Ask, ...]] = {"recolour": ("colour",), "reshape": ("noun",), "swap": ("side",)}
        ask: Ask = rng.choice(asks.get(edit, ("colour", "noun")) if relevant else ("colour", "noun", "side"))
        thing = scene.cells[target]
        assert thing is not None
        word = thing.colour if ask == "noun" else thing.noun
        place = target if relevant else self._bystander(rng, scene, target, edit)
        changed = self._edit(rng, scene, edit, place)
        edited = [quadrant(p).coords for p in range(4) if scene.cells[p] != changed.cells[p]]
        name = f"{self.prefix}-{self.seed}-t{index}"
        before = self.example(scene, ask, word, f"{name}-before")
        after = self.example(changed, ask, word, f"{name}-after", edited=edited)
        return Twin(edit=edit, relevant=relevant, before=before, after=after)

    @staticmethod
    def _bystander(rng: np.random.Generator, scene: Scene, target: int, edit: str) -> int:
        """Another thing; for a swap it must stand in the other row. Of three things in four places one always does."""
        others = [p for p, c in enumerate(scene.cells) if c is not None and p != target]
        return int(rng.choice([p for p in others if edit != "swap" or p // 2 != target // 2]))

    def _edit(self, rng: np.random.Generator, scene: Scene, edit: str, place: int) -> Scene:
        cells = list(scene.cells)
        thing = cells[place]
        assert thing is not None
        here = [c for c in cells if c is not None]
        if edit == "recolour":
            colours = [c for c in COLOURS if c not in {t.colour for t in here}]
            cells[place] = replace(thing, colour=str(rng.choice(colours)))
        elif edit == "reshape":
            noun = str(rng.choice([n for n in self.nouns if n not in {t.noun for t in here}]))
            cells[place] = Thing(noun, thing.colour, self.look(rng, noun))
        elif edit == "remove":
            cells[place] = None
        else:  # swap: left and right of the row change places
            other = place ^ 1
            cells[place], cells[other] = cells[other], cells[place]
        return replace(scene, cells=tuple(cells))
