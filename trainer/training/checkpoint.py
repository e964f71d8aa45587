"""The training state in checkpoints: values of a save, and the state of a start checkpoint or of a saved step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from prepcli.core.errors import Key, PrepError, text
from prepcli.engine.blobs import HostLeaf, HostShard
from prepcli.models.param_tree import ParamLeaf, Tree, flatten_tree, unflatten_tree
from prepcli.planning.manifest_fields import CastCounts, Manifest
from trainer.distributed.leaf_slices import CheckpointReader, exchange_is_faster, index_box
from trainer.distributed.sharding import ShardingContext, local_device_sharding
from trainer.nn.initialization import init_adapters, init_params
from trainer.nn.model_spec import ModelSpec
from trainer.training.leaf_loading import LeafLoader
from trainer.training.optimizers import LOW_BITS, round_to_nearest
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes

OPT_STATE = "opt_state"
PARAMS = "params"


class PendingSave(Protocol):
    """A save of a checkpoint."""

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, also by an error."""
        ...

    def wait(self) -> float:
        """Wait until the checkpoint is complete and durable. Return the seconds that the save took.

        Raises:
            PrepError: The checkpoint cannot be written.
        """
        ...


class Checkpoints(Protocol):
    """The checkpoints of one run, by step."""

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        ...

    def open(self, step: int) -> CheckpointReader:
        """Open the checkpoint of a step. Raise PrepError if it is damaged."""
        ...

    def start_save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Manifest
    ) -> PendingSave:
        """Begin to save a checkpoint. The leaves may change after the call.

        Args:
            step: Step of the state.
            leaves: The state's leaves by dotted name.
            manifest_fields: Additional entries of the manifest.

        Returns:
            The save, which may continue in the background. The next one begins after its end.

        Raises:
            PrepError: The checkpoint cannot be written.
        """
        ...

    def note_evaluations(self, metric: str, costs: Mapping[int, float]) -> None:
        """Count the costs of evaluations, by step, for saved steps whose manifests lack them."""
        ...


def host_leaves(
    state: TrainState | dict[str, Tree],
    optimizer_state: bool = True,
    *,
    frozen: Collection[str] = (),
    saved_dtype: str | None = None,
) -> dict[str, HostLeaf]:
    """Return the leaves of the state by name, with the shards that this process saves.

    Args:
        state: The training state, or parts of it by name, e.g. `params`.
        optimizer_state: Include the optimizer's moments.
        frozen: Paths of parameters to leave out.
        saved_dtype: Dtype to which the parameters are cast on the host. None means no cast.
    """
    kept: dict[str, object] = dict(state)
    if not optimizer_state:
        del kept[OPT_STATE]
    excluded = {f"{PARAMS}.{path}" for path in frozen}
    host: dict[str, HostLeaf] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(kept)[0]:
        name = leaf_name(path)
        if name in excluded:
            continue
        # The number of a leaf chooses the replica that saves it. All processes count the same
        # leaves in the same order, so they agree without a message.
        number = len(host)
        # Number of shards per axis. For shape [8, 6] and shards [2, 6] the counts are 4 and 1. On 8
        # devices that leaves 8 / 4 = 2 replicas of each shard.
        num_shards = 1
        for extent, shard_extent in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            num_shards *= math.ceil(extent / max(1, shard_extent))
        num_replicas = len(leaf.sharding.device_set) // max(1, num_shards)
        dtype = leaf.dtype
        if saved_dtype is not None and name.startswith(f"{PARAMS}."):
            dtype = jnp.dtype(saved_dtype)
        shards: list[HostShard] = []
        for shard in leaf.addressable_shards:
            if shard.replica_id == number % num_replicas:
                box = index_box(shard.index, leaf.shape)
                shards.append(HostShard(box, partial(_fetch_shard, shard, dtype)))
        host[name] = HostLeaf(leaf.shape, dtype.name, tuple(shards))
    return host


def _fetch_shard(shard: jax.Shard, dtype: np.dtype[Any]) -> np.ndarray:
    """Copy a shard to the host, in a dtype."""
    # A JAX array caches its host copy for as long as it lives: a temporary array frees the copy early. The values of
    # a CPU device are not copied. JAX does not donate a buffer that a NumPy array refers to, so that steps leave it
    # alone.
    data = shard.data
    # The shard is on a device of this process, so it has data.
    assert data is not None
    array = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(array).astype(dtype, copy=False)


# The bits that bfloat16 cuts off.
LOW_MASK = 2**LOW_BITS - 1
# All bits except the sign. Without the sign, float32 values have the same order as their bits read
# as integers.
ABS_MASK = 0x7FFFFFFF
INFINITY = 0x7F800000
# The smallest float32 that rounds to an infinite bfloat16: halfway between the largest bfloat16,
# 0x7F7F0000, and infinity, 0x7F800000. The tie goes to the even one, infinity.
FIRST_OVERFLOW = 0x7F7F8000


