"""`prep.batches`: the batches of `prep train`, in JAX and in torch."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from tests.helpers.training_folder import RECIPE, make_training_folder
from tests.trainer.run.test_train_losses import write_documents
from trainer.data import files as data_files
from trainer.data import store
from trainer.data.files import DataFile
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.training import loop

STEPS = 12
PACKED = ("data.type=json", "data.path=train.jsonl", "data.packing=documents")
SOURCES = """
[[data.sources]]
name = "near"
path = "text.txt"
weight = 3
[[data.sources]]
name = "far"
path = "other.txt"
weight = 1
"""
CHANGES: Mapping[str, tuple[str, ...]] = {
    "unshuffled": ("data.shuffle=false", "data.holdout=0"),
    "documents": PACKED,
    "epochs": ("train.steps=", "train.epochs=0.6", "optimizer.decay_steps=4"),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_documents(Path("train.jsonl"), 0, 200)


def package_environment() -> dict[str, str]:
    """Return an environment for programs in another folder to import this checkout."""
    return os.environ | {"PYTHONPATH": str(Path(prep.__file__).parents[2])}


def record_fed_batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """Return a list of the batches of the training loop. It grows with each step."""
    fed: list[dict[str, np.ndarray]] = []
    load_batch = loop.load_batch

    def load_and_record(*args: Any, **options: Any) -> dict[str, Any]:
        batch = load_batch(*args, **options)
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


@pytest.mark.parametrize(
    "change", [pytest.param("unshuffled", marks=pytest.mark.slow), "documents", "epochs"]
)
def test_batches_equal_the_batches_of_train(change: str, monkeypatch: pytest.MonkeyPatch):
    fed = record_fed_batches(monkeypatch)
    prep.train("recipe.toml", "run", overrides=CHANGES[change])
    batches = prep.batches("recipe.toml", out="other", overrides=CHANGES[change])
    assert batches.steps == len(fed)
    assert_equal_batches(list(batches), fed)


@pytest.mark.slow
def test_mixture_equals_the_batches_of_train(monkeypatch: pytest.MonkeyPatch):
    words = Path("text.txt").read_text().split()
    Path("other.txt").write_text(" ".join(reversed(words)))
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "")
    Path("mixed.toml").write_text(f"{data}{SOURCES}\n[batch]{rest}")
    fed = record_fed_batches(monkeypatch)
    prep.train("mixed.toml")
    assert_equal_batches(list(prep.batches("mixed.toml")), fed)


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


@pytest.mark.parametrize("place", ["recipe", "checkpoint"])
def test_rules_of_the_batch_count_its_replicas(place: str):
    rule, words = "act:batch=dp", ["mesh=2,4,1", "batch.size=", "batch.per_replica=4"]
    if place == "recipe":
        words.append(f"rules=['{rule}']")
    else:
        prep.save_init("tiny", "split", mesh="2,4,1", pad_vocab="8", rules=[rule])
        words.append("model.path=split")
    prep.train("recipe.toml", "run", overrides=words, stop_after=1)
    environment = json.loads(Path("run", ENVIRONMENT_FILE).read_text())
    # Two replicas of four rows. The devices of fsdp have the same rows.
    assert environment["data"]["batch_sequences"] == 8
    batch = next(prep.batches("recipe.toml", out="other", overrides=words))
    assert batch["tokens"].shape == (8, 16)


def read_whole_batches() -> list[dict[str, np.ndarray]]:
    return list(prep.batches("recipe.toml"))


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


# The shares of two ranks, each read by three workers of torch.
TORCH_PROGRAM = """
import hashlib
import numpy as np
import torch
import prepcli as prep

class PrepBatches(torch.utils.data.IterableDataset):
    def __init__(self, rank, world_size, start):
        self.batches = prep.batches("recipe.toml", process=rank, of=world_size, start=start)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, n_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(self.batches.step + first, self.batches.steps, n_workers):
            yield self.batches.batch(step)

def load(rank):
    return torch.utils.data.DataLoader(
        PrepBatches(rank, 2, start=3),
        batch_size=None,
        num_workers=3,
        multiprocessing_context=METHOD,
    )

