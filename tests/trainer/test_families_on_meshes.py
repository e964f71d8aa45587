"""A training step of each family on a mesh: the loss of one device, and every parameter moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoders import ONE_BY_ONE, QUICK, batch_of, decoder, filled
from tests.models import RELATIVES
from trainer import model as models
from trainer.mesh import parse
from trainer.model import Compute
from trainer.optim import AdamW, Rate
from trainer.sharding import shards
from trainer.step import Setup, first_state, train_step
from trainer.tree import flat, nested

VOCAB = 131


@pytest.mark.parametrize("name", RELATIVES)
def test_a_step_on_a_mesh(name: str):
    config = {**RELATIVES[name], "vocab_size": 136, "true_vocab_size": VOCAB, "num_hidden_layers": 2}
    made, on = decoder(config), shards(parse("1,2,4"))
    whole, batch = made.params(filled(config)), batch_of(VOCAB, 4, 12)
    plain: Any = models.loss_sums(whole, {key: jnp.asarray(v) for key, v in batch.items()}, made.model, ONE_BY_ONE)
    setup = Setup(
        made.model,
        Compute(head_chunk=4, shards=on),
        AdamW(Rate(1e-2, 1e-2, "constant", 0, 1), 0.9, 0.99, 1e-8, 0.1, False, 1.0),
    )
    leaves = made.model.leaves
    params = nested({path: jax.device_put(leaf, on.of(leaves[path])) for path, leaf in flat(whole).items()})
    placed = {key: jax.device_put(value, on.activation(value.shape, "batch", "seq")) for key, value in batch.items()}
    step = jax.jit(partial(train_step, setup=setup), compiler_options=QUICK)
    after, measured = step(first_state(params, setup), placed)
    assert float(measured["loss"]) == pytest.approx(float(plain.loss), rel=1e-5)
    assert (int(after["step"]), int(after["skipped"])) == (1, 0)
    before = flat(whole)
    for path, leaf in flat(after["params"]).items():
        assert np.isfinite(leaf).all()
        assert not np.array_equal(leaf, before[path]), path
        assert leaf.sharding.is_equivalent_to(on.of(leaves[path]), leaf.ndim)
