"""The tables of `data.sources`: each has the keys of its dataset, and errors name the table and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.recipe import LoadedRecipe, load_recipe, recipe_to_toml
from trainer.recipe.data_table import split_sources

RECIPE = """
[model]
path = "m"
[data]
seq_length = 8
bad_lines = 3
{data}
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 10
"""
TWO = """\
[[data.sources]]
name = "wiki"
path = "~/wiki.jsonl"
weight = 3
[[data.sources]]
name = "chat"
path = ["${FOLDER}/a.csv", "b.csv"]
weight = 0.5
type = "csv"
format = "chat"
bad_lines = 0
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("FOLDER", "/data")


def load(folder: Path, data: str) -> LoadedRecipe:
    """Load a recipe with this `[data]`."""
    (folder / "x.toml").write_text(RECIPE.replace("{data}", data))
    return load_recipe(folder / "x.toml")


def test_sources_inherit_keys_of_the_data_table(tmp_path: Path):
    (wiki, first), (chat, second) = split_sources(load(tmp_path, TWO).recipe.data)
    assert wiki is not None
    assert chat is not None
    assert [(source.name, source.weight) for source in (wiki, chat)] == [("wiki", 3), ("chat", 0.5)]
    assert (first.path, first.type, first.fields, first.bad_lines) == (
        ("/home/me/wiki.jsonl",),
        "auto",
        None,
        3,
    )
    assert (second.path, second.type, second.bad_lines) == (("/data/a.csv", "b.csv"), "csv", 0)
    assert (second.format, second.fields) == ("chat", "messages")
    assert first.sources is second.sources is None


def test_sources_without_columns_have_no_fields(tmp_path: Path):
    data = load(
        tmp_path, 'fields = "body"\n' + TWO.replace("weight = 3", 'weight = 3\ntype = "text"')
    ).recipe.data
    assert [part.fields for _, part in split_sources(data)] == [None, "messages"]
    pairs = TWO.replace('format = "chat"', 'fields = "[a], b"')
    data = load(tmp_path, pairs).recipe.data
    assert [part.fields for _, part in split_sources(data)] == [None, "[a], b"]


def test_data_with_a_path_is_one_source(tmp_path: Path):
    data = load(tmp_path, 'path = "a.txt"').recipe.data
    assert list(split_sources(data)) == [(None, data)]


def test_written_recipe_reads_back_equal_sources(tmp_path: Path):
    loaded = load(tmp_path, TWO)
    (tmp_path / "y.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(tmp_path / "y.toml").recipe == loaded.recipe


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "x.toml:4: `data.path` is missing"),
        (
            TWO.replace("weight = 3", "wieght = 3"),
            "table 1 of `data.sources`: unknown key `wieght` - did you mean",
        ),
        (
            TWO.replace('name = "chat"\n', ""),
            "table 2 of `data.sources`: `name` is missing - it takes text: name in",
        ),
        (
            TWO.replace("weight = 3", "weight = 0"),
            "table 1 of `data.sources`: `weight` is 0 - it takes a number > 0",
        ),
        (
            TWO.replace('name = "chat"', 'name = "wiki"'),
            "two tables of `data.sources` have the name 'wiki'",
        ),
        (
            TWO.replace("weight = 3\n", ""),
            "only some tables of `data.sources` have a weight - without one: wiki",
        ),
        (
            TWO.replace("weight = 3", 'weight = 3\nfields = "a,"'),
            'source `wiki`: `data.fields` is "a," - a field is empty',
        ),
        (
            TWO.replace("weight = 3", 'weight = 3\ntype = "text"\nfields = "a"'),
            'source `wiki`: `data.fields` is "a" - it names a column of json objects, but `data.type` is text',
        ),
        ('path = "a.txt"\n' + TWO, '`data.path` is ["a.txt"] - `data.sources` names the datasets'),
        ("sources = []", "`data.sources` is []"),
        ('sources = ["a"]', '`data.sources` is ["a"]'),
        (
            "holdout = 0.1\n" + TWO.replace("weight = 3", 'weight = 3\neval_path = "v.txt"'),
            "`data.holdout` is 0.1, and tables of `data.sources` have evaluation data of their own",
        ),
        (
            TWO.replace("${FOLDER}", "${NOT_SET_ANYWHERE}"),
            "`data.sources` needs the environment variable",
        ),
    ],
)
def test_error_names_the_invalid_source_table(tmp_path: Path, data: str, message: str):
    with pytest.raises(PrepError) as caught:
        load(tmp_path, data)
    assert message in str(caught.value)
