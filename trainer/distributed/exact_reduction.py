"""Gradients and loss sums that do not depend on the number of devices that split the batch.

A batch is a fixed number of logical shards of equal shape. Each device computes its logical shards one at a time
with full parameters, and all sums have the order of one binary tree. The norm of the gradients is a sum over blocks.
Their shapes depend on the parameters and the number of logical shards only. XLA starts without fused multiply-add.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from prepcli.core.errors import PrepError
from prepcli.models.param_tree import ParamLeaf, Tree, flatten_tree, unflatten_tree
from trainer.distributed.devices import all_devices, backends_are_initialized
from trainer.distributed.sharding import ShardingContext, dim_axes, jax_partition_spec

TokenBatch = Mapping[str, Array]
REPLICATED = PartitionSpec()


def compiler_options() -> dict[str, Any]:
    """Return XLA options with which a function has equal results in the programs of all meshes.

    XLA eliminates common subexpressions earlier on several devices than on one. It then simplifies other
    expressions. On CPUs, contraction of products and sums depends on the division of a program for compilation, and
    the optimizations of LLVM round some values of parameters otherwise if a mesh splits them.
    """
    options: dict[str, Any] = {"xla_disable_hlo_passes": "cse"}
    if jax.default_backend() == "cpu":
        options |= {"xla_cpu_parallel_codegen_split_count": 1, "xla_backend_optimization_level": 0}
    return options


@dataclass(frozen=True, slots=True)
class ExactReduction:
    """Sums over the logical shards of a batch."""

    num_shards: int  # Logical shards of a batch, a power of two
    sharding: ShardingContext  # The device mesh. Its axes, if larger than 1, split the batch.
    leaves: Mapping[str, ParamLeaf]  # Parameters by path

    def sum_losses(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> Any:
        """Sum a function of parameters and rows, a tree of arrays, over all logical shards."""

        def sum_local(params: Tree, rows: TokenBatch) -> Any:
            sums = self._sum_device(function, params, rows)
            return jax.tree.map(lambda x: fixed_order_psum(x, REPLICATED, self._batch_axes), sums)

        return self._map_devices(sum_local, REPLICATED)(params, batch)

    def map_shards(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> Any:
        """Compute a function of parameters and rows for each logical shard. Arrays of its result are [shards, ...]."""

        def map_local(params: Tree, rows: TokenBatch) -> Any:
            one = _runtime_one(rows)
            return lax.map(
                lambda shard: call_in_loop(partial(function, params), shard, one),
                self._local_shards(rows),
            )

        return self._map_devices(map_local, PartitionSpec(tuple(self._batch_axes)))(params, batch)

    def sum_gradients(
        self, value_and_grad: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> tuple[Tree, dict[str, Array], Array]:
        """Sum gradients and loss sums over all logical shards.

        Args:
            value_and_grad: Computes ((loss, loss sums), gradients) of rows.
            params: Parameters in float32 or bfloat16.
            batch: The rows of the step.

        Returns:
            Gradients with the shardings of their parameters, loss sums, and the norm of the gradients.
        """
        specs = {path: self._param_spec(leaf) for path, leaf in self.leaves.items()}

        def sum_local(params: Tree, rows: TokenBatch) -> tuple[Tree, Any, Array]:
            (_, sums), gradients = self._sum_device(value_and_grad, params, rows)
            sums = jax.tree.map(lambda x: fixed_order_psum(x, REPLICATED, self._batch_axes), sums)
            leaves: dict[str, Array] = {}
            blocks: list[Array] = []
            for path, gradient in flatten_tree(gradients).items():
                leaf = fixed_order_psum(gradient, specs[path], self._batch_axes)
                leaves[path] = leaf
                blocks.append(self._block_sums(path, leaf, specs[path], one=_runtime_one(rows)))
            return (
                unflatten_tree(leaves),
                sums,
                call_in_loop(_norm_of_blocks, blocks, _runtime_one(rows)),
            )

        out_specs = (unflatten_tree(specs), REPLICATED, REPLICATED)
        # The barrier keeps XLA from fusing the sums with the operations that use them.
        return lax.optimization_barrier(self._map_devices(sum_local, out_specs)(params, batch))

    @property
    def _batch_axes(self) -> dict[str, int]:
        """The mesh axes of a size above 1 that split the batch, outermost first."""
        if self.sharding.device_mesh is None:
            return {}
        axes = self.sharding.activation_axes((self.num_shards,), "batch")[0]
        return {axis: self.sharding.device_mesh.shape[axis] for axis in axes}

    def _param_spec(self, leaf: ParamLeaf) -> PartitionSpec:
        spec = self.sharding.param_spec(leaf)
        if spec is None:
            return REPLICATED
        return jax_partition_spec(spec)

    def _map_devices(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """Map a function of full parameters and the rows of a device over the mesh."""
        mesh = self.sharding.device_mesh
        if mesh is None:
            return function
        in_specs = (REPLICATED, PartitionSpec(tuple(self._batch_axes)))
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _sum_device(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, rows: TokenBatch
    ) -> Any:
        """Sum a function over the logical shards of one device."""
        return sum_in_tree(
            partial(function, params), self._local_shards(rows), one=_runtime_one(rows)
        )

    def _local_shards(self, rows: TokenBatch) -> dict[str, Array]:
        """Split the rows of one device into its logical shards."""
        # 8 logical shards over batch axes of sizes 2 and 2 leave 2 logical shards per device.
        num_local = self.num_shards // math.prod(self._batch_axes.values())
        return {
            name: array.reshape(num_local, -1, *array.shape[1:]) for name, array in rows.items()
        }

    def _block_sums(self, path: str, shard: Array, spec: PartitionSpec, *, one: Array) -> Array:
        """Compute the sum of squares in each block of a gradient."""
        leaf = self.leaves[path]
        # Blocks per dim on this device. With 8 logical shards, a dim of 12 has gcd(12, 8) = 4 blocks
        # of 3. A device with 6 of the 12 has 4 * 6 // 12 = 2 of them. The number 4 does not depend
        # on the mesh.
        counts: list[int] = []
        may_split = self.sharding.may_split_over_batch_axes(leaf)
        for extent, local, is_split in zip(leaf.shape, shard.shape, may_split):
            num_blocks = 1
            if is_split:
                num_blocks = math.gcd(extent, self.num_shards)
            counts.append(num_blocks * local // extent)
        sums = square_sums(_split_blocks(shard, counts), one=one).reshape(counts)
        for dim, axes in enumerate(dim_axes(spec, shard.ndim)):
            if axes:
                sums = lax.all_gather(sums, axes, axis=dim, tiled=True)
        return sums


def _runtime_one(rows: TokenBatch) -> Array:
    """Return 1 as min(token id, 0) + 1. Token ids are never negative."""
    # XLA cannot fold a number that depends on the input, so a loop with this number of iterations
    # stays a loop. Its body is compiled alone, the same on every mesh.
    return 1 + jnp.minimum(rows["tokens"][0, 0], 0)


def _split_blocks(x: Array, counts: Sequence[int]) -> Array:
    """Split an array into blocks, `counts` per dim, and return them as [blocks, elements of a block]."""
    # [4, 6] with counts [2, 3] becomes [2, 2, 3, 2]: count and extent of a block, per dim. The
    # transpose with order (0, 2, 1, 3) puts the counts first: [2, 3, 2, 2], then [6, 4].
    extents: list[int] = []
    for count, extent in zip(counts, x.shape):
        extents += [count, extent // count]
    split = x.reshape(extents)
    order = (*range(0, split.ndim, 2), *range(1, split.ndim, 2))
    return split.transpose(order).reshape(math.prod(counts), -1)


def _norm_of_blocks(block_sums: Sequence[Array]) -> Array:
    """Compute the norm of all gradients from their blocks' sums of squares."""
    return jnp.sqrt(jnp.stack([sums.sum() for sums in block_sums]).sum())


