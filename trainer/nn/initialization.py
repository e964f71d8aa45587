"""Random initialization of parameters."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import InitialSteps, Mixer
from prepcli.models.lora import LORA_B, num_features
from prepcli.models.param_tree import DECAY_RATES, ParamLeaf, Tree, unflatten_tree
from trainer.nn.model_spec import ModelSpec

# (random key, shape of a layer) -> initial values
Sample = Callable[[Array, tuple[int, ...]], Array]

# Ends of the paths of leaves of recurrent mixers.
STEP_BIASES = "mixer.dt_bias.bias"
MAMBA_STEP_BIASES = "mixer.dt_up.bias"
# Factors of the residual stream (Doge).
RESIDUAL_WEIGHTS = ("attn_residual.weight", "mlp_residual.weight")
# End of a path -> initial values. The norm of a mixer scales by its weight, also where other norms of the model scale
# by 1 + weight.
CONSTANTS = {
    **{"mixer.norm.scale": 1.0, STEP_BIASES: 1.0, "mixer.d.weight": 1.0},
    **{"router.input_scale.weight": 1.0, "router.expert_scale.weight": 1.0},
    # All keys have the same score at first, and residual connections are plain.
    **{"attn.score_rate.weight": 0.0, **dict.fromkeys(RESIDUAL_WEIGHTS, 1.0)},
    # softplus gives 0.8 and 0.3, the initial factors of `XIELUActivation` in transformers.
    "mlp.xielu_alpha_p.weight": math.log(math.expm1(0.8)),
    "mlp.xielu_alpha_n.weight": math.log(math.expm1(0.3)),
    **{"mlp.xielu_beta.scale": 0.5, "mlp.xielu_eps.scale": -1e-6},
}
# Rates of gated delta nets, as in `Qwen3NextGatedDeltaNet` of transformers.
MIN_DECAY_RATE = 0.01
MAX_DECAY_RATE = 16.0


def init_params(model: ModelSpec, seed: int) -> Tree:
    """Initialize all parameters in float32: matrices and embeddings normal, biases zero, norm scales the identity.

    The values of a layer depend neither on how layers are stored nor on which other parameters the model has.

    Args:
        model: The model to initialize.
        seed: Seed of the random key.

    Returns:
        Nested dict of float32 arrays.
    """
    return init_leaves(model.leaves, jax.random.key(seed), model)


def init_leaves(leaves: Mapping[str, ParamLeaf], key: Array, model: ModelSpec) -> Tree:
    """Initialize some or all leaves of a model, with the values that `init_params` has for a random key."""
    values = {path: _init_leaf(leaf, key, model.arch_config) for path, leaf in leaves.items()}
    return unflatten_tree(
        {
            path: _clear_padding(value, leaves[path], model.true_vocab_size)
            for path, value in values.items()
        }
    )


def _clear_padding(values: Array, leaf: ParamLeaf, true_vocab_size: int) -> Array:
    """Set the rows of padded token ids to zero, as `prep pad-vocab` does."""
    axis = next((axis for axis, dim in enumerate(leaf.dims) if dim[:1] == ("vocab",)), None)
    if axis is None or leaf.shape[axis] == true_vocab_size:
        return values
    is_true = jnp.arange(leaf.shape[axis]) < true_vocab_size
    return jnp.where(
        is_true.reshape([-1 if i == axis else 1 for i in range(values.ndim)]), values, 0.0
    )


def _init_leaf(leaf: ParamLeaf, key: Array, arch_config: ArchConfig) -> Array:
    """Initialize one leaf with a key derived from its path without layer numbers."""
    sample_mixer = _mixer_sample(leaf.path_pattern, arch_config.mixer)
    if sample_mixer is not None:
        return _random_leaf(leaf, key, sample_mixer)
    for suffix, value in CONSTANTS.items():
        if leaf.path_pattern.endswith(suffix):
            return jnp.full(leaf.shape, value, jnp.float32)
    if leaf.role in ("scale", "bias"):
        identity = 1.0 - arch_config.norm_scale_offset
        return jnp.full(leaf.shape, identity if leaf.role == "scale" else 0.0, jnp.float32)
    std = arch_config.leaf_init_std(leaf.path_pattern)
    return _random_leaf(
        leaf, key, lambda layer_key, shape: jax.random.normal(layer_key, shape) * std
    )


def _mixer_sample(path: str, mixer: Mixer | None) -> Sample | None:
    """Return the initial values of the decays and steps of a recurrent mixer. None for other leaves."""
    # They are those of transformers. `Qwen3NextGatedDeltaNet` has random rates. `Mamba2Mixer`, `BambaMixer` and
    # `GraniteMoeHybridMambaLayer` number their heads. Only `Mamba2Mixer` has random steps.
    if mixer is None:
        return None
    if path.endswith(DECAY_RATES) and mixer.kind == "mamba":
        return _number_state_rates
    if path.endswith(DECAY_RATES):
        return _number_decay_rates if mixer.kind == "mamba2" else _sample_decay_rates
    if path.endswith((STEP_BIASES, MAMBA_STEP_BIASES)) and mixer.initial_steps is not None:
        return partial(_sample_step_biases, steps=mixer.initial_steps)
    return None


def _sample_decay_rates(key: Array, shape: tuple[int, ...]) -> Array:
    """Sample logarithms of rates from MIN_DECAY_RATE to MAX_DECAY_RATE."""
    return jnp.log(jax.random.uniform(key, shape, minval=MIN_DECAY_RATE, maxval=MAX_DECAY_RATE))


def _number_decay_rates(key: Array, shape: tuple[int, ...]) -> Array:
    """Return log(1), log(2), ..., log(H) for the H heads in a layer."""
    num_heads = math.prod(shape)
    return jnp.log(jnp.arange(1, num_heads + 1, dtype=jnp.float32)).reshape(shape)


def _number_state_rates(key: Array, shape: tuple[int, ...]) -> Array:
    """Return the logarithms of the rates 1, 2, ..., N of the states of each channel (arXiv:2312.00752, section 3.6)."""
    rates = jnp.log(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32))
    return jnp.broadcast_to(rates, shape)


def _sample_step_biases(key: Array, shape: tuple[int, ...], *, steps: InitialSteps) -> Array:
    """Sample the biases b with softplus(b) = dt, for log-uniform steps dt."""
    bounds = (math.log(steps.minimum), math.log(steps.maximum))
    log_steps = jax.random.uniform(key, shape, minval=bounds[0], maxval=bounds[1])
    # XLA flushes smaller numbers to 0, which would give a bias of -inf.
    floor = max(steps.floor, float(jnp.finfo(jnp.float32).tiny))
    dt = jnp.maximum(jnp.exp(log_steps), floor)
    # The inverse of softplus(b) = log(1 + exp(b)) is log(exp(dt) - 1).
    return dt + jnp.log(-jnp.expm1(-dt))


def init_adapters(model: ModelSpec, seed: int) -> Tree:
    """Initialize the adapters of a model in float32: A uniform with the bound of PEFT, 1 / sqrt(inputs), and B zero.

    Args:
        model: A model with adapters.
        seed: Seed of the random key.

    Returns:
        Nested dict of float32 arrays, without the parameters that are trained as a whole.
    """
    assert model.adapters is not None
    key = jax.random.key(seed)
    return unflatten_tree(
        {path: _init_adapter(leaf, key) for path, leaf in model.adapters.matrices.items()}
    )


def _init_adapter(leaf: ParamLeaf, key: Array) -> Array:
    if leaf.path.endswith(LORA_B):
        return jnp.zeros(leaf.shape, jnp.float32)

    def sample(layer_key: Array, shape: tuple[int, ...]) -> Array:
        bound = num_features(leaf) ** -0.5
        return jax.random.uniform(layer_key, shape, minval=-bound, maxval=bound)

    return _random_leaf(leaf, key, sample)


def _random_leaf(leaf: ParamLeaf, key: Array, sample: Sample) -> Array:
    """Sample the values of each layer with a key derived from the leaf's path and the number of the layer."""
    leaf_key = jax.random.fold_in(
        key, zlib.crc32(re.sub(r"\{\w+\}\.", "", leaf.path_pattern).encode())
    )
    axis = leaf.stack_axis
    if axis is not None:
        layer_shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        layer_keys = jax.vmap(partial(jax.random.fold_in, leaf_key))(jnp.arange(leaf.shape[axis]))
        layers = jax.vmap(lambda layer_key: sample(layer_key, layer_shape))(layer_keys)
        return jnp.moveaxis(layers, 0, axis)
    if leaf.layer_index is not None:
        leaf_key = jax.random.fold_in(leaf_key, leaf.layer_index)
    return sample(leaf_key, leaf.shape)
