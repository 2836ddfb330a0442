"""Pictures of edit pairs: whose answer comes out of a transplant, what latents hold, and what reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from realvr.evaluate.figures import BLUE, GREY, ORANGE, STYLE, png
from realvr.rewards.answers import plain

WHEN = ("before", "after")


@dataclass(frozen=True)
class Case:
    """An edit pair as the pictures need it. images: before, after. boxes: of the question, normalised, per image.

    edited: normalised boxes of the edit. arms: per arm name the entry of its pictures.json, None where it has none.
    """

    edit: str
    question: str
    gold: tuple[str, str]
    images: tuple[Image.Image, Image.Image]
    boxes: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
    edited: Sequence[Sequence[float]]
    arms: dict[str, dict[str, Any] | None]


def _show(
    ax: Axes, image: Image.Image, boxes: Sequence[Sequence[float]], edited: Sequence[Sequence[float]] = ()
) -> None:
    smooth = "nearest" if max(image.size) <= 128 else "antialiased"
    ax.imshow(image, interpolation=smooth)
    _frame(ax, image.size, boxes, edited)


def _frame(
    ax: Axes, size: tuple[int, int], boxes: Sequence[Sequence[float]], edited: Sequence[Sequence[float]]
) -> None:
    """Boxes over a picture (solid: the question's, dotted: the edit's) and no axes."""
    w, h = size
    outline = [patheffects.Stroke(linewidth=4, foreground="black"), patheffects.Normal()]
    for kind, line in ((edited, ":"), (boxes, "-")):
        for x0, y0, x1, y1 in kind:
            at, extent = (x0 * w - 0.5, y0 * h - 0.5), ((x1 - x0) * w, (y1 - y0) * h)
            effects = outline if line == "-" else []
            ax.add_patch(
                Rectangle(at, *extent, fill=False, lw=2, ec="white", ls=line, clip_on=False, path_effects=effects)
            )
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _chip(ax: Axes, text: str, colour: str) -> None:
    """A filled, rounded label in the middle of an empty axes."""
    ax.axis("off")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    if colour:
        box = FancyBboxPatch(
            (0.08, 0.36), 0.84, 0.28, boxstyle="round,pad=0.02,rounding_size=0.08", fc=colour, ec="none"
        )
        ax.add_patch(box)
    label = _short(text, 12)
    size = 10 if len(label) <= 8 else 7.5
    ax.text(0.5, 0.5, label, ha="center", va="center", color="white" if colour else "#555555", weight="bold", size=size)


def whose(answer: str, gold: tuple[str, str]) -> str:
    """Whose answer came out: `A`, `B` or `other`."""
    said = plain(answer)
    return "A" if said == plain(gold[0]) else "B" if said == plain(gold[1]) else "other"


def transplant_cases(cases: Sequence[Case], arms: Sequence[str]) -> bytes:
    """One row a pair: image A, image B, and per arm the answer to A's prompt with A's own and with B's latents."""
    colours = {"A": BLUE, "B": ORANGE, "other": GREY}
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(cases), 2 + 2 * len(arms), figsize=(3.0 + 2.1 * len(arms), 1.62 * len(cases) + 0.75), squeeze=False,
            gridspec_kw={"width_ratios": [1.35, 1.35, *[1] * (2 * len(arms))], "wspace": 0.08, "hspace": 0.42},
        )  # fmt: skip
        for row, case in zip(grid, cases, strict=True):
            for ax, image, boxes, name, gold in zip(row, case.images, case.boxes, "AB", case.gold, strict=False):
                _show(ax, image, boxes)
                ax.set_xlabel(f"{name}: {_short(gold, 14)}", color=colours[name], weight="bold", labelpad=3)
            row[0].set_title(
                _short(f"{case.edit}: {case.question}", 42), loc="left", fontsize=9, weight="normal", pad=4
            )
            for i, arm in enumerate(arms):
                entry = case.arms.get(arm)
                answers = entry["transplant"]["answers"] if entry else {}
                for ax, key in zip(row[2 + 2 * i : 4 + 2 * i], ("0", max(answers, key=int, default="0")), strict=True):
                    text = answers.get(key)
                    _chip(
                        ax,
                        "–" if text is None else text or "(nothing)",
                        "" if text is None else colours[whose(text, case.gold)],
                    )
        for i, arm in enumerate(arms):
            for ax, what in zip(grid[0][2 + 2 * i : 4 + 2 * i], ("A's own\nlatents", "B's\nlatents"), strict=True):
                ax.text(0.5, 1.0, what, ha="center", va="center", fontsize=9, color="#555555")
            _name(grid[0][2 + 2 * i], arm, 22)
        return png(figure)