# The start of XLA without fused multiply-add, for results that do not depend on the shapes of a program.
#
# LLVM fuses one of the products in `a * b + c * d` with the sum, and its choice depends on the shapes of a program. No
# option of a compilation prevents it: XLA's CPU backend chooses its instructions when it starts, from `XLA_FLAGS`,
# which it reads once per process.

FLAGS = "XLA_FLAGS"
MAX_ISA = "--xla_cpu_max_isa"
# AVX is the newest x86 instruction set without fused multiply-add, which came with AVX2.
WITHOUT_FUSED = f"{MAX_ISA}=AVX"
X86_MACHINES = ("x86_64", "AMD64")
# For one value LLVM emits no vector instructions and no fused operation, so the probe needs many.
PROBE_SIZE = 4096

# The flags that XLA has read, if `start_exact_backend` has started it.
_flags_of_start: str | None = None


def start_exact_backend() -> None:
    """Start the devices of this process so that XLA's code for x86 processors rounds each product.

    `XLA_FLAGS` has its earlier value afterwards. Devices in use stay unchanged.

    Raises:
        PrepError: They are in use already, and fuse products and sums.
    """
    if platform.machine() not in X86_MACHINES:
        return
    was_in_use = backends_are_initialized()
    if not was_in_use:
        with _flags_without_fused():
            all_devices()
    if jax.default_backend() == "cpu" and fuses_multiply_add():
        what = "exact results are not possible in this process"
        hint = (
            f'`{FLAGS}={WITHOUT_FUSED}` before Python starts, or the setting `reduction = "fast"`'
        )
        if was_in_use:
            why = "JAX was used before, and XLA fuses products and sums: it reads its flags at the first use"
            raise PrepError(what, why, f"call prep before other code uses JAX, or {hint}")
        raise PrepError(what, f"XLA fuses products and sums with `{FLAGS}={xla_flags()}`", hint)


