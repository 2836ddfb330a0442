"""Evaluate one checkpoint: greedy answers, flips under edits, latent distance, replacement and transplant of latents.

Completions come from a rollout engine, interventions from a plain transformers model. A checkpoint that closes no span
has no latents: what concerns them is then absent, not zero.

Writes evaluation.json (estimates, origin), values.json (per metric and item), items.jsonl (every completion and
intervention), pairs.json and pictures/ (edit pairs for the report).
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.console import say
from launch.errors import UserError
from launch.files import write_json
from realvr.config import EvaluateSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.data.sources import open_source, open_twins
from realvr.data.twins import Twin
from realvr.evaluate.edits import picture_pairs, wrong_candidates
from realvr.evaluate.items import (
    Decoded,
    Values,
    decoded,
    item_record,
    replacement_values,
    transplant_values,
    twin_values,
    validation_values,
)
from realvr.evaluate.latents import replacement, transplant
from realvr.evaluate.metrics import METRICS, shown
from realvr.evaluate.probe import Probe
from realvr.evaluate.provenance import provenance
from realvr.rollout.records import RolloutEngine, Sampling

log = logging.getLogger(__name__)

STOP = "</answer>"


def run_evaluate(settings: EvaluateSettings, run: Any) -> None:
    """The job: evaluate `settings.model` into the run folder and print the table."""
    estimates = evaluate_checkpoint(settings, run.folder)
    for metric in METRICS:
        say(f"{metric.title:36s} {shown(estimates.get(metric.key))}")
    say(f"{run.folder / 'evaluation.json'}")


def evaluate_checkpoint(
    settings: EvaluateSettings, folder: Path, engine: RolloutEngine | None = None
) -> dict[str, Any]:
    """Evaluate and write everything into `folder`; returns metric → Estimate or None.

    engine: a running engine that holds the checkpoint's weights (it stays open); None starts the settings' own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = {"start": time.monotonic()}
    examples, twins = _read(settings)
    sides = [*examples, *(t.before for t in twins), *(t.after for t in twins)]
    read = _decode(settings, sides, engine)
    clock["decode"] = time.monotonic()
    first, second = len(examples), len(examples) + len(twins)
    plain, before, after = read[:first], read[first:second], read[second:]
    values = Values()
    validation_values(values, plain)
    twin_values(values, twins, before, after)
    records = [item_record("validation", d) for d in plain]
    for twin, *pair in zip(twins, before, after, strict=True):
        for when, d in zip(("before", "after"), pair, strict=True):
            records.append(item_record("twins", d, edit=twin.edit, relevant=twin.relevant, when=when))
    outcomes: dict[str, str] = {}
    pairs: list[dict[str, Any]] = []
    if settings.interventions.enabled:
        outcomes, pairs = _intervene(settings, folder, plain, _closed_pairs(twins, before, after), values, records)
    clock["interventions"] = time.monotonic()
    names = list(dict.fromkeys([*(m.key for m in METRICS), *values.by_metric]))
    estimates = {name: values.estimate(name, settings.bootstrap, settings.seed) for name in names}
    stamps = list(clock.items())
    seconds = {name: round(t - stamps[i][1], 2) for i, (name, t) in enumerate(stamps[1:])}
    write_json(folder / "values.json", values.by_metric)
    write_json(folder / "pairs.json", pairs)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / "items.jsonl").write_text(lines, encoding="utf-8")
    # Last: who finds it finds everything.
    write_json(folder / "evaluation.json", {
        "label": settings.label or settings.name,
        "metrics": {name: e.as_dict() if e else None for name, e in estimates.items()},
        "transplant_outcomes": list(outcomes.values()),
        "seconds": seconds,
        "provenance": provenance(settings),
    })  # fmt: skip
    return estimates


