"""The inputs of the estimates of a training step, from a recipe, the shapes of a model and a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from trainer.models.architecture import ArchConfig
from trainer.models.memory_inputs import MemoryInputs
from trainer.models.mesh import Mesh
from trainer.models.param_tree import ParamLeaf
from trainer.models.partition import num_batch_shards
from trainer.models.rules import Rules
from trainer.recipe import Recipe, batch_shape

ITEMSIZES = {"float32": 4, "bfloat16": 2}


class Shapes(Protocol):
    """A model's architecture and the shapes of its parameters."""

    @property
    def arch_config(self) -> ArchConfig:
        """The choices of its layers."""
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
    recipe: Recipe, model: Shapes, *, mesh: Mesh, rules: Rules, widens_bfloat16: bool = False
) -> MemoryInputs:
    """Return the inputs of the memory estimate of a training step.

    Args:
        recipe: The recipe.
        model: The model to train.
        mesh: The mesh without open axes.
        rules: Partition rules.
        widens_bfloat16: Whether the devices compute bfloat16 in float32, as CPUs do.

    Raises:
        UsageError: The batch does not divide among the devices.
    """
    shape = batch_shape(recipe.batch, n_devices=mesh.n_devices, n_replicas=num_batch_shards(mesh, rules))
    return MemoryInputs(
        arch_config=model.arch_config,
        leaves=model.leaves,
        mesh=mesh,
        rules=rules,
        micro_batch_size=shape.micro_batch_size,
        seq_length=recipe.data.seq_length,
        source_length=recipe.data.source_length or 0,
        itemsize=ITEMSIZES["float32" if widens_bfloat16 else recipe.model.dtype],
        remat_policy=recipe.model.remat_policy,
        head_chunk_size=recipe.model.head_chunk_size,
        ffn_chunk_size=recipe.model.ffn_chunk_size,
        attention_tile=_attention_tile(recipe),
        accumulate=shape.accumulate,
    )


def _attention_tile(recipe: Recipe) -> tuple[int, int] | None:
    """Return the queries and keys of a tile; None if the scores of all exist at the same time."""
    model = recipe.model
    return None if model.attention_kernel == "reference" else (model.q_chunk_size, model.k_chunk_size)


def context_warnings(recipe: Recipe, model: Shapes) -> Iterator[str]:
    """Yield a warning if sequences are longer than the model's context."""
    config = model.arch_config
    scaled = (int(rope.original_max_positions * rope.factor) for rope in config.ropes)
    context = max([config.max_positions, *scaled])
    if config.ropes and recipe.data.seq_length > context:
        yield f"`data.seq_length` is {recipe.data.seq_length:,}, and the model was made for {context:,} positions"
