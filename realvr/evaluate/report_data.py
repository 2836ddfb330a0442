"""What a report is made of: arms, their evaluation folders, training logs, tables and paired differences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from launch.errors import UserError
from realvr.evaluate.metrics import METRICS, Metric
from realvr.evaluate.pictures import Case
from realvr.evaluate.statistics import Estimate, PairedTest, difference, mcnemar

CURVES = (
    ("reward/mean", "Reward"),
    ("reward/accuracy", "Accuracy of rollouts"),
    ("reward/format", "Format of rollouts"),
    ("evidence/loss", "Evidence loss"),
    ("evidence/gap", "Evidence gap g"),
    ("evidence/gamma_mass", "Readout contrast γ, mass"),
    ("rollout/closed_span_rate", "Closed spans"),
    ("validation/accuracy", "Validation accuracy"),
)
PAIRED = ("accuracy", "strict_flip", "false_flip", "distance_relevant", "distance_irrelevant", "p_right",
          "drop_p/contrast/donor/1", "drop_p/contrast/donor/2", "drop_p/contrast/donor/4", "donor_answer",
          "donor_margin_shift")  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """A checkpoint: its name in the report, its evaluation folder, and its training run's metrics.jsonl (or None)."""

    name: str
    evaluation: Path
    metrics: Path | None = None


@dataclass(frozen=True)
class Expectation:
    """Something said beforehand, what was measured, and whether it came out (None: not measured)."""

    text: str
    measured: str
    met: bool | None


@dataclass(frozen=True)
class ReportInputs:
    """Arms in the order of the table; the last is compared with the one before it.

    lead: a paragraph under the title. seconds: wall-clock by stage. expectations: checked and shown as they came out.
    limits: paragraphs on what the numbers do and do not show.
    """

    title: str
    arms: tuple[Arm, ...]
    lead: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    expectations: tuple[Expectation, ...] = ()
    limits: tuple[str, ...] = ()
    pairs: int = 4


@dataclass(frozen=True)
class Evaluation:
    """An evaluation folder, read. metrics: by key. items: by metric key, {item id: value}."""

    name: str
    raw: dict[str, Any]
    metrics: dict[str, Estimate | None]
    items: dict[str, dict[str, float]]
    pairs: list[dict[str, Any]]
    folder: Path


def load_evaluation(name: str, folder: Path) -> Evaluation:
    """Read what `realvr evaluate` wrote; a missing or foreign file raises UserError."""
    found = {}
    for file in ("evaluation.json", "values.json", "pairs.json"):
        path = folder / file
        try:
            found[file] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: not a file of an evaluation ({error}); run `realvr evaluate` into {folder}"
            ) from error
    raw = found["evaluation.json"]
    metrics = {key: Estimate.from_dict(value) for key, value in raw["metrics"].items()}
    return Evaluation(name, raw, metrics, found["values.json"], found["pairs.json"], folder)


def read_metrics(path: Path | None) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl, one a step (a resumed run repeats steps: the last counts); none for None."""
    if path is None:
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error}); give a run's metrics.jsonl") from error
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        merged[line["step"]] = {**merged.get(line["step"], {}), **line}
    return [merged[step] for step in sorted(merged)]


def table_rows(evaluations: Sequence[Evaluation]) -> list[tuple[Metric, list[Estimate | None]]]:
    """Each metric with its estimate per arm, in the order of METRICS."""
    return [(metric, [e.metrics.get(metric.key) for e in evaluations]) for metric in METRICS]


def paired_rows(first: Evaluation, second: Evaluation) -> list[tuple[Metric, Estimate, PairedTest | None]]:
    """second − first over the items that both measured; right/wrong metrics also get McNemar's test."""
    out = []
    for metric in METRICS:
        a, b = first.items.get(metric.key, {}), second.items.get(metric.key, {})
        shared = sorted(a.keys() & b.keys())
        if metric.key not in PAIRED or not shared:
            continue
        before, after = [a[i] for i in shared], [b[i] for i in shared]
        binary = set(before) | set(after) <= {0.0, 1.0}
        estimate = difference(after, before)
        assert estimate is not None
        out.append((metric, estimate, mcnemar(after, before) if binary else None))
    return out


def cases(evaluations: Sequence[Evaluation]) -> list[Case]:
    """Edit pairs that any arm has pictures of, in the order of the set, one of each edit in turn."""
    by_id: dict[str, dict[str, dict[str, Any]]] = {}
    source: dict[str, tuple[Evaluation, dict[str, Any]]] = {}
    for evaluation in evaluations:
        for entry in evaluation.pairs:
            by_id.setdefault(entry["id"], {})[evaluation.name] = entry
            source.setdefault(entry["id"], (evaluation, entry))
    by_edit: dict[str, list[str]] = {}
    for name, (_, entry) in source.items():
        by_edit.setdefault(entry["edit"], []).append(name)
    turns = max((len(names) for names in by_edit.values()), default=0)
    ordered = [names[turn] for turn in range(turns) for names in by_edit.values() if turn < len(names)]
    found = []
    for name in ordered:
        evaluation, entry = source[name]
        pictures = []
        for file in entry["images"]:
            with Image.open(evaluation.folder / file) as image:
                pictures.append(image.convert("RGB"))
        arms = {e.name: by_id[name].get(e.name) for e in evaluations}
        gold = tuple(entry["gold"])
        found.append(
            Case(entry["edit"], entry["question"], gold, tuple(pictures), tuple(entry["boxes"]), entry["edited"], arms)
        )
    return found
