"""Configuration files: the YAML dialect, `extends`, dotted overrides, and where every value came from.

The dialect is YAML 1.2's core schema: `1e-5` is a number, `on`, `off`, `yes` and `12:30` are strings, a key given twice
is an error. PyYAML alone follows YAML 1.1 and gets each of these wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from launch.errors import UserError, did_you_mean

FieldPath = tuple[str | int, ...]

_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict] = {}


for _tag, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class Layers:
    """Merged values and the place each came from (`configs/rl.yaml:12` or `override 'latent.k=4'`)."""

    top: str
    """The file that was asked for: the place of values that are missing."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[FieldPath, str] = field(default_factory=dict)

    def origin(self, path: FieldPath) -> str:
        """Where the value at `path`, or the nearest block above it, was set."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return self.top

    def put(self, path: FieldPath, value: Any, origins: dict[FieldPath, str]) -> None:
        """Set a value; mappings merge into mappings, everything else (lists too) replaces."""
        block = self.values
        for key in path[:-1]:
            block = block[key]
        if isinstance(value, dict) and (not path or isinstance(block.get(path[-1]), dict)):
            self.origins.update({path: origins[path]} if path in origins else {})
            for key, item in value.items():
                self.put((*path, key), item, origins)
            return
        block[path[-1]] = value
        self.origins = {known: place for known, place in self.origins.items() if known[: len(path)] != path}
        self.origins |= {known: place for known, place in origins.items() if known[: len(path)] == path}


def read_layers(path: str | Path, overrides: Sequence[str] = ()) -> Layers:
    """Read a file, the files it extends (nearest wins) and the overrides (last wins).

    Raises:
        UserError: a file that is missing, is no YAML mapping, extends itself; an override that is not `a.b=VALUE`.
    """
    layers = Layers(top=str(path))
    for file, values, lines in reversed(_chain(Path(path))):
        values.pop("extends", None)
        layers.put((), values, {at: f"{file}:{line}" for at, line in lines.items()})
    for text in overrides:
        _apply_override(layers, text)
    return layers


def to_yaml(values: Any, one_line: bool = False) -> str:
    """YAML text that `read_layers` reads back as the same values."""
    if one_line:
        text = yaml.dump(
            values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True
        )
        return text.removesuffix("...\n").strip()
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def from_yaml(text: str) -> Any:
    """Values of YAML text in the dialect of the configuration files.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    return yaml.load(text, Loader=_Loader)


def _chain(path: Path) -> list[tuple[Path, dict[str, Any], dict[FieldPath, int]]]:
    """The file and the files it extends, nearest first: path, values, lines."""
    chain: list[tuple[Path, dict[str, Any], dict[FieldPath, int]]] = []
    said_by = ""
    while True:
        if path.resolve() in [file.resolve() for file, _, _ in chain]:
            circle = " → ".join([*(str(file) for file, _, _ in chain), str(path)])
            raise UserError(f"{said_by}: extends goes in a circle: {circle}")
        if not path.is_file():
            raise UserError(_missing(path, said_by))
        values, lines = _read_file(path)
        chain.append((path, values, lines))
        parent = values.get("extends")
        if parent is None:
            return chain
        said_by = f"{path}:{lines['extends',]}"
        if not isinstance(parent, str):
            raise UserError(f"{said_by}: extends is {parent!r}; it should be the path of one YAML file")
        path = path.parent / parent


def _missing(path: Path, said_by: str) -> str:
    where = f"{said_by}: extends" if said_by else "configuration file"
    if path.exists():
        return f"{where} '{path}' is a folder; it should be a YAML file"
    folder = path.parent
    if not folder.is_dir():
        return f"{where} '{path}' does not exist; there is no folder '{folder}'"
    files = [str(folder / file.name) for file in sorted(folder.glob("*.y*ml")) if file.is_file()]
    return f"{where} '{path}' does not exist; {did_you_mean(str(path), files) if files else 'no YAML file is there'}"


def _read_file(path: Path) -> tuple[dict[str, Any], dict[FieldPath, int]]:
    """A file's values and the line of each."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        lines: dict[FieldPath, int] = {}
        if node is not None:
            _note_lines(node, (), lines, path)
        values = {} if node is None else loader.construct_document(node)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_yaml_place(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}; it should hold `key: value` lines")
    return values, lines


def _yaml_place(error: yaml.YAMLError) -> str:
    """`:7: problem` out of PyYAML's multi-line message."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return (f":{mark.line + 1}: column {mark.column + 1}" if mark else "") + f": is no valid YAML: {problem}"


def _note_lines(node: yaml.Node, at: FieldPath, lines: dict[FieldPath, int], file: Path, above: tuple = ()) -> None:
    if node in above:
        raise UserError(f"{file}:{node.start_mark.line + 1}: an alias refers to the block that it stands in")
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*at, index] = item.start_mark.line + 1
            _note_lines(item, (*at, index), lines, file, above)
    if not isinstance(node, yaml.MappingNode):
        return
    mine: dict[str, int] = {}
    for key, item in node.value:
        line = key.start_mark.line + 1
        if key.value in mine:
            raise UserError(f"{file}:{line}: '{key.value}' was given before, in line {mine[key.value]}; keep one")
        mine[key.value] = line
        lines[*at, key.value] = line
        _note_lines(item, (*at, key.value), lines, file, above)


def _apply_override(layers: Layers, text: str) -> None:
    name, equals, value_text = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise UserError(f"override '{text}' should look like a.b=VALUE, for example checkpoint.every=10")
    if keys == ("extends",):
        raise UserError(f"override '{text}': extends belongs into a file")
    try:
        value = from_yaml(value_text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise UserError(f"override '{text}': the value is no valid YAML ({problem}); quote it") from error
    origin = f"override '{text}'"
    block = layers.values
    for depth, key in enumerate(keys[:-1]):
        if block.get(key) is None:  # absent, or `lora: null` in the file and `model.lora.r=4` here
            block[key] = {}
            layers.origins[keys[: depth + 1]] = origin
        inner = block[key]
        if not isinstance(inner, dict):
            what = f"{'.'.join(keys[: depth + 1])} is {inner!r}, not a block"
            raise UserError(f"override '{text}': {what}; override it as a whole")
        block = inner
    origins: dict[FieldPath, str] = {keys: origin}
    if isinstance(value, dict):
        origins |= {(*keys, inner): origin for inner in value}
    layers.put(keys, value, origins)
