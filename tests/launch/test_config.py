"""Configuration: what is read, what wins, and the one line that a mistake gets."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from launch.config import Settings, describe, dump_config, load_config, load_settings
from launch.config_files import from_yaml, to_yaml
from launch.errors import UserError
from tests.launch import toy


class Circle(Settings):
    kind: Literal["circle"] = "circle"
    radius: float = Field(gt=0)
    """Radius."""


class Square(Settings):
    kind: Literal["square"] = "square"
    side: int = Field(default=2, ge=1)
    """Side."""


class Adapter(Settings):
    rank: int = Field(default=16, ge=1)
    """Rank."""


class Model(Settings):
    path: str
    """Where the weights are. A folder."""
    adapter: Adapter | None = None
    """Adapters."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights."""


class Example(Settings):
    model: Model
    shape: Annotated[Circle | Square, Field(discriminator="kind")] = Square(side=3)
    """A union chosen by kind."""
    sizes: tuple[int, ...] = (1, 2)
    """A list."""
    parts: tuple[Adapter, ...] = ()
    """A list of blocks."""
    extra: dict[str, object] = Field(default_factory=dict)
    """Free keys."""
    lr: float = Field(default=1e-3, gt=0, lt=1)
    """Rate."""
    amount: int | Literal["all"] = "all"
    """A number or all."""

    @model_validator(mode="after")
    def _rule(self) -> "Example":
        if self.lr == 0.5:
            raise ValueError("lr may not be 0.5 with this model; use 0.4")
        return self


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)

    write(a="model: {path: x}\n")
    return write


def load(*overrides: str, file: str = "a.yaml") -> Example:
    return load_settings(Example, file, overrides)


def refusal(*overrides: str, file: str = "a.yaml") -> str:
    with pytest.raises(UserError) as caught:
        load(*overrides, file=file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_extends_several_levels_and_the_nearest_wins(files, tmp_path):
    (tmp_path / "sub").mkdir()
    files(
        base="model: {path: base, dtype: float32}\nsizes: [1, 2, 3]\nlr: 1e-2\n", middle="extends: base.yaml\nlr: 0.2\n"
    )
    (tmp_path / "sub" / "top.yaml").write_text("extends: ../middle.yaml\nmodel: {path: top}\nsizes: [9]\n")
    got = load("model.adapter.rank=4", file="sub/top.yaml")
    assert got.model == Model(path="top", dtype="float32", adapter=Adapter(rank=4))
    assert got.sizes == (9,)  # lists replace
    assert got.lr == 0.2


def test_overrides_parse_yaml_and_the_last_wins(files):
    got = load("sizes=[4, 5]", "lr=1e-5", "lr=2e-5", "model.path='007'", "extra={a: on, b: 1e-3}", "extra.c=null")
    assert got.sizes == (4, 5)
    assert got.lr == 2e-5
    assert got.model.path == "007"
    assert got.extra == {"a": "on", "b": 1e-3, "c": None}


def test_override_of_a_block_that_the_file_sets_to_null(files):
    files(n="model: {path: x, adapter: null}\n")
    assert load("model.adapter.rank=2", file="n.yaml").model.adapter == Adapter(rank=2)
    assert load("model.adapter={}", file="n.yaml").model.adapter == Adapter()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.pth=y"], "override 'model.pth=y': model.pth is unknown; did you mean 'path'?"),
        (["modle.path=y"], "override 'modle.path=y': modle is unknown; did you mean 'model'?"),
        (["dtype=float32"], "dtype is unknown; did you mean 'model.dtype'?"),
        (["zzz=1"], "zzz is unknown; known: amount, extra, lr"),
        (["lr=2"], "override 'lr=2': lr is 2; it should be less than 1"),
        (["lr=.nan"], "lr is nan; it should be a finite number"),
        (
            ["model.dtype=float31"],
            "model.dtype is 'float31'; it should be 'bfloat16' or 'float32'; did you mean 'float32'?",
        ),
        (["model.adapter.rank=0"], "model.adapter.rank is 0; it should be greater than or equal to 1"),
        (["model.adapter=3"], "model.adapter is 3; it should be a block of `key: value` lines"),
        (["model.path=12"], "model.path is 12; it should be a valid string (quote it: '\"12\"')"),
        (["sizes=[1, x]"], "override 'sizes=[1, x]': sizes[1] is 'x'; it should be a valid integer"),
        (["parts=[{}, {rnak: 2}]"], "parts[1].rnak is unknown; did you mean"),
        (["shape.kind=oval"], "shape.kind is 'oval'; it should be one of 'circle', 'square'"),
        (["shape.side=0", "shape.kind=square"], "override 'shape.side=0': shape.side is 0; it should be"),
        (
            ["shape={kind: circle}"],
            "shape.radius is missing; it is: Radius; give it in the file or as shape.radius=VALUE",
        ),
        (["shape={kind: circle, side: 1, radius: 1}"], "shape.side is unknown"),
        (["shape.side=1"], "shape.kind is missing; it selects the kind of block"),
        (["amount=some"], "override 'amount=some': amount is 'some'; it should be a valid integer"),
        (["lr=0.5"], "a.yaml: lr may not be 0.5 with this model; use 0.4"),
        (["lr"], "override 'lr' should look like a.b=VALUE"),
        (["lr..x=1"], "override 'lr..x=1' should look like a.b=VALUE"),
        (["sizes=[1"], "override 'sizes=[1': the value is no valid YAML"),
        (["sizes.0=1"], "sizes is {'0': 1}; it should be a valid tuple"),
        (["model.path.x=1"], "override 'model.path.x=1': model.path is 'x', not a block"),
        (["extends=b.yaml"], "extends belongs into a file"),
    ],
)
def test_a_wrong_override_gets_one_line(files, overrides, said):
    assert said in refusal(*overrides)


