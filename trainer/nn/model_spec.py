"""Static descriptions: architecture, shapes of parameters, execution options, and rematerialization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.models.activation_memory import (
    OFFLOAD_NONE,
    REMAT_NONE,
    ActivationName,
    RematPolicy,
    check_remat,
)
from prepcli.models.architecture import ArchConfig
from prepcli.models.attention_kernels import (
    AttentionFeature,
    KernelSpec,
    check_features,
    check_saved_scores,
    find_kernel,
)
from prepcli.models.lora import Adapters, build_adapters
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import Family, HFConfig, true_vocab_size
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules, check_leaf_rules, merge_rules
from trainer.distributed.sharding import HOST_MEMORY, ShardingContext


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The way of computing attention. It changes results by rounding only.

    Raises:
        UsageError: `kernel` is unknown.
    """

    kernel: str = "reference"  # One of `KERNEL_NAMES`
    q_chunk_size: int = 512  # Queries of a tile. -1 means all.
    k_chunk_size: int = 512  # Keys of a tile. -1 means all.

    def __post_init__(self) -> None:
        """Check the name of the kernel."""
        find_kernel(self.kernel)

    @property
    def spec(self) -> KernelSpec:
        """The capabilities of the kernel."""
        return find_kernel(self.kernel)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The static description of a model: its architecture and the shapes of its parameters."""

    family: Family  # The model family
    arch_config: ArchConfig  # The choices of its layers
    # Each parameter by path, as the checkpoint stores it. Adapters are among them.
    leaves: Mapping[str, ParamLeaf]
    true_vocab_size: int  # Vocabulary size without padding. Padded rows follow the true ones.
    is_tied: bool  # Whether the LM head is the token embedding
    # The low-rank adapters, which are then the only trained parameters. None without LoRA.
    adapters: Adapters | None = None

    @property
    def saved_leaves(self) -> Mapping[str, ParamLeaf]:
        """Parameters of a training checkpoint, by path: the adapters, or all without LoRA."""
        return self.leaves if self.adapters is None else self.adapters.leaves

    @property
    def base_paths(self) -> list[str]:
        """Paths of the base of adapters. Training does not change them. Empty without LoRA."""
        return [path for path in self.leaves if path not in self.saved_leaves]

    @property
    def has_stacked_layers(self) -> bool:
        """Whether one leaf stores a parameter of all layers."""
        return any(leaf.stack_axis is not None for leaf in self.leaves.values())


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """The execution options of a forward pass. They change results by rounding only.

    Raises:
        UsageError: `remat_policy` is unknown, or another option conflicts with it.
    """

    dtype: str = "float32"  # Dtype of the computation
    scan_layers: bool = True  # Compile one layer and scan it over all layers
    # The activations that a layer saves for its backward pass: the name of a policy, "none" for all except the
    # ones inside norms and activation functions, or names of activations. The input of each layer is always
    # saved.
    remat_policy: RematPolicy = REMAT_NONE
    # Tokens of a device per row with logits in memory at the same time. -1 means all.
    head_chunk_size: int = 512
    # The device mesh and its rules
    sharding: ShardingContext = field(default_factory=ShardingContext)
    # The attention kernel and its tiles
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)
    # Tokens of a device per row of a chunk of the MLP and of attention's projections. -1 means all.
    ffn_chunk_size: int = -1
    # "residuals" to save the inputs of layers in host memory, or "none"
    offload: str = OFFLOAD_NONE

    def __post_init__(self) -> None:
        """Check the rematerialization policy, alone and with the other options."""
        check_remat(self.remat_policy, self.offload, ffn_chunk_size=self.ffn_chunk_size)
        check_saved_scores(self.remat_policy, self.attention_options.kernel)
        if self.sharding.sequence_parallel_size > 1:
            check_features(
                self.attention_options.spec, frozenset({AttentionFeature.SPLIT_SEQUENCE})
            )


def build_model(
    family: Family,
    config: HFConfig,
    is_tied: bool,
    *,
    scan: bool = True,
    scan_axis: int = 0,
    lora: LoraConfig | None = None,
) -> ModelSpec:
    """Build the description of a Hugging Face config's model.

    Args:
        family: The family of the config.
        config: Fields of config.json.
        is_tied: Whether the LM head is the token embedding.
        scan: Whether each parameter of the layers is one leaf, stacked over layers.
        scan_axis: The axis over which layers are stacked.
        lora: Settings of adapters to add to the model. None means no adapters.

    Returns:
        The model, without parameter values.

    Raises:
        PrepError: The config is invalid or needs an unsupported feature.
    """
    arch_config = family.arch_config(config)
    leaves = param_leaves(family, config, is_tied, scan=scan, scan_axis=scan_axis)
    adapters = (
        build_adapters(family, config, lora, is_tied=is_tied, scan=scan, scan_axis=scan_axis)
        if lora
        else None
    )
    return ModelSpec(
        family=family,
        arch_config=arch_config,
        leaves={**leaves, **adapters.leaves} if adapters else leaves,
        true_vocab_size=true_vocab_size(family, config),
        is_tied=is_tied,
        adapters=adapters,
    )


def unscannable_error() -> PrepError:
    """Return the UsageError of a scan over a checkpoint with one leaf per layer."""
    reshard = Command("reshard", Option("scan", True))
    hint = text("{}, or {}", Key("model.scan_layers", False), reshard)
    return usage_error("layers cannot be scanned", "the checkpoint stores one leaf per layer", hint)


def model_from_manifest(manifest: Mapping[str, Any]) -> ModelSpec:
    """Build the ModelSpec of a checkpoint's manifest. Layers are stacked as in the checkpoint."""
    config = manifest["config"]
    return build_model(
        family_of(config),
        config,
        manifest["tied"],
        scan=manifest["scan"],
        scan_axis=manifest["scan_axis"],
        lora=lora_from_manifest(manifest),
    )


