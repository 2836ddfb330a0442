"""Latent rollouts a second: vLLM with the plug-in, the batched loop with a prefill a sibling, and plain vLLM text.

    python -m tests.benchmarks.rollout [--json out.json] [--rounds 3] [--shapes real tiny]

All three decode the same prompts to the same ragged lengths on one thread. `hf loop` is the public way: every sibling's
prompt and picture are computed. `vllm text` is vLLM without the plug-in, no latents. Ratios are of CPU seconds, which a
busy machine does not distort; rounds alternate between the engines and the least of each counts.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from realvr.config import LatentSettings, ModelSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.families import get_family
from realvr.rollout import vllm_engine
from realvr.rollout.hf_engine import HfEngine, Row
from realvr.rollout.records import Sampling
from realvr.rollout.vllm_engine import VllmEngine

LATENT = LatentSettings(k=8, open="forced", close="forced")
OURS_ALONE = ("hf_overrides", "worker_cls", "scheduler_cls", "additional_config")


@dataclass(frozen=True)
class Shape:
    """One workload: pictures of `side`² pixels, `prompts` × `siblings` completions of `shortest`–`longest` tokens."""

    name: str
    hidden: int
    layers: int
    side: int
    prompts: int
    siblings: int
    shortest: int
    longest: int


REAL = Shape("real", hidden=256, layers=6, side=1420, prompts=4, siblings=8, shortest=16, longest=190)
TINY = Shape("tiny", hidden=128, layers=3, side=84, prompts=32, siblings=8, shortest=12, longest=12)


def build(shape: Shape, folder: Path) -> tuple[ModelSettings, list[Example]]:
    """A random Qwen2.5-VL of the shape's width and depth, and questions about noise pictures of its size."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    get_family("qwen2_5_vl").tiny(str(folder / "model"), "test", seed=0)
    config = AutoConfig.from_pretrained(folder / "model")
    text, heads = config.text_config, max(2, shape.hidden // 64)
    text.hidden_size, text.num_hidden_layers, text.intermediate_size = shape.hidden, shape.layers, 2 * shape.hidden
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 2)
    text.layer_types = ["full_attention"] * shape.layers
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    config.vision_config.out_hidden_size = shape.hidden
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "model")
    rng, examples = np.random.default_rng(0), []
    for i in range(shape.prompts):
        path = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (shape.side, shape.side, 3), dtype=np.uint8)).save(path)
        examples.append(Example(f"e{i}", (str(path),), "What colour is the circle?", "red"))
    return ModelSettings(path=str(folder / "model"), dtype="float32"), examples


class Vllm(VllmEngine):
    """The engine with each completion's length given; `plain` starts vLLM without anything of ours."""

    def __init__(self, model: ModelSettings, lengths: np.ndarray, plain: bool) -> None:
        self.lengths, self.plain = lengths, plain
        settings = RolloutSettings(gpus=0, engine_args={"max_num_seqs": lengths.size})
        made = vllm_engine.engine_args
        vllm_engine.engine_args = lambda *a: {k: v for k, v in made(*a).items() if not plain or k not in OURS_ALONE}
        try:
            super().__init__(model, LATENT, settings, seed=0)
        finally:
            vllm_engine.engine_args = made
        if plain:
            self.grammar = replace(self.grammar, latent=-1)  # plain text may hold any id, and none is a latent

    def _params(self, sampling: Sampling, seed: int, key: str) -> Any:
        params = super()._params(sampling, seed, key)
        example, sibling = map(int, key.split("-")[1:])
        params.max_tokens, params.ignore_eos, params.stop_token_ids = int(self.lengths[example, sibling]), True, []
        if self.plain:
            params.extra_args = params.seed = None  # seeds with chunked prefill stop plain vLLM on a CPU
        return params

    def _take(self, keys: Sequence[str]) -> dict[str, Any]:
        nothing = np.zeros((0, 1), np.float32), np.zeros(0, np.int64)
        return dict.fromkeys(keys, nothing) if self.plain else super()._take(keys)

    def run(self, examples: Sequence[Example], sampling: Sampling) -> int:
        self.reset_caches()  # as after a weight sync: every step of training starts cold
        return tokens_of(self.generate(examples, sampling, range(len(examples))))