def test_errors_name_the_file_and_line_that_set_the_value(files):
    files(base="model:\n  path: x\nlr: 7\n", top="# comment\nextends: base.yaml\nsizes:\n  - 1\n  - two\n")
    message = refusal(file="top.yaml")
    assert "top.yaml:5: sizes[1] is 'two'" in message
    assert "base.yaml:3: lr is 7" in message


def test_missing_fields_say_what_they_are(files):
    files(m="model: {}\n", e="lr: 0.1\n")
    assert refusal(file="m.yaml") == (
        "m.yaml:1: model.path is missing; it is: Where the weights are. A folder; "
        "give it in the file or as model.path=VALUE"
    )
    assert refusal(file="e.yaml") == "e.yaml: model is missing; it is a block with path"


def test_only_the_first_findings_are_listed(files):
    message = refusal("a1=1", "b2=2", "c3=3", "d4=4", "e5=5")
    assert message.count("is unknown") == 3
    assert message.endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: x}\n  lr: 1\n", "bad.yaml:2: column 3: is no valid YAML"),
        ("model: {path: x\n", "is no valid YAML"),
        ("model: {path: x}\nlr: 0.1\nlr: 0.2\n", "bad.yaml:3: 'lr' was given before, in line 2"),
        ("- 1\n", "bad.yaml: holds a list; it should hold `key: value` lines"),
        ("", "bad.yaml: model is missing"),
        ("extends: bad.yaml\n", "extends goes in a circle: bad.yaml → bad.yaml"),
        ("extends: other.yaml\n", "bad.yaml:1: extends 'other.yaml' does not exist"),
        ("lr: 0.1\nextends: [a.yaml]\n", "bad.yaml:2: extends is ['a.yaml']; it should be the path of one YAML file"),
        ("model: &m\n  path: *m\n", "an alias refers to the block that it stands in"),
        ("model: !!python/object:os.system {}\n", "bad.yaml:1: column 8: is no valid YAML"),
    ],
)
def test_a_malformed_file_gets_one_line(files, text, said):
    files(bad=text)
    assert said in refusal(file="bad.yaml")


