"""Continue a training in Levanter: restore a checkpoint, take the next steps, and save a checkpoint.

It runs in the environment of Levanter, as `levanter_oracle.py`, with one argument, a file with the keys of `Request`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any, TypedDict

from levanter_oracle import attention, checkpoint, equinox, haliax, make_config

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax

optim = importlib.import_module("levanter.optim")
averaging = importlib.import_module("levanter.optim.model_averaging")
trainer_state = importlib.import_module("levanter.trainer_state")


class Request(TypedDict):
    """The training to continue.

    Attributes:
        config: config.json of the model.
        exported: The checkpoint to restore.
        layout: Layout of the checkpoint.
        content: `state`, `state without moments`, or `model` for a new training state.
        ids: Tokens of all steps, [steps, batch, length].
        first: First step to take, counted from 1.
        last: Last step.
        steps: Steps of the schedule.
        optimizer: Fields of `AdamConfig`.
        ema: Decay of the averages of the parameters, or 0.
        saved: Folder of the checkpoint to save.
        losses: File of the losses to write.
    """

    config: str
    exported: str
    layout: str
    content: str
    ids: str
    first: int
    last: int
    steps: int
    optimizer: dict[str, Any]
    ema: float
    saved: str
    losses: str


def compute_loss(model: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of a batch [batch, length]."""
    batch = haliax.Axis("batch", tokens.shape[0])
    position = haliax.Axis("position", tokens.shape[1])
    named = haliax.named(tokens, (batch, position))
    logits = model(named, attention.AttentionMask.causal())
    values = logits.rearrange(("batch", "position", "vocab")).array
    return optax.softmax_cross_entropy_with_integer_labels(values[:, :-1], tokens[:, 1:]).mean()


def make_state(request: Request) -> Any:
    """Return a new training state."""
    config = json.loads(Path(request["config"]).read_text())
    model_config = make_config(config, request["layout"])
    vocab = haliax.Axis("vocab", config["vocab_size"])
    model = model_config.model_type.init(vocab, model_config, key=jax.random.PRNGKey(0))
    averages = None
    if request["ema"]:
        averages = averaging.EmaModelAveragingConfig(beta=request["ema"])
    if request["content"] == "model":
        model = checkpoint.load_checkpoint(model, request["exported"], subpath="model")
    optimizer = optim.AdamConfig(**request["optimizer"]).build(request["steps"])
    return trainer_state.TrainerState.init(
        optimizer, model, key=jax.random.PRNGKey(1), model_averaging=averages
    )


def restore(state: Any, request: Request) -> Any:
    """Restore a training state with the functions of `Trainer.initial_state`."""
    saveable = equinox.filter(state, trainer_state.saveable_training_mask(state))
    loaded = checkpoint.load_checkpoint(saveable, request["exported"])
    state = equinox.combine(loaded, state)
    if request["content"] == "state":
        return state
    adam = optax.tree_utils.tree_get(state.opt_state, "ScaleByAdamState")
    zeros = {
        "mu": jax.tree.map(jnp.zeros_like, adam.mu),
        "nu": jax.tree.map(jnp.zeros_like, adam.nu),
    }
    opt_state = optax.tree_utils.tree_set(state.opt_state, **zeros)
    return dataclasses.replace(state, opt_state=opt_state)


def main(request: Request) -> None:
    """Take the steps, and write the checkpoint and the losses."""
    ids = np.load(request["ids"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    losses: dict[str, float] = {}
    with jax.set_mesh(mesh):
        state = make_state(request)
        if request["content"] != "model":
            state = restore(state, request)

        @equinox.filter_jit
        def take_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            loss, gradients = equinox.filter_value_and_grad(compute_loss)(state.model, tokens)
            return state.take_step(gradients, key=state.training_key)[0], loss

        assert state.int_step == request["first"] - 1
        for step in range(request["first"], request["last"] + 1):
            state, loss = take_step(state, jnp.array(ids[step - 1]))
            losses[str(step)] = float(loss)
        # `Trainer` names a checkpoint by its last step, counted from 0.
        last = state.int_step - 1
        checkpoint.save_checkpoint(
            state.saveable_state, last, f"{request['saved']}/step-{last}", is_temporary=False
        )
    Path(request["losses"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