if __name__ == "__main__":
    for shares in zip(load(0), load(1), strict=True):
        tokens = np.concatenate([share["tokens"].numpy() for share in shares])
        print(hashlib.sha256(tokens.tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_workers_give_the_batches_of_one_process(method: str):
    pytest.importorskip("torch")
    Path("program.py").write_text(TORCH_PROGRAM.replace("METHOD", repr(method)))
    run = subprocess.run(
        [sys.executable, "program.py"],
        check=True,
        capture_output=True,
        text=True,
        env=package_environment(),
    )
    expected = [hashlib.sha256(batch["tokens"].tobytes()) for batch in read_whole_batches()[3:]]
    assert run.stdout.split() == [digest.hexdigest() for digest in expected]


def test_copies_open_the_tokens_again():
    batches = prep.batches("recipe.toml", process=1, of=2, start=4)
    data = pickle.dumps(batches)
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert (copy.step, copy.first_row, copy.n_rows) == (4, 4, 4)
    assert_equal_batches(list(copy), list(batches))


def test_copies_ignore_a_changed_recipe():
    batches = prep.batches("recipe.toml")
    data = pickle.dumps(batches)
    Path("recipe.toml").write_text(RECIPE.replace("seed = 3", "seed = 4"))
    assert_equal_batches(list(pickle.loads(data)), list(batches))


def test_copies_refuse_changed_data():
    data = pickle.dumps(prep.batches("recipe.toml"))
    text = Path("text.txt")
    text.write_text(text.read_text() + " w1 w2")
    with pytest.raises(prep.PrepError, match="the data has changed during the run"):
        pickle.loads(data)


def test_batches_import_no_jax():
    program = (
        "import sys, prepcli as prep\n"
        "next(prep.batches('recipe.toml'))\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=package_environment())


def test_unknown_batch_size_is_an_error():
    overrides = ["batch.size=", "batch.per_device=1", 'mesh="1,-1,1"']
    with pytest.raises(prep.UsageError, match="mesh 1,-1,1 has no size for fsdp"):
        prep.batches("recipe.toml", overrides=overrides)


@pytest.mark.parametrize("share", [(2, 2), (0, 9)])
def test_invalid_share_is_an_error_before_the_data_is_read(share: tuple[int, int]):
    with pytest.raises(prep.UsageError, match=r"`process` is 2|a batch has 8 sequences"):
        prep.batches("recipe.toml", process=share[0], of=share[1])
    assert not Path("runs").exists()


def test_digest_names_the_batches_of_a_run():
    whole = prep.batches("recipe.toml")
    assert whole.digest() == prep.batches("recipe.toml", process=2, of=3, start=7).digest()
    other_seed = prep.batches("recipe.toml", overrides="seed=4")
    assert whole.digest() != other_seed.digest()
    seen = hashlib.sha256(b"".join(batch["tokens"].tobytes() for batch in whole))
    read = hashlib.sha256(b"".join(whole.batch(step)["tokens"].tobytes() for step in range(STEPS)))
    assert seen.digest() == read.digest()


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
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


def test_tokenize_leaves_nothing_to_read(read_files: list[str]):
    for process in range(2):
        prep.tokenize_shard("recipe.toml", process, of=2)
    read_files.clear()
    prep.batches("recipe.toml", process=1, of=2)
    assert read_files == []


def test_changed_data_is_read_again(read_files: list[str]):
    before = prep.batches("recipe.toml").identity
    text = Path("text.txt")
    stamp = text.stat().st_mtime_ns
    text.write_text(text.read_text().replace("w1 ", "w2 "))
    os.utime(text, ns=(stamp, stamp + 1))
    read_files.clear()
    assert prep.batches("recipe.toml", process=1, of=2).identity != before
    assert "text.txt" in read_files


def test_other_settings_do_not_use_the_record():
    before = prep.batches("recipe.toml").identity
    changed = prep.batches("recipe.toml", verify=False, overrides="data.max_examples=1")
    assert changed.identity != before
    # A record of tokens that are gone is ignored.
    for path in Path("runs/recipe/data").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert prep.batches("recipe.toml", verify=False).identity == before