def test_a_file_that_is_not_there_or_not_text(files, tmp_path):
    assert refusal(file="b.yaml").startswith("configuration file 'b.yaml' does not exist; did you mean 'a.yaml'?")
    assert "there is no folder 'none'" in refusal(file="none/b.yaml")
    assert "is a folder" in refusal(file=str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("model: {path: é}\n".encode("latin-1"))
    assert "latin.yaml: cannot be read as UTF-8" in refusal(file="latin.yaml")
    (tmp_path / "bom.yaml").write_bytes("\ufeffmodel: {path: x}\n".encode())
    assert load(file="bom.yaml").model.path == "x"


def test_a_longer_circle(files):
    files(p="extends: q.yaml\n", q="extends: p.yaml\n")
    assert "p.yaml → q.yaml → p.yaml" in refusal(file="p.yaml")


def test_anchors_and_merge_keys(files):
    files(y="x: &x {path: p}\nmodel:\n  <<: *x\n  dtype: float32\n")
    assert refusal(file="y.yaml").startswith("y.yaml:1: x is unknown")
    files(y="extra: {x: &x {rank: 3}}\nmodel:\n  path: p\n  adapter: {<<: *x}\n")
    assert load(file="y.yaml").model.adapter == Adapter(rank=3)


def test_a_dump_reads_back_as_the_same_settings(files, tmp_path):
    got = load(
        "extra={a: '1e-5', b: 'on', c: '12:30', d: 'null', e: 010, f: [true, 1.0]}",
        "model.adapter={}",
        "shape={kind: circle, radius: 3}",
    )
    (tmp_path / "dump.yaml").write_text(dump_config(got))
    assert load(file="dump.yaml") == got


# PyYAML reads a key of unusual line breaks (next line, line separator) back as a blank.
letters = st.characters(exclude_characters="\x85\u2028\u2029")
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(letters, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(letters, max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_yaml_round_trip(value):
    assert from_yaml(to_yaml(value)) == value
    assert from_yaml(to_yaml(value, one_line=True)) == value


def test_describe_lists_every_field_with_its_default():
    rows = {row.name: row for row in describe(Example)}
    assert rows["model.path"].default == "required"
    assert rows["model.path"].help == "Where the weights are. A folder."
    assert rows["model.dtype"].type == "bfloat16 | float32"
    assert rows["model.adapter"].default == "null"
    assert rows["model.adapter.rank"].type == "int ≥ 1"
    assert rows["shape.side"].default == "3"  # the default block's own value, not its class's
    assert rows["parts[].rank"].default == "16"
    assert rows["lr"].type == "float > 0 < 1"
    assert rows["sizes"].default == "[1, 2]"


def test_every_shared_field_is_described():
    assert [row.name for row in describe(toy.ToySettings) if not row.help and row.name != "job"] == []


@pytest.fixture
def toy_jobs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(toy.install(tmp_path / "site")))


def test_the_job_selects_the_model(files, toy_jobs):
    files(t="job: toy.train\nblock: {lr: 0.3}\n", without="steps: 3\n", other="job: toy.trian\n", five="job: 5\n")
    assert load_config("t.yaml", ["steps=4"]) == toy.ToySettings(steps=4, block=toy.BlockSettings(lr=0.3))
    assert load_config("without.yaml", job="toy.train").steps == 3
    for file, job, said in (
        ("without.yaml", None, "without.yaml: job is missing; it should be one of: "),
        ("other.yaml", None, "other.yaml:1: job 'toy.trian' is unknown; did you mean 'toy.train'?"),
        ("five.yaml", None, "five.yaml:1: job '5' is unknown"),
        ("t.yaml", "toy.other", "t.yaml:1: job is 'toy.train', but this command runs 'toy.other'"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(file, job=job)
        assert said in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "", ".hidden", "a b", "a//b"])
def test_a_run_name_stays_below_runs_dir(files, toy_jobs, name):
    files(t="job: toy.train\n")
    with pytest.raises(UserError, match="name is"):
        load_config("t.yaml", [f"name='{name}'"])


def test_a_run_name_may_have_folders(files, toy_jobs):
    files(t="job: toy.train\n")
    assert load_config("t.yaml", ["name=demo/grpo-1.5"]).name == "demo/grpo-1.5"
