"""Recipes as TOML and as text."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.key_types import (
    KeySchema,
    example_value,
    key_line_numbers,
    parse_override_value,
    to_toml,
)
from trainer.recipe.loading import RawRecipe, apply_overrides
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES

# The form in which runs keep their recipes: runs resume only if it stays readable and equal.

RECIPES = Path(__file__).parents[3] / "recipes"
# Complete recipes, as the runs of an earlier version keep them
STORED = sorted((Path(__file__).parents[2] / "golden" / "recipes").glob("*.toml"))


def lines_by_key(text: str) -> dict[tuple[str, str], str]:
    """Return the line of each table and key."""
    lines: dict[tuple[str, str], str] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line
        # A key without a value is a comment, e.g. `# rules: the checkpoint's`.
        key = line.removeprefix("# ").split(" ")[0].rstrip(":")
        lines[table, key] = line
    return lines


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_complete_recipe_keeps_its_text(path: Path):
    """A key that was added later has a line with its default. All other lines are equal, in the same order."""
    loaded = load_recipe(RECIPES / path.name)
    stored = lines_by_key(path.read_text())
    kept: list[str] = []
    for key, line in lines_by_key(recipe_to_toml(loaded.recipe, loaded.origins)).items():
        if key in stored:
            kept.append(line)
        else:
            assert line.endswith("# default") or line.startswith("[")
    assert kept == [*stored.values()]
    assert load_recipe(path).recipe == loaded.recipe


def test_complete_recipe_keeps_a_rope_scaling(tmp_path: Path):
    factors = "[1, 1.5, 4.25e-3]"
    scaling = f"{{ rope_type = 'longrope', short_factor = {factors}, long_factor = {factors}, factor = 4 }}"
    overrides = (
        f"model.rope_scaling={scaling}",
        "model.rope_theta=5e5",
        "model.max_position_embeddings=4096",
    )
    loaded = load_recipe(RECIPES / "llama-7b.toml", overrides)
    text = recipe_to_toml(loaded.recipe, loaded.origins)
    (tmp_path / "recipe.toml").write_text(text)
    again = load_recipe(tmp_path / "recipe.toml").recipe
    assert again.model == loaded.recipe.model
    assert again.model.rope_scaling == {
        "rope_type": "longrope",
        "short_factor": [1, 1.5, 0.00425],
        "long_factor": [1, 1.5, 0.00425],
        "factor": 4,
    }
    assert (again.model.rope_theta, again.model.max_position_embeddings) == (5e5, 4096)


@pytest.mark.parametrize("names", [("attention_output",), ("q", "attention_output")])
def test_complete_recipe_keeps_names_of_activations(tmp_path: Path, names: tuple[str, ...]):
    overrides = (f"model.remat_policy={list(names)}", "model.offload=residuals")
    loaded = load_recipe(RECIPES / "llama-7b.toml", overrides)
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    model = load_recipe(tmp_path / "recipe.toml").recipe.model
    assert (model.remat_policy, model.offload) == (names, "residuals")


@pytest.mark.parametrize("rules", [(), ("embed=none",), ("embed=fsdp+sp", "kv_heads=mp|none")])
def test_complete_recipe_keeps_rules(tmp_path: Path, rules: tuple[str, ...]):
    loaded = load_recipe(RECIPES / "llama-7b.toml", [f"rules={list(rules)}"])
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(tmp_path / "recipe.toml").recipe.rules == rules


# Values as TOML: reading back, lines of keys, and values of `--set` after a shell has removed their quotes.


@pytest.mark.parametrize(
    "value",
    [
        "a\x7fb",
        "\x00\x1f\t\n\r",
        'quote " and \\ backslash',
        "\u2028 \U0001f600",
        {"a b": 1, "a.b": 2, "": 3, "plain-key_1": 4},
        [0.0025, 2e-05, 0.00025, -1e-300, 1e300],
        [True, False, 1],
    ],
    ids=ascii,
)
def test_to_toml_reads_back(value: object):
    assert tomllib.loads(f"value = {to_toml(value)}") == {"value": value}


DOCUMENT = '''\
# a comment with [model] in it
name = "x"

  [model]  # and here
path = """
[data]
type = 1
"""
data.deep.er = 3
[data]
path = [
  "a = 1",   # = ]
  "b",
]
inline = { a = 1, "b c" = { d = 2 } }
[[tables]]
x = 1
'''


def test_key_line_numbers_finds_keys_and_tables():
    assert key_line_numbers(DOCUMENT) == {
        "name": 2,
        "model": 4,
        "model.path": 5,
        "model.data": 9,
        "model.data.deep": 9,
        "model.data.deep.er": 9,
        "data": 10,
        "data.path": 11,
        "data.inline": 15,
        "tables": 16,
        "tables.x": 17,
    }


@given(st.lists(st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers())))
def test_keys_after_any_value_have_line_numbers(values: list[object]):
    lines = key_line_numbers("\n".join(f"k{i} = {to_toml(v)}" for i, v in enumerate(values)))
    assert lines == {f"k{number}": number + 1 for number in range(len(values))}


LISTS = """\
a = [
  [1],
  [ "b" ]
]
"c" = 1
[ d . "e" ]
f = { g = [
  1 ] }
