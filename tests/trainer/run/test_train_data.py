"""Data files of buckets and of the hub, on loopback servers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError, UsageError
from prepcli.sources.locate import Access
from tests.helpers.corpus import make_config, tokenize_quietly
from tests.helpers.data_formats import write_arrow_files, write_json_files
from tests.helpers.fork_server import run_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import FakeObjectStore, use_objects
from trainer.data.dataset_layout import WHOLE, Selection
from trainer.data.files import DataFile, check_not_empty
from trainer.data.find_files import DataFinder, find_data_files
from trainer.data.store import read_meta

ROWS = [{"id": str(i), "text": f"the cat {i} sat on the mat"} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
OBJECTS = {
    "bucket/data/b.jsonl": LINES,
    "bucket/data/a.jsonl.gz": gzip.compress(LINES),
    "bucket/data/.hidden.jsonl": LINES,
    "bucket/data/notes.md": b"no data",
    "bucket/data/deep/c.jsonl": LINES,
    "bucket/empty.jsonl": b"",
}
FINDER = DataFinder(Access(), note=lambda text: None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    with use_objects(monkeypatch, OBJECTS) as store:
        yield store


def find(url: str) -> list[str]:
    return [str(file.path) for file in FINDER.find(url, lambda name: ".jsonl" in name, WHOLE)]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_urls_name_files_folders_and_globs(scheme: str):
    folder = f"{scheme}://bucket/data"
    assert find(f"{folder}/notes.md") == [f"{folder}/notes.md"]
    assert find(folder) == [
        f"{folder}/{name}" for name in ("a.jsonl.gz", "b.jsonl", "deep/c.jsonl")
    ]
    assert find(f"{folder}/*.jsonl") == [f"{folder}/b.jsonl"]
    assert find(f"{scheme}://bucket/**/c*") == [f"{folder}/deep/c.jsonl"]


@pytest.mark.usefixtures("store")
def test_url_without_data_fails():
    for url in ("s3://bucket/none", "s3://bucket/data/*.csv"):
        with pytest.raises(PrepError, match="no data in"):
            find(url)
    (empty,) = FINDER.find("s3://bucket/empty.jsonl", lambda name: True, WHOLE)
    with pytest.raises(PrepError, match=r"s3://bucket/empty.jsonl is empty"):
        check_not_empty(empty)
    with pytest.raises(PrepError, match="is an invalid URL"):
        find("hf://owner/name")


@pytest.mark.parametrize("url", ["https://example.com/a.jsonl", "ftp://host/a.txt"])
def test_urls_of_other_schemes_are_named_with_the_supported_ones(url: str):
    with pytest.raises(UsageError) as caught:
        FINDER.find(url, lambda name: True, WHOLE)
    assert caught.value.what == f"cannot read data from {url}"
    assert caught.value.why == "supported: paths, gs://, s3:// and hf://datasets/"


def test_bucket_gives_the_tokens_of_local_files(store: FakeObjectStore, tmp_path: Path):
    pytest.importorskip("pyarrow")
    local = [*write_json_files(tmp_path, ROWS)[:4], *write_arrow_files(tmp_path, ROWS)]
    for path in local:
        store.objects[f"bucket/all/{path.name}"] = path.read_bytes()
    digests: list[object] = []
    for path in local:
        config = make_config(
            tmp_path, path, type="auto", fields="text", cache=tmp_path / f"cache-{path.name}"
        )
        for paths in (config.paths, (f"s3://bucket/all/{path.name}",)):
            tokens = tokenize_quietly(replace(config, paths=paths, remote=FINDER))
            digests.append(read_meta(config.cache / tokens.identity).shards["00000"].digests)
    assert digests == [digests[0]] * len(digests)


def test_object_that_changes_is_an_error(store: FakeObjectStore):
    (file,) = FINDER.find("s3://bucket/data/b.jsonl", lambda name: True, WHOLE)
    store.objects["bucket/data/b.jsonl"] = LINES.replace(b"cat", b"hat")
    with pytest.raises(PrepError, match="changed while it was read"), file.open() as stream:
        stream.read()


def test_digest_changes_with_the_object_content(store: FakeObjectStore):
    def digest() -> DataFile:
        return FINDER.find("s3://bucket/data/b.jsonl", lambda name: True, WHOLE)[0]

    before = digest()
    assert digest() == before
    store.objects["bucket/data/b.jsonl"] = LINES.replace(b"cat", b"hat")
    assert digest().digest != before.digest


def find_in_bucket(selection: Selection, url: str = "gs://bucket/set") -> list[str]:
    """Return the names of the files of a folder in a bucket that a selection has."""
    names: list[str] = []
    for file in find_data_files([url], "auto", selection, remote=FINDER):
        assert isinstance(file, DataFile)
        names.append(str(file.path).removeprefix("gs://bucket/"))
    return names


def test_split_selects_files_of_a_bucket_by_their_names(store: FakeObjectStore):
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl", "notes.md"):
        store.objects[f"bucket/set/{name}"] = LINES
    notes: list[str] = []
    finder = DataFinder(Access(), notes.append)
    assert len(find_data_files(["gs://bucket/set"], "auto", remote=finder)) == 2
    assert notes == [
        "gs://bucket/set has files of several splits (test, train) and all are read: `data.split` selects one"
    ]
    assert find_in_bucket(Selection(split="test")) == ["set/test-00000-of-00001.jsonl"]
    with pytest.raises(PrepError, match="has no split"):
        find_in_bucket(Selection(split="dev"))
    with pytest.raises(PrepError, match="no path of the data is a dataset"):
        find_in_bucket(Selection(split="test"), "gs://bucket/set/test-00000-of-00001.jsonl")


def test_readme_in_a_bucket_lists_the_files_of_a_split(store: FakeObjectStore):
    for name, content in REPO.files.items():
        store.objects[f"bucket/set/{name}"] = content
    assert find_in_bucket(WHOLE) == ["set/x/a.jsonl", "set/x/b.jsonl"]
    assert find_in_bucket(Selection(config="main")) == ["set/x/a.jsonl", "set/x/b.jsonl"]
    store.objects["bucket/set/README.md"] = b"---\n{\n---\n"
    with pytest.raises(PrepError, match=r"metadata of gs://bucket/set/README\.md is malformed"):
        find_in_bucket(WHOLE)


README = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: x/*.jsonl\n---\n"
REPO = FakeRepo({"README.md": README, "x/a.jsonl": LINES, "x/b.jsonl": LINES, "y/c.jsonl": LINES})
SCRIPT = """
import json, sys
from trainer.data.find_files import DataFinder
from prepcli.core.errors import PrepError
from prepcli.sources.locate import Access
from trainer.data.files import check_not_empty
from trainer.data.dataset_layout import Selection
finder = DataFinder(Access(offline="--offline" in sys.argv), note=lambda text: None)
answer = []
for url, config, split in json.loads(sys.argv[1]):
    try:
        files = finder.find(url, lambda name: name.endswith(".jsonl"), Selection(config, split))
        for file in files:
            with file.open() as stream:
                answer.append([str(file.path), file.nbytes, file.digest, len(stream.read())])
    except PrepError as error:
        answer.append(str(error))
