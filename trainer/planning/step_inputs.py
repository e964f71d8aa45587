"""The inputs of the estimates of a training step, from a recipe, the shapes of a model and a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from prepcli.core.errors import Key, UsageError, text, usage_error
from prepcli.models.activation_memory import OFFLOAD_NONE, check_ring_blocks
from prepcli.models.architecture import ArchConfig
from prepcli.models.attention_kernels import (
    ANY_ACCELERATOR,
    AUTO,
    CPU,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
    check_features,
    check_mixer,
    find_kernel,
    rank_kernels,
    required_attention_features,
    run_features,
)
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig, resolve_dropout
from prepcli.models.mesh import Mesh, format_sizes
from prepcli.models.param_tree import (
    FREEZE_KEY,
    PATTERN_KEYS,
    ParamLeaf,
    check_used,
    widest_head,
)
from prepcli.models.parameters import HFConfig
from prepcli.models.partition import num_batch_shards, num_sequence_shards
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules, activation_rules
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs, StateLeaf
from trainer.recipe import BatchShape, Recipe, batch_shape
from trainer.recipe.optimizer_tables import WHOLE, OptimizerTable
from trainer.recipe.text_fields import SEGMENTED

KEY = "train.reduction"
SHARDS_KEY = "train.reduction_shards"
DEFAULT_SHARDS = 8
# Kernels that are bit-identical for equal shapes in every compiled program.
KERNELS = ("reference", "blockwise")
# Optimizers that update each element by itself: they sum nothing over a parameter.
ELEMENTWISE_OPTIMIZERS = ("adamw", "lion", "sgd")
USE_FAST = text("{}", Key(KEY, "fast", is_override=True))


def reduction_shards(recipe: Recipe, shape: BatchShape, *, mesh: Mesh, rules: Rules) -> int:
    """Return the number of logical shards of a batch, or 0 if `train.reduction` is fast.

    Args:
        recipe: The recipe.
        shape: The shape of its batches on the mesh.
        mesh: The mesh without axes of size -1.
        rules: Partition rules.

    Raises:
        UsageError: The batch, the mesh or another option does not allow an exact reduction.
    """
    if recipe.train.reduction != "exact":
        return 0
    _check_options(recipe)
    _check_mesh(mesh, rules)
    # The gradient of a step is a balanced binary tree over the logical shards, so that each device
    # sums a whole subtree. That needs a power of two which every mesh of the run divides.
    num_shards = recipe.train.reduction_shards or math.gcd(shape.size, DEFAULT_SHARDS)
    # The gcd with a power of two is the largest such power that divides the batch, e.g. 8 for 24.
    if not _is_power_of_two(num_shards) or shape.size % num_shards:
        why = f"it has to be a power of two that divides the batch of {shape.size}"
        raise usage_error(
            f"`{SHARDS_KEY}` is {num_shards}", why, _shards_hint(math.gcd(shape.size, 1 << 31))
        )
    num_computed = num_batch_shards(mesh, rules) * shape.accumulate
    if num_shards % num_computed:
        what = f"`{KEY}` is exact, and the batch has {num_shards} logical shards"
        why = f"{num_batch_shards(mesh, rules)} replicas x `batch.accumulate` {shape.accumulate} = {num_computed}"
        # The smallest number of shards that the replicas and micro-batches divide, if it is valid.
        better = math.lcm(num_shards, num_computed)
        is_possible = _is_power_of_two(better) and shape.size % better == 0
        if is_possible:
            hint = _shards_hint(better)
        else:
            hint = "make replicas x `batch.accumulate` a power of two"
        raise usage_error(what, f"{why}, which does not divide them", hint)
    return num_shards


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """The parts of a batch on a mesh."""

    shape: BatchShape
    num_replicas: int  # devices that split a micro-batch
    num_shards: int  # logical shards of the batch, or 0 if `train.reduction` is fast
    num_rows: int  # sequences computed by a device at the same time


def split_batch(recipe: Recipe, mesh: Mesh, rules: Rules) -> BatchSplit:
    """Return the parts of the batch of a recipe.

    Raises:
        UsageError: The batch or its logical shards do not divide among the devices.
    """
    num_replicas = num_batch_shards(mesh, rules)
    shape = batch_shape(recipe.batch, n_devices=mesh.n_devices, n_replicas=num_replicas)
    num_shards = reduction_shards(recipe, shape, mesh=mesh, rules=rules)
    num_rows = shape.micro_batch_size // num_replicas
    if num_shards:
        num_rows = shape.size // num_shards
    return BatchSplit(shape, num_replicas, num_shards, num_rows)


def check_exact_model(arch_config: ArchConfig, kernel: str) -> None:
    """Check that results of a model and its attention kernel are known to be equal in every program.

    Raises:
        UsageError: They are not.
    """
    if arch_config.encoder is not None:
        raise usage_error(
            f"`{KEY}` is exact, and the model has an encoder",
            "both together are not supported",
            USE_FAST,
        )
    if kernel not in KERNELS:
        why = f"`{KEY}` is exact, and gradients of {kernel} are not known to be equal in every program"
        raise usage_error(
            f"`model.attention_kernel` is {kernel}",
            why,
            text("{}", Key("model.attention_kernel", "blockwise", is_override=True)),
        )


def _check_options(recipe: Recipe) -> None:
    """Raise UsageError if another option of the recipe does not allow an exact reduction."""
    if recipe.model.offload != OFFLOAD_NONE:
        what = f"`{KEY}` is exact, and `model.offload` is {recipe.model.offload}"
        raise usage_error(
            what,
            "both together are not supported",
            text("{} or {}", Key("model.offload", "none", is_override=True), USE_FAST),
        )
    if recipe.optimizer.type not in ELEMENTWISE_OPTIMIZERS:
        what = f"`{KEY}` is exact, and `optimizer.type` is {recipe.optimizer.type}"
        why = f"it sums over parameters in the order of the mesh; {', '.join(ELEMENTWISE_OPTIMIZERS)} do not"
        raise usage_error(
            what, why, text("{} or {}", Key("optimizer.type", "adamw", is_override=True), USE_FAST)
        )


def _check_mesh(mesh: Mesh, rules: Rules) -> None:
    """Raise UsageError if a mesh axis splits anything but the batch."""
    # `parse_rule` rejects several choices for the batch, so the first one is the only one.
    batch_axes = activation_rules(rules)["batch"][0]
    others = tuple(axis for axis in mesh.names if axis not in batch_axes and mesh.size(axis) > 1)
    if others:
        what = f"`{KEY}` is exact, and the mesh has {format_sizes(mesh, others)}"
        why = f"results are exact for {' and '.join(batch_axes)} only: other axes split sums that XLA orders"
        raise usage_error(
            what, why, text("use a mesh of {} only, or {}", " and ".join(batch_axes), USE_FAST)
        )


def _is_power_of_two(number: int) -> bool:
    # A power of two has one bit, e.g. 8 & 7 = 0b1000 & 0b0111 = 0.
    return number & (number - 1) == 0


def _shards_hint(num_shards: int) -> str:
    return text("{}", Key(SHARDS_KEY, num_shards, is_override=True))


ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Sizes of attention tiles and head chunks that a recipe does not set. On an accelerator large ones keep the matrix
# units busy. On a CPU the scores and the logits must stay in the caches. `python -m bench.cpu_step` measures a step.
#
# Tokens of a tile and of a head chunk.
ACCELERATOR_SIZE = 512
CPU_TILE_SIZE = 64
# For sequences of more than CPU_LONG_LENGTH tokens.
CPU_LONG_TILE_SIZE = 128
CPU_LONG_LENGTH = 1024
# Tokens of a head chunk, over all rows of a micro-batch on a device.
CPU_HEAD_TOKENS = 256


class Shapes(Protocol):
    """A model's architecture and the shapes of its parameters."""

    @property
    def arch_config(self) -> ArchConfig:
        """Architecture of the model."""
        ...

    @property
    def leaves(self) -> Mapping[str, ParamLeaf]:
        """Each parameter by path."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model's architecture and the shapes of its parameters, without jax."""

    arch_config: ArchConfig
    leaves: Mapping[str, ParamLeaf]


