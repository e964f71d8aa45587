"""The files of a dataset: by its README, by their names, and in the branch of converted files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.data.dataset_layout import Selection, matches, read_metadata, select_files

README = """\
---
configs:
- config_name: wiki
  data_files:
  - split: train
    path: wiki/train-*
  - split: test
    path: [wiki/test.parquet, extra/**/*.parquet]
- config_name: raw
  default: true
  data_files: raw/*.jsonl
---
# Text
"""
LISTED = [
    "README.md",
    "wiki/train-00001.parquet",
    "wiki/train-00000.parquet",
    "wiki/test.parquet",
    "raw/b.jsonl",
]
LISTED += ["raw/a.jsonl", "raw/deep/c.jsonl", "extra/x/y.parquet", "other.jsonl"]


def select(
    names: Sequence[str], metadata: Mapping[str, Any] | None = None, **parts: str
) -> list[str]:
    return select_files(
        "o/n",
        names,
        metadata or {},
        Selection(**parts),
        accepts=lambda name: name.endswith((".parquet", ".jsonl")),
    )


@pytest.fixture
def metadata(tmp_path: Path) -> Mapping[str, Any]:
    (tmp_path / "README.md").write_text(README)
    return read_metadata(tmp_path / "README.md")


@pytest.mark.parametrize(
    ("parts", "files"),
    [
        ({}, ["raw/a.jsonl", "raw/b.jsonl"]),
        ({"config": "wiki"}, ["wiki/train-00000.parquet", "wiki/train-00001.parquet"]),
        ({"config": "wiki", "split": "test"}, ["wiki/test.parquet", "extra/x/y.parquet"]),
    ],
)
def test_readme_lists_files(metadata: Mapping[str, Any], parts: dict[str, str], files: list[str]):
    assert select(LISTED, metadata, **parts) == files


@pytest.mark.parametrize(
    ("names", "split", "files"),
    [
        (
            ["data/train-00000-of-00002-ab.parquet", "data/train-00001-of-00002-cd.parquet"],
            "train",
            [0, 1],
        ),
        (
            [
                "data/train-00000-of-00001.parquet",
                "data/test-00000-of-00001.parquet",
                "train.jsonl",
            ],
            "test",
            [1],
        ),
        (["train.jsonl", "dev.jsonl", "my_test.jsonl"], "validation", [1]),
        (["validation/a.jsonl", "train/a.jsonl", "training_b.jsonl"], "train", [1, 2]),
        (["a.jsonl", "b.jsonl", ".hidden.jsonl", "note.md"], "train", [0, 1]),
    ],
)
def test_split_is_inferred_from_file_names(names: list[str], split: str, files: list[int]):
    assert select(names, split=split) == [names[i] for i in files]


def test_folders_of_the_converted_branch_are_configurations():
    names = [
        "en/train/0000.parquet",
        "en/train/0001.parquet",
        "en/test/0000.parquet",
        "de/train/0000.parquet",
    ]
    assert select(names, config="en") == names[:2]
    assert select(names, config="de", split="train") == names[3:]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"config": "fr"},
            'o/n has no configuration `fr` - its configurations: wiki, raw - `data.config = "wiki"`',
        ),
        ({"config": "wiki", "split": "dev"}, "o/n has no split `dev` - its splits: train, test"),
    ],
)
def test_unknown_part_is_an_error(metadata: Mapping[str, Any], parts: dict[str, str], message: str):
    with pytest.raises(PrepError) as caught:
        select(LISTED, metadata, **parts)
    assert message in str(caught.value)


def test_choice_without_a_default_is_an_error(metadata: Mapping[str, Any]):
    with pytest.raises(PrepError, match="o/n has several configurations"):
        select(["en/train/0000.parquet", "de/train/0000.parquet"])
    with pytest.raises(PrepError, match="no data in o/n"):
        select(["README.md", "script.py"])


@pytest.mark.parametrize(
    ("name", "pattern", "is_match"),
    [
        ("a/b.jsonl", "a/*.jsonl", True),
        ("a/c/b.jsonl", "a/*.jsonl", False),
        ("a/c/b.jsonl", "a/**/*.jsonl", True),
        ("a/b.jsonl", "a/**/*.jsonl", True),
        ("a/b.jsonl", "**", True),
        ("a/b.jsonl", "a", True),
        ("a/b.jsonl", "a/", True),
        ("ab.jsonl", "a", False),
        ("a.jsonl", "?.jsonl", True),
        ("a+jsonl", "a.jsonl", False),
    ],
)
def test_glob_spans_folders_only_with_two_stars(name: str, pattern: str, is_match: bool):
    assert matches(name, pattern) == is_match


WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@given(name=st.text("ab/", max_size=8), pattern=st.text("ab/*?", max_size=8))
def test_glob_matches_as_the_regular_expression_does(name: str, pattern: str):
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    regex = "".join(WILDCARDS.get(part) or re.escape(part) for part in parts)
    assert matches(name, pattern) == (re.fullmatch(f"{regex}(?:/.*)?", name) is not None)


def test_glob_of_many_wildcards_ends():
    assert not matches("a" * 300, "*a" * 100 + "b")
    assert not matches("a/" * 100, "**/" * 100 + "b")


def test_yaml_values_of_other_types_are_not_names():
    bomb: object = "x"
    for _ in range(40):
        bomb = [bomb, bomb]
    metadata = {
        "configs": [
            {"config_name": bomb},
            {"config_name": "c", "data_dir": bomb, "data_files": {"path": bomb}},
        ]
    }
    with pytest.raises(PrepError, match="no data in o/n"):
        select_files("o/n", ["a.jsonl"], metadata, Selection(config="c"), accepts=lambda name: True)
    with pytest.raises(PrepError, match="no data in o/n"):
        select_files(
            "o/n", ["a.txt"], {"configs": 7}, Selection(config="c"), accepts=lambda name: False
        )


def test_malformed_metadata_is_an_error(tmp_path: Path):
    assert read_metadata(None) == {}
    (tmp_path / "README.md").write_text("---\na: [\n---\n")
    with pytest.raises(PrepError, match=r"the metadata of .*README.md is malformed"):
        read_metadata(tmp_path / "README.md")