print(json.dumps(answer))
"""


def test_hub_dataset_is_read_through_the_cache(tmp_path: Path):
    requests = [["hf://datasets/o/n", "main", "train"], ["hf://datasets/o/n/y/*.jsonl", None, None]]
    requests += [["hf://datasets/o/n", "main", "test"], ["hf://datasets/o/none", None, None]]
    with serve_hub({"o/n": REPO}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path)}
        answers = json.loads(run_python(SCRIPT, json.dumps(requests), env=environment).stdout)
        n_requests = len(hub.requests)
        offline = json.loads(
            run_python(SCRIPT, json.dumps(requests[:2]), "--offline", env=environment).stdout
        )
        assert len(hub.requests) == n_requests
    *files, no_split, no_dataset = answers
    names = ("x/a.jsonl", "x/b.jsonl", "y/c.jsonl")
    assert [file[0] for file in files] == [f"hf://datasets/o/n/{name}" for name in names]
    assert all(nbytes == read_nbytes == len(LINES) for _, nbytes, _, read_nbytes in files)
    assert len({digest for _, _, digest, _ in files}) == 1
    assert no_split.startswith("o/n has no split `test` - its splits: train")
    assert no_dataset.startswith(
        "cannot read o/none - HTTP 404 from the hub: there is no such dataset"
    )
    assert offline == files
