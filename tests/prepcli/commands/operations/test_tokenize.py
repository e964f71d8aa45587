"""`prep tokenize`: the tokens of a recipe in one or several processes, and in other formats."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE
from tests.helpers.run_cli import run_failing
from tests.helpers.training_folder import RECIPE, WORDS, make_training_folder
from tests.test_readme import ROOT, blocks, write_files
from trainer.data import shards, token_formats

N_FILES = 5
MIXTURE = """
[[data.sources]]
name = "near"
path = "data/*.txt"
eval_path = "text.txt"
[[data.sources]]
name = "far"
path = "text.txt"
"""


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_texts()
    Path("recipe.toml").write_text(RECIPE.replace('"text.txt"', '"data/*.txt"'))
    monkeypatch.setattr(shards, "SHARD_NBYTES", 1000)


def write_texts() -> None:
    Path("data").mkdir()
    random = np.random.default_rng(0)
    for index in range(N_FILES):
        words = (WORDS[number] for number in random.integers(0, len(WORDS), 100 * index + 50))
        Path(f"data/{index}.txt").write_text(" ".join(words))


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", "--json", *args]) == OK
    return json.loads(capsys.readouterr().out)


def read_stores(run: str) -> dict[str, bytes]:
    """Return the files of all token stores of a run."""
    cache = Path(run, "data")
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in cache.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_processes_write_the_bytes_of_train(capsys: pytest.CaptureFixture[str]):
    for index in (2, 0):
        assert (
            main(["tokenize", "recipe.toml", "--out", "shared", "--processes", f"3/{index}"]) == OK
        )
    report = run_json(capsys, "--out", "shared", "--processes", "3/1")
    assert report["complete"]
    assert report["process"] == 1
    prep.train("recipe.toml", "alone", overrides="train.steps=1")
    assert read_stores("shared") == read_stores("alone")


def test_train_uses_the_tokens(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenize", "recipe.toml", "-q"]) == OK
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--set", "train.steps=1"]) == OK
    captured = capsys.readouterr()
    assert "using the tokens of an earlier run" in captured.err


def test_slurm_numbers_the_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    reports: list[dict[str, object]] = []
    for index in range(2):
        monkeypatch.setenv("SLURM_PROCID", str(index))
        reports.append(run_json(capsys))
    assert [report["process"] for report in reports] == [0, 1]
    assert [report["complete"] for report in reports] == [False, True]


def test_incomplete_tokens_are_reported(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenize", "recipe.toml", "--processes", "2/0"]) == OK
    n_shards = -(-sum(path.stat().st_size for path in Path("data").iterdir()) // 1000)
    expected = f"train: {n_shards // 2} shards of {n_shards} left to other processes\n"
    assert capsys.readouterr().out == expected


def test_changed_data_gives_other_tokens(capsys: pytest.CaptureFixture[str]):
    settings = ("recipe.toml", "--processes")
    assert main(["tokenize", *settings, "2/0", "-q"]) == OK
    Path("data/1.txt").write_text("w1 w2")
    assert main(["tokenize", *settings, "2/1", "-q"]) == OK
    assert len([*Path("runs/recipe/data").glob("*/00000")]) == 1
    assert not [*Path("runs/recipe/data").glob("*/store.json")]
    report = run_json(capsys, "--processes", "2/0")
    assert report["complete"]


def test_mixture_has_a_store_per_source():
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "").replace("holdout = 0.1\n", "")
    Path("mixed.toml").write_text(f"{data}{MIXTURE}\n[batch]{rest}")
    results = [prep.tokenize_shard("mixed.toml", process, of=2) for process in range(2)]
    names = ["near-validation", "near-train", "far-train"]
    assert [part.name for part in results[1].data] == names
    assert results[1].is_complete
    missing = [part.missing_shards for part in results[0].data]
    assert all(0 < count <= part.shards // 2 for count, part in zip(missing, results[0].data))
    prep.batches("mixed.toml")


TWICE = """
[[data.sources]]
name = "texts"
path = "rows/*.jsonl"
eval_path = "rows/*.jsonl"
[[data.sources]]
name = "prompts"
path = "rows/*.jsonl"
fields = "[text], text"
"""


def test_stores_of_equal_files_are_separate():
    data, rest = RECIPE.split("[batch]")
    data = data.replace('path = "text.txt"\n', "").replace("holdout = 0.1\n", "max_examples = 90\n")
    data = data.replace('"text"', '"json"')
    Path("twice.toml").write_text(f"{data}{TWICE}\n[batch]{rest}")
    Path("rows").mkdir()
    for name in "ab":
        line = json.dumps({"text": " ".join(WORDS)}) + "\n"
        Path(f"rows/{name}.jsonl").write_text(line * 50)
    results = [prep.tokenize_shard("twice.toml", process, of=2) for process in range(2)]
    # `max_examples` leaves one shard of the training data.
    assert [part.shards for part in results[0].data[1:]] == [1, 1]
    assert results[0].data[0].missing_shards > 1
    assert [part.missing_shards for part in results[0].data[1:]] == [0, 0]
    assert results[1].is_complete
    assert [part.documents for part in results[1].data] == [100, 90, 90]


def test_other_formats_have_the_documents_of_the_store():
    pq = pytest.importorskip("pyarrow.parquet")
    result = prep.tokenize_shard("recipe.toml", out="tokens", format="megatron")
    assert result.data[0].path == Path("tokens/train.idx")
    store = next(path for path in Path("runs/recipe/data").iterdir() if path.is_dir())
    ids = b"".join(path.read_bytes() for path in sorted(store.glob("*/tokens.bin")))
    assert Path("tokens/train.bin").read_bytes() == ids
    table = prep.tokenize_shard("recipe.toml", out="tokens", format="parquet").data[0]
    rows = pq.read_table(table.path).to_pydict()["input_ids"]
    assert len(rows) == N_FILES == table.documents
    assert np.concatenate(rows).astype("<u2").tobytes() == ids
    again = prep.batches(
        "recipe.toml", overrides=["data.type=megatron", "data.path=tokens/train.idx"], out="other"
    )
    assert again.digest() == prep.batches("recipe.toml").digest()


def test_full_disk_leaves_no_half_of_a_dataset(monkeypatch: pytest.MonkeyPatch):
    def fill_disk(*arguments: object) -> Iterator[bytes]:
        yield b"start"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        patches.setattr(token_formats, "_megatron_index", fill_disk)
        with pytest.raises(prep.PrepError, match="No space left on device"):
            prep.tokenize_shard("recipe.toml", out="tokens", format="megatron")
    assert not list(Path("tokens").iterdir())
    with monkeypatch.context() as patches:
        patches.setattr(token_formats.shutil, "copyfileobj", fill_disk_at_once)
        with pytest.raises(prep.PrepError, match="No space left on device"):
            prep.tokenize_shard("recipe.toml", out="tokens", format="megatron")
    assert not list(Path("tokens").iterdir())
    prep.tokenize_shard("recipe.toml", out="tokens", format="megatron")
    assert sorted(os.listdir("tokens")) == ["train.bin", "train.idx"]


def fill_disk_at_once(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_unfit_format_is_an_error_before_the_work():
    with pytest.raises(prep.PrepError, match="its format has no loss weights"):
        prep.tokenize_shard(
            "recipe.toml", out="tokens", format="megatron", overrides="data.add_bos=true"
        )
    assert not Path("runs").exists()


def test_tokens_in_a_bucket_are_refused(capsys: pytest.CaptureFixture[str]):
    """They were written to a local folder called `gs:`."""
    error = run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--out", "gs://bucket/tokens")
    assert "cannot write gs://bucket/tokens" in error
    with pytest.raises(prep.UsageError, match="cannot write gs://bucket/tokens"):
        prep.batches("recipe.toml", out="gs://bucket/tokens")
    assert not Path("gs:").exists()


def test_last_process_writes_other_formats():
    for process in range(2):
        result = prep.tokenize_shard("recipe.toml", process, of=2, out="tokens", format="megatron")
        assert Path("tokens/train.idx").exists() == result.is_complete == bool(process)


def test_invalid_arguments_are_errors(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenize", "recipe.toml", "--format", "megatron"]) == USAGE
    assert "`--format megatron` needs `--out`" in capsys.readouterr().err
    with pytest.raises(prep.UsageError, match="`process` is 2"):
        prep.tokenize_shard("recipe.toml", 2, of=2)


PAGE = ROOT / "docs/how-to/data.md"
LOOP_PAGE = ROOT / "docs/how-to/own-loop.md"


def run_script(page: Path, word: str) -> str:
    """Run the script of a page with a word in it, in a process of its own, and return what it prints."""
    write_files(page, Path())
    Path("gpt-neo-1.3B").symlink_to("tiny")
    Path("validation.txt").write_text(Path("text.txt").read_text())
    (script,) = [
        block.text for block in blocks(page) if block.language == "python" and word in block.text
    ]
    Path("script.py").write_text(script)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_NUM_CPU_DEVICES": "4",
    }
    run = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("library", ["concurrent", "ray", "apache_beam"])
def test_scripts_of_the_guide_complete_the_tokens(library: str):
    if library != "concurrent":
        pytest.importorskip(library)
    run_script(PAGE, f"import {library}" if library != "concurrent" else "ProcessPoolExecutor")
    result = prep.tokenize_shard("corpus.toml", 0, of=4)
    assert result.is_complete


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_loops_of_the_guide_read_the_batches(library: str):
    pytest.importorskip(library)
    printed = run_script(LOOP_PAGE, f"import {library}")
    batches = prep.batches("loop.toml", start=3)
    expected = [f"{batches.step} {(8, 64)} {batch['tokens'].sum()}" for batch in batches]
    assert printed.splitlines() == expected
