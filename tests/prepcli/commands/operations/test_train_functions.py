"""`prep.train` with a loss and metrics of the caller."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import prepcli as prep
from prepcli.restore.item_reader import open_reader
from tests.helpers.training_folder import make_training_folder
from trainer.training.metrics import METRICS_FILE, read_metrics


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    return next(str(path) for path in Path().glob("*.toml"))


def doubled_loss(logits: Array, targets: Array) -> Array:
    """Return twice the cross entropy."""
    return -2 * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def cross_entropy_metric(logits: Array, targets: Array) -> dict[str, Array]:
    return {"nats": doubled_loss(logits, targets) / 2}


def test_train_with_a_loss_function_logs_it_and_resumes_with_it(recipe: str):
    changes = ("train.steps=4", "train.eval_every=2", "checkpoint.every=2")
    first = prep.train(recipe, "run", overrides=changes, stop_after=2, loss_fn=doubled_loss)
    assert (first.step, first.is_finished) == (2, False)
    with pytest.raises(
        prep.PrepError,
        match=r"the loss function has changed since the run began - .*doubled_loss, now",
    ):
        prep.train(recipe, "run", overrides=changes)
    last = prep.train(
        recipe, "run", overrides=changes, loss_fn=doubled_loss, metric_fn=cross_entropy_metric
    )
    assert last.is_finished
    with open_reader(Path("run/4"), verify=False) as reader:
        manifest = dict(reader.manifest)
    assert manifest["loss_fn"] == f"{__name__}.doubled_loss"
    lines = read_metrics(Path("run") / METRICS_FILE)
    losses = [line["loss"] for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    # The losses differ a little: the weights are random, and the rows are others.
    assert losses[0] == pytest.approx(2 * evaluations[0]["eval_loss"], rel=0.05)
    assert [line["eval_nats"] for line in evaluations if "eval_nats" in line] == pytest.approx(
        [evaluations[-1]["eval_loss"]], rel=1e-5
    )


def test_train_rejects_functions_that_do_not_fit(recipe: str):
    options: dict[str, Any] = {"loss_fn": "focal"}
    with pytest.raises(
        prep.UsageError,
        match=r"invalid `loss_fn='focal'` - the expected type is a function \| None",
    ):
        prep.train(recipe, "run", **options)
    with pytest.raises(prep.UsageError, match=r"`train\.reduction` is exact"):
        prep.train(recipe, "run", overrides="train.reduction=exact", loss_fn=doubled_loss)
    assert not Path("run").exists()