def count_changed_values(params: Tree, dtype: str, frozen: Collection[str] = ()) -> CastCounts:
    """Count the values changed by a cast of the parameters.

    All processes of a run call it.

    Args:
        params: The parameters.
        dtype: Dtype of the cast.
        frozen: Paths of parameters that are not saved.

    Returns:
        The dtypes `from` and `to`, and the numbers of all `values` and of the `changed` ones.

    Raises:
        PrepError: A finite value is too large for the dtype.
    """
    dtypes: set[str] = set()
    num_values = 0
    num_changed = 0
    overflowed: list[str] = []
    for path, leaf in flatten_tree(params).items():
        if path in frozen:
            continue
        leaf_changed, leaf_overflows = count_leaf_changes(leaf, dtype)
        dtypes.add(str(leaf.dtype))
        num_values += leaf.size
        num_changed += leaf_changed
        if leaf_overflows:
            overflowed.append(path)
    if overflowed:
        hint = text("{}", Key("checkpoint.dtype", "float32", is_override=True))
        raise PrepError(f"parameters cannot be saved in {dtype}", overflow_text(overflowed), hint)
    return {
        "from": ", ".join(sorted(dtypes)),
        "to": dtype,
        "values": num_values,
        "changed": num_changed,
    }


def overflow_text(paths: Sequence[str]) -> str:
    """Return why the parameters with these paths cannot be cast."""
    subject = f"{paths[0]} has"
    if len(paths) > 1:
        subject = f"{len(paths)} parameters, {paths[0]} first, have"
    return f"{subject} values that are too large for it"


def count_leaf_changes(leaf: Array, dtype: str) -> tuple[int, int]:
    """Return the numbers of values that a cast changes, and of finite ones that it makes infinite. NaN stays NaN."""
    sharding = leaf.sharding
    # Replicated counts are addressable by every process of a run.
    replicated: NamedSharding | None = None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    count_rows = jax.jit(_count_rows, static_argnames="dtype", out_shardings=replicated)
    changed, overflowed = count_rows(leaf, dtype=dtype)
    return _sum_counts(changed), _sum_counts(overflowed)


def _sum_counts(row_counts: Array) -> int:
    # A leaf may have more than 2^32 values. JAX has no 64-bit integers by default, NumPy has.
    return int(np.asarray(row_counts).sum(dtype=np.int64))


def _count_rows(leaf: Array, dtype: str) -> tuple[Array, Array]:
    """Count the changed and the overflowed values in each row of the first axis, as two uint32 arrays."""
    # The bits are compared: devices may flush subnormal values.
    values = leaf.astype(jnp.float32)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & ABS_MASK
    if dtype == "bfloat16":
        changed = bits & LOW_MASK != 0
        overflowed = magnitude >= FIRST_OVERFLOW
    else:
        cast = values.astype(dtype).astype(jnp.float32)
        changed = lax.bitcast_convert_type(cast, jnp.uint32) != bits
        overflowed = jnp.isinf(cast)
    # Magnitudes above INFINITY are NaN. INFINITY itself is no overflow: it was infinite before.
    changed &= magnitude <= INFINITY
    overflowed &= magnitude < INFINITY
    axes = tuple(range(1, leaf.ndim))
    return changed.sum(axis=axes, dtype=jnp.uint32), overflowed.sum(axis=axes, dtype=jnp.uint32)


UINT_BY_ITEMSIZE = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# One seed for each half of a digest.
SEEDS = (0x9E3779B9, 0x85EBCA6B)


def digest_base_params(leaves: Mapping[str, Array]) -> str:
    """Return the digest of parameters by path, as 16 hexadecimal digits.

    All processes of a job call it together.

    Args:
        leaves: Arrays of elements of at most 4 bytes.
    """
    halves = np.asarray(_sum_leaves(dict(sorted(leaves.items()))))
    return "".join(f"{int(half):08x}" for half in halves)


@jax.jit
def _sum_leaves(leaves: dict[str, Array]) -> Array:
    """Return both halves of the digest, uint32 [2]."""
    total = jnp.zeros(len(SEEDS), jnp.uint32)
    for number, leaf in enumerate(leaves.values()):
        sums = [_weighted_sum(leaf, seed) for seed in SEEDS]
        # `number + 1` ties each sum to the position of its leaf, so two leaves with exchanged
        # values change the digest.
        total = total + _mix_bits(jnp.stack(sums) + jnp.uint32(number + 1))
    return total


