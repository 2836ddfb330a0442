"""The report of several checkpoints: one offline HTML file, pictures first, then the table, then what it may mean.

It reads evaluation folders (`realvr evaluate` writes them) and training logs, and computes nothing but paired
differences. What was not measured is shown as “–”.
"""

import base64
import csv
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from rich.table import Table
from rich.text import Text

from realvr.evaluate.metrics import Metric, shown
from realvr.evaluate.report_data import (
    Arm,
    Evaluation,
    ReportInputs,
    load_evaluation,
    paired_rows,
    read_metrics,
    table_rows,
)
from realvr.evaluate.sections import figures_of
from realvr.evaluate.statistics import Estimate, PairedTest


def build_report(inputs: ReportInputs, out: Path) -> Path:
    """Write `out` (HTML) and beside it the table as .json and .csv; returns `out`."""
    evaluations = [load_evaluation(arm.name, arm.evaluation) for arm in inputs.arms]
    rows = table_rows(evaluations)
    pair = evaluations[-2:] if len(evaluations) > 1 else []
    paired = paired_rows(*pair) if pair else []
    runs = {arm.name: lines for arm in inputs.arms if (lines := read_metrics(arm.metrics))}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": lambda e: shown(e, interval=False), "interval": _interval, "yaml": _yaml}
    template = environment.from_string(
        files("realvr.evaluate").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    )
    figures = [
        {**figure, "data": base64.b64encode(figure["png"]).decode()} for figure in figures_of(inputs, evaluations, runs)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    page = template.render(
        inputs=inputs, evaluations=evaluations, rows=rows, paired=paired, pair=[e.name for e in pair],
        figures=figures, written=datetime.now(UTC).isoformat(timespec="seconds"), provenance=_provenance(evaluations),
    )  # fmt: skip
    out.write_text(page, encoding="utf-8")
    write_tables(rows, paired, evaluations, inputs, out)
    return out


def write_tables(
    rows: Sequence[tuple[Metric, list[Estimate | None]]],
    paired: Sequence[tuple[Metric, Estimate, PairedTest | None]],
    evaluations: Sequence[Evaluation],
    inputs: ReportInputs,
    out: Path,
) -> None:
    """The table beside the report: .csv (a line a metric and arm) and .json (everything, with origin)."""
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["metric", "arm", "value", "low", "high", "n"])
        for metric, estimates in rows:
            for evaluation, e in zip(evaluations, estimates, strict=True):
                values = ["", "", "", 0] if e is None else [e.value, e.low, e.high, e.n]
                writer.writerow([metric.key, evaluation.name, *values])
    document = {
        "title": inputs.title,
        "arms": {e.name: {"metrics": e.raw["metrics"], "provenance": e.raw["provenance"]} for e in evaluations},
        "paired": {m.key: {**e.as_dict(), "p": t.p if t else None} for m, e, t in paired},
        "expectations": [vars(e) for e in inputs.expectations],
        "seconds": inputs.seconds,
    }
    out.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def terminal_table(arms: Sequence[Arm]) -> Table:
    """The table for a terminal (rich): metrics down, arms across, value with its 95 % interval."""
    evaluations = [load_evaluation(arm.name, arm.evaluation) for arm in arms]
    table = Table(title="value, n, [95 % interval]; “–” is not measured", title_justify="left", header_style="bold")
    table.add_column("")
    for evaluation in evaluations:
        table.add_column(evaluation.name, justify="right")
    for metric, estimates in table_rows(evaluations):
        cells = (f"{shown(e, interval=False)}  n={e.n}\n{_interval(e)}" if e else "–" for e in estimates)
        table.add_row(metric.title, *(Text(cell) for cell in cells))
    return table


def _interval(estimate: Estimate) -> str:
    return shown(estimate).split(" ", 1)[1].rsplit(" n=", 1)[0]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _provenance(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[str]]]:
    """Rows of the provenance table: what, per arm."""
    keys = list(dict.fromkeys(key for e in evaluations for key in e.raw["provenance"] if key != "settings"))
    return [(key, [_plain(e.raw["provenance"].get(key)) for e in evaluations]) for key in keys]


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