def step_inputs(
    recipe: Recipe,
    model: Shapes,
    *,
    mesh: Mesh,
    rules: Rules,
    device: DeviceKind = ANY_ACCELERATOR,
    widens_bfloat16: bool = False,
    dropout: DropoutConfig = NO_DROPOUT,
) -> MemoryInputs:
    """Return the inputs of the memory estimate of a training step.

    Args:
        recipe: The recipe.
        model: The model to train.
        mesh: The mesh without axes of size -1.
        rules: Partition rules.
        device: Kind of the devices, for the choice of `auto` and for sizes that the recipe does not
            set.
        widens_bfloat16: Whether the devices compute bfloat16 in float32, as CPUs do.
        dropout: Rates of dropout and forgetful causal masking.

    Raises:
        UsageError: The batch, or the tokens of a sequence, do not divide among the devices, the
            attention kernel of the recipe lacks a feature of the run or does not run on the
            devices.
    """
    check_token_split(recipe, num_sequence_shards(mesh, rules))
    batch = split_batch(recipe, mesh, rules)
    sizes = chunk_sizes(recipe, device, num_rows=batch.num_rows)
    kernel = recipe.model.attention_kernel
    # An estimate without a kind of device is valid for every platform, so a kernel for TPUs only must
    # not fail because the platform is not `tpu`. Its features are checked all the same.
    if kernel != AUTO and device == ANY_ACCELERATOR:
        needs = attention_needs(recipe, model, mesh, rules, dropout)
        check_features(find_kernel(kernel), needs.features)
    else:
        _, choices = run_kernels(recipe, model, mesh, rules, device=device, dropout=dropout)
        kernel = choices[0].name
    return MemoryInputs(
        arch_config=model.arch_config,
        leaves=model.leaves,
        mesh=mesh,
        rules=rules,
        micro_batch_size=batch.num_rows * batch.num_replicas,
        seq_length=recipe.data.seq_length,
        source_length=recipe.data.source_length or 0,
        has_segments=has_segments(recipe),
        itemsize=ITEMSIZES["float32" if widens_bfloat16 else recipe.model.dtype],
        tile_itemsize=ITEMSIZES[recipe.model.dtype],
        remat_policy=recipe.model.remat_policy,
        offload=recipe.model.offload,
        head_chunk_size=sizes.head,
        ffn_chunk_size=recipe.model.ffn_chunk_size,
        attention_tile=find_kernel(kernel).score_tile(sizes.queries, sizes.keys),
        # With an exact reduction these are logical shards per device: a batch of 64 in 8 shards on 2
        # replicas has 8 rows at a time, 64 / (8 * 2) = 4 times.
        accumulate=batch.shape.size // (batch.num_rows * batch.num_replicas),
        is_exact=batch.num_shards > 0,
        optimizer_state=state_leaves(recipe.optimizer, model.leaves),
        frozen=frozenset(
            model.leaves.keys() - recipe.optimizer.trained_leaves(model.leaves).keys()
        ),
        plans_for_cpu=widens_bfloat16,
        stored_itemsize=ITEMSIZES[recipe.model.param_dtype],
    )