def _name(ax: Axes, arm: str, above: int) -> None:
    """An arm's name over the pair of axes that begins with `ax`."""
    ax.annotate(
        arm, (1.04, 1), (0, above), xycoords="axes fraction", textcoords="offset points",
        ha="center", va="bottom", weight="bold", fontsize=11,
    )  # fmt: skip


def edit_pairs(cases: Sequence[Case], arms: Sequence[str]) -> bytes:
    """Two rows a pair, before and after the edit: the image with the question's box, then two panels an arm.

    The first shows where its latents point (cosine to each visual token, light is near), the second how much each
    latent is read by the right and by the wrong answer.
    """
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            2 * len(cases), 1 + 2 * len(arms), squeeze=False,
            figsize=(1.5 + 3.0 * len(arms), 1.62 * 2 * len(cases) + 0.7),
            gridspec_kw={"width_ratios": [1.0, *[1.0, 1.25] * len(arms)], "wspace": 0.24, "hspace": 0.34},
        )  # fmt: skip
        for c, case in enumerate(cases):
            looks = [look for entry in case.arms.values() if entry for look in entry["looks"]]
            top = 1.15 * max((max(*look["right"], *look["wrong"]) for look in looks), default=1.0)
            for j, when in enumerate(WHEN):
                row = grid[2 * c + j]
                _show(row[0], case.images[j], case.boxes[j], case.edited if j else ())
                row[0].set_ylabel(f"{when}: {_short(case.gold[j], 14)}", fontsize=9, weight="bold", labelpad=4)
                if j == 0:
                    row[0].set_title(
                        _short(f"{case.edit}: {case.question}", 42), loc="left", fontsize=9, weight="normal", pad=5
                    )
                for i, arm in enumerate(arms):
                    _look(row[1 + 2 * i], row[2 + 2 * i], case, case.arms.get(arm), j, top)
        for i, arm in enumerate(arms):
            _name(grid[0][1 + 2 * i], arm, 34)
        handles = [Rectangle((0, 0), 1, 1, fc=colour) for colour in (BLUE, ORANGE)]
        names = ["read by the right answer", "read by the wrong one (the other image's)"]
        place = {"loc": "upper right", "bbox_to_anchor": (1.0, -0.2), "borderaxespad": 0, "fontsize": 9}
        grid[-1][-1].legend(handles, names, ncols=min(2, len(arms)), **place)
        return png(figure)


def _look(heat: Axes, bars: Axes, case: Case, entry: dict[str, Any] | None, j: int, top: float) -> None:
    """One arm's pair of panels for image j of a case."""
    if entry is None:
        for ax in (heat, bars):
            ax.axis("off")
            ax.text(0.5, 0.5, "–", ha="center", va="center", transform=ax.transAxes, color="#777777")
        return
    maps = [np.asarray(look["similarity"]) for look in entry["looks"]]
    w, h = case.images[j].size
    low, high = min(m.min() for m in maps), max(m.max() for m in maps)
    heat.imshow(maps[j], cmap="viridis", vmin=low, vmax=high, extent=(-0.5, w - 0.5, h - 0.5, -0.5))
    _frame(heat, case.images[j].size, case.boxes[j], case.edited if j else ())
    look = entry["looks"][j]
    x = np.arange(len(look["right"]))
    bars.bar(x - 0.2, look["right"], 0.38, color=BLUE)
    bars.bar(x + 0.2, look["wrong"], 0.38, color=ORANGE)
    bars.set_ylim(0, top)
    bars.set_xticks(x, [f"z{i + 1}" if len(x) <= 4 else str(i + 1) for i in x], fontsize=7.5)
    bars.locator_params(axis="y", nbins=2)
    bars.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.3g}%" if v > 0 else "")
    bars.tick_params(axis="both", length=0)
    bars.tick_params(axis="y", labelsize=6.5, pad=1, labelcolor="#555555")
    said = look["answer"] or "(nothing)"
    right = plain(said) == plain(case.gold[j])
    bars.set_title(f"says {_short(said, 12)} {'✓' if right else '✗'}", fontsize=8.5, weight="normal", pad=3)


def _short(text: str, width: int) -> str:
    """At most `width` printable characters, safe for matplotlib ($ would start mathematics)."""
    text = "".join(c if c.isprintable() else "·" for c in text)
    return (text if len(text) <= width else text[: width - 1] + "…").replace("$", r"\$")