def _weighted_sum(leaf: Array, seed: int) -> Array:
    """Sum the bits of all elements, each times an odd number that depends on its position."""
    bits = lax.bitcast_convert_type(leaf, UINT_BY_ITEMSIZE[leaf.dtype.itemsize]).astype(jnp.uint32)
    # The position is the row-major index plus the seed. For shape [2, 3] the strides are 3 and 1,
    # and element [1, 2] has index 1 * 3 + 2 * 1 = 5. A global index does not depend on the
    # sharding.
    position = jnp.full(leaf.shape, seed, jnp.uint32)
    for axis in range(leaf.ndim):
        stride = math.prod(leaf.shape[axis + 1 :]) % 2**32
        position = position + lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(
            stride
        )
    # An odd factor is invertible modulo 2^32: a change of one element always changes the sum.
    return jnp.sum(bits * (2 * _mix_bits(position) + 1), dtype=jnp.uint32)


def _mix_bits(x: Array) -> Array:
    """Mix the bits of uint32 numbers (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def restore_state(
    reader: CheckpointReader, setup: StepSetup, base: CheckpointReader | None = None
) -> TrainState:
    """Restore a training state onto the mesh of `setup`, whatever mesh it was saved on.

    Host memory holds two slices of a leaf at a time, or two read units of each device if these are larger. For a
    remote checkpoint, it also holds the slices read ahead. CPU devices keep the host memory of a leaf.

    Args:
        reader: The saved state.
        setup: The static parts of the step.
        base: Checkpoint of the frozen parameters. None if there are none.

    Raises:
        PrepError: A leaf is missing in the checkpoint, or has another shape.
    """
    entries, structure = jax.tree_util.tree_flatten_with_path(_sharded_shapes(setup))
    targets = {leaf_name(path): leaf for path, leaf in entries}
    frozen: list[str] = []
    if base is not None:
        frozen = [f"params.{path}" for path in setup.model.base_paths]
    saved = [name for name in targets if name not in frozen]

    arrays: dict[str, Array] = {}
    for source, names in ((reader, saved), (base, frozen)):
        if source is not None:
            leaves = make_loader(source).load_all((name, targets[name]) for name in names)
            arrays.update(zip(names, leaves, strict=True))
    return structure.unflatten([arrays[name] for name in targets])


def init_state(
    reader: CheckpointReader,
    setup: StepSetup,
    adapters: CheckpointReader | None = None,
    *,
    on_rounding: Callable[[CastCounts], None] = lambda counts: None,
) -> TrainState:
    """Return the state before the first step: the checkpoint's parameters, a new optimizer and counters of 0.

    Args:
        reader: The checkpoint.
        setup: The static parts of the step.
        adapters: Checkpoint of the model's adapters, if it has any. None to initialize them.
        on_rounding: Called if trained parameters were rounded to bfloat16, with the counts of
            `RoundingLoader`.

    Raises:
        PrepError: A parameter is missing in the checkpoint or has another shape, or a value is too
            large for the dtype of the parameters.
    """
    shapes = _sharded_shapes(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init_rest = jax.jit(
        lambda params: _without_params(init_train_state(params, setup)),
        out_shardings=_without_params(shardings),
    )
    # The base has the first values of parameters that are trained as a whole, next to new adapters.
    loader = RoundingLoader(make_loader(adapters or reader))
    params = _initial_params(
        reader, setup, loader, is_new=adapters is None, shapes=shapes["params"]
    )
    if (counts := loader.counts())["values"]:
        on_rounding(counts)
    state: TrainState = init_rest(params)
    state["params"] = params
    return state


def random_state(setup: StepSetup, seed: int) -> TrainState:
    """Return the state before the first step of a model with random parameters. They do not depend on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, _sharded_shapes(setup))

    def init() -> TrainState:
        return init_train_state(round_params(init_params(setup.model, seed), setup), setup)

    return jax.jit(init, out_shardings=shardings)()


def _initial_params(
    reader: CheckpointReader,
    setup: StepSetup,
    trained_loader: RoundingLoader,
    *,
    is_new: bool,
    shapes: Tree,
) -> Tree:
    """Load the frozen parameters with `reader`, and load or initialize the trained ones."""
    model = setup.model
    sharding = setup.sharding
    dtype_of = setup.param_dtype_of
    frozen = {path: model.leaves[path] for path in model.base_paths}
    base: Tree = {}
    if frozen:
        base = load_leaves(make_loader(reader), frozen, sharding=sharding, dtype_of=dtype_of)
    loaded = dict(model.saved_leaves)
    trained: Tree = {}
    if model.adapters is not None and is_new:
        matrices = model.adapters.matrices
        loaded = {path: leaf for path, leaf in loaded.items() if path not in matrices}
        flat_shapes = flatten_tree(shapes)
        shardings = unflatten_tree({path: flat_shapes[path].sharding for path in matrices})
        init = jax.jit(
            lambda: round_params(init_adapters(model, setup.seed), setup), out_shardings=shardings
        )
        trained = init()
    if loaded:
        leaves = load_leaves(trained_loader, loaded, sharding=sharding, dtype_of=dtype_of)
        trained = setup.with_trained_params(trained, leaves)
    return setup.with_trained_params(base, trained)