class Loop(HfEngine):
    """The reference engine with each completion's length given."""

    def __init__(self, model: ModelSettings, lengths: np.ndarray) -> None:
        super().__init__(model, LATENT, RolloutSettings(gpus=0), seed=0)
        self.lengths = lengths
        self.ids = type(self.ids)(**{**asdict(self.ids), "eos": ()})

    def _group(self, example: Example, sampling: Sampling, seed: int) -> Any:
        self.left = list(self.lengths[seed])
        return super()._group(example, sampling, seed)

    def _extend(self, row: Row, *args: Any) -> None:
        if not row.tokens:
            self.left, row.length = self.left[1:], self.left[0]
        super()._extend(row, *args)
        if len(row.tokens) == row.length:
            row.finish = "length"

    def run(self, examples: Sequence[Example], sampling: Sampling) -> int:
        return tokens_of(self.generate(examples, sampling, range(len(examples))))


def tokens_of(groups: Sequence[Any]) -> int:
    return sum(len(r.tokens) for g in groups for r in g.rollouts)


def timed(run: Callable[[], int]) -> tuple[float, float, int]:
    """CPU seconds, wall seconds, tokens."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = run()
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def measure(shape: Shape, rounds: int, hf_rounds: int = 1) -> dict[str, Any]:
    """Rows by engine, and the two ratios."""
    with tempfile.TemporaryDirectory() as folder:
        model, examples = build(shape, Path(folder))
        lengths = np.random.default_rng(1).integers(shape.shortest, shape.longest + 1, (shape.prompts, shape.siblings))
        lengths[:, 0] = shape.longest
        sampling = Sampling(n=shape.siblings, temperature=1.0, max_new_tokens=shape.longest)
        engines = {"vllm latent": Vllm(model, lengths, plain=False), "vllm text": Vllm(model, lengths, plain=True)}
        prompt = engines["vllm latent"].builder.length(examples[0])
        for engine in engines.values():
            engine.run(examples, sampling)  # the first batch pays for lazy set-up
        times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                times[name].append(timed(lambda engine=engine: engine.run(examples, sampling)))
        for engine in engines.values():
            engine.close()
        loop = Loop(model, lengths)
        loop._group(examples[0], Sampling(n=1, max_new_tokens=2), 0)
        times["hf loop"] = [timed(lambda: loop.run(examples, sampling)) for _ in range(hf_rounds)]
    best = {name: min(rows) for name, rows in times.items()}
    if {tokens for _, _, tokens in best.values()} != {int(lengths.sum())}:
        raise RuntimeError(f"the engines made different numbers of tokens: {best}")
    rollouts = lengths.size
    return {
        "shape": asdict(shape) | {"prompt_tokens": prompt, "completion_tokens": int(lengths.sum())},
        "engines": {
            name: {"cpu_s": cpu, "wall_s": wall, "rollouts_per_cpu_s": rollouts / cpu, "tokens_per_cpu_s": tokens / cpu}
            for name, (cpu, wall, tokens) in best.items()
        },
        "faster_than_loop": best["hf loop"][0] / best["vllm latent"][0],
        "cost_over_text": best["vllm latent"][0] / best["vllm text"][0],
    }


def show(found: dict[str, Any]) -> None:
    shape = found["shape"]
    title = (
        f"{shape['name']}: {shape['prompts']} prompts of {shape['prompt_tokens']} tokens × {shape['siblings']}, "
        f"{shape['shortest']}–{shape['longest']} new tokens, d={shape['hidden']}, {shape['layers']} layers"
    )
    table = Table("engine", "CPU s", "wall s", "rollouts / CPU s", "tokens / CPU s", title=title)
    for name, row in found["engines"].items():
        table.add_row(
            name,
            f"{row['cpu_s']:.2f}",
            f"{row['wall_s']:.2f}",
            f"{row['rollouts_per_cpu_s']:.2f}",
            f"{row['tokens_per_cpu_s']:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"vllm latent: {found['faster_than_loop']:.1f}× the loop, {found['cost_over_text']:.2f}× the cost of plain text"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of the vLLM engines")
    parser.add_argument("--shapes", nargs="+", choices=["real", "tiny"], default=["real", "tiny"])
    options = parser.parse_args()
    results = []
    for name in options.shapes:
        results.append(measure(REAL if name == "real" else TINY, options.rounds))
        show(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
