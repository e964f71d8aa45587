"""Recipes that are right: what they load to, and what is kept of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.models import mesh
from trainer.models.errors import PrepError
from trainer.recipe import batch_shape, load_recipe, recipe_to_toml, schema
from trainer.recipe.docs_page import render_page
from trainer.recipe.formatting import alternatives, example_value, to_toml
from trainer.recipe.tables import KEY_SCHEMAS, value_of

ROOT = Path(__file__).parents[3]
SMALL = """\
[model]
path = "tiny-init"
[data]
type = "text"
path = "train.txt"
seq_length = 8
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 20
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_what_is_not_given_is_the_default(small: Path):
    loaded = load_recipe(small)
    recipe = loaded.recipe
    assert (recipe.name, recipe.seed, recipe.mesh) == ("small", 0, "-1,1,1")
    assert (recipe.model.path, recipe.data.path, recipe.data.fields) == ("tiny-init", ("train.txt",), None)
    assert (recipe.checkpoint.keep, recipe.optimizer.b2, recipe.model.head_chunk_size) == (2, 0.999, 512)
    assert loaded.origins["seed"] == loaded.origins["name"] == loaded.origins["eval.limit"] == "default"
    assert set(KEY_SCHEMAS) - set(loaded.origins) == {
        "model.path",
        "data.type",
        "data.path",
        "data.seq_length",
        "batch.size",
        "optimizer.lr",
        "train.steps",
    }


def test_a_recipe_cannot_be_changed(small: Path):
    recipe = load_recipe(small).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.optimizer.__setattr__("lr", 1.0)
    assert recipe == load_recipe(small).recipe


def test_json_has_its_text_under_text(small: Path):
    loaded = load_recipe(small, ["data.type=json"])
    assert (loaded.recipe.data.fields, loaded.origins["data.fields"]) == ("text", "default")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr = 1", "optimizer.lr", 1.0),
        ("mesh=1,64,4", "mesh", "1,64,4"),
        ("model.path=gpt2", "model.path", "gpt2"),
        ('name="a b"', "name", "a b"),
        ('data.path=["a", "b"]', "data.path", ("a", "b")),
        ("model.scan_layers=false", "model.scan_layers", False),
        ("checkpoint.keep=all", "checkpoint.keep", "all"),
        ("model.path=a=b", "model.path", "a=b"),
        ("name=2024", "name", "2024"),
        ("data.cache=1e3", "data.cache", "1e3"),
    ],
)
def test_set_takes_toml_and_else_text(small: Path, text: str, key: str, value: object):
    loaded = load_recipe(small, [text])
    assert value_of(loaded.recipe, key) == value
    assert loaded.origins[key] == f"--set {key}"


def test_the_last_set_of_a_key_counts(small: Path):
    assert load_recipe(small, ["seed=1", "seed=2"]).recipe.seed == 2


