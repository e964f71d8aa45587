"""Data of `prep train`: files of buckets and the hub, copies of datasets, mixtures, and notes about conversations."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE, PrepError, UsageError
from prepcli.core.observer import SilentObserver
from prepcli.sources.open_folder import Access
from tests.helpers.corpus import make_config, tokenize_quietly
from tests.helpers.data_formats import write_arrow_files, write_json_files
from tests.helpers.fork_server import run_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.train_runs import set_keys, train_json
from tests.helpers.training_folder import RECIPE, WORDS, make_training_folder
from trainer.data.dataset_layout import WHOLE, Selection
from trainer.data.files import DataFile, check_not_empty
from trainer.data.find_files import DataFinder, find_data_files
from trainer.data.store import read_meta
from trainer.training.metrics import METRICS_FILE, read_metrics

# Data files of buckets and of the hub, on loopback servers.

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
from prepcli.sources.open_folder import Access
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


# A copy of a dataset of the hub on this machine: every command reads the same part of it, or refuses.

SPLITS = {"train": "w1", "test": "w2", "validation": "w3"}

COPY_README = "---\nconfigs:\n- config_name: default\n  data_files:\n"

COPY_README += "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in SPLITS)

COPY_README += "---\n# Text\n"


@pytest.fixture
def _copy_dir(work_dir: Path) -> None:
    Path("copy/data").mkdir(parents=True)
    Path("copy/README.md").write_text(COPY_README)
    for split, word in SPLITS.items():
        lines = [json.dumps({"text": " ".join([word] * 40)}) for _ in range(20)]
        Path(f"copy/data/{split}-00000-of-00001.jsonl").write_text("\n".join(lines))
    text = RECIPE.replace('path = "text.txt"\n', 'path = "copy"\n').replace("holdout = 0.1\n", "")
    Path("recipe.toml").write_text(text.replace('"text"', '"json"'))


def used_words(tokens: np.ndarray) -> set[str]:
    return {WORDS[token] for token in np.unique(tokens)} - {WORDS[0]}


def batch_words(*overrides: str) -> set[str]:
    batch = next(iter(prep.batches("recipe.toml", overrides=["data.add_eos=false", *overrides])))
    return used_words(batch["tokens"])


def tokenized_words(*overrides: str) -> set[str]:
    settings = ["data.add_eos=false", *overrides]
    report = prep.tokenize_shard("recipe.toml", overrides=settings)
    (part,) = (part for part in report.data if part.name == "train")
    assert part.path is not None
    return used_words(np.fromfile(part.path / "00000" / "tokens.bin", "<u2"))


@pytest.mark.usefixtures("_copy_dir")
@pytest.mark.parametrize("read", [batch_words, tokenized_words])
def test_copy_of_a_dataset_gives_one_split(read: Callable[..., set[str]]):
    assert read() == {"w1"}
    assert read("data.split=test") == {"w2"}
    assert read("data.split=train", "data.eval_split=validation") == {"w1"}


@pytest.mark.usefixtures("_copy_dir")
def test_folder_without_a_readme_gives_the_split_of_its_names(capsys: pytest.CaptureFixture[str]):
    Path("copy/README.md").unlink()
    assert batch_words("data.split=validation") == {"w3"}
    assert main(["tokenize", "recipe.toml"]) == 0
    note = "copy has files of several splits (test, train, validation) and all are read"
    assert note in capsys.readouterr().err


COMMANDS = {
    "train": ["train", "recipe.toml"],
    "tokenize": ["tokenize", "recipe.toml"],
    "plan": ["plan", "recipe.toml"],
    "eval": ["eval", "tiny-init", "--data", "copy", "--type", "json"],
}


@pytest.mark.usefixtures("_copy_dir")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str], command: str):
    for override, message in (
        ("data.split=dev", "copy has no split `dev`"),
        ("data.config=fr", "copy has no configuration `fr`"),
        ("data.revision=main", "data.revision"),
    ):
        assert message in run_failing(capsys, USAGE, *COMMANDS[command], "--set", override)


@pytest.mark.usefixtures("_copy_dir")
def test_batches_refuse_an_unknown_part():
    for override in ("data.split=dev", "data.config=fr", "data.revision=main"):
        with pytest.raises(prep.UsageError):
            prep.batches("recipe.toml", overrides=[override])


@pytest.mark.usefixtures("_copy_dir")
@pytest.mark.parametrize("command", ["tokenize", "plan"])
def test_every_command_refuses_too_long_sequences(capsys: pytest.CaptureFixture[str], command: str):
    arguments = [*COMMANDS[command], *set_keys("model.preset=gpt2", "model.init=random")]
    arguments += set_keys("model.path=", "data.tokenizer=tiny")
    error = run_failing(capsys, USAGE, *arguments, "--set", "data.seq_length=4096")
    assert "the model has 1024 positions" in error


# The token that a tokenizer puts before texts: the same in every command, one per document.

BEGIN = 5

TEXTS = ["w9 w8 w7", "w20 w21"]

DATA = ("data.path=rows.jsonl", "data.type=json", "data.holdout=0", "data.add_eos=false")


@pytest.fixture
def _prefix_dir(work_dir: Path) -> None:
    write_prefix(Path("tiny"))
    convert = ["save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "--overwrite", "-q"]
    assert main(convert) == OK
    lines = [json.dumps({"text": text}) for text in TEXTS * 40]
    Path("rows.jsonl").write_text("\n".join(lines))


def write_prefix(folder: Path) -> None:
    """Let the tokenizer of a folder begin each text with a token."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    ids = [(WORDS[BEGIN], BEGIN)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{WORDS[BEGIN]} $A", None, ids)
    tokenizer.save(file)