"""


def test_lines_of_nested_lists_are_no_tables():
    assert key_line_numbers(LISTS) == {"a": 1, "c": 5, "d": 6, "d.e": 6, "d.e.f": 7}


QUOTES = '''\
a = """x""""
b = """
y"""""
c = ""
d = """"""
e = "\\\\"
f = 'it ends in \\'
g = 1
'''


def test_strings_that_end_in_quotes_have_line_numbers():
    assert key_line_numbers(QUOTES) == {"a": 1, "b": 2, "c": 4, "d": 5, "e": 6, "f": 7, "g": 8}


TEXT_OR_BOOLEAN: KeySchema = {
    "description": "text or a boolean",
    "anyOf": [{"type": "boolean"}, {"type": "string"}],
}


def test_text_that_looks_like_a_boolean_needs_quotes():
    """A key that takes both needs the quotes of a text."""
    assert parse_override_value("true", TEXT_OR_BOOLEAN) is True
    assert parse_override_value('"true"', TEXT_OR_BOOLEAN) == "true"


def test_hint_of_an_invalid_override_is_a_valid_override():
    """A date is no value of any key."""
    path = RECIPES / "llama-7b.toml"
    for key in KEY_SCHEMAS.keys() - {"optimizer.type"}:
        with pytest.raises(PrepError) as caught:
            load_recipe(path, [f"{key}=[1979-05-27]"])
        if f"unknown key `{key}`" in caught.value.message:
            continue
        hint = re.search(r"`--set ([^`]*(?:`[^`]*)*)`$", caught.value.message.partition("\n")[0])
        if hint is None:
            assert f"`{key}` is" not in caught.value.message.partition("\n")[0], key
            continue
        (argument,) = shlex.split(hint[1])
        raw = RawRecipe(Path("x.toml"), {name: {} for name in TABLE_NAMES})
        overridden, faults = apply_overrides(raw, [argument])
        assert not faults
        example = example_value(KEY_SCHEMAS[key])
        assert overridden.get(key) == (example.strip() if isinstance(example, str) else example), (
            key
        )


def test_numbers_for_a_list_of_numbers_are_not_text():
    assert parse_override_value("0.1", KEY_SCHEMAS["model.fcm_ratio"]) == 0.1
    assert parse_override_value("8", KEY_SCHEMAS["data.path"]) == "8", "a key of texts"


@pytest.mark.parametrize(
    "text", ["data.config=", 'data.config=""', "data.config=a", "data.config=''"]
)
def test_empty_value_removes_a_key_that_may_be_absent(text: str):
    raw = RawRecipe(Path("x.toml"), {"data": {"config": "en", "split": "train"}})
    overridden, faults = apply_overrides(raw, ["data.config=de", text, "data.source_length="])
    assert not faults
    assert overridden.tables["data"] == {"split": "train"} | (
        {"config": "a"} if text.endswith("a") else {}
    )
    assert overridden.overridden_keys == ({"data.config"} if text.endswith("a") else set())


def test_empty_value_of_a_required_key_is_kept():
    overridden, _ = apply_overrides(RawRecipe(Path("x.toml"), {"mesh": "1,1,1"}), ["mesh="])
    assert overridden.get("mesh") == ""