def _read(settings: EvaluateSettings) -> tuple[list[Example], list[Twin]]:
    source = open_source(settings.data)
    examples = [source[i] for i in range(min(settings.n, len(source)))]
    if not examples:
        raise UserError(
            f"data: the validation set {settings.data.path or settings.data.kind} has no examples; evaluate on one"
        )
    # A set's twins cycle through its four edits, relevant and irrelevant: eight pairs hold one of each.
    twins = open_twins(settings.twins, 8 * settings.twins_per_edit) if settings.twins else []
    return examples, twins


def _decode(settings: EvaluateSettings, examples: Sequence[Example], engine: RolloutEngine | None) -> list[Decoded]:
    """Greedy completions of all examples in one go, read."""
    penalty = settings.repetition_penalty
    sampling = Sampling(
        n=1, temperature=0.0, max_new_tokens=settings.max_new_tokens, stop=(STOP,),
        repetition_penalty=checkpoint_penalty(settings.model.path) if penalty is None else penalty,
    )  # fmt: skip
    own = engine is None
    running = start_engine(settings) if engine is None else engine
    try:
        groups = running.generate(examples, sampling, [settings.seed] * len(examples))
    finally:
        if own:
            running.close()
    return [decoded(g.example, g.rollouts[0]) for g in groups]


def start_engine(settings: EvaluateSettings) -> RolloutEngine:
    """The engine that `engine` names, with the weights of `model.path`; close it when done."""
    if settings.engine == "vllm":
        from realvr.rollout.vllm_engine import VllmEngine as Engine
    else:
        from realvr.rollout.hf_engine import HfEngine as Engine
    rollout = RolloutSettings(
        engine=settings.engine, engine_args=settings.engine_args, max_new_tokens=settings.max_new_tokens
    )
    return Engine(settings.model, settings.latent, rollout, settings.seed)


def checkpoint_penalty(path: str) -> float:
    """repetition_penalty of the checkpoint's generation_config.json; 1 where the checkpoint states none."""
    from transformers import GenerationConfig

    try:
        return float(GenerationConfig.from_pretrained(path).repetition_penalty or 1.0)
    except OSError:  # the file is optional
        return 1.0


def _closed_pairs(twins: Sequence[Twin], before: Sequence[Decoded], after: Sequence[Decoded]) -> list[Twin]:
    """Relevant twins with different golds whose two completions both closed a span."""
    return [
        t for t, a, b in zip(twins, before, after, strict=True)
        if t.relevant and t.before.answer.casefold() != t.after.answer.casefold() and a.closed and b.closed
    ]  # fmt: skip


def _intervene(
    settings: EvaluateSettings,
    folder: Path,
    plain: Sequence[Decoded],
    twins: Sequence[Twin],
    values: Values,
    records: list[dict[str, Any]],
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Replacement and transplant, added to `values` and `records`; gives transplant outcomes and pairs to show."""
    cfg, k = settings.interventions, settings.latent.k
    closed = [d for d in plain if d.closed][: cfg.n]
    if len(closed) < 2 and not twins:
        log.info("%s closes no latent span: nothing to replace or transplant", settings.model.path)
        return {}, []
    model = settings.model
    probe = Probe(model.path, model.dtype, model.min_visual_tokens, model.max_visual_tokens)
    if len(closed) >= 2:
        replaced = replacement(
            probe, [d.example for d in closed], wrong_candidates(closed, plain), k, cfg, settings.seed
        )
        replacement_values(values, replaced)
        records += [
            {"set": "replacement", **asdict(r), "drops": {"/".join(map(str, key)): v for key, v in r.drops.items()}}
            for r in replaced
        ]
    moved = transplant(probe, twins, k, cfg)
    records += [{"set": "transplant", **asdict(t)} for t in moved]
    outcomes = transplant_values(values, moved)
    kept = list(zip(twins, moved, strict=True))[: cfg.pictures]
    return outcomes, picture_pairs(probe, folder, kept, k, cfg.batch) if kept else []