def with_adapters(
    inputs: MemoryInputs,
    recipe: Recipe,
    adapters: Mapping[str, ParamLeaf],
    *,
    stored_itemsize: int = FLOAT32,
) -> MemoryInputs:
    """Return the inputs of a run that trains only adapters.

    Args:
        inputs: Inputs of a run that trains all parameters.
        recipe: The recipe.
        adapters: The adapters by path.
        stored_itemsize: Bytes per element of the frozen parameters.
    """
    return replace(
        inputs,
        adapters=adapters,
        adapter_itemsize=ITEMSIZES[recipe.model.param_dtype],
        stored_itemsize=stored_itemsize,
        optimizer_state=state_leaves(recipe.optimizer, adapters),
        frozen=frozenset(adapters.keys() - recipe.optimizer.trained_leaves(adapters).keys()),
    )


def check_token_split(recipe: Recipe, num_shards: int) -> None:
    """Raise UsageError if the tokens of a sequence do not divide among the shards of the mesh."""
    for key, length in (
        ("seq_length", recipe.data.seq_length),
        ("source_length", recipe.data.source_length or 0),
    ):
        try:
            check_ring_blocks(length, num_shards)
        except UsageError as error:
            what = text("`data.{}` is {}: {}", key, length, error.what)
            raise usage_error(what, error.why, error.hint) from error


def attention_needs(
    recipe: Recipe,
    model: Shapes,
    mesh: Mesh | None,
    rules: Rules,
    dropout: DropoutConfig = NO_DROPOUT,
) -> AttentionNeeds:
    """Return the requirements of a run on its attention kernel.

    Args:
        recipe: The recipe.
        model: The model to train.
        mesh: The mesh without axes of size -1, or None for one device.
        rules: Partition rules.
        dropout: Rates of dropout and forgetful causal masking.
    """
    features = run_features(
        remat_policy=recipe.model.remat_policy,
        num_sequence_shards=num_sequence_shards(mesh, rules),
        dropout=dropout,
        has_segments=has_segments(recipe),
    )
    check_mixer(model.arch_config, features)
    return AttentionNeeds(
        required_attention_features(model.arch_config, model.leaves) | features,
        dtype=recipe.model.dtype,
        # A model without attention can use any kernel, for heads of any width.
        head_dim=max(1, widest_head(model.leaves)),
    )


def run_kernels(
    recipe: Recipe,
    model: Shapes,
    mesh: Mesh | None,
    rules: Rules,
    *,
    device: DeviceKind,
    dropout: DropoutConfig = NO_DROPOUT,
) -> tuple[AttentionNeeds, tuple[KernelChoice, ...]]:
    """Return the needs of a run's attention, and the kernels that can compute it, the best first.

    Raises:
        UsageError: No kernel, or not the one that the recipe names, can compute it on these devices.
    """
    needs = attention_needs(recipe, model, mesh, rules, dropout)
    requested = recipe.model.attention_kernel
    length = longest_sequence(recipe)
    return needs, rank_kernels(requested, needs, device=device, length=length)


