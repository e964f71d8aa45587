"""The inputs of the memory estimate of a training step: shapes, mesh and execution options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.models.architecture import ArchConfig
from trainer.models.mesh import Mesh
from trainer.models.param_tree import ParamLeaf
from trainer.models.partition import Rules, activation_rules, partition_spec

FLOAT32 = 4
SAVES_ALL = ("none", "everything_saveable")
SAVES_DOTS = ("dots_saveable", "checkpoint_dots")
SAVES_SCORES = ("everything_saveable", *SAVES_DOTS)  # of all tiles, with blockwise attention
SAVES_WEIGHT_DOTS = ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """The inputs of the memory estimate.

    Attributes:
        arch_config: The choices of the layers.
        leaves: Parameters by path.
        mesh: The mesh without open axes; None for one device.
        rules: Mesh axes of each logical dim.
        micro_batch_size: Sequences of a micro-batch, over all devices.
        seq_length: Tokens of a sequence, or of a target.
        source_length: Tokens of a source; 0 without an encoder.
        itemsize: Bytes per element in the dtype of the computation, as the devices store it.
        remat_policy: Rematerialization policy of the layers.
        head_chunk_size: Tokens per row whose logits exist at the same time; -1 for all.
        ffn_chunk_size: Tokens per row of a chunk of the MLP and of attention's projections; -1 for all.
        attention_tile: Queries and keys whose scores exist at the same time, -1 for all; None if scores are not tiled.
        blocks_overlap: Whether a rematerialized layer holds the working sets of attention and MLP at the same time in
            its backward pass, as XLA plans for CPUs.
    """

    arch_config: ArchConfig
    leaves: Mapping[str, ParamLeaf]
    mesh: Mesh | None
    rules: Rules
    micro_batch_size: int
    seq_length: int
    source_length: int = 0
    itemsize: int = FLOAT32
    remat_policy: str = "none"
    head_chunk_size: int = 512
    ffn_chunk_size: int = -1
    attention_tile: tuple[int, int] | None = None
    blocks_overlap: bool = True

    @property
    def num_experts(self) -> int:
        """Experts per layer; 0 without experts."""
        return self._extent("experts")

    @property
    def embed_size(self) -> int:
        """Width of the residual stream, which no mesh axis splits."""
        return self._extent("embed")

    def local_extent(self, dim: str) -> int:
        """Return the extent of a logical dim of parameters on one device; 0 if no parameter has it."""
        return self._extent(dim) // self.num_shards(dim)

    def num_shards(self, dim: str) -> int:
        """Return the number of shards along a logical dim of activations."""
        return self._num_shards(dim, self._extent(dim))

    @property
    def local_batch_size(self) -> int:
        """Sequences of a micro-batch on one device."""
        return self.micro_batch_size // (self.axis_size("dp") * self.axis_size("fsdp"))

    def num_residual_shards(self, length: int) -> int:
        """Return the number of shards of the residual stream along `length` tokens."""
        return self._num_shards("residual_seq", length)

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along a mesh axis."""
        return self.mesh.size(axis) if self.mesh else 1

    def local_leaf_size(self, leaf: ParamLeaf, is_gathered: bool = False) -> int:
        """Return the elements of a parameter on one device, after the all-gather over fsdp if `is_gathered`."""
        spec = partition_spec(leaf.dims, leaf.shape, self.mesh, self.rules) if self.mesh else None
        axes = [axis for dim_axes in spec.mesh_axes for axis in dim_axes] if spec else []
        split_axes = (axis for axis in axes if not (is_gathered and axis == "fsdp"))
        return math.prod(leaf.shape) // math.prod(map(self.axis_size, split_axes))

    def leaf_extent(self, leaf: ParamLeaf, dim_name: str) -> int:
        """Return the extent of a logical dim of one parameter; 1 if the parameter lacks it."""
        return math.prod(extent for dim, extent in zip(leaf.dims, leaf.shape) if dim and dim[0] == dim_name)

    def _extent(self, dim: str) -> int:
        """Return the extent of a logical dim in the first parameter with this dim; 0 if there is none."""
        extents = (
            self.leaf_extent(leaf, dim)
            for leaf in self.leaves.values()
            if (dim,) in [leaf_dim[:1] for leaf_dim in leaf.dims]
        )
        return next(extents, 0)

    def _num_shards(self, dim: str, extent: int) -> int:
        """Return the number of shards along a dim of activations, whose batch is split first."""
        if not self.mesh or not extent:
            return 1
        shape = (self.axis_size("dp") * self.axis_size("fsdp"), extent)
        return partition_spec([("batch",), (dim,)], shape, self.mesh, activation_rules(self.rules)).shards_per_dim[1]
