"""Continue a training in MaxText: restore an item, take the next steps, and save the item again.

It runs in the environment of MaxText, as `maxtext_oracle.py`, with one argument, a file with the keys of `Request`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, TypedDict

from maxtext_oracle import maxtext_utils, model_creation_utils, pyconfig, settings

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

train_state_nnx = importlib.import_module("maxtext.common.train_state_nnx")


class Request(TypedDict):
    """The training to continue.

    Attributes:
        config: config.json of the model.
        item: The item to restore, with an absolute path.
        layout: Layout of the item.
        has_state: Whether the item has a training state. Otherwise the optimizer is new.
        ids: Tokens of all steps, [steps, batch, length].
        first: First step to take, counted from 1.
        last: Last step.
        rates: Learning rate of each step.
        adam: Arguments of `optax.adamw`.
        saved: Folder of the item to save.
        losses: File of the losses to write.
    """

    config: str
    item: str
    layout: str
    has_state: bool
    ids: str
    first: int
    last: int
    rates: list[float]
    adam: dict[str, float]
    saved: str
    losses: str


def main(request: Request) -> None:
    """Take the steps, and write the item and the losses."""
    config = json.loads(Path(request["config"]).read_text())
    ids = np.load(request["ids"])
    base = str(Path(str(pyconfig.__file__)).parent / "base.yml")
    values = settings(config, request["item"], request["layout"])
    values["per_device_batch_size"] = ids.shape[1]
    words = [f"{key}={value}" for key, value in values.items()]
    maxtext_config = pyconfig.initialize(["oracle", base, *words])
    mesh = jax.sharding.Mesh(
        maxtext_utils.create_device_mesh(maxtext_config), maxtext_config.mesh_axes
    )
    model = model_creation_utils.from_pretrained(maxtext_config, mesh=mesh)
    if isinstance(model, tuple):
        model = model[0]
    rates = jnp.array(request["rates"], jnp.float32)
    adam: dict[str, Any] = request["adam"]
    update = optax.adamw(lambda count: rates[count], **adam)
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)
    state = train_state_nnx.TrainStateNNX(model, optimizer)
    if request["has_state"]:
        restore(state, request["item"])

    def compute_loss(model: Any, tokens: jax.Array) -> jax.Array:
        logits = model(
            decoder_input_tokens=tokens,
            decoder_positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            decoder_segment_ids=jnp.ones(tokens.shape, jnp.int32),
            enable_dropout=False,
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    losses: dict[str, float] = {}
    with mesh:
        for step in range(request["first"], request["last"] + 1):
            loss, gradients = nnx.value_and_grad(compute_loss)(model, jnp.array(ids[step - 1]))
            state.apply_gradients(gradients)
            losses[str(step)] = float(loss)
    linen_state = train_state_nnx.split_for_checkpoint(nnx.state(state))[0]
    ocp.PyTreeCheckpointer().save(request["saved"], linen_dict(linen_state))
    Path(request["losses"]).write_text(json.dumps(losses))


def linen_dict(state: Any) -> Any:
    """Return a state in the layout of MaxText's checkpoints."""
    return train_state_nnx.to_linen_checkpoint_dict(nnx.to_pure_dict(state))


def restore(state: Any, item: str) -> None:
    """Restore an item with the functions that MaxText has for its checkpoints."""
    linen_state = train_state_nnx.split_for_checkpoint(nnx.state(state))[0]
    target = linen_dict(linen_state)
    restored = ocp.PyTreeCheckpointer().restore(item, item=target)
    nnx.replace_by_pure_dict(linen_state, train_state_nnx.from_linen_checkpoint_dict(restored))
    nnx.update(state, linen_state)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
