"""The inputs of the memory estimate of a training step: shapes, mesh and execution options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.models.activation_memory import (
    OFFLOAD_NONE,
    REMAT_NONE,
    RING_BLOCKS,
    WHOLE,
    RematPolicy,
    chunk_length,
)
from prepcli.models.architecture import ArchConfig
from prepcli.models.mesh import Mesh
from prepcli.models.param_tree import ParamLeaf, dim_extent
from prepcli.models.partition import (
    activation_spec,
    leaf_spec,
    num_batch_shards,
    num_sequence_shards,
)
from prepcli.models.rules import Rules

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A leaf of the optimizer state."""

    param: ParamLeaf  # Its parameter
    # Axes of the parameter that have extent 1 in the leaf, e.g. axis 1 for row statistics of Adafactor.
    reduced_axes: tuple[int, ...]
    itemsize: int  # Bytes per element

    @property
    def nbytes(self) -> int:
        """Bytes on all devices."""
        return self.itemsize * math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(
            1 if axis in self.reduced_axes else extent
            for axis, extent in enumerate(self.param.shape)
        )


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """The inputs of the memory estimate."""

    arch_config: ArchConfig  # The choices of the layers
    leaves: Mapping[str, ParamLeaf]  # Parameters by path
    mesh: Mesh | None  # The mesh without axes of size -1, or None for one device
    rules: Rules  # Partition rules
    micro_batch_size: int  # Sequences of a micro-batch, over all devices
    seq_length: int  # Tokens of a sequence, or of a target
    source_length: int = 0  # Tokens of a source, or 0 without an encoder
    # Whether sequences have segment ids and positions, because documents share them
    has_segments: bool = False
    # Bytes per element in the dtype of the computation, as the devices store it
    itemsize: int = FLOAT32
    # Bytes per element of tiles of attention, or None for `itemsize`. CPUs widen bfloat16 tile by tile.
    tile_itemsize: int | None = None
    remat_policy: RematPolicy = REMAT_NONE  # Rematerialization policy of the layers
    # "residuals" if the inputs of layers are saved in host memory, or "none"
    offload: str = OFFLOAD_NONE
    # Tokens of a device per row with logits in memory at the same time. -1: all.
    head_chunk_size: int = 512
    # Tokens of a device per row of a chunk of the MLP and of attention's projections. -1 for all.
    ffn_chunk_size: int = -1
    # Queries and keys with scores in memory at once, -1 for all, or None if scores are not tiled, `NO_SCORES` if
    # they are never in memory
    attention_tile: tuple[int, int] | None = None
    accumulate: int = 1  # Micro-batches of a step
    # Whether gradients are summed in an order that does not depend on the mesh. `accumulate` is then the number
    # of logical shards of a device.
    is_exact: bool = False
    # Leaves of the optimizer state that belong to parameters, or None for two float32 moments of each
    optimizer_state: tuple[StateLeaf, ...] | None = None
    frozen: frozenset[str] = frozenset()  # Paths of the parameters that are not trained
    # Whether the devices are CPUs, for which XLA fuses less and gathers weights later than for accelerators
    plans_for_cpu: bool = True
    # Adapters by path, and the parameters of `leaves` that are trained as a whole, if only they are trained. None
    # to train all parameters.
    adapters: Mapping[str, ParamLeaf] | None = None
    stored_itemsize: int = FLOAT32  # Bytes per element of the parameters in `leaves`
    adapter_itemsize: int = FLOAT32  # Bytes per element of the adapters

    @property
    def saved_leaves(self) -> Mapping[str, ParamLeaf]:
        """Parameters in the checkpoints of the run, by path."""
        if self.adapters is None:
            return self.leaves
        return self.adapters

    @property
    def all_leaves(self) -> Mapping[str, ParamLeaf]:
        """Parameters of the model and its adapters, by path."""
        return {**self.leaves, **(self.adapters or {})}

    @property
    def trained_leaves(self) -> Mapping[str, ParamLeaf]:
        """Parameters with gradients and moments, by path."""
        return {path: leaf for path, leaf in self.saved_leaves.items() if path not in self.frozen}

    @property
    def num_experts(self) -> int:
        """Experts per layer, or 0 without experts."""
        return self.extent("experts")

    @property
    def embed_size(self) -> int:
        """Width of the residual stream. The estimate does not split it over mesh axes."""
        return self.extent("embed")

    def local_extent(self, dim: str) -> int:
        """Return the extent of a logical dim of parameters on one device, or 0 if no parameter has it."""
        return self.extent(dim) // self.num_shards(dim)

    def num_shards(self, dim: str, extent: int | None = None) -> int:
        """Return the number of shards along a dim of activations, by default with the extent of the parameters."""
        if extent is None:
            extent = self.extent(dim)
        if not self.mesh or not extent:
            return 1
        # The batch is split first.
        shape = (num_batch_shards(self.mesh, self.rules), extent)
        return activation_spec(shape, ("batch", dim), self.mesh, self.rules).shards_per_dim[1]

    @property
    def local_batch_size(self) -> int:
        """Sequences of a micro-batch on one device."""
        return self.micro_batch_size // num_batch_shards(self.mesh, self.rules)

    @property
    def num_sequence_shards(self) -> int:
        """Number of shards of a sequence along its tokens."""
        return num_sequence_shards(self.mesh, self.rules)

    def local_length(self, length: int) -> int:
        """Return the tokens on one device of a row of `length` tokens."""
        return length // self.num_sequence_shards

    def score_tile(self, local_queries: int, local_keys: int) -> tuple[int, int]:
        """Return how many queries and keys a device has scores for in memory at once."""
        num_blocks = RING_BLOCKS if self.num_sequence_shards > 1 else 1
        # A tile is within one block, and a device of a ring holds two blocks of a row.
        q_size, k_size = self.attention_tile or (WHOLE, WHOLE)
        return chunk_length(q_size, local_queries // num_blocks), chunk_length(
            k_size, local_keys // num_blocks
        )

    def num_residual_shards(self, local_length: int) -> int:
        """Return into how many shards the residual stream is split along a device's `local_length` tokens."""
        # The rule of the residual stream counts all shards of a row. Those of sp are in `local_length`
        # already: with sp 2 and mp 4 a device's tokens have 8 / 2 = 4 shards.
        num_shards = self.num_sequence_shards
        return self.num_shards("residual_seq", local_length * num_shards) // num_shards

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along a mesh axis."""
        if self.mesh:
            return self.mesh.size(axis)
        return 1

    def local_leaf_size(self, leaf: ParamLeaf, is_gathered: bool = False) -> int:
        """Return the elements of a parameter on one device, after the all-gather over fsdp if `is_gathered`."""
        if self.mesh:
            spec = leaf_spec(leaf.path, leaf.dims, leaf.shape, mesh=self.mesh, rules=self.rules)
        else:
            spec = None
        axes: list[str] = []
        if spec:
            axes.extend(itertools.chain.from_iterable(spec.mesh_axes))
        # The all-gather over fsdp undoes this axis only. Other axes still split the leaf.
        split_axes = (axis for axis in axes if not (is_gathered and axis == "fsdp"))
        return math.prod(leaf.shape) // math.prod(map(self.axis_size, split_axes))

    def local_state_nbytes(self, leaf: StateLeaf) -> int:
        """Return the bytes of a leaf of the optimizer state on one device."""
        param = leaf.param
        if not self.mesh:
            return leaf.nbytes
        spec = leaf_spec(param.path, param.dims, param.shape, mesh=self.mesh, rules=self.rules)
        return leaf.nbytes // math.prod(spec.without_axes(leaf.reduced_axes).shards_per_dim)

    def extent(self, dim: str) -> int:
        """Return the extent of a logical dim of the parameters, or 0 if no parameter has it."""
        return dim_extent(self.leaves, dim)