def test_paths_and_nothing_else_are_expanded(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    sets = ["model.path=~/m", "data.path=['${DATA}/${DATA}.txt', '~', 'a~/$DATA']", "name=n${DATA}", "data.cache=~me/x"]
    recipe = load_recipe(small, [sets[0], sets[1], sets[3]]).recipe
    assert recipe.model.path == "/home/me/m"
    assert recipe.data.path == ("/data//data.txt", "/home/me", "a~/$DATA")
    assert recipe.data.cache == "~me/x"
    assert load_recipe(small, [sets[2]]).recipe.name == "n${DATA}"


def test_every_example_is_right(tmp_path: Path):
    instead = {"batch.per_device", "batch.per_replica", "train.epochs", "optimizer.warmup_ratio", "data.eval_path"}
    instead |= {"data.source_length", "data.source_prefix"}
    found = {
        key: tomllib.loads(f"v = {example_value(part)}")["v"] for key, part in KEY_SCHEMAS.items() if key not in instead
    }
    found |= {"data.type": "json", "optimizer.schedule": "cosine"}
    (tmp_path / "x.toml").write_text(toml(found))
    assert load_recipe(tmp_path / "x.toml").recipe.data.fields == "text"
    pair = ["data.fields=[article], summary", "data.source_length=512", "data.source_prefix=summarize: "]
    assert load_recipe(tmp_path / "x.toml", pair).recipe.data.source_prefix == "summarize:"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_that_come_with_prep_load(path: Path):
    recipe = load_recipe(path).recipe
    assert recipe.name == path.stem
    n_devices = mesh.parse_mesh(recipe.mesh).n_devices
    assert batch_shape(recipe.batch, n_devices, n_devices // mesh.parse_mesh(recipe.mesh).size("mp")).accumulate in (
        1,
        8,
    )
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"prep train recipes/{path.name}" in header


def test_the_page_on_recipes_is_current():
    assert (ROOT / "docs" / "recipes.md").read_text() == render_page(), (
        "python -m trainer.recipe.docs_page > docs/recipes.md"
    )


def test_the_schema_says_what_loading_holds():
    found = json.loads(json.dumps(schema()))
    assert found["required"] == ["model", "data", "batch", "optimizer", "train"]
    assert not found["additionalProperties"]
    assert found["$defs"]["Optimizer"]["properties"]["lr"]["exclusiveMinimum"] == 0


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
PATHS = TEXTS.filter(lambda text: "${" not in text and not text.startswith("~"))
NAMES = st.from_regex(r"[^\s./\\\x00-\x1f\x7f-][^/\\\x00-\x1f\x7f]*", fullmatch=True).filter(lambda t: t.isprintable())
SPECIAL = {
    "name": NAMES,
    "mesh": st.sampled_from(["1,8,1", "-1,1,1", "!fsdp:2,mp:4,sp:2"]),
    "data.path": PATHS | st.lists(PATHS, min_size=1, max_size=3),
    "data.eval_path": PATHS | st.lists(PATHS, min_size=1, max_size=3),
    "data.source_prefix": TEXTS,
    "optimizer.warmup_steps": st.integers(0, 9),
    "optimizer.decay_steps": st.integers(10, 2**30),
    "optimizer.warmup_ratio": st.floats(0, 0.4),
    "train.steps": st.integers(10, 2**30),
}


def values(part: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*map(of_option, alternatives(part)))


def of_option(part: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "const" in part or "enum" in part:
        return st.sampled_from(part.get("enum") or [part["const"]])
    low, high = part.get("minimum", part.get("exclusiveMinimum", 0)), part.get("maximum", part.get("exclusiveMaximum"))
    if part["type"] == "integer":
        return st.integers(low, high or 2**30)
    if part["type"] == "number":
        no_low, no_high = "exclusiveMinimum" in part, "exclusiveMaximum" in part
        floats = st.floats(low, high or 1e30, exclude_min=no_low, exclude_max=no_high)
        return floats | (st.nothing() if high else st.integers(1, 9))
    return st.booleans() if part["type"] == "boolean" else PATHS


@st.composite
def valid_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Dotted keys and their values; keys that exclude one another never meet."""
    batch = draw(st.sampled_from([("size",), ("per_device",), ("per_replica", "accumulate"), ("size", "per_replica")]))
    length = draw(st.sampled_from(["steps", "epochs"]))
    warmup = draw(st.sampled_from(["warmup_steps", "warmup_ratio"]))
    chosen = {f"batch.{key}" for key in batch} | {f"train.{length}"}
    excluded = {"optimizer.warmup_steps", "optimizer.warmup_ratio", "optimizer.decay_steps", "data.fields"}
    excluded |= {"data.source_length", "data.source_prefix"}
    excluded |= {key for key in KEY_SCHEMAS if key.startswith("batch.")} | {"train.steps", "train.epochs"}
    excluded |= {draw(st.sampled_from(["data.holdout", "data.eval_path"])), "train.eval_every", "eval.limit"}
    needed = {key for key, part in KEY_SCHEMAS.items() if "default" not in part and "absent" not in part} | chosen
    optional = [*sorted(set(KEY_SCHEMAS) - needed - excluded), f"optimizer.{warmup}"]
    keys = needed | set(draw(st.lists(st.sampled_from(optional), unique=True)))
    found = {key: draw(SPECIAL.get(key, values(KEY_SCHEMAS[key]))) for key in sorted(keys)}
    if found["data.type"] == "json" and draw(st.booleans()):
        found["data.fields"] = draw(TEXTS.filter(lambda text: not {*text} & {*"[]"}))
    elif found["data.type"] == "json" and draw(st.booleans()):
        found |= {"data.fields": "[title], [article], summary", "data.source_length": draw(st.integers(2, 2**30))}
        found |= {"data.source_prefix": draw(TEXTS)} if draw(st.booleans()) else {}
    if found.get("data.holdout") or "data.eval_path" in found:
        found |= {"train.eval_every": draw(st.integers(0, 9)), "eval.limit": draw(st.integers(0, 9))}
    return found


def toml(flat: Mapping[str, Any]) -> str:
    lines = [f"{key} = {to_toml(value)}" for key, value in flat.items() if "." not in key]
    for table in dict.fromkeys(key.partition(".")[0] for key in flat if "." in key):
        lines += [f"[{table}]"]
        lines += [f"{key.partition('.')[2]} = {to_toml(flat[key])}" for key in flat if key.startswith(f"{table}.")]
    return "\n".join(lines)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(valid_recipes(), st.booleans())
def test_the_complete_recipe_is_the_same_recipe(tmp_path: Path, flat: dict[str, Any], with_crlf: bool):
    path = tmp_path / "a.toml"
    path.write_bytes(toml(flat).replace("\n", "\r\n" if with_crlf else "\n").encode())
    loaded = load_recipe(path)
    for key, value in flat.items():
        one = (value,) if key in ("data.path", "data.eval_path") and isinstance(value, str) else value
        assert value_of(loaded.recipe, key) == (tuple(one) if isinstance(one, list) else one)
        assert key not in loaded.origins
    again = tmp_path / "recipe.toml"
    again.write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(again).recipe == loaded.recipe
    assert recipe_to_toml(load_recipe(again).recipe, loaded.origins) == again.read_text()


def test_the_complete_recipe_says_where_values_are_from(small: Path):
    loaded = load_recipe(small, ["optimizer.lr=0.5", 'data.path=["a", "b"]'])
    lines = recipe_to_toml(loaded.recipe, loaded.origins).splitlines()
    assert lines[3:6] == ["", "[model]", 'path = "tiny-init"']
    assert "steps = 20" in lines
    assert {
        'name = "small"                                  # default',
        "seed = 0                                        # default",
        "# decay_steps: the run's steps                  # default",
        "lr = 0.5                                        # --set optimizer.lr",
        'path = ["a", "b"]                               # --set data.path',
    } <= set(lines)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.steps", 10**30), ("batch.size", 2**31), ("data.seq_length", 2**63), ("optimizer.warmup_steps", 10**12)],
)
def test_recipe_integers_beyond_int32_are_refused(small: Path, key: str, value: int):
    with pytest.raises(PrepError, match=f"`{key}` is {value}") as caught:
        load_recipe(small, [f"{key}={value}"])
    assert "it is too large: the most is 2,147,483,647" in str(caught.value)


def test_recipe_floats_beyond_float32_are_refused(small: Path):
    with pytest.raises(PrepError, match=r"`optimizer\.lr` is 1e"):
        load_recipe(small, ["optimizer.lr=1e300"])


def test_recipe_periods_may_be_huge(small: Path):
    assert load_recipe(small, [f"checkpoint.every={10**12}"]).recipe.checkpoint.every == 10**12
