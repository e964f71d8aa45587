"""Rematerialization of layers: save the activations of a policy, and compute all other activations again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from prepcli.models.remat import OFFLOAD_NONE, REMAT_NONE
from trainer.distributed.sharding import HOST_MEMORY
from trainer.nn.activation_names import LAYER_INPUT, name_activation
from trainer.nn.model_spec import ForwardConfig

# ((residual stream, KV cache), weights) -> the same pair
Layer = Callable[[Any, Any], Any]


def with_remat(layer: Layer, forward_config: ForwardConfig, *, in_loop: bool = False) -> Layer:
    """Apply the rematerialization policy to a layer.

    Outside a loop, common subexpression elimination has to be prevented: the compiler would otherwise merge the
    recomputation with the forward pass and save all activations.

    Args:
        layer: Computes (carry, weights) -> carry.
        forward_config: The policy, and whether inputs of layers are saved in host memory.
        in_loop: Whether the layer is the body of a loop.
    """
    if forward_config.remat_policy == REMAT_NONE:
        return layer
    if forward_config.offload == OFFLOAD_NONE:
        return jax.checkpoint(layer, policy=_save_policy(forward_config), prevent_cse=not in_loop)

    def run_named(carry: Any, weights: Any) -> Any:
        return layer((name_activation(carry[0], LAYER_INPUT), carry[1]), weights)

    return jax.checkpoint(
        run_named, policy=_offload_policy(forward_config), prevent_cse=not in_loop
    )


def _save_policy(forward_config: ForwardConfig) -> Callable[..., Any]:
    """Return the policy that saves activations on the device."""
    policy = forward_config.remat_policy
    if isinstance(policy, str):
        return getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint_policies.save_only_these_names(*policy)


def _offload_policy(forward_config: ForwardConfig) -> Callable[..., Any]:
    """Return the policy that saves inputs of layers in host memory, and named activations on the device."""
    policy = forward_config.remat_policy
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[] if isinstance(policy, str) else list(policy),
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