def has_segments(recipe: Recipe) -> bool:
    """Return whether documents share a sequence and do not attend to each other."""
    return recipe.data.packing == SEGMENTED


def run_dropout(recipe: Recipe, config: HFConfig) -> DropoutConfig:
    """Return the rates of dropout and forgetful causal masking of a run, given the model's config.json.

    The rate of adapters of a file is not known here.

    Raises:
        PrepError: The recipe takes the rates of the config, and one is invalid.
    """
    fields = family_of(config).dropout_fields
    model = recipe.model
    dropout = resolve_dropout(
        model.dropout, fcm_ratio=model.fcm_ratio, config=config, dropout_fields=fields
    )
    return replace(dropout, adapters=recipe.lora.dropout)


def longest_sequence(recipe: Recipe) -> int:
    """Return the tokens of the longest sequence: of a source or a target."""
    return max(recipe.data.seq_length, recipe.data.source_length or 0)


def chunk_sizes(recipe: Recipe, device: DeviceKind, *, num_rows: int) -> ChunkSizes:
    """Return the sizes of tiles and of head chunks of a run: those that its recipe sets, and the devices' defaults.

    Args:
        recipe: The recipe.
        device: Kind of the devices.
        num_rows: Sequences of a micro-batch on one device.
    """
    default = default_chunk_sizes(device, length=longest_sequence(recipe), num_rows=num_rows)
    model = recipe.model
    return ChunkSizes(
        queries=default.queries if model.q_chunk_size is None else model.q_chunk_size,
        keys=default.keys if model.k_chunk_size is None else model.k_chunk_size,
        head=default.head if model.head_chunk_size is None else model.head_chunk_size,
    )


def context_warnings(recipe: Recipe, model: Shapes) -> Iterator[str]:
    """Yield a warning if sequences are longer than the model's context."""
    context = rotary_context(model.arch_config)
    if context is not None and recipe.data.seq_length > context:
        length = Key("data.seq_length")
        why = f"is {recipe.data.seq_length:,}, and the model was made for {context:,} positions"
        yield text("{} {}; {} extends them", length, why, Key("model.rope_scaling"))


def rotary_context(config: ArchConfig) -> int | None:
    """Return the positions that a model with rotary embeddings was made for. None for other models.

    Longer sequences are computed, with angles that the model was not trained on.
    """
    if not config.ropes:
        return None
    # Longrope has no `factor` here. Its stretched length is `max_position_embeddings`.
    scaled = (int(rope.original_max_positions * rope.factor) for rope in config.ropes)
    return max([config.max_positions, *scaled])


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The sizes of the chunks in which a step computes attention and head."""

    queries: int  # Queries of a tile of blockwise attention. -1 for all.
    keys: int  # Keys of a tile of blockwise attention. -1 for all.
    head: int  # Tokens of a device per row with logits in memory at the same time. -1 for all.


def default_chunk_sizes(device: DeviceKind, *, length: int, num_rows: int) -> ChunkSizes:
    """Return the sizes for a kind of devices.

    Args:
        device: Kind of the run's devices.
        length: Tokens of the longest sequence.
        num_rows: Sequences of a micro-batch on one device, at least one.
    """
    if device.platform != CPU.platform:
        return ChunkSizes(ACCELERATOR_SIZE, ACCELERATOR_SIZE, head=ACCELERATOR_SIZE)
    tile_size = CPU_TILE_SIZE if length <= CPU_LONG_LENGTH else CPU_LONG_TILE_SIZE
    return ChunkSizes(tile_size, tile_size, head=max(1, CPU_HEAD_TOKENS // num_rows))


def check_patterns(table: OptimizerTable, leaves: Mapping[str, ParamLeaf]) -> None:
    """Check that each pattern of a recipe matches a parameter, and that a parameter is trained.

    Raises:
        UsageError: A pattern matches no parameter, or all are frozen.
    """
    for name in PATTERN_KEYS:
        check_used(getattr(table, name), leaves, f"optimizer.{name}")
    if not table.trained_leaves(leaves):
        raise usage_error(
            f"`{FREEZE_KEY}` matches all parameters",
            "the run would train nothing",
            "use fewer patterns",
        )


def state_leaves(table: OptimizerTable, leaves: Mapping[str, ParamLeaf]) -> tuple[StateLeaf, ...]:
    """Return the leaves of the optimizer state that belong to parameters."""
    itemsize = ITEMSIZES[table.moment_dtype]
    trained = table.trained_leaves(leaves).values()
    moments: list[StateLeaf] = []
    for leaf in trained:
        moments += [StateLeaf(leaf, axes, itemsize) for axes in table.moments(leaf)]
    # Averages are float32 for every dtype: with a decay rate near 1 the updates are tiny.
    averages = [StateLeaf(leaf, WHOLE, FLOAT32) for leaf in trained if table.ema]
    return (*moments, *averages)