def xla_flags() -> str:
    """Return the flags in force: the flags set by `start_exact_backend`, or the environment's."""
    if _flags_of_start is None:
        return os.environ.get(FLAGS, "")
    return _flags_of_start


@contextmanager
def _flags_without_fused() -> Iterator[None]:
    """Disable fused multiply-add while XLA starts, unless the user's XLA_FLAGS already choose the instruction set."""
    global _flags_of_start
    flags = os.environ.get(FLAGS)
    started = flags or ""
    if MAX_ISA not in started:
        started = f"{started} {WITHOUT_FUSED}".strip()
    os.environ[FLAGS] = started
    try:
        yield
    finally:
        if flags is None:
            del os.environ[FLAGS]
        else:
            os.environ[FLAGS] = flags
    _flags_of_start = started


@cache
def fuses_multiply_add() -> bool:
    """Return whether XLA fuses products and sums on this process's CPU, by computing `a * b + c`."""
    a, b, c = np.random.default_rng(0).standard_normal((3, PROBE_SIZE)).astype(np.float32)
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        options = {"xla_backend_optimization_level": 3}
        computed = jax.jit(_multiply_add, compiler_options=options)(a, b, c)
    # NumPy rounds the product and then the sum. A fused operation rounds once, so some of the 4096
    # random results differ.
    return not np.array_equal(np.asarray(computed), a * b + c)


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.multiply(a, b) + c


# Sums over shards of a batch in the order of a binary tree, bit-identical on every number of devices.
#
# Floating-point addition is commutative but not associative: (a + b) + c and a + (b + c) round
# differently. The sum is therefore always computed as the same tree over the shards, in the order of
# the batch, e.g. for 8 shards:
#
#     ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
#
# A power of two of devices computes disjoint subtrees. Of 2 devices the first computes the left half
# and the second the right half, and one addition between them is left. Of 4 devices each computes one
# inner bracket. Each addition has the same two operands on every mesh.


def sum_in_tree(function: Callable[[Any], Any], inputs: Any, *, one: Array) -> Any:
    """Sum the results of a function over shards, computed one after the other.

    At most log2(shards) + 1 results exist at the same time.

    Args:
        function: Computes the result of one shard, a tree of arrays.
        inputs: Tree of arrays [shards, ...]. The number of shards is a power of two.
        one: int32 [], always 1. It is computed from arrays, so that XLA does not see a constant.
    """
    num_shards = len(jax.tree.leaves(inputs)[0])
    if num_shards == 1:
        return call_in_loop(function, jax.tree.map(lambda array: array[0], inputs), one)
    halves = jax.tree.map(lambda array: array.reshape(2, num_shards // 2, *array.shape[1:]), inputs)

    def add_half(total: Any, step: tuple[Any, Array]) -> tuple[Any, None]:
        half, is_first = step
        part = sum_in_tree(function, half, one=one)
        # The first half takes the place of the zeros. Adding it to them would turn -0.0 into 0.0.
        return jax.tree.map(lambda a, b: jnp.where(is_first, b, a + b), total, part), None

    result = jax.eval_shape(function, jax.tree.map(lambda array: array[0], inputs))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
    return lax.scan(add_half, zeros, (halves, jnp.array([True, False])))[0]


def call_in_loop(function: Callable[[Any], Any], inputs: Any, num_iterations: Array) -> Any:
    """Call a function once, in the body of a loop with a number of iterations unknown to XLA.

    XLA compiles the body of a loop on its own. Otherwise it would fuse the function with the code around it, which
    depends on the number of shards, and round differently.
    """
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, inputs)
    )

    def call(state: tuple[Array, Any]) -> tuple[Array, Any]:
        return state[0] + 1, lax.optimization_barrier(function(lax.optimization_barrier(inputs)))

    return lax.while_loop(lambda state: state[0] < num_iterations, call, (jnp.int32(0), zeros))[1]


