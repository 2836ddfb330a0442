"""Which figures a report has, with captions and texts for readers who cannot see them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from realvr.evaluate import figures, pictures
from realvr.evaluate.metrics import shown
from realvr.evaluate.report_data import CURVES, Evaluation, ReportInputs, cases
from realvr.evaluate.statistics import Estimate

TOPS = (1, 2, 4, 8)


def figures_of(
    inputs: ReportInputs, evaluations: Sequence[Evaluation], runs: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Figures in reading order, each with section, title, caption, alt and png bytes."""
    colours = {e.name: figures.ARMS[i % len(figures.ARMS)] for i, e in enumerate(evaluations)}
    latent = [e.name for e in evaluations if e.pairs]
    shown_cases = cases(evaluations)[: 2 * inputs.pairs]
    found: list[dict[str, Any]] = []
    if latent:
        found += [
            _transplant_cases(shown_cases[: inputs.pairs + 2], latent),
            _transplant_bars(evaluations),
            _edit_pairs(shown_cases[: inputs.pairs], latent),
        ]
    found += [f for f in (_distances(evaluations, colours), _drops(evaluations, colours)) if f]
    drawn = figures.curves(runs, CURVES, colours)
    if drawn:
        last = [f"{name} ended after step {lines[-1]['step']}" for name, lines in runs.items()]
        found.append(
            {
                "title": "Training: reward and evidence",
                "caption": "Thin: every optimizer step. Thick: mean of the last five. An arm trained without the "
                "evidence loss has no evidence curves.",
                "alt": f"Training curves by optimizer step. {'; '.join(last)}.",
                "png": drawn,
            }
        )
    return found


def _transplant_cases(found: Sequence[pictures.Case], arms: Sequence[str]) -> dict[str, Any]:
    return {
        "title": "Latent transplant: image A answered with the latents of image B",
        "caption": "B is A after one edit that changes the answer. The prompt holds image A throughout; only "
        "the latents are exchanged. Blue: A's answer comes out, orange: B's, grey: another. “–”: the arm closed no "
        "span there. "
        "The first pairs of the set, one of each edit in turn, not chosen by outcome.",
        "alt": " ".join(_say(case, arms) for case in found),
        "png": pictures.transplant_cases(found, arms),
    }


def _say(case: pictures.Case, arms: Sequence[str]) -> str:
    said = []
    for arm in arms:
        entry = case.arms.get(arm)
        answers = entry["transplant"]["answers"] if entry else {}
        text = answers.get(max(answers, key=int, default="0"), "–")
        said.append(f"{arm} says {text[:20] or 'nothing'}")
    return f"{case.question} A {case.gold[0]}, B {case.gold[1]}: with B's latents {', '.join(said)}."


def _transplant_bars(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    counts: dict[str, dict[str, int] | None] = {}
    for e in evaluations:
        tally = Counter(e.raw["transplant_outcomes"])
        counts[e.name] = {key: tally[key] for key in ("A", "B", "other")} if tally else None
    rates = {e.name: e.metrics.get("donor_answer") for e in evaluations}
    return {
        "title": "Whose answer comes out",
        "caption": "All pairs whose answer A the model gets right with its own latents, answered with all of B's. "
        "The whisker is the 95 % interval of B's share.",
        "alt": "Share of B's answers: " + "; ".join(f"{name} {shown(rate)}" for name, rate in rates.items()) + ".",
        "png": figures.transplant_bars(counts, rates),
    }


def _edit_pairs(found: Sequence[pictures.Case], arms: Sequence[str]) -> dict[str, Any]:
    return {
        "title": "Edit pairs: where latents point and what reads them",
        "caption": "Left: the image with the question's box (solid) and the edit (dotted). Per arm: cosine of the mean "
        "latent to every visual token (light is near; one scale for both images of a pair), and each latent's readout, "
        "the attention it gets from the right answer (blue) and from the other image's answer (orange), averaged over "
        "layers and heads. Above the bars: what the model says with its own latents.",
        "alt": f"{len(found)} edit pairs with boxes, similarity maps and readout bars for {', '.join(arms)}.",
        "png": pictures.edit_pairs(found, arms),
    }


def _distances(evaluations: Sequence[Evaluation], colours: dict[str, str]) -> dict[str, Any] | None:
    groups = {
        "relevant edit": {e.name: e.metrics.get("distance_relevant") for e in evaluations},
        "irrelevant edit": {e.name: e.metrics.get("distance_irrelevant") for e in evaluations},
    }
    return _dots(
        groups, colours, "How far latents move under an edit", "1 − cos of mean-pooled latents",
        "An edit of the object asked about should move them, an edit of another object should not.",
    )  # fmt: skip


def _drops(evaluations: Sequence[Evaluation], colours: dict[str, str]) -> dict[str, Any] | None:
    groups: dict[str, dict[str, Estimate | None]] = {}
    for top in TOPS:
        key = f"drop_p/contrast/donor/{top}"
        if any(e.metrics.get(key) for e in evaluations):
            groups[f"top {top} replaced"] = {e.name: e.metrics.get(key) for e in evaluations}
    return _dots(
        groups, colours, "What the right answer loses when latents are replaced", "drop of P(right answer)",
        "The latents that the right answer reads more than wrong ones are replaced by another example's.",
    )  # fmt: skip


def _dots(
    groups: dict[str, dict[str, Estimate | None]], colours: dict[str, str], title: str, axis: str, caption: str
) -> dict[str, Any] | None:
    measured = {a for arms in groups.values() for a, e in arms.items() if e is not None}
    if not measured:
        return None
    kept = {name: {a: e for a, e in arms.items() if a in measured} for name, arms in groups.items()}
    rows = "; ".join(f"{name}, {a}: {shown(e)}" for name, arms in kept.items() for a, e in arms.items())
    return {
        "title": title,
        "caption": caption + " Whiskers: 95 % interval.",
        "alt": f"{axis}. {rows}.",
        "png": figures.dots(kept, colours, axis),
    }
