"""The demo in small: every stage for a few steps, then the report; a second start finds everything done."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def demo(folder: Path) -> str:
    command = [sys.executable, "-m", "realvr.cli", "demo", "--smoke", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_smoke(tmp_path):
    demo(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 5
    assert not re.search(r'(?:src|href)="https?:', page), "the report must open offline"
    for arm in ("base", "sft", "grpo", "realvr"):
        found = json.loads((tmp_path / "evaluate" / arm / "evaluation.json").read_text())
        accuracy = found["metrics"]["accuracy"]
        assert accuracy["low"] <= accuracy["value"] <= accuracy["high"] and accuracy["n"] == 16
    for arm in ("grpo", "realvr"):
        lines = [json.loads(line) for line in (tmp_path / arm / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
        assert ("evidence/loss" in lines[0]) == (arm == "realvr")
        assert max(line["grpo/logprob_gap_max"] for line in lines) < 1e-3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report
    before = (tmp_path / "realvr" / "metrics.jsonl").stat().st_mtime_ns
    assert "done already" in demo(tmp_path)
    assert (tmp_path / "realvr" / "metrics.jsonl").stat().st_mtime_ns == before
