"""From completions to items (one record each), and from items to estimates."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from launch.errors import UserError
from realvr.data.examples import Example
from realvr.data.twins import Twin
from realvr.evaluate import statistics
from realvr.evaluate.latents import Replaced, Transplanted
from realvr.evaluate.statistics import Estimate
from realvr.families.base import END, LATENT, START
from realvr.rewards.answers import plain
from realvr.rewards.grading import grade
from realvr.rollout.records import Rollout

_SPAN = re.compile(re.escape(START) + f"({re.escape(LATENT)})+.*?" + re.escape(END), re.DOTALL)


@dataclass(frozen=True)
class Decoded:
    """One greedy completion, read. strict, lenient: the answer, or None where none can be read.

    mean_latent: [d], mean over all latents of its spans; None without a closed span.
    """

    example: Example
    text: str
    strict: str | None
    lenient: str | None
    right: bool
    right_lenient: bool
    closed: bool
    mean_latent: np.ndarray | None

    @property
    def said(self) -> str | None:
        """The lenient answer in the form in which two answers are compared."""
        return None if self.lenient is None else plain(self.lenient)


def decoded(example: Example, rollout: Rollout) -> Decoded:
    """Read one completion."""
    strict, lenient = (
        grade(rollout.text, example.answer, example.kind, mode, example.options) for mode in ("reward", "eval")
    )
    closed = _SPAN.search(rollout.text) is not None
    mean = np.asarray(rollout.latents, dtype=np.float64).mean(0) if closed else None
    return Decoded(
        example, rollout.text, strict.extracted, lenient.extracted, strict.correct, lenient.correct, closed, mean
    )


def cosine_distance(a: np.ndarray, b: np.ndarray) -> float:
    """1 − cos of two vectors."""
    return float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


class Values:
    """What was measured, item by item: metric → {item id: value}. clusters: item id → what must be resampled whole."""

    def __init__(self) -> None:
        self.by_metric: dict[str, dict[str, float]] = {}
        self.clusters: dict[str, str] = {}

    def add(self, metric: str, item: str, value: float | bool, cluster: str) -> None:
        """Record one value; an item has one value a metric."""
        values = self.by_metric.setdefault(metric, {})
        if item in values:
            raise UserError(f"evaluation: record {item} occurs twice ({metric}); ids must be unique: rename one")
        values[item] = float(value)
        self.clusters[item] = cluster

    def estimate(self, metric: str, resamples: int, seed: int) -> Estimate | None:
        """Share (all values 0 or 1) or mean with its interval; None where nothing was measured."""
        values = self.by_metric.get(metric, {})
        x = np.array(list(values.values()))
        clusters = [self.clusters[item] for item in values]
        if set(x.tolist()) <= {0.0, 1.0} and not metric.startswith(CONTINUOUS):
            return statistics.rate(x.astype(bool), clusters, resamples, seed)
        return statistics.mean(x, clusters, resamples, seed)


CONTINUOUS = ("distance", "p_right", "drop_", "donor_margin", "cos_")


def validation_values(values: Values, items: Sequence[Decoded]) -> None:
    """Accuracy (strict, lenient), answered and closed-span rate; questions about one image are one cluster."""
    for d in items:
        cluster = d.example.images[0] if d.example.images else d.example.id
        add = partial(values.add, item=d.example.id, cluster=cluster)
        add("accuracy", value=d.right)
        add("accuracy_lenient", value=d.right_lenient)
        add("answered", value=d.strict is not None)
        add("closed_span", value=d.closed)


def twin_values(values: Values, twins: Sequence[Twin], before: Sequence[Decoded], after: Sequence[Decoded]) -> None:
    """Flips and latent distances; every name also with `/edit`. A distance needs a closed span in both completions.

    strict_flip: over relevant edits, both strictly right and the gold changed; strict_flip_changed: over those that
    changed the gold. false_flip: over all edits that left the gold, whether the (lenient) answer changed.
    """
    for twin, a, b in zip(twins, before, after, strict=True):
        changed = twin.before.answer.casefold() != twin.after.answer.casefold()
        found: dict[str, float] = {}
        if twin.relevant:
            found["strict_flip"] = a.right and b.right and changed
        if twin.relevant and changed:
            found["strict_flip_changed"] = a.right and b.right
        if not changed:
            found["false_flip"] = a.said != b.said
        if a.mean_latent is not None and b.mean_latent is not None:
            name = "distance_relevant" if twin.relevant else "distance_irrelevant"
            found[name] = cosine_distance(a.mean_latent, b.mean_latent)
        for metric, value in found.items():
            values.add(metric, twin.before.id, value, twin.before.id)
            values.add(f"{metric}/{twin.edit}", twin.before.id, value, twin.before.id)


def replacement_values(values: Values, items: Sequence[Replaced]) -> None:
    """Probability of the right answer and what it loses: drop_p and drop_logp by order/replacement/k."""
    for item in items:
        add: Callable[..., None] = partial(values.add, item=item.id, cluster=item.image)
        add("p_right", value=np.exp(item.logp))
        if item.cos_roi is not None:
            add("cos_roi", value=item.cos_roi)
        for (order, name, k), (lost_p, lost_logp) in item.drops.items():
            add(f"drop_p/{order}/{name}/{k}", value=lost_p)
            add(f"drop_logp/{order}/{name}/{k}", value=lost_logp)


def transplant_values(values: Values, items: Sequence[Transplanted]) -> dict[str, str]:
    """Donor-answer rate (pairs whose A was right) and margins by number of latents; the full transplant has no suffix.

    Returns whose answer came out of the full transplant (A, B, other) by pair, over the pairs of the rate.
    """
    outcomes = {}
    for item in items:
        full = max(item.answers)
        for k, margin in item.margins.items():
            values.add(f"donor_margin/{k}", item.id, margin, item.id)
        values.add("donor_margin_shift", item.id, item.margins[full] - item.margins[0], item.id)
        if item.whose(0) != "A":
            continue
        outcomes[item.id] = item.whose(full)
        for k in item.answers:
            values.add(f"donor_answer/{k}", item.id, item.whose(k) == "B", item.id)
        values.add("donor_answer", item.id, outcomes[item.id] == "B", item.id)
    return outcomes


def item_record(kind: str, d: Decoded, **more: Any) -> dict[str, Any]:
    """One completion as a line of items.jsonl."""
    return {
        "set": kind,
        "id": d.example.id,
        "question": d.example.question,
        "gold": d.example.answer,
        "answer": d.strict,
        "answer_lenient": d.lenient,
        "right": d.right,
        "right_lenient": d.right_lenient,
        "closed": d.closed,
        "text": d.text,
        **more,
    }
