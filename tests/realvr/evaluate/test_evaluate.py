"""A whole evaluation on tiny checkpoints, and the report that is made of it."""

import base64
import csv
import io
import json
import re
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console

from launch.errors import UserError
from realvr.config import EvaluateSettings
from realvr.evaluate.evaluate import evaluate_checkpoint
from realvr.evaluate.metrics import METRICS, shown
from realvr.evaluate.provenance import checkpoint_digest
from realvr.evaluate.report import build_report, terminal_table
from realvr.evaluate.report_data import Arm, Expectation, ReportInputs, load_evaluation, paired_rows, read_metrics
from realvr.evaluate.report_demo import expectations, limits
from realvr.evaluate.statistics import Estimate, difference, proportion

LATENT = ("closed_span", "distance_relevant", "distance_irrelevant", "cos_roi", "p_right", "drop_p/contrast/donor/4")


def settings(path, latents):
    return EvaluateSettings.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "max_visual_tokens": 64},
            "latent": {"k": 4, "open": "forced" if latents else "free", "close": "forced"},
            "data": {"kind": "shapes", "size": 64, "seed": 5},
            "twins": {"kind": "shapes", "size": 64, "seed": 6},
            "n": 10, "twins_per_edit": 1, "engine": "hf", "max_new_tokens": 9, "bootstrap": 500,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def arms(tiny_demo, tmp_path_factory):
    """A checkpoint that opens no span and one that does, twice: four arms as in the demo."""
    root = tmp_path_factory.mktemp("evaluations")
    evaluate_checkpoint(settings(tiny_demo, latents=False), root / "plain")
    evaluate_checkpoint(settings(tiny_demo, latents=True), root / "latent")
    log = root / "metrics.jsonl"
    lines = [{"step": i, "reward/mean": 0.1 * i, "evidence/loss": None if i == 3 else 0.5} for i in range(1, 9)]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 8, "reward/mean": 0.9}]))
    names = ("base", "LVR-SFT", "LVR-RL", "ReaLVR")
    return tuple(
        Arm(name, root / ("plain" if name == "base" else "latent"), log if name in names[2:] else None)
        for name in names
    )


def test_a_model_without_spans_has_no_latent_metrics(arms):
    plain, latent = (load_evaluation(arm.name, arm.evaluation) for arm in arms[:2])
    assert plain.metrics["closed_span"].value == 0 and latent.metrics["closed_span"].value == 1
    for name in LATENT[1:]:
        assert plain.metrics[name] is None and latent.metrics[name].n > 0, name
    assert plain.pairs == [] and plain.raw["transplant_outcomes"] == []
    assert [m.key for m in METRICS] == list(plain.metrics)[: len(METRICS)]
    for evaluation in (plain, latent):
        assert evaluation.metrics["accuracy"].n == 10 and evaluation.metrics["strict_flip"].n == 4
        assert evaluation.metrics["false_flip"].n == 4 and evaluation.raw["provenance"]["seed"] == 0


def test_every_completion_and_intervention_is_an_item(arms):
    lines = [json.loads(line) for line in (arms[1].evaluation / "items.jsonl").read_text().splitlines()]
    count = {kind: sum(line["set"] == kind for line in lines) for kind in {line["set"] for line in lines}}
    assert count == {"validation": 10, "twins": 16, "replacement": 10, "transplant": 4}
    assert len(lines[-1]["answers"]) == 4 and set(lines[-1]["answers"]) == {"0", "1", "2", "4"}
    pair = load_evaluation("x", arms[1].evaluation).pairs[0]
    with Image.open(arms[1].evaluation / pair["images"][0]) as image:
        assert image.size == (64, 64)


@pytest.fixture(scope="module")
def report(arms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    measured = (*expectations(arms), Expectation("The moon is made of cheese", "no", False))
    inputs = ReportInputs("Title & <tag>", arms, seconds={"base": 61.2}, expectations=measured, limits=limits())
    return build_report(inputs, folder / "report.html")


def test_the_report_is_one_file_with_readable_pictures(report):
    page = report.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page) and "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert "<script" not in page and "Title &amp; &lt;tag&gt;" in page
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', page)
    assert len(pictures) == page.count("<img") == 6
    for data, alt in pictures:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.width > 500 and len(set(image.convert("L").resize((64, 64)).tobytes())) > 10
        assert len(alt) > 30
    assert page.index("Latent transplant") < page.index("<table")
    for text in ("What one seed does and does not show", "McNemar p", "checkpoint", "ReaLVR − LVR-RL", "61", "cheese"):
        assert text in page
    assert re.search(r"Donor answer.*?<td>–</td>", page, re.DOTALL)


def test_tables_beside_the_report(report, arms):
    with report.with_suffix(".csv").open(encoding="utf-8") as file:
        rows = {(r["metric"], r["arm"]): r for r in csv.DictReader(file)}
    assert len(rows) == len(METRICS) * 4
    assert rows["p_right", "base"]["value"] == "" and rows["p_right", "base"]["n"] == "0"
    want = load_evaluation("x", arms[1].evaluation).metrics["p_right"]
    assert float(rows["p_right", "LVR-SFT"]["value"]) == want.value
    document = json.loads(report.with_suffix(".json").read_text())
    assert (
        list(document["arms"]) == ["base", "LVR-SFT", "LVR-RL", "ReaLVR"] and document["paired"]["accuracy"]["p"] == 1
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(arms))
    assert "–" in (text := console.export_text()) and "Strict correct flip" in text and "n=10" in text


def test_paired_rows_pair_by_item(arms):
    first = load_evaluation("a", arms[0].evaluation)
    first.items["accuracy"] = {"x": 0.0, "y": 1.0, "z": 0.0, "only here": 1.0}
    second = replace(first, items={"accuracy": {"z": 1.0, "y": 1.0, "x": 1.0, "only there": 0.0}})
    ((metric, estimate, test),) = paired_rows(first, second)
    assert metric.key == "accuracy" and estimate == difference([1, 1, 1], [0, 1, 0]) and estimate.n == 3
    assert (test.only_first, test.only_second, test.n) == (2, 0, 3)


def test_expectations_say_what_came_out(arms):
    found = {e.text.split(":")[0]: e for e in expectations(arms)}
    assert found["LVR-RL"].met and found["LVR-RL"].measured == "0.475"  # mean of the last four − of the first three
    assert not found["The base model's accuracy is at least 0.84"].met
    without = expectations(tuple(replace(arm, metrics=None) for arm in arms[:2]))
    assert [e.met for e in without][2:] == [None] * 4 and without[3].measured == "–"
    assert "smoke" in limits(smoke=True)[0]


def test_a_repeated_step_counts_once(arms):
    lines = read_metrics(arms[2].metrics)
    assert [line["step"] for line in lines] == list(range(1, 9)) and lines[-1]["reward/mean"] == 0.9
    assert lines[-1]["evidence/loss"] == 0.5


def test_shown_numbers():
    assert shown(None) == "–"
    assert shown(proportion([True, True])) == "1.000 [0.342, 1.000] n=2"
    assert shown(Estimate(-0.0004, -0.0006, 0.0, 7), interval=False) == "−0.00040"


def test_errors_name_the_file(tmp_path, arms):
    with pytest.raises(UserError, match=r"evaluation.json: not a file of an evaluation"):
        load_evaluation("x", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{broken\n")
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read as JSON lines"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_the_digest_follows_the_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    before = checkpoint_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert before != checkpoint_digest(str(tmp_path)) and len(before) == 64
