"""pydantic's findings as one line: which file and field, what it was, what it should be."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from launch.config_files import FieldPath, Layers
from launch.errors import UserError, did_you_mean

SHOWN = 3


def user_error(error: ValidationError, model: type[BaseModel], layers: Layers) -> UserError:
    """One line out of a validation error; the first three findings, and how many more there are."""
    lines: list[str] = []
    seen: set[FieldPath] = set()
    for finding in error.errors(include_url=False):
        path = _field_path(finding, layers.values)
        if path in seen:  # other branches of a union
            continue
        seen.add(path)
        lines.append(f"{layers.origin(path)}: {_explain(finding, path, model)}")
    more = f" (and {len(lines) - SHOWN} more)" if len(lines) > SHOWN else ""
    return UserError("; ".join(lines[:SHOWN]) + more)


def field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every field of a model, blocks before their fields."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in blocks(info.annotation):
            yield from field_names(inner, f"{prefix}{name}.")


def blocks(annotation: Any) -> list[type[BaseModel]]:
    """Models inside an annotation: `X`, `X | None`, `tuple[X, ...]`, `Annotated[X | Y, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in blocks(part)]


def _field_path(finding: dict[str, Any], values: dict[str, Any]) -> FieldPath:
    """pydantic's location without the names of union branches that it mixes in."""
    path: list[str | int] = []
    at: Any = values
    absent = finding["type"] in ("missing", "extra_forbidden")
    for index, key in enumerate(finding["loc"]):
        inside = (isinstance(at, dict) and key in at) or (isinstance(at, list) and isinstance(key, int))
        if inside:
            at = at[key]
        if inside or (absent and index == len(finding["loc"]) - 1):
            path.append(key)
    return tuple(path)


def _explain(finding: dict[str, Any], path: FieldPath, model: type[BaseModel]) -> str:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    name = _dotted(path)
    if kind == "extra_forbidden":
        return f"{name} is unknown; {_nearest(path, model)}"
    if kind == "missing":
        return f"{name} is missing; {_wanted(path, model)}"
    if kind == "union_tag_not_found":
        return f"{name}.{context['discriminator'].strip(chr(39))} is missing; it selects the kind of block"
    if kind == "union_tag_invalid":
        tag = f"{name}.{context['discriminator'].strip(chr(39))}"
        return f"{tag} is {context['tag']!r}; it should be one of {context['expected_tags']}"
    if kind in ("model_type", "dict_type"):
        return f"{name} is {_short(value)}; it should be a block of `key: value` lines"
    message = finding["msg"].removeprefix("Value error, ")
    if kind in ("value_error", "assertion_error") and isinstance(value, dict | BaseModel):  # a rule between fields
        return f"{name}: {message}" if path else message
    wish = message.removeprefix("Input should be ")
    said = f"{name} is {_short(value)}; " + (f"it should be {wish}" if wish != message else message)
    if kind == "string_type" and isinstance(value, int | float):
        said += f" (quote it: '\"{value}\"')"
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")])
        said += f"; {hint}" if hint.startswith("did") else ""
    return said


def _nearest(path: FieldPath, model: type[BaseModel]) -> str:
    """Where an unknown key may have been meant: the same name in another block, or the nearest name in this one."""
    key = str(path[-1])
    elsewhere = [name for name in dict.fromkeys(field_names(model)) if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    siblings = [name for block in _models_at(path[:-1], model) for name in block.model_fields]
    return did_you_mean(key, siblings)


def _wanted(path: FieldPath, model: type[BaseModel]) -> str:
    """What a missing field is, from its docstring, and how to give it."""
    if any(isinstance(key, int) for key in path):
        return "give it in the file"
    for block in _models_at(path[:-1], model):
        info = block.model_fields.get(str(path[-1]))
        inner = blocks(info.annotation) if info is not None else []
        if inner:
            needed = [name for name, field in inner[0].model_fields.items() if field.is_required()]
            return f"it is a block with {', '.join(needed or inner[0].model_fields)}"
        if info is not None and info.description:
            text = " ".join(info.description.split())
            return f"it is: {text.rstrip('.')}; give it in the file or as {_dotted(path)}=VALUE"
    return f"give it in the file or as {_dotted(path)}=VALUE"


def _models_at(path: FieldPath, model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that the block at `path` may be; list indices and free keys stay in their block."""
    models = [model]
    for key in path:
        inner = [m for block in models if key in block.model_fields for m in blocks(block.model_fields[key].annotation)]
        models = inner or models
    return models


def _dotted(path: FieldPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "…"
