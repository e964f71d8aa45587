"""`prep tokenize --show`: the text of samples and their counts, on a terminal, in a pipe, as JSON and as a page."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from tests.helpers.run_cli import run_failing
from tests.helpers.training_folder import RECIPE, make_training_folder, write_tokenizer
from trainer.data.sample_text import SamplePart, TokenSample, sample_line, sample_lines

ROOT = Path(__file__).parents[4]
FIELDS = 'type = "json"\npath = "data/*.jsonl"\nfields = "[ask], answer"\nholdout = 0'
ASKED = ["w5 w6", "w7", "\x1b[31m ⟦w8⟧"]
ANSWERED = ["w9 w1", "w3 " * 20, "w4"]
WORDS = ["w0", *(f"w{number}" for number in range(1, 120)), "\x1b[31m", "⟦w8⟧"]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    Path("words").mkdir()
    write_tokenizer(Path("words"), WORDS)
    Path("data").mkdir()
    for index, (ask, answer) in enumerate(zip(ASKED, ANSWERED)):
        row = json.dumps({"ask": ask, "answer": answer})
        Path(f"data/{index}.jsonl").write_text(f"{row}\n")
    recipe = RECIPE.replace('type = "text"\npath = "text.txt"', f'tokenizer = "words"\n{FIELDS}')
    Path("recipe.toml").write_text(recipe.replace("holdout = 0.1\n", ""))


def run_on_terminal(*words: str) -> str:
    """Run `prep` with its results on a pseudo-terminal of 80 columns, and return them."""
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "prepcli", *words],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(slave)
    output = bytearray()
    try:
        while data := os.read(master, 1 << 16):
            output += data
    except OSError:  # the process closed the terminal
        pass
    os.close(master)
    assert process.wait() == OK
    return output.decode().replace("\r\n", "\n")


def read_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", "--json", *words]) == OK
    return json.loads(capsys.readouterr().out)["data"]["train"]


def test_pipe_gets_brackets_around_loss(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenize", "recipe.toml", "--show", "3", "-v"]) == OK
    lines = capsys.readouterr().out.splitlines()
    # The end token of the model is w0.
    assert lines[:3] == [
        "--- train 1: 5 tokens, 3 with loss",
        "w5 w6⟦ w9 w1 w0⟧",
        "ids: 5 6 ⟦9 1 0⟧",
    ]
    assert lines[4] == "--- train 2: 22 tokens, 21 with loss, longer than a sequence"
    # Neither a control character nor a bracket of the data looks like one of prep.
    assert lines[9] == "\\x1b[31m \\u27e6w8\\u27e7⟦ w4 w0⟧"
    assert lines[12].startswith("data   samples  tokens  with loss  cut  dropped  longest")
    assert lines[13].split() == ["train", "3", "31", "26", "1", "15", "22", "0"]


def test_marks_end_at_the_end_of_a_line():
    parts = (
        SamplePart("a\n", (1,), 0.0),
        SamplePart("b\nc\n", (2,), 1.0),
        SamplePart("\nd", (3,), 0.0),
        SamplePart("e", (4,), 1.0),
        SamplePart("\n", (5,), 0.0),
    )
    sample = TokenSample(parts=parts, source=(), tokens=5, loss_tokens=2, is_cut=False)
    assert list(sample_lines(sample, shows_ids=False, width=None)) == [
        "a↵\n⟦b↵\nc↵⟧\n↵\nd⟦e⟧↵",
    ]
    assert sample_line(sample) == "a\\n⟦b\\nc\\n⟧\\nd⟦e⟧\\n"


def test_terminal_of_80_columns_gets_color():
    output = run_on_terminal("tokenize", "recipe.toml", "--show", "1")
    lines = output.splitlines()
    assert lines[1] == "w5 w6\x1b[1;32m w9 w1 w0\x1b[0m"
    table = lines[3:5]
    assert [line.split()[0] for line in table] == ["data", "train"]
    assert max(map(len, table)) <= 80


def test_json_has_the_parts_of_samples(capsys: pytest.CaptureFixture[str]):
    train = read_json(capsys, "--show", "2")
    assert train["counts"]["samples"] == 3
    parts = train["samples"][0]["parts"]
    assert [(part["text"], part["ids"], part["weight"]) for part in parts] == [
        ("w5 w6", [5, 6], 0.0),
        (" w9 w1 w0", [9, 1, 0], 1.0),
    ]
    assert len(train["samples"]) == 2
    assert "samples" not in read_json(capsys)


def test_python_has_samples_as_data():
    (train,) = prep.tokenize_shard("recipe.toml", show=0).data
    assert (train.counts, train.samples) == (
        prep.SampleCounts(3, 31, 26, cut=1, dropped=15, longest=22),
        (),
    )
    (train,) = prep.tokenize_shard("recipe.toml", show=9).data
    assert [sample.tokens for sample in train.samples] == [5, 22, 4]


def test_one_process_of_a_job_shows_samples():
    # So little data is one shard, of process 0, which completes the tokens. Of processes that find them, process 0
    # shows them.
    for out, order in (("a", (0, 1)), ("b", (1, 0))):
        shown: list[tuple[int, bool]] = []
        for index in (*order, 0, 1):
            tokens = prep.tokenize_shard("recipe.toml", index, of=2, out=out, show=1).data[0]
            shown.append((index, bool(tokens.samples)))
        assert shown == [(index, index == 0) for index in (*order, 0, 1)]


def test_page_has_marks_and_escapes(capsys: pytest.CaptureFixture[str]):
    Path("data/3.jsonl").write_text(json.dumps({"ask": "<b>", "answer": "w1"}) + "\n")
    assert main(["tokenize", "recipe.toml", "--show", "3", "--html", "page.html"]) == OK
    assert "wrote page.html" in capsys.readouterr().err
    page = Path("page.html").read_text()
    assert "<pre>\nw5 w6<mark> w9 w1 w0</mark></pre>" in page
    assert "<summary>token ids</summary><p>5 6 <mark>9 1 0</mark></p>" in page
    assert "\x1b" not in page
    assert '<td>without loss</td><td class="n">0</td>' in page
    # The page of another program is not replaced, and the tokens are not made first.
    Path("other.html").write_text("mine")
    words = ("tokenize", "recipe.toml", "--show", "1", "--html", "other.html")
    assert "other.html is not overwritten" in run_failing(capsys, FAILED, *words)


def test_page_needs_samples(capsys: pytest.CaptureFixture[str]):
    error = run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--html", "page.html")
    assert "`--html` needs `--show`" in error
    assert "hint: `--show 3`" in error


def all_files() -> set[Path]:
    return set(Path(".").rglob("*"))


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_dry_run_shows_samples_and_keeps_nothing(
    packing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ("tokenize", "recipe.toml", "--show", "1", "--set", f"data.packing={packing}")
    temporary = Path("temporary").absolute()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = all_files()
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == OK
    shown = capsys.readouterr().out
    assert all_files() == before
    assert shown.splitlines()[-1] == "train: no tokens are kept"
    # The samples and the table are those of a run.
    assert main([*words]) == OK
    output = capsys.readouterr().out
    assert output.splitlines()[:-1] == shown.splitlines()[:-1]
    # Tokens that exist are read.
    before = all_files()
    assert main([*words, "--dry-run"]) == OK
    assert capsys.readouterr().out == output
    assert all_files() == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "`--dry-run` needs `--show`"),
        (["--show", "1", "--processes", "2/0"], "`--dry-run` is for one process"),
        (["--show", "1", "--format", "parquet", "--out", "a"], "exclude each other"),
    ],
)
def test_dry_run_without_samples_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    assert why in run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--dry-run", *words)


def test_dry_run_in_python_has_samples():
    (train,) = prep.tokenize_shard("recipe.toml", show=2, dry_run=True).data
    assert train.path is None
    assert len(train.samples) == 2
    assert not Path("runs").exists()


def test_mixture_shows_samples_of_each_source(capsys: pytest.CaptureFixture[str]):
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "data/{index}.jsonl"\n'
        for index, name in enumerate(("near", "far"))
    )
    recipe = Path("recipe.toml").read_text().replace('path = "data/*.jsonl"\n', "")
    recipe = recipe.replace("seq_length = 16", "seq_length = 4").replace(
        "[batch]", f"{sources}[batch]"
    )
    Path("recipe.toml").write_text(recipe)
    assert main(["tokenize", "recipe.toml", "--show", "1"]) == OK
    output = capsys.readouterr().out
    assert "--- near-train 1: 5 tokens" in output
    assert "--- far-train 1: 22 tokens" in output


def test_train_logs_a_sample_of_each_source(capsys: pytest.CaptureFixture[str]):
    names = ("near", "far", "third", "fourth", "fifth")
    for name, index in zip(names, (0, 1, 0, 0, 0)):
        row = json.loads(Path(f"data/{index}.jsonl").read_text().splitlines()[0])
        lines = [json.dumps(row | {"answer": f"{row['answer']} w{index}"})] * 9
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{name}.jsonl"\n' for name in names
    )
    recipe = Path("recipe.toml").read_text().replace('path = "data/*.jsonl"\n', "")
    Path("recipe.toml").write_text(recipe.replace("[batch]", f"{sources}[batch]"))
    assert main(["train", "recipe.toml", "--dry-run"]) == OK
    lines = capsys.readouterr().err.splitlines()
    samples = [line for line in lines if line.startswith("first sample")]
    assert [line.partition(":")[0] for line in samples] == [
        f"first sample of {name}" for name in names[:4]
    ]
    assert samples[0] == "first sample of near: w5 w6⟦ w9 w1 w0 w0⟧"
    assert all("⟦" in line for line in samples)
    assert sum(map(len, samples)) < 7 * 80
    assert "`prep tokenize RECIPE --show 1` shows the first samples of 1 other source" in lines


def test_train_logs_counts_and_one_sample(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--set", "data.seq_length=4", "--dry-run"]) == OK
    lines = capsys.readouterr().err.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("train "))
    assert row == ["train", "3", "31", "26", "2", "3", "22", "0"]
    assert "first sample: w5 w6⟦ w9 w1 w0⟧" in lines


def test_train_logs_a_long_sample_in_a_few_lines(capsys: pytest.CaptureFixture[str]):
    row = json.dumps({"ask": "w5", "answer": "w100 " * 3000})
    Path("data/0.jsonl").write_text(f"{row}\n")
    assert main(["train", "recipe.toml", "--dry-run"]) == OK
    (line,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("first sample")
    )
    assert " [… 2,938 tokens …] " in line
    assert 300 < len(line) < 7 * 80
