"""Finding data files: the files of a path or a dataset, their order, and errors if there are none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError, Text
from tests.helpers.corpus import make_config, tokenize_quietly
from trainer.data.columns import columns_hint
from trainer.data.conversations import messages_value
from trainer.data.dataset_layout import WHOLE, Selection, matches, read_metadata, select_files
from trainer.data.files import DataFile
from trainer.data.find_files import find_data_files, resolve_type
from trainer.data.readers.reader import Record
from trainer.recipe.text_fields import DataType

# Finding data files: the files of a path, their order, and the error if there are none.


def find_paths(
    paths: Sequence[str], data_type: DataType, selection: Selection = WHOLE
) -> list[Path]:
    """Return the local data files of paths."""
    files = find_data_files(paths, data_type, selection)
    local = [file for file in files if isinstance(file, Path)]
    assert len(local) == len(files)
    return local


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b.txt",
        "a.txt",
        "sub/c.txt",
        "a.jsonl",
        "note.md",
        ".hidden.txt",
        ".git/d.txt",
        "x[1].txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("data_type", "paths", "names"),
    [
        ("text", [""], ["a.txt", "b.txt", "sub/c.txt", "x[1].txt"]),
        ("json", [""], ["a.jsonl"]),
        ("auto", [""], ["a.jsonl", "a.txt", "b.txt", "sub/c.txt", "x[1].txt"]),
        ("text", ["note.md"], ["note.md"]),
        ("text", ["b.txt", "a.txt"], ["b.txt", "a.txt"]),
        ("text", ["sub", "*.txt", "b.txt"], ["sub/c.txt", "a.txt", "b.txt", "x[1].txt"]),
        ("text", ["**/c.txt"], ["sub/c.txt"]),
        ("text", ["[ab].*"], ["a.jsonl", "a.txt", "b.txt"]),
        ("text", ["s*"], ["sub/c.txt"]),
        ("text", ["x[1].txt"], ["x[1].txt"]),
    ],
)
def test_find_files_returns_files_in_order(
    folder: Path, data_type: DataType, paths: list[str], names: list[str]
):
    files = find_paths([str(folder / path) for path in paths], data_type)
    assert [str(path.relative_to(folder)) for path in files] == names


def test_find_files_counts_linked_file_once(folder: Path):
    (folder / "again.txt").symlink_to(folder / "b.txt")
    names = [path.name for path in find_paths([str(folder)], "text")]
    assert names == ["a.txt", "again.txt", "c.txt", "x[1].txt"]


@pytest.mark.parametrize(
    ("path", "data_type", "why"),
    [
        (
            "none",
            "text",
            "looked for a file of that name, *.txt in a folder of that name, or matches of it as a glob",
        ),
        (
            "*.csv",
            "text",
            "looked for a file of that name, *.txt in a folder of that name, or matches of it as a glob",
        ),
        ("sub", "json", "looked for *.jsonl; found c.txt"),
        ("many", "text", "looked for *.txt; found 0.md, 1.md, 2.md …"),
        ("empty", "text", "looked for *.txt; found nothing"),
    ],
)
def test_find_files_fails_without_files(folder: Path, path: str, data_type: DataType, why: str):
    (folder / "empty").mkdir()
    (folder / "many").mkdir()
    for number in range(4):
        (folder / "many" / f"{number}.md").touch()
    with pytest.raises(PrepError) as caught:
        find_data_files([str(folder / "a.txt"), str(folder / path)], data_type)
    assert caught.value.what == f"no data in `{folder / path}`"
    assert caught.value.why == why


def test_find_files_fails_for_unreadable_folder():
    with tempfile.TemporaryDirectory() as folder:
        # The first folder is readable, the second one is not.
        for path in (Path(folder), Path(folder, "sub")):
            path.mkdir(exist_ok=True)
            path.chmod(0o755 if path == Path(folder) else 0)
        with (
            unprivileged(),
            pytest.raises(PrepError, match=r"cannot read or write .*sub - Permission denied"),
        ):
            find_data_files([folder], "text")


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Drop the rights of root, who can read everything."""
    original_uid = os.geteuid()
    if original_uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(original_uid)