def square_sums(blocks: Array, *, one: Array) -> Array:
    """Compute the sum of squares in each row of an array [blocks, elements]. The loop rounds all rows alike.

    Args:
        blocks: The rows.
        one: int32 [], always 1. It is computed from arrays, so that XLA does not see a constant.
    """

    def add_row(index: Array, sums: Array) -> Array:
        row = lax.dynamic_index_in_dim(blocks, index, keepdims=False)
        return lax.dynamic_update_index_in_dim(sums, jnp.square(row).sum(), index, 0)

    # The factor `one` hides the number of rows from XLA.
    return lax.fori_loop(0, len(blocks) * one, add_row, jnp.zeros(len(blocks), blocks.dtype))


def fixed_order_psum(x: Array, spec: PartitionSpec, batch_axes: Mapping[str, int]) -> Array:
    """Add an array of every device in the order of the tree, inside `jax.shard_map`.

    Args:
        x: The sum of the device's own shards, with the full shape.
        spec: Mesh axes that split the result.
        batch_axes: Sizes of the mesh axes that split the batch, outermost first. Each is a power of two.

    Returns:
        The device's shard of the sum.
    """
    # x is reshaped so that each dim becomes one dim per mesh axis that splits it, and one for the
    # rest. Example: [8, 3] with the spec (("dp", "fsdp"), None) on dp 2 and fsdp 2 becomes
    # [2, 2, 2, 3], and `split_axes` is ["dp", "fsdp", "", ""].
    split_axes: list[str] = []
    split_shape: list[int] = []
    shard_shape: list[int] = []
    for extent, axes in zip(x.shape, dim_axes(spec, x.ndim)):
        sizes = [batch_axes[axis] for axis in axes]
        rest = extent // math.prod(sizes)
        split_axes += [*axes, ""]
        split_shape += [*sizes, rest]
        shard_shape.append(rest)
    x = x.reshape(split_shape)
    # The innermost axis first: its devices hold neighboring subtrees of the batch.
    for axis, size in reversed(list(batch_axes.items())):
        if axis in split_axes:
            x = _reduce_scatter(x, split_axes.index(axis), axis, size=size)
        else:
            x = _all_reduce(x, axis, size)
    return x.reshape(shard_shape)


def _all_reduce(x: Array, axis: str, size: int) -> Array:
    """Add arrays over a mesh axis: each device adds a part, then all devices gather the parts."""
    # The parts must be equal: e.g. 7 elements on 4 devices are padded to 8, 2 for each device.
    if x.size % size:
        padded = jnp.pad(x.reshape(-1), (0, -x.size % size))
        return _all_reduce(padded, axis, size)[: x.size].reshape(x.shape)
    part = _reduce_scatter(x.reshape(size, -1), 0, axis, size=size)
    return lax.all_gather(part, axis, tiled=True).reshape(x.shape)


def _reduce_scatter(x: Array, dim: int, axis: str, *, size: int) -> Array:
    """Add arrays over a mesh axis. A device gets the index of its coordinate, as a dim of extent 1."""
    # Recursive halving, nearest neighbors first. In each round a device keeps the half of the indices that agree with
    # its coordinate in one more bit, and sends the other half to the neighbor that keeps it. Example with 4 devices
    # and indices 0 to 3: in round 0 device 0 keeps 0 and 2 and sends 1 and 3 to device 1. In round 1 it keeps 0 and
    # sends 2 to device 2. It then has (x0 + x1) + (x2 + x3) of index 0, the tree above.
    coordinate = lax.axis_index(axis)
    for bit in range(size.bit_length() - 1):
        pairs = x.reshape(*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[dim + 1 :])
        own = (coordinate >> bit) & 1
        kept = lax.dynamic_index_in_dim(pairs, own, dim + 1, keepdims=False)
        sent = lax.dynamic_index_in_dim(pairs, 1 - own, dim + 1, keepdims=False)
        neighbors = [(device, device ^ (1 << bit)) for device in range(size)]
        x = kept + lax.ppermute(sent, axis, neighbors)
    return x