def expected_ids() -> list[int]:
    """Return the ids of the first documents, as the tokenizers library encodes them."""
    tokenizer = Tokenizer.from_file("tiny/tokenizer.json")
    return [token for text in TEXTS for token in tokenizer.encode(text).ids]


@pytest.mark.usefixtures("_prefix_dir")
def test_tokens_of_training_are_those_of_the_tokenizer(capsys: pytest.CaptureFixture[str]):
    overrides = [*DATA, "data.shuffle=false"]
    batch = next(iter(prep.batches("recipe.toml", overrides=overrides)))
    assert batch["tokens"][0][: len(expected_ids())].tolist() == expected_ids()
    # The first token of a document has no loss. Targets are one place before their tokens.
    is_begin = batch["targets"][0] == BEGIN
    assert is_begin.any()
    assert not batch["weights"][0][is_begin].any()
    settings = set_keys(*overrides)
    assert main(["tokenize", "recipe.toml", *settings, "--out", "again"]) == OK
    log = capsys.readouterr().err
    assert log.count("each document begins with w5, as the tokenizer begins a text") == 1
    (tokens,) = Path("again").rglob("tokens.bin")
    assert np.fromfile(tokens, "<u2")[: len(expected_ids())].tolist() == expected_ids()


@pytest.mark.usefixtures("_prefix_dir")
def test_prompts_and_evaluation_begin_as_training_does():
    loss = prep.evaluate("tiny-init", "rows.jsonl", seq_length=8).loss
    assert loss is not None
    plain = prep.evaluate(
        "tiny-init", "rows.jsonl", seq_length=8, overrides="data.add_bos=false"
    ).loss
    assert loss != plain
    generated = prep.generate("tiny-init", TEXTS[0], max_new_tokens=1)
    assert generated.prompt_tokens[0][0] == BEGIN


@pytest.mark.usefixtures("_prefix_dir")
def test_recipe_overrides_the_tokenizer():
    batch = next(iter(prep.batches("recipe.toml", overrides=[*DATA, "data.add_bos=false"])))
    assert BEGIN not in batch["tokens"]


def train(*overrides: str) -> list[str]:
    words = ["train", "recipe.toml", "--out", "run", "--set", "train.steps=4"]
    for override in (*DATA, *overrides):
        words += ["--set", override]
    return words


@pytest.mark.usefixtures("_prefix_dir")
def test_stopped_run_without_the_token_says_how_to_resume(capsys: pytest.CaptureFixture[str]):
    # A run of an earlier version has recorded `add_bos = false`, the default then.
    assert main([*train("data.add_bos=false"), "--stop-after", "2", "-q"]) in (OK, 75)
    stores = sorted(Path().rglob("tokens.bin"))
    error = run_failing(capsys, FAILED, *train())
    assert "data.add_bos: false -> not set" in error
    # The data is not tokenized again before the refusal.
    assert sorted(Path().rglob("tokens.bin")) == stores != []
    assert "`--set data.add_bos=false` keeps it" in error
    run_ok(*train("data.add_bos=false"))


@pytest.mark.usefixtures("_prefix_dir")
def test_stopped_run_resumes_if_the_tokenizer_adds_nothing():
    make_training_folder()
    assert main([*train("data.add_bos=false"), "--stop-after", "2", "-q"]) in (OK, 75)
    run_ok(*train())


# `prep train` on several sources: the mixture is the same after a stop, and a bucket may be one of them.

SOURCES = """
[[data.sources]]
name = "near"
path = "text.txt"
weight = 3
[[data.sources]]
name = "far"
path = "s3://bucket/data"
weight = 1
bad_lines = 1
"""


@pytest.fixture
def _mixture_dir(work_dir: Path) -> None:
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "")
    Path("recipe.toml").write_text(f"{data}{SOURCES}\n[batch]{rest}")