@pytest.mark.parametrize(
    ("names", "file_type"),
    [
        (["a.txt", "b.txt.gz", "c.txt.zst"], "text"),
        (["a.jsonl", "b.json", "c.ndjson.gz", "d.jsonl.zst"], "json"),
        (["a.csv", "b.tsv.gz"], "csv"),
        (["a.parquet"], "parquet"),
        (["a.arrow", "b.feather"], "arrow"),
        (["a.npy", "b.bin"], "ids"),
    ],
)
def test_suffixes_tell_the_type(names: list[str], file_type: DataType):
    files = [*map(Path, names), DataFile(f"s3://bucket/{names[0]}", 1, "etag:1")]
    assert resolve_type(files, "auto") == file_type
    assert resolve_type([Path("a.md"), *files], file_type) == file_type


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.txt", "b.md"],
            "the type of b.md is unknown - known suffixes: .txt, .jsonl, .csv, .tsv",
        ),
        (["a.parquet.gz"], "the type of a.parquet.gz is unknown"),
        (["a.txt", "b.csv"], "the data files have several types - a.txt is text, b.csv is csv"),
    ],
)
def test_unclear_type_is_an_error(names: list[str], message: str):
    with pytest.raises(PrepError) as caught:
        resolve_type([*map(Path, names)], "auto")
    assert message in str(caught.value)


def test_url_without_remote_files_is_an_error():
    with pytest.raises(PrepError, match="only local files are read here"):
        find_data_files(["gs://bucket/a.txt"], "text")


def test_only_regular_files_are_data(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(PrepError, match=r"pipe\.txt is not a file"):
        find_data_files([str(tmp_path / "pipe.txt")], "text")
    with pytest.raises(PrepError, match=r"/dev/zero is not a file"):
        find_data_files(["/dev/zero"], "text")
    (tmp_path / "a.txt").write_text("the cat")
    for path in (tmp_path, tmp_path / "*.txt"):
        assert find_data_files([str(path)], "text") == (tmp_path / "a.txt",)


def test_nul_in_a_path_is_an_error():
    with pytest.raises(PrepError, match="no data in"):
        find_data_files(["a\0b"], "text")


def write_dataset(folder: Path, names: list[str]) -> None:
    """Write the files of a saved dataset, with one that is no part of it."""
    folder.mkdir(parents=True)
    for name in [*names, "cache-1.arrow"]:
        (folder / name).write_bytes(b"x")
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))


def test_saved_dataset_gives_the_files_of_a_split(tmp_path: Path):
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for split in ("train", "test"):
        write_dataset(tmp_path / split, names)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert find_data_files([str(tmp_path)], "auto") == tuple(
        tmp_path / "train" / name for name in names
    )
    in_test = find_paths([str(tmp_path)], "arrow", Selection(split="test"))
    assert in_test[0].parent.name == "test"
    assert find_data_files([str(tmp_path / "test")], "auto") == tuple(
        tmp_path / "test" / name for name in names
    )
    with pytest.raises(PrepError, match="has no split `dev` - its splits: train, test"):
        find_data_files([str(tmp_path)], "auto", Selection(split="dev"))
    with pytest.raises(PrepError, match=r"`data\.eval_split = \"train\"`"):
        find_data_files([str(tmp_path)], "auto", Selection(split="dev", split_key="eval_split"))
    for selection in (Selection(config="a"), Selection(revision="a")):
        with pytest.raises(PrepError, match="no path of the data is a dataset"):
            find_data_files([str(tmp_path)], "auto", selection)


@pytest.mark.parametrize(
    "selection", [Selection(config="a"), Selection(split="a"), Selection(revision="a")]
)
def test_selection_without_a_dataset_is_an_error(tmp_path: Path, selection: Selection):
    (tmp_path / "a.txt").write_text("w1")
    with pytest.raises(PrepError, match="no path of the data is a dataset"):
        find_data_files([str(tmp_path / "a.txt")], "auto", selection)
    write_dataset(tmp_path / "saved", ["a.arrow"])
    with pytest.raises(PrepError, match="no path of the data is a dataset"):
        find_data_files([str(tmp_path / "saved")], "auto", selection)


