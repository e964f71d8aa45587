"""`prep tokenize` and `prep.batches`: the tokens of a recipe, and the batches of `prep train`."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing
from tests.helpers.slow_cases import slow_except
from tests.helpers.training_folder import RECIPE, WORDS, make_training_folder
from tests.test_readme import ROOT, blocks, write_files
from tests.trainer.run.test_train_losses import write_documents
from trainer.data import files as data_files
from trainer.data import shards, store, token_formats
from trainer.data.files import DataFile
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.training import loop

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


@pytest.fixture
def texts(monkeypatch: MonkeyPatch) -> None:
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


def run_json(capsys: Capture, *args: str) -> dict[str, object]:
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


@pytest.mark.usefixtures("texts")
def test_processes_write_the_bytes_of_train(capsys: Capture):
    for index in (2, 0):
        words = ("--out", "shared", "--processes", f"3/{index}")
        assert main(["tokenize", "recipe.toml", *words]) == OK
    report = run_json(capsys, "--out", "shared", "--processes", "3/1")
    assert report["complete"]
    assert report["process"] == 1
    prep.train("recipe.toml", "alone", overrides="train.steps=1")
    assert read_stores("shared") == read_stores("alone")


@pytest.mark.usefixtures("texts")
def test_train_uses_the_tokens(capsys: Capture):
    assert main(["tokenize", "recipe.toml", "-q"]) == OK
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--set", "train.steps=1"]) == OK
    captured = capsys.readouterr()
    assert "using the tokens of an earlier run" in captured.err


@pytest.mark.usefixtures("texts")
def test_slurm_numbers_the_processes(capsys: Capture, monkeypatch: MonkeyPatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    reports: list[dict[str, object]] = []
    for index in range(2):
        monkeypatch.setenv("SLURM_PROCID", str(index))
        reports.append(run_json(capsys))
    assert [report["process"] for report in reports] == [0, 1]
    assert [report["complete"] for report in reports] == [False, True]


@pytest.mark.usefixtures("texts")
def test_incomplete_tokens_are_reported(capsys: Capture):
    assert main(["tokenize", "recipe.toml", "--processes", "2/0"]) == OK
    n_shards = -(-sum(path.stat().st_size for path in Path("data").iterdir()) // 1000)
    expected = f"train: {n_shards // 2} shards of {n_shards} left to other processes\n"
    assert capsys.readouterr().out == expected


@pytest.mark.usefixtures("texts")
def test_changed_data_gives_other_tokens(capsys: Capture):
    settings = ("recipe.toml", "--processes")
    assert main(["tokenize", *settings, "2/0", "-q"]) == OK
    Path("data/1.txt").write_text("w1 w2")
    assert main(["tokenize", *settings, "2/1", "-q"]) == OK
    assert len([*Path("runs/recipe/data").glob("*/00000")]) == 1
    assert not [*Path("runs/recipe/data").glob("*/store.json")]
    report = run_json(capsys, "--processes", "2/0")
    assert report["complete"]


@pytest.mark.usefixtures("texts")
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


@pytest.mark.usefixtures("texts")
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
    overrides = ["data.type=megatron", "data.path=tokens/train.idx"]
    again = prep.batches("recipe.toml", overrides=overrides, out="other")
    assert again.digest() == prep.batches("recipe.toml").digest()


@pytest.mark.usefixtures("texts")
def test_full_disk_leaves_no_half_of_a_dataset(monkeypatch: MonkeyPatch):
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


@pytest.mark.usefixtures("texts")
def test_unfit_format_is_an_error_before_the_work():
    with pytest.raises(prep.PrepError, match="its format has no loss weights"):
        prep.tokenize_shard(
            "recipe.toml", out="tokens", format="megatron", overrides="data.add_bos=true"
        )
    assert not Path("runs").exists()


@pytest.mark.usefixtures("texts")
def test_tokens_in_a_bucket_are_refused(capsys: Capture):
    """They were written to a local folder called `gs:`."""
    error = run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--out", "gs://bucket/tokens")
    assert "cannot write gs://bucket/tokens" in error
    with pytest.raises(prep.UsageError, match="cannot write gs://bucket/tokens"):
        prep.batches("recipe.toml", out="gs://bucket/tokens")
    assert not Path("gs:").exists()


@pytest.mark.usefixtures("texts")
def test_last_process_writes_other_formats():
    for process in range(2):
        result = prep.tokenize_shard("recipe.toml", process, of=2, out="tokens", format="megatron")
        assert Path("tokens/train.idx").exists() == result.is_complete == bool(process)


@pytest.mark.usefixtures("texts")
def test_invalid_arguments_are_errors(capsys: Capture):
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
    texts = [block.text for block in blocks(page) if block.language == "python"]
    (script,) = [text for text in texts if word in text]
    Path("script.py").write_text(script)
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "4"}
    words = [sys.executable, "script.py"]
    run = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("library", ["ray", "apache_beam"])
def test_scripts_of_the_guide_complete_the_tokens(library: str):
    pytest.importorskip(library)
    run_script(PAGE, f"import {library}")
    result = prep.tokenize_shard("corpus.toml", 0, of=4)
    assert result.is_complete


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("library", slow_except(["jax", "torch"], ["jax"]))
def test_loops_of_the_guide_read_the_batches(library: str):
    pytest.importorskip(library)
    printed = run_script(LOOP_PAGE, f"import {library}")
    batches = prep.batches("loop.toml", start=3)
    expected = [f"{batches.step} {(8, 64)} {batch['tokens'].sum()}" for batch in batches]
    assert printed.splitlines() == expected


# `prep.batches`: the batches of `prep train`, in JAX and in torch


STEPS = 12
PACKED = ("data.type=json", "data.path=train.jsonl", "data.packing=documents")


@pytest.fixture
def documents(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_documents(Path("train.jsonl"), 0, 200)


def record_fed_batches(monkeypatch: MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """Return a list of the batches of the training loop. It grows with each step."""
    fed: list[dict[str, np.ndarray]] = []
    load_batch = loop.load_batch

    def load_and_record(*args: Any, **options: Any) -> dict[str, Any]:
        batch = load_batch(*args, **options)
        # Only training batches have epochs. One of an evaluation compiles its step.
        if "epochs" in options:
            fed.append({name: np.asarray(array) for name, array in batch.items()})
        return batch

    monkeypatch.setattr(loop, "load_batch", load_and_record)
    return fed


def assert_equal_batches(batches: list[Any], expected: list[Any]) -> None:
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected):
        assert batch.keys() == other.keys()
        for name, array in other.items():
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array, name)


@pytest.mark.usefixtures("documents")
def test_batches_equal_the_batches_of_train(monkeypatch: MonkeyPatch):
    fed = record_fed_batches(monkeypatch)
    prep.train("recipe.toml", "run", overrides=PACKED)
    batches = prep.batches("recipe.toml", out="other", overrides=PACKED)
    assert batches.steps == len(fed)
    assert_equal_batches(list(batches), fed)


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.path=", "model.init=random", "model.config=tiny"),
        ("model.path=tiny",),
        ("batch.size=", "batch.per_replica=4"),
    ],
    ids=["random-start", "hugging-face", "per-replica"],
)
def test_other_forms_of_a_recipe_have_equal_batches(overrides: tuple[str, ...]):
    other = prep.batches("recipe.toml", out="other", overrides=overrides)
    assert other.digest() == prep.batches("recipe.toml").digest()


@pytest.mark.usefixtures("documents")
def test_rules_of_the_batch_count_its_replicas():
    words = ["mesh=2,4,1", "batch.size=", "batch.per_replica=4", "model.path=split"]
    prep.save_init("tiny", "split", mesh="2,4,1", pad_vocab="8", rules=["act:batch=dp"])
    prep.train("recipe.toml", "run", overrides=words, stop_after=1)
    environment = json.loads(Path("run", ENVIRONMENT_FILE).read_text())
    # Two replicas of four rows. The devices of fsdp have the same rows.
    assert environment["data"]["batch_sequences"] == 8
    batch = next(prep.batches("recipe.toml", out="other", overrides=words))
    assert batch["tokens"].shape == (8, 16)


def read_whole_batches() -> list[dict[str, np.ndarray]]:
    return list(prep.batches("recipe.toml"))


@pytest.mark.usefixtures("documents")
def test_global_jax_arrays_equal_the_batches_of_one_process():
    """The process of this test has the devices of all processes, so it places one share per device."""
    import jax

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    shares = [prep.batches("recipe.toml", process=process, of=8, start=2) for process in range(8)]
    for expected in read_whole_batches()[2:]:
        parts = [next(share) for share in shares]
        for name, array in expected.items():
            joined = np.concatenate([part[name] for part in parts])
            placed = jax.make_array_from_process_local_data(sharding, joined, array.shape)
            np.testing.assert_array_equal(np.asarray(placed), array)
            for shard, part in zip(placed.addressable_shards, parts):
                np.testing.assert_array_equal(np.asarray(shard.data), part[name])


@pytest.mark.usefixtures("documents")
def test_copies_open_the_tokens_again():
    batches = prep.batches("recipe.toml", process=1, of=2, start=4)
    data = pickle.dumps(batches)
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert (copy.step, copy.first_row, copy.n_rows) == (4, 4, 4)
    assert_equal_batches(list(copy), list(batches))


@pytest.mark.usefixtures("documents")
def test_copies_ignore_a_changed_recipe():
    batches = prep.batches("recipe.toml")
    data = pickle.dumps(batches)
    Path("recipe.toml").write_text(RECIPE.replace("seed = 3", "seed = 4"))
    assert_equal_batches(list(pickle.loads(data)), list(batches))


@pytest.mark.usefixtures("documents")
def test_copies_refuse_changed_data():
    data = pickle.dumps(prep.batches("recipe.toml"))
    text = Path("text.txt")
    text.write_text(text.read_text() + " w1 w2")
    with pytest.raises(prep.PrepError, match="the data has changed during the run"):
        pickle.loads(data)


@pytest.mark.usefixtures("documents")
def test_batches_import_no_jax():
    program = (
        "import sys, prepcli as prep\n"
        "next(prep.batches('recipe.toml'))\n"
        "assert 'jax' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.usefixtures("documents")
def test_unknown_batch_size_is_an_error():
    overrides = ["batch.size=", "batch.per_device=1", 'mesh="1,-1,1"']
    with pytest.raises(prep.UsageError, match="mesh 1,-1,1 has no size for fsdp"):
        prep.batches("recipe.toml", overrides=overrides)


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize("share", [(2, 2), (0, 9)])
def test_invalid_share_is_an_error_before_the_data_is_read(share: tuple[int, int]):
    with pytest.raises(prep.UsageError, match=r"`process` is 2|a batch has 8 sequences"):
        prep.batches("recipe.toml", process=share[0], of=share[1])
    assert not Path("runs").exists()


@pytest.mark.usefixtures("documents")
def test_digest_names_the_batches_of_a_run():
    whole = prep.batches("recipe.toml")
    assert whole.digest() == prep.batches("recipe.toml", process=2, of=3, start=7).digest()
    other_seed = prep.batches("recipe.toml", overrides="seed=4")
    assert whole.digest() != other_seed.digest()
    seen = [batch["tokens"].tobytes() for batch in whole]
    assert seen == [whole.batch(step)["tokens"].tobytes() for step in range(STEPS)]


@pytest.fixture
def read_files(monkeypatch: MonkeyPatch) -> list[str]:
    """Return a list of the data files and token files read for their digests. It grows with each read."""
    read: list[str] = []
    hash_file = data_files.hash_file
    file_digest = store.file_digest

    def record_hash(path: Path) -> DataFile:
        read.append(path.name)
        return hash_file(path)

    def record_digest(path: Path) -> str:
        read.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(data_files, "hash_file", record_hash)
    monkeypatch.setattr(store, "file_digest", record_digest)
    return read


@pytest.mark.usefixtures("documents")
def test_only_process_0_reads_everything_at_a_start(read_files: list[str]):
    whole = prep.batches("recipe.toml")
    read_files.clear()
    other = prep.batches("recipe.toml", process=1, of=2, start=5)
    assert read_files == []
    assert other.digest() == whole.digest()
    prep.batches("recipe.toml", process=0, of=2, start=5)
    assert sorted({*read_files}) == ["documents.bin", "text.txt", "tokens.bin"]
    read_files.clear()
    prep.batches("recipe.toml", verify=False)
    assert read_files == []


@pytest.mark.usefixtures("documents")
def test_tokenize_leaves_nothing_to_read(read_files: list[str]):
    for process in range(2):
        prep.tokenize_shard("recipe.toml", process, of=2)
    read_files.clear()
    prep.batches("recipe.toml", process=1, of=2)
    assert read_files == []


@pytest.mark.usefixtures("documents")
def test_changed_data_is_read_again(read_files: list[str]):
    before = prep.batches("recipe.toml").identity
    text = Path("text.txt")
    stamp = text.stat().st_mtime_ns
    text.write_text(text.read_text().replace("w1 ", "w2 "))
    os.utime(text, ns=(stamp, stamp + 1))
    read_files.clear()
    assert prep.batches("recipe.toml", process=1, of=2).identity != before
    assert "text.txt" in read_files


@pytest.mark.usefixtures("documents")
def test_other_settings_do_not_use_the_record():
    before = prep.batches("recipe.toml").identity
    changed = prep.batches("recipe.toml", verify=False, overrides="data.max_examples=1")
    assert changed.identity != before
    # A record of tokens that are gone is ignored.
    for path in Path("runs/recipe/data").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert prep.batches("recipe.toml", verify=False).identity == before
