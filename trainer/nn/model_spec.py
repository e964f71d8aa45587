"""Static descriptions: a model's architecture and parameter shapes, and the execution options of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.models.architecture import ArchConfig
from prepcli.models.attention_kernels import check_saved_scores, check_split_sequence
from prepcli.models.lora import Adapters, build_adapters
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import Family, HFConfig, true_vocab_size
from prepcli.models.registry import family_of
from prepcli.models.remat import OFFLOAD_NONE, REMAT_NONE, RematPolicy, check_remat
from prepcli.models.rule_text import merge_rules
from prepcli.models.rules import Rules, check_leaf_rules
from trainer.distributed.sharding import ShardingContext
from trainer.nn.kernels.options import AttentionOptions


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The static description of a model: its architecture and the shapes of its parameters.

    Attributes:
        family: The model family.
        arch_config: The choices of its layers.
        leaves: Each parameter by path, as the checkpoint stores it. Adapters are among them.
        true_vocab_size: Vocabulary size without padding. Padded rows follow the true ones.
        is_tied: Whether the LM head is the token embedding.
        adapters: The low-rank adapters, which are then the only trained parameters. None without LoRA.
    """

    family: Family
    arch_config: ArchConfig
    leaves: Mapping[str, ParamLeaf]
    true_vocab_size: int
    is_tied: bool
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

    Attributes:
        dtype: Dtype of the computation.
        scan_layers: Compile one layer and scan it over all layers.
        remat_policy: The activations that a layer saves for its backward pass: the name of a policy, "none" for all
            except the ones inside norms and activation functions, or names of activations. The input of each layer is
            always saved.
        head_chunk_size: Tokens of a device per row with logits in memory at the same time. -1 means all.
        sharding: The device mesh and its rules.
        attention_options: The attention kernel and its tiles.
        ffn_chunk_size: Tokens of a device per row of a chunk of the MLP and of attention's projections. -1 means all.
        offload: "residuals" to save the inputs of layers in host memory, or "none".

    Raises:
        UsageError: `remat_policy` is unknown, or another option conflicts with it.
    """

    dtype: str = "float32"
    scan_layers: bool = True
    remat_policy: RematPolicy = REMAT_NONE
    head_chunk_size: int = 512
    sharding: ShardingContext = field(default_factory=ShardingContext)
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)
    ffn_chunk_size: int = -1
    offload: str = OFFLOAD_NONE

    def __post_init__(self) -> None:
        """Check the rematerialization policy, alone and with the other options."""
        check_remat(self.remat_policy, self.offload, ffn_chunk_size=self.ffn_chunk_size)
        check_saved_scores(self.remat_policy, self.attention_options.kernel)
        check_split_sequence(self.attention_options.spec, self.sharding.sequence_parallel_size)


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
    """Build the ModelSpec of a checkpoint's manifest.

    Layers are stacked as in the checkpoint.
    """
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
