"""Model runner V2 on a CPU: its Triton kernels run in Triton's interpreter. A process of its own, see test_vllm_v2.

usage: python -m tests.realvr.rollout.v2_child <checkpoint> <folder for pictures>   → one JSON line of gaps
"""

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton.backends import backends


class Driver:
    """vLLM asks Triton's drivers whether one is active; the interpreter needs nothing else of it."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)


def padded(example: Any, words: int) -> Any:
    """The example with a question longer by so many tokens."""
    return replace(example, question=example.question + " a" * words)


def main(checkpoint: Path, folder: Path) -> None:
    from realvr.config import RolloutSettings
    from realvr.rollout.hf_engine import HfEngine
    from realvr.rollout.records import Sampling
    from realvr.rollout.vllm_engine import VllmEngine
    from tests.realvr.rollout.world import FORCED, FREE, Replay, examples, gap, model_settings

    asked = examples(folder, 3)
    # Overlapped scheduling is what GPUs run by default: tokens are then known to the host one step late.
    scarce = {
        "async_scheduling": True,
        "num_gpu_blocks_override": 9,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "max_model_len": 256,
    }
    settings = RolloutSettings(gpus=0, engine_args=scarce)
    engine = VllmEngine(model_settings(checkpoint), FREE, settings, seed=0)
    reference = HfEngine(model_settings(checkpoint), FREE, settings, seed=0)
    found = {"stats": engine.llm.collective_rpc("latent_stats")[0], "greedy": {}}
    for name, latent in (("free", FREE), ("forced", FORCED)):
        engine.set_latent(latent)
        reference.latent = latent
        greedy = Sampling(n=1, temperature=0.0, max_new_tokens=18)
        both = [e.generate(asked, greedy, [0] * len(asked)) for e in (engine, reference)]
        found["greedy"][name] = vars(gap(*both, engine.grammar.end))
    # All six siblings reach the end of a block in the middle of their span, and there are not blocks enough for all.
    latent = FORCED.model_copy(update={"k": 14})
    engine.set_latent(latent)
    padding = next(n for n in range(32) if (engine.builder.length(padded(asked[0], n)) + 8) % 32 == 0)
    replay, sampling = Replay(checkpoint, latent), Sampling(n=6, temperature=1.0, max_new_tokens=24)
    groups = engine.generate([padded(asked[0], padding)], sampling, [1])
    found["replay"] = [replay(g.example, r, sampling.temperature) for g in groups for r in g.rollouts]
    found["distinct"] = len({tuple(r.tokens) for g in groups for r in g.rollouts})
    found["resumed"] = engine.llm.collective_rpc("latent_stats")[0]["resumed"]
    again = engine.generate([padded(asked[0], padding)], replace(sampling, n=2), [1])
    found["repeats"] = all(
        a.tokens.tolist() == b.tokens.tolist() for a, b in zip(again[0].rollouts, groups[0].rollouts, strict=False)
    )
    engine.close()
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
