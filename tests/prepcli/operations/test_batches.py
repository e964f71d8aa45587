"""`prep.batches`: the batches that `prep train` computes with, in JAX and in torch."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from tests.helpers.training_folder import RECIPE, make_training_folder
from tests.prepcli.training_runs.test_train_packing import write_documents
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
    "init": (),
    "hugging-face": ('model.path="tiny"',),
    "unshuffled": ("data.shuffle=false", "data.holdout=0"),
    "documents": PACKED,
    "per-replica": ("batch.size=", "batch.per_replica=4"),
    "epochs": ("train.steps=", "train.epochs=0.6", "optimizer.decay_steps=4"),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_documents(Path("train.jsonl"), 0, 200)


def package_environment() -> dict[str, str]:
    """Return an environment in which a program in another folder imports this checkout."""
    return os.environ | {"PYTHONPATH": str(Path(prep.__file__).parents[1])}


def record_fed_batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """Return a list that receives each batch that the training loop feeds to its step."""
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


@pytest.mark.parametrize("change", CHANGES)
def test_batches_equal_the_batches_of_train(change: str, monkeypatch: pytest.MonkeyPatch):
    fed = record_fed_batches(monkeypatch)
    prep.train("recipe.toml", "run", overrides=CHANGES[change])
    batches = prep.batches("recipe.toml", out="other", overrides=CHANGES[change])
    assert batches.steps == len(fed)
    assert_equal_batches(list(batches), fed)


def test_mixture_equals_the_batches_of_train(monkeypatch: pytest.MonkeyPatch):
    words = Path("text.txt").read_text().split()
    Path("other.txt").write_text(" ".join(reversed(words)))
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "")
    Path("mixed.toml").write_text(f"{data}{SOURCES}\n[batch]{rest}")
    fed = record_fed_batches(monkeypatch)
    prep.train("mixed.toml")
    assert_equal_batches(list(prep.batches("mixed.toml")), fed)


def test_random_start_has_the_batches_of_its_checkpoint():
    overrides = ["model.path=", "model.init=random", "model.config=tiny"]
    random = prep.batches("recipe.toml", out="other", overrides=overrides)
    assert random.digest() == prep.batches("recipe.toml").digest()


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
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert (copy.step, copy.first_row, copy.n_rows) == (4, 4, 4)
    assert_equal_batches(list(copy), list(batches))


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


def test_digest_names_the_batches_of_a_run():
    whole = prep.batches("recipe.toml")
    assert whole.digest() == prep.batches("recipe.toml", process=2, of=3, start=7).digest()
    other_seed = prep.batches("recipe.toml", overrides="seed=4")
    assert whole.digest() != other_seed.digest()
    seen = hashlib.sha256(b"".join(batch["tokens"].tobytes() for batch in whole))
    read = hashlib.sha256(b"".join(whole.batch(step)["tokens"].tobytes() for step in range(STEPS)))
    assert seen.digest() == read.digest()
