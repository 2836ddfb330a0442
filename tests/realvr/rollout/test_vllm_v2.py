"""The adapter for model runner V2 (what GPUs use), through Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_v2_equals_transformers(fluent25: Path, tmp_path: Path) -> None:
    """Greedy, chunked prefill, sampling by seed, preemption: one engine in a process of its own."""
    command = [sys.executable, "-m", "tests.realvr.rollout.v2_child", str(fluent25), str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert child.returncode == 0 and lines, child.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    print(found)
    assert found["stats"]["runner"] == "v2"
    for one in found["greedy"].values():
        assert one["tokens"] and one["latents"] <= 1e-4 and one["logprobs"] <= 1e-5 and one["latent_count"] >= 8
    assert max(p for p, _ in found["replay"]) <= 1e-5
    assert max(z for _, z in found["replay"]) <= 1e-4
    assert found["distinct"] == len(found["replay"])
    assert found["resumed"] >= 2
    assert found["repeats"]
