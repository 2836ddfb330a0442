"""ViRL39K: a parquet file of questions with verifiable answers, and a folder of pictures beside it.

Columns: question, answer (in `\\boxed{}`), image (a list of paths, empty or null where there is no picture), qid,
source, category, PassRate_32BTrained, PassRate_7BBase. Tags may be missing or stand inside the question. The set does
not say how an answer is graded: a single letter among labelled options is a choice, what has a digit or a LaTeX
command is mathematics, the rest is text.
"""

import re
from dataclasses import replace
from typing import Literal

from realvr.data.examples import Example
from realvr.data.sources.rows import Row
from realvr.data.sources.table import Table, TableOptions

_CARRIED = ("category", "PassRate_32BTrained", "PassRate_7BBase")
_MATHS = re.compile(r"\d|\\[a-zA-Z]+|[=^_√π°]|^[+-]?[a-z]$")


class ViRL39KOptions(TableOptions):
    """`options` of the virl39k reader."""

    inner_tags: Literal["refuse", "number"] = "number"
    """`<image>` inside a question: write `[image 1]` there, or refuse the record; pictures come before the question."""
    boxed: bool = True
    """The answer is what stands in the last `\\boxed{}` of the answer field."""


class ViRL39K(Table):
    """The parquet file (or folder, or hub id) of the set; `image_root` is the folder that holds its `images/`."""

    usual = {"id": "qid", "images": "image"}

    @classmethod
    def options_model(cls) -> type[TableOptions]:
        return ViRL39KOptions

    def draft(self, row: Row) -> Example:
        example = super().draft(row)
        meta = {name: row.data[name] for name in _CARRIED if row.data.get(name) is not None}
        kind = self.options.kind or (example.kind if example.options else answer_kind(example.question, example.answer))
        return replace(example, kind=kind, meta=example.meta | meta)


def answer_kind(question: str, answer: str) -> Literal["text", "choice", "math"]:
    """How an answer without a declared kind is graded (see the module)."""
    if re.fullmatch(r"[A-J]", answer) and all(_labelled(question, letter) for letter in {"A", "B", answer}):
        return "choice"
    return "math" if _MATHS.search(answer) else "text"


def _labelled(question: str, letter: str) -> bool:
    return re.search(rf"(?:^|[\s(\[]){letter}\s*[.):\]、：．]", question) is not None
