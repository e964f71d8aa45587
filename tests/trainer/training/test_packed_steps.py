"""Training steps on packed documents: independent of the mesh, of micro-batches, and of padding."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from prepcli.models.mesh import parse_mesh
from tests.helpers import runs
from trainer.data.order import RowOrder
from trainer.data.packing import DocumentDataset, document_dataset
from trainer.distributed.sharding import make_sharding_context
from trainer.training import feed
from trainer.training.evaluation import evaluate, jit_eval_step
from trainer.training.step import StepSetup, jit_train_step

STEPS, ROWS = 3, 8
# Numbers of logical shards: 0 for a step without exact reduction.
REFERENCE, EXACT = 0, 8


def make_dataset(packing: str = "documents") -> DocumentDataset:
    """Return the tokens of `runs` as documents of 1 to 24 tokens."""
    tokens = runs.make_tokens()
    lengths = np.random.default_rng(0).integers(1, 25, 100)
    ends = np.minimum(np.cumsum(lengths), tokens.n_tokens)
    ends[-1] = tokens.n_tokens
    return document_dataset(replace(tokens, ends=ends.astype("<u8")), packing)


def make_setup(mesh: str, accumulate: int, num_shards: int) -> StepSetup:
    """Return the setup of steps on some of the devices."""
    setup, parsed = runs.make_setup(runs.LLAMA, accumulate=accumulate), parse_mesh(mesh)
    sharding = make_sharding_context(parsed, devices=jax.devices()[: parsed.n_devices])
    forward_config = replace(setup.forward_config, sharding=sharding)
    return replace(setup, forward_config=forward_config, reduction_shards=num_shards)


def train_losses(setup: StepSetup) -> list[float]:
    """Run steps; return the summed loss of each."""
    dataset, state = make_dataset(), runs.make_state(setup)
    order = RowOrder(dataset.n_rows, ROWS, seed=1, shuffle=True)
    step, losses = jit_train_step(setup), []
    for number in range(STEPS):
        state, metrics = step(state, feed.load_batch(dataset, order.rows(number), setup.sharding))
        losses.append(float(metrics["loss"]))
    return losses


# By default test_packed_rows compares packed documents on a mesh with one device.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate", "num_shards"),
    [("1,2,4", 2, REFERENCE), ("2,4,1", 1, EXACT)],
)
def test_losses_do_not_depend_on_the_mesh(mesh: str, accumulate: int, num_shards: int):
    expected = train_losses(make_setup("1,1,1", 1, num_shards))
    losses = train_losses(make_setup(mesh, accumulate, num_shards))
    assert losses == (expected if num_shards else pytest.approx(expected, rel=1e-5))


def test_evaluation_does_not_depend_on_packing():
    setup = make_setup("1,1,1", 1, REFERENCE)
    params, eval_step = (
        runs.make_state(setup)["params"],
        jit_eval_step(setup.model, setup.forward_config),
    )
    packed, padded = (
        evaluate(
            params,
            make_dataset(packing),
            eval_step=eval_step,
            sharding=setup.sharding,
            batch_size=ROWS,
        )
        for packing in ("documents", "none")
    )
    assert packed.num_tokens == padded.num_tokens
    assert packed.mean_loss == pytest.approx(padded.mean_loss, rel=1e-6)
    assert packed.accuracy == padded.accuracy