def _without_params(state: TrainState) -> dict[str, object]:
    return {name: value for name, value in state.items() if name != "params"}


def load_params(
    reader: CheckpointReader,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    dtype_of: Callable[[str], str],
) -> Tree:
    """Load the parameters of a model.

    Args:
        reader: An open checkpoint.
        model: The model.
        sharding: Mesh and partition rules. Without a mesh, parameters go to the first device.
        dtype_of: Returns the dtype for a parameter's path.

    Raises:
        PrepError: A parameter is missing in the checkpoint, or has another shape.
    """
    return load_leaves(make_loader(reader), model.leaves, sharding=sharding, dtype_of=dtype_of)


def make_loader(reader: CheckpointReader) -> LeafLoader:
    """Return the loader of a checkpoint's leaves. All processes of a job call it together."""
    return LeafLoader(reader, exchange_is_faster(reader))


def load_leaves(
    loader: LeafLoader | RoundingLoader,
    leaves: Mapping[str, ParamLeaf],
    *,
    sharding: ShardingContext,
    dtype_of: Callable[[str], str],
) -> Tree:
    """Load parameters by path with a loader. `sharding` and `dtype_of` are as for `load_params`."""
    first_device = local_device_sharding()
    targets: list[tuple[str, jax.ShapeDtypeStruct]] = []
    for path, leaf in leaves.items():
        dtype = jax.numpy.dtype(dtype_of(path))
        target = jax.ShapeDtypeStruct(
            leaf.shape, dtype, sharding=sharding.param_sharding(leaf) or first_device
        )
        targets.append((f"params.{path}", target))
    return unflatten_tree(dict(zip(leaves, loader.load_all(targets), strict=True)))


def _sharded_shapes(setup: StepSetup) -> TrainState:
    """Return the state's shapes with a sharding each. Without a mesh, all leaves are on the first device."""
    first_device = local_device_sharding()

    def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)

    return jax.tree.map(with_sharding, state_shapes(setup))


class RoundingLoader:
    """A loader of leaves with a count of the values changed by rounding from float32 to bfloat16.

    Such a leaf is loaded in float32 and rounded on its devices. Other leaves are loaded as by a `LeafLoader`.
    """

    def __init__(self, loader: LeafLoader) -> None:
        """Set the loader of the stored leaves."""
        self._loader = loader
        self._num_values = self._num_changed = 0
        self._overflowed: list[str] = []

    def load_all(self, targets: Iterable[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[Array]:
        """Load leaves in order. See `LeafLoader.load_all`."""
        targets = list(targets)
        leaves = self._loader.load_all(
            (name, self._loaded_target(name, target)) for name, target in targets
        )
        for name, target in targets:
            # No variable keeps a leaf before rounding during the load of the next one.
            yield self._round(name, next(leaves), target)

    def _loaded_target(self, name: str, target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the target of a leaf before it is rounded."""
        spec = self._loader.reader.leaves.get(name)
        if target.dtype != jnp.bfloat16 or spec is None or spec.dtype == "bfloat16":
            return target
        return jax.ShapeDtypeStruct(target.shape, jnp.float32, sharding=target.sharding)

    def _round(self, name: str, leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
        """Round a leaf to the dtype of its target, and count the changed values."""
        if leaf.dtype == target.dtype:
            return leaf
        num_changed, num_overflows = count_leaf_changes(leaf, "bfloat16")
        self._num_values += leaf.size
        self._num_changed += num_changed
        if num_overflows:
            self._overflowed.append(name)
        return jax.jit(round_to_nearest, out_shardings=target.sharding)(leaf)

    def counts(self) -> CastCounts:
        """Return the dtypes `from` and `to`, and the numbers of rounded `values` and of the `changed` ones.

        Raises:
            PrepError: A finite value is too large for bfloat16.
        """
        if self._overflowed:
            why = overflow_text(self._overflowed)
            hint = text("{}", Key("model.param_dtype", "float32", is_override=True))
            raise PrepError("parameters cannot be rounded to bfloat16", why, hint)
        return {
            "from": "float32",
            "to": "bfloat16",
            "values": self._num_values,
            "changed": self._num_changed,
        }


def round_params(params: Tree, setup: StepSetup) -> Tree:
    """Round random float32 parameters to the nearest values in the dtypes of the state."""
    rounded: dict[str, Array] = {}
    for path, leaf in flatten_tree(params).items():
        if setup.param_dtype_of(path) == "bfloat16":
            leaf = round_to_nearest(leaf)
        rounded[path] = leaf
    return unflatten_tree(rounded)
