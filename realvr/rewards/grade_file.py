"""Grade a file of outputs: verdicts line by line, and where they differ from verdicts that are given."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from launch.errors import UserError
from realvr.data.sources.rows import JsonRows, Row
from realvr.rewards.answers import Kind, Mode
from realvr.rewards.grading import grade

_NAMES = {"output": ("output", "prediction", "completion"), "gold": ("gold", "answer")}


@dataclass(frozen=True)
class Graded:
    """rows: the file's records with `verdict`, `extracted`, `reason` and, where `correct` is given, `disagrees`."""

    rows: list[dict[str, Any]]

    @property
    def right(self) -> int:
        """Records that are right."""
        return sum(row["verdict"] for row in self.rows)

    @property
    def judged(self) -> int:
        """Records that bring a verdict."""
        return sum("disagrees" in row for row in self.rows)

    @property
    def disagreements(self) -> list[dict[str, Any]]:
        """Records whose verdict differs from the one they bring."""
        return [row for row in self.rows if row.get("disagrees")]

    @property
    def unread(self) -> dict[str, int]:
        """Why no answer could be read, with counts."""
        return dict(Counter(row["reason"] for row in self.rows if row["extracted"] is None).most_common())


def grade_file(path: Path, out: Path, kind: Kind | None = None, mode: Mode | None = None) -> Graded:
    """Grade every line of a JSON or JSON-lines file and write the verdicts to `out`.

    Fields: `output` (or `prediction`, `completion`; null and empty are outputs without an answer), `gold` (or
    `answer`), `kind` text | choice | math, `mode` reward | eval, `options`, `correct`. kind and mode given here stand
    in where a line has none; without either a line is graded as text in reward mode. A bad line raises UserError.
    """
    rows = JsonRows(str(path))
    done = []
    for row in rows:
        output, gold, chosen, how, options = _fields(row, kind or "text", mode or "reward")
        verdict = grade(output, gold, chosen, how, options)
        record = dict(row.data) | {"verdict": verdict.correct, "extracted": verdict.extracted, "reason": verdict.reason}
        if "correct" in row.data:
            record["disagrees"] = bool(row.data["correct"]) != verdict.correct
        done.append(record)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in done), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); name another file with --out") from error
    return Graded(done)


def summary(graded: Graded) -> Iterator[str]:
    """Lines for a terminal."""
    n, unread = len(graded.rows), sum(graded.unread.values())
    yield f"{graded.right} of {n} right ({graded.right / n:.1%}), {unread} without a readable answer"
    for reason, count in graded.unread.items():
        yield f"  {count} × {reason}"
    if graded.judged:
        yield f"{len(graded.disagreements)} of {graded.judged} given verdicts disagree"
        for row in graded.disagreements[:20]:
            said = {key: row.get(key) for key in ("id", "kind", "mode", "gold", "output", "prediction") if key in row}
            yield f"  here {'right' if row['verdict'] else 'wrong'}, given {row['correct']}: {json.dumps(said)[:160]}"


def _fields(row: Row, kind: str, mode: str) -> tuple[str, str, Any, Any, tuple[str, ...]]:
    found = {}
    for name, usual in _NAMES.items():
        column = next((c for c in usual if c in row.data), None)
        if column is None:
            raise UserError(
                f"{row.where}: {name} is missing; a line has output, gold, and may have kind, mode, options"
            )
        found[name] = row.data[column]
    output = "" if found["output"] is None else found["output"]
    gold = json.dumps(found["gold"]) if isinstance(found["gold"], bool | int | float) else found["gold"]
    kind, mode = row.data.get("kind", kind), row.data.get("mode", mode)
    if not isinstance(output, str) or not isinstance(gold, str):
        raise UserError(f"{row.where}: output and gold should be texts, not {output!r} and {gold!r}; mend the line")
    for name, value, allowed in (("kind", kind, get_args(Kind)), ("mode", mode, get_args(Mode))):
        if value not in allowed:
            raise UserError(f"{row.where}: {name} is {value!r}; it should be one of {', '.join(allowed)}")
    options = row.data.get("options") or ()
    if not isinstance(options, list | tuple) or not all(isinstance(o, str) for o in options):
        raise UserError(f"{row.where}: options are {options!r}; they should be a list of texts; mend the line")
    correct = row.data.get("correct")
    if "correct" in row.data and not isinstance(correct, bool):
        raise UserError(f"{row.where}: correct is {correct!r}; it should be true or false, or absent; mend the line")
    return output, gold, kind, mode, tuple(options)