@pytest.mark.usefixtures("_mixture_dir")
def test_stopped_mixture_resumes_with_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    numbers = np.random.default_rng(1).integers(0, len(WORDS), (50, 30))
    lines = [json.dumps({"text": " ".join(WORDS[number] for number in row)}) for row in numbers]
    content = gzip.compress("\n".join([*lines, "{"]).encode())
    with use_objects(monkeypatch, {"bucket/data/a.jsonl.gz": content}) as store:
        capsys.readouterr()
        assert train_json(capsys, "--out", "whole")[0] == OK
        assert train_json(capsys, "--out", "parts", "--stop-after", "5")[0] == STOPPED
        assert train_json(capsys, "--out", "parts")[0] == OK
        whole, parts = (read_metrics(Path(name) / METRICS_FILE) for name in ("whole", "parts"))
        store.objects["bucket/data/a.jsonl.gz"] = gzip.compress(b'{"text": "w1"}\n' * 99)
        assert train_json(capsys, "--out", "parts", "--set", "train.steps=14")[0] == FAILED
    steps = [line for line in whole if "loss" in line]
    assert [line["loss"] for line in steps] == [line["loss"] for line in parts if "loss" in line]
    assert [(line["tokens.near"], line["tokens.far"]) for line in steps] == [
        (96 * step, 32 * step) for step in range(1, 13)
    ]


# Parts of conversations without effect on the tokens: every command that reads the data counts them.

EOS = "w2"

# The next role ends a turn, as in GLM-4.
TEMPLATE = """\
{%- for message in messages %}
    {{- 'w3 ' if message.role == 'user' else 'w4 ' }}{{ message.content + ' ' }}END
{%- endfor %}
{%- if add_generation_prompt %}{{ 'w4 ' }}{% endif %}
"""

TOOLS = [{"type": "function", "function": {"name": "sum"}}]

NOTES = {
    "tools": "2 conversations have `tools` that the chat template does not show",
    "reasoning": "1 turn of the assistant has reasoning that the template leaves out",
    "stop": "10 conversations have no loss on a token that ends a text",
}


@dataclass(frozen=True)
class Notes(SilentObserver):
    """An observer that keeps notes."""

    lines: list[str] = field(default_factory=list)

    def note(self, text: str, level: int = 0) -> None:
        self.lines.append(text)


def turn(role: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": "w7 w8 w9", **keys}


@pytest.fixture
def _chat_dir(work_dir: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "messages": [turn("user", weight=0), turn("assistant", reasoning_content="w1")],
            "tools": TOOLS,
        },
        {"messages": [turn("user"), turn("assistant", weight=0), turn("assistant", weight=1)]},
        {"messages": [turn("user"), turn("assistant", train=False)], "tools": TOOLS},
        {"messages": [turn("user"), turn("assistant", loss=False), turn("user")], "tools": None},
        *[{"messages": [turn("user"), turn("assistant")], "tools": []}] * 8,
    ]
    for index in range(2):
        part = rows[6 * index : 6 * index + 6]
        Path(f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    text = RECIPE.replace('path = "text.txt"', 'path = "*.jsonl"\nformat = "chat"')
    text = text.replace('type = "text"', 'type = "json"').replace("holdout = 0.1\n", "")
    Path("recipe.toml").write_text(text.replace('"tiny-init"', '"tiny"'))
    write_template("")


def write_template(end: str) -> None:
    """Write a template that ends each turn with a text, and let `w2` end generated texts."""
    template = TEMPLATE.replace("END", end and f"{{{{ '{end} ' }}}}")
    Path("tiny/chat_template.jinja").write_text(template)
    Path("tiny/generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))


def count_notes(log: str) -> dict[str, int]:
    return {name: log.count(note) for name, note in NOTES.items()}


@pytest.mark.usefixtures("_chat_dir")
def test_every_command_counts_ignored_parts(capsys: pytest.CaptureFixture[str]):
    once = dict.fromkeys(NOTES, 1)
    for process in ("2/1", "2/0"):
        capsys.readouterr()
        assert main(["tokenize", "recipe.toml", "--processes", process]) == OK
    assert count_notes(capsys.readouterr().err) == once
    # The tokens are in the cache now.
    assert main(["train", "recipe.toml", "--set", "train.steps=1"]) == OK
    assert count_notes(capsys.readouterr().err) == once
    notes = Notes()
    prep.batches("recipe.toml", out="other", progress=notes)
    assert count_notes("\n".join(notes.lines)) == once


@pytest.mark.usefixtures("_chat_dir")
def test_stop_token_with_loss_is_no_note():
    write_template(EOS)
    notes = Notes()
    prep.batches("recipe.toml", progress=notes)
    assert count_notes("\n".join(notes.lines)) == {"tools": 1, "reasoning": 1, "stop": 0}
