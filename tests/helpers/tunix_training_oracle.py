"""Continue a training in Tunix: restore a step, take the next steps, and save a step.

It runs in the environment of Tunix, as `tunix_oracle.py`, with one argument, a file with the keys of `Request`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, TypedDict

from tunix_oracle import CLASSES, CheckpointManager, make_config

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Request(TypedDict):
    """The training to continue.

    Attributes:
        config: config.json of the model.
        exported: Folder with the step to restore.
        content: `state`, `state without moments`, or `model` for a new optimizer.
        ids: Tokens of all steps, [steps, batch, length].
        first: First step to take, counted from 1.
        last: Last step.
        rates: Learning rate of each update.
        adam: Arguments of `optax.adamw`.
        saved: Folder of the step to save.
        losses: File of the losses to write.
    """

    config: str
    exported: str
    content: str
    ids: str
    first: int
    last: int
    rates: list[float]
    adam: dict[str, float]
    saved: str
    losses: str


def compute_loss(model: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of a batch [batch, length]."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool)), (len(tokens), length, length)
    )
    logits = model(tokens, positions, None, mask)
    if isinstance(logits, tuple):
        logits = logits[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def main(request: Request) -> None:
    """Take the steps, and write the step and the losses."""
    config = json.loads(Path(request["config"]).read_text())
    module_name, class_name = CLASSES[config["model_type"]]
    module = importlib.import_module(f"tunix.models.{module_name}.model")
    model = getattr(module, class_name)(make_config(module, config), rngs=nnx.Rngs(0))
    rates = jnp.array(request["rates"], jnp.float32)
    # As in `create_optimizer` of tunix/cli/config.py.
    make_optimizer = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
    update = make_optimizer(learning_rate=lambda count: rates[count], **request["adam"])
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)
    manager = CheckpointManager(request["exported"])
    if request["content"] == "model":
        manager.maybe_restore(model)
    else:
        step, _ = manager.maybe_restore(model, optimizer)
        assert step == request["first"] - 1
        assert int(optimizer.step[...]) == step
    manager.close()
    if request["content"] == "state without moments":
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        adam = state["opt_state"]["inner_state"][0]
        for slot in ("mu", "nu"):
            adam[slot] = jax.tree.map(jnp.zeros_like, adam[slot])
        nnx.update(optimizer, state)
    ids = np.load(request["ids"])

    @nnx.jit
    def take_step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(compute_loss)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    losses: dict[str, float] = {}
    for step in range(request["first"], request["last"] + 1):
        losses[str(step)] = float(take_step(model, optimizer, jnp.array(ids[step - 1])))
    manager = CheckpointManager(request["saved"])
    manager.save(request["last"], model, optimizer, force=True)
    manager.close()
    Path(request["losses"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
