"""Readers of data sets, one file each, all giving sequences of Example."""

from collections.abc import Sequence
from importlib import import_module

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Example
from realvr.data.twins import Twin

Source = Sequence[Example]

_READERS = {
    "visual_cot": "VisualCot",
    "jsonl": "Jsonl",
    "table": "Table",
    "virl39k": "ViRL39K",
    "meta": "Meta",
}
_GENERATED = {"shapes": "Shapes", "digits": "Digits"}


def open_source(settings: SourceSettings, max_bad_records: int = 0) -> Source:
    """The data set that the settings name. Bad files raise UserError; bad records only beyond `max_bad_records`."""
    if settings.kind == "mixture":
        from realvr.data.mixture import Mixture

        return Mixture(settings, max_bad_records)
    module = import_module(f"realvr.data.sources.{settings.kind}")
    if settings.kind in _GENERATED:
        return getattr(module, _GENERATED[settings.kind])(settings)
    return getattr(module, _READERS[settings.kind])(settings, max_bad_records)


def open_twins(settings: SourceSettings, n: int) -> list[Twin]:
    """n counterfactual twins of a generated set; other sets have none (UserError)."""
    if settings.kind not in _GENERATED:
        raise UserError(f"data: kind {settings.kind} has no counterfactual twins; use {' or '.join(_GENERATED)}")
    return getattr(import_module(f"realvr.data.sources.{settings.kind}"), _GENERATED[settings.kind])(settings).twins(n)