def test_folder_with_a_selection_gives_the_split_of_its_names(tmp_path: Path):
    for name in ("train.jsonl", "dev.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("{}")
    selected = find_paths([str(tmp_path)], "json", Selection(split="validation"))
    assert selected == [tmp_path / "dev.jsonl"]
    with pytest.raises(PrepError, match="has no split `test` - its splits: "):
        find_data_files([str(tmp_path)], "json", Selection(split="test"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"_data_files": 3}', '{"_data_files": [{"filename": "../a"}]}']
)
def test_malformed_saved_dataset_is_an_error(tmp_path: Path, text: str):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(PrepError, match=r"state\.json is malformed"):
        find_data_files([str(tmp_path)], "auto")


@pytest.mark.parametrize("split", ["../private", "/etc", "train/../../private", "a\0b", "."])
def test_split_outside_of_a_saved_dataset_is_refused(tmp_path: Path, split: str):
    write_dataset(tmp_path / "private", ["data.arrow"])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    with pytest.raises(
        PrepError, match=r"dataset_dict\.json names .* - it is not (inside|a file name)"
    ):
        find_data_files([str(tmp_path / "saved")], "auto")


def test_nul_in_a_file_name_of_a_saved_dataset_is_refused(tmp_path: Path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a\\u0000.arrow"}]}')
    with pytest.raises(PrepError, match=r"state\.json names .* - it is not a file name"):
        find_data_files([str(tmp_path)], "auto")


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_deeply_nested_list_of_a_saved_dataset_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(
        PrepError, match=rf"{name} is malformed - its JSON is nested more than 100 levels deep"
    ):
        find_data_files([str(tmp_path)], "auto")


@pytest.mark.slow
def test_dataset_saved_by_the_library_is_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"text": ["the cat", "the hat sat"] * 4})
    parts = datasets.DatasetDict({"train": part, "test": part})
    parts.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 2, "test": 1})
    saved = tokenize_quietly(make_config(tmp_path, tmp_path / "saved", type="auto", fields="text"))
    part.to_json(str(tmp_path / "a.jsonl"))
    lines = tokenize_quietly(
        make_config(tmp_path, tmp_path / "a.jsonl", type="auto", fields="text")
    )
    assert saved.ids[:].tolist() == lines.ids[:].tolist()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("./train.tx", "did you mean `./train.txt`?"),
        ("owner/name", "`hf://datasets/owner/name` reads a dataset on the hub"),
        ("nowhere/at/all.txt", "a relative path starts from the current folder"),
        ("link.txt", "correct the link"),
    ],
)
def test_hint_for_a_missing_path_fits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
):
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("removed.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrepError) as caught:
        find_data_files([path], "auto")
    assert hint in caught.value.hint


# The files of a dataset: by its README, by their names, and in the branch of converted files.

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


# Hints with the recipe keys for the columns of public datasets.

DEFAULT = Text("name the columns")


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (
            ["prompt", "response"],
            "`--set data.format=prompt_response` `--set data.fields='[prompt], response'`",
        ),
        (
            ["id", "prompt", "completion"],
            "`--set data.format=prompt_completion` `--set data.fields='[prompt], completion'`",
        ),
        (
            ["instruction", "input", "output"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+input], output'`, "
            "or `--set data.fields='[instruction+input], output'`",
        ),
        (
            ["instruction", "output"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+input], output'`, "
            "or `--set data.fields='[instruction], output'`",
        ),
        (
            ["instruction", "context", "response"],
            "`--set data.format=alpaca` `--set data.fields='[instruction+context], response'`, "
            "or `--set data.fields='[instruction+context], response'`",
        ),
        (["question", "context", "response"], "`--set data.fields='[question+context], response'`"),
        (["article", "highlights", "id"], "`--set data.fields='[article], highlights'`"),
        (["content", "path"], "`--set data.fields=content`"),
        (["a", "b"], "name the columns"),
    ],
)
def test_columns_lead_to_the_keys_that_read_them(columns: list[str], hint: str):
    assert columns_hint(dict.fromkeys(columns, "a"), DEFAULT) == hint


def test_other_columns_of_conversations_need_two_keys():
    turns = [{"role": "user", "content": "a"}]
    keys = "`--set data.format=chat` `--set data.fields=conversations`"
    assert columns_hint({"conversations": turns}, DEFAULT) == keys


def test_turns_of_sharegpt_are_a_format():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    with pytest.raises(PrepError, match="has no `role`") as caught:
        messages_value(Record({"conversations": turns}, "rows.jsonl:1", 10), "conversations")
    assert caught.value.hint == "`--set data.format=sharegpt` `--set data.fields=conversations`"
