"""Charts of a report, drawn with matplotlib in the Okabe–Ito colours, which colour-blind readers can tell apart."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from realvr.evaluate.statistics import Estimate

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#9A9A9A"
ARMS = ("#7A7A7A", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2")
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555", "axes.grid": True,
    "grid.color": "#E6E6E6", "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": "white",
}  # fmt: skip


def png(figure: Figure, dpi: int = 144) -> bytes:
    """PNG bytes; closes the figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)
    return buffer.getvalue()


def transplant_bars(counts: dict[str, dict[str, int] | None], rates: dict[str, Estimate | None]) -> bytes:
    """Per arm the share of A's, B's and other answers after the transplant, with the interval of B's share."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(7.2, 0.62 * len(counts) + 1.2))
        for y, (arm, found) in enumerate(counts.items()):
            total = sum(found.values()) if found else 0
            estimate = rates.get(arm)
            if not found or not total or estimate is None:
                ax.text(0.01, y, "– no latents, or A never right", va="center", color="#777777", fontsize=9)
                continue
            left = 0.0
            for key, colour in (("B", ORANGE), ("A", BLUE), ("other", GREY)):
                share = found[key] / total
                ax.barh(y, share, left=left, color=colour, height=0.62)
                if share > 0.06:
                    ax.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center", color="white", weight="bold")
                left += share
            spread = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
            ax.errorbar(estimate.value, y, xerr=spread, color="black", capsize=3, lw=1.4)
            ax.text(1.01, y, f"n = {total}", va="center", color="#555555", fontsize=9)
        ax.set_yticks(range(len(counts)), list(counts), weight="bold")
        ax.set_ylim(len(counts) - 0.5, -0.5)
        ax.set_xlim(0, 1)
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        handles = [Rectangle((0, 0), 1, 1, fc=c) for c in (ORANGE, BLUE, GREY)]
        labels = ["B's answer (the donor's)", "A's answer", "another answer"]
        ax.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return png(figure)


def curves(
    runs: dict[str, list[dict[str, Any]]], panels: Sequence[tuple[str, str]], colours: dict[str, str]
) -> bytes | None:
    """Training curves: a panel per (metric, title) that any run logged; None where none did."""
    found = [(m, t) for m, t in panels if any(m in line for lines in runs.values() for line in lines)]
    if not found:
        return None
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=(3.7 * columns, 2.5 * rows), squeeze=False, layout="constrained"
        )
        for ax, (metric, title) in zip(grid.flat, found, strict=False):
            for name, lines in runs.items():
                points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
                if points:
                    x, y = map(np.asarray, zip(*points, strict=True))
                    ax.plot(x, y, color=colours[name], alpha=0.28, lw=1)
                    ax.plot(x, _smooth(y), color=colours[name], lw=2, label=name)
            ax.set_title(title)
        for ax in list(grid.flat)[len(found) :]:
            ax.axis("off")
        for ax in grid[-1]:
            ax.set_xlabel("optimizer step")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels) or 1)
        return png(figure)


def _smooth(y: np.ndarray, width: int = 5) -> np.ndarray:
    """Trailing mean over up to `width` points, so that no point knows its future."""
    total = np.cumsum(np.insert(y.astype(float), 0, 0.0))
    end = np.arange(1, len(y) + 1)
    start = np.maximum(0, end - width)
    return (total[end] - total[start]) / (end - start)


def dots(groups: dict[str, dict[str, Estimate | None]], colours: dict[str, str], axis: str) -> bytes:
    """Values with intervals: groups by name (rows), arms by colour. Arms without a value show “–”."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(7.2, 0.34 * sum(len(g) + 1 for g in groups.values()) + 0.9))
        y, ticks = 0, []
        for name, arms in groups.items():
            ticks.append((y + (len(arms) - 1) / 2, name))
            for arm, estimate in arms.items():
                if estimate is None:
                    ax.text(0, y, "  – not measured", va="center", color=colours[arm], fontsize=9)
                else:
                    spread = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
                    ax.errorbar(estimate.value, y, xerr=spread, fmt="o", color=colours[arm], capsize=3, ms=6)
                y += 1
            y += 1
        ax.set_yticks(*zip(*ticks, strict=True))
        ax.invert_yaxis()
        ax.axvline(0, color="#999999", lw=1)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(axis)
        names = list(dict.fromkeys(arm for arms in groups.values() for arm in arms))
        handles = [plt.Line2D([], [], marker="o", ls="", color=colours[n]) for n in names]
        ax.legend(handles, names, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))
        return png(figure)
