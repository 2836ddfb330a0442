"""Counterfactual twins: one example before and after an edit of its image."""

from dataclasses import dataclass

from realvr.data.examples import Example


@dataclass(frozen=True)
class Twin:
    """`before` and `after` share the question; pixels outside the edited boxes are identical.

    edit: `recolour`, `remove`, `reshape` or `swap`. relevant: the edit changes the answer.
    """

    edit: str
    relevant: bool
    before: Example
    after: Example