def rules_from_manifest(manifest: Mapping[str, Any]) -> Rules:
    """Return the partition rules of a checkpoint."""
    return merge_rules(manifest["rules"])


def check_mesh_divides(model: ModelSpec, sharding: ShardingContext) -> None:
    """Check that the mesh divides every parameter, and that each rule of leaves is for some of them.

    Raises:
        UsageError: The mesh does not divide a parameter, or a rule of leaves does not fit the parameters.
    """
    check_leaf_rules(sharding.rules, {path: leaf.dims for path, leaf in model.leaves.items()})
    for leaf in model.leaves.values():
        try:
            sharding.param_spec(leaf)
        except PrepError as error:
            command = Command(
                "save-init",
                "MODEL",
                Option("mesh", str(sharding.mesh)),
                Option("pad_vocab", "auto"),
            )
            hint = text(
                "another mesh, or a checkpoint made for this one: {}, or with {} of {}",
                command,
                Option("rules"),
                Command("save-init"),
            )
            raise usage_error(error.what, error.why, hint) from error


# Names of activations, by which rematerialization policies save them (`jax.ad_checkpoint.checkpoint_name`).
#
# In the forward pass of a `jax.custom_vjp` a name saves an array only if the backward pass reads it. Blockwise
# attention therefore names its output and its normalizers there. An MLP in chunks of tokens computes hidden units
# again, whatever the policy.

# The residual stream before a layer. Every policy saves it.
LAYER_INPUT = "layer_input"


def name_activation(x: Array, name: ActivationName | Literal["layer_input"]) -> Array:
    """Name an activation. Its values do not change."""
    return checkpoint_name(x, name)


# Rematerialization of layers: save the activations of a policy, and compute all other activations again.

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
    policy = forward_config.remat_policy
    if policy == REMAT_NONE:
        return layer
    if forward_config.offload == OFFLOAD_NONE:
        if isinstance(policy, str):
            save_policy = getattr(jax.checkpoint_policies, policy)
        else:
            save_policy = jax.checkpoint_policies.save_only_these_names(*policy)
        return jax.checkpoint(layer, policy=save_policy, prevent_cse=not in_loop)

    def run_named(carry: Any, weights: Any) -> Any:
        return layer((name_activation(carry[0], LAYER_INPUT), carry[1]), weights)

    # Inputs of layers go to host memory, and named activations stay on the device.
    offload_policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[] if isinstance(policy, str) else list(policy),
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
    return jax.checkpoint(run_named, policy=offload_policy, prevent_cse=not in_loop)
