"""Names of what an evaluation measures, with what each means. Reports, tables and documentation read this list."""

from dataclasses import dataclass

from realvr.evaluate.statistics import Estimate


@dataclass(frozen=True)
class Metric:
    """key: name in evaluation.json. better: `up`, `down` or empty where neither is."""

    key: str
    title: str
    meaning: str
    better: str = ""


METRICS = (
    Metric("accuracy", "Accuracy", "Right answers; the answer must stand in exactly one <answer> block.", "up"),
    Metric("accuracy_lenient", "Accuracy, lenient", "Right answers, read wherever the text gives one.", "up"),
    Metric("answered", "Answered", "Completions from which an answer can be read strictly.", "up"),
    Metric("closed_span", "Closed span", "Completions with a closed latent span."),
    Metric(
        "strict_flip", "Strict correct flip", "Of all relevant edits: both answers right and the gold changed.", "up"
    ),
    Metric(
        "strict_flip_changed", "Strict correct flip, gold changed", "The same, of edits that changed the gold.", "up"
    ),
    Metric(
        "false_flip",
        "False flip",
        "Of edits that left the gold: the answer changed (never answering scores 0).",
        "down",
    ),
    Metric("distance_relevant", "Latent distance, relevant edit", "1 − cos of mean latents before and after.", "up"),
    Metric(
        "distance_irrelevant", "Latent distance, irrelevant edit", "The same where the edit concerns another object."
    ),
    Metric(
        "cos_roi", "Cosine latents–evidence", "Latents to the mean visual token of the boxes. Says nothing about use."
    ),
    Metric("p_right", "P(right answer)", "Probability of the right answer after the model's own latents.", "up"),
    Metric("drop_p/contrast/donor/1", "P(right) drop, top 1", "Loss when the top latent is another example's.", "up"),
    Metric(
        "drop_p/contrast/donor/2", "P(right) drop, top 2", "The same for the top two (by right − wrong readout).", "up"
    ),
    Metric("drop_p/contrast/donor/4", "P(right) drop, top 4", "The same for the top four.", "up"),
    Metric(
        "donor_answer",
        "Donor answer",
        "Image A with all of edited image B's latents: B's answer (A right before).",
        "up",
    ),
    Metric(
        "donor_margin_shift",
        "Donor margin shift",
        "Rise of log p(B's answer) − log p(A's answer) by B's latents.",
        "up",
    ),
)


def shown(estimate: Estimate | None, interval: bool = True) -> str:
    """`0.62 [0.55, 0.69] n=200`; “–” where nothing was measured. Small values keep their leading digits."""
    if estimate is None:
        return "–"
    digits = 5 if 0 < max(abs(estimate.value), abs(estimate.low), abs(estimate.high)) < 0.001 else 3
    value, low, high = (f"{v:.{digits}f}".replace("-", "−") for v in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}] n={estimate.n}" if interval else value
