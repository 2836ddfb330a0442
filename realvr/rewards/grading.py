"""Is an answer right? A grader by kind: option letters, mathematics, text. Unreadable is wrong, never a default."""

from collections.abc import Sequence
from dataclasses import dataclass

from realvr.rewards import worker
from realvr.rewards.answers import Kind, Mode, choice, extract, inner, normalise, plain
from realvr.rewards.workers import Call, shared


@dataclass(frozen=True)
class Verdict:
    """Whether the output is right, the answer read from it (None: none could be read), and why it is wrong."""

    correct: bool
    extracted: str | None
    reason: str = ""


def grade(
    output: str,
    gold: str,
    kind: Kind = "text",
    mode: Mode = "reward",
    options: Sequence[str] = (),
    limit_s: float = 5.0,
) -> Verdict:
    """Grade one completion against the gold answer.

    kind: `choice` compares option letters (gold: a letter, or the text of one of the options), `math` compares
    expressions by math-verify in a process that is killed after limit_s seconds, `text` compares normalised text.
    mode: see `answers.extract`. Raises ValueError for an unknown kind or mode.
    """
    if kind not in ("choice", "math", "text") or mode not in ("reward", "eval"):
        raise ValueError(f"unknown kind {kind!r} or mode {mode!r}")
    found = extract(output, kind, mode, options)
    if found.text is None:
        return Verdict(False, None, found.reason)
    wanted = inner(normalise(gold)).text or ""
    if kind == "choice":
        letter = choice(wanted, options)
        if letter.text is None:
            return Verdict(False, found.text, f"the gold answer {gold!r} names no option: {letter.reason}")
        same = found.text == letter.text
        return Verdict(same, found.text, "" if same else "another option")
    if kind == "math":
        same, reason = equal_maths(wanted, found.text, limit_s)
        return Verdict(same, found.text, reason)
    same = plain(wanted) != "" and plain(found.text) == plain(wanted)
    return Verdict(same, found.text, "" if same else "another text")


def equal_maths(gold: str, answer: str, limit_s: float) -> tuple[bool, str]:
    """Whether two expressions are equal, and why not; in a worker unless this is one."""
    if gold.strip() == answer.strip():
        return True, ""
    if worker.INSIDE:
        from realvr.rewards.maths import equal

        return equal(gold, answer)
    (outcome,) = shared().run([Call("realvr.rewards.maths.equal", {"gold": gold, "answer": answer}, limit_s)])
    return outcome.value if outcome.ok else (False, f"grading {outcome.status}: {outcome.reason}")
