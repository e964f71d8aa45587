"""Load training state from checkpoints onto the devices of all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.core.errors import Key, PrepError, text
from prepcli.engine.checkpoint_store import CheckpointReader
from prepcli.models.param_tree import ParamLeaf, Tree, flatten_tree, unflatten_tree
from prepcli.planning.manifest_fields import CastCounts
from trainer.distributed.leaf_slices import exchange_is_faster
from trainer.distributed.sharding import ShardingContext, local_device_sharding
from trainer.nn.initialization import init_adapters, init_params
from trainer.nn.model_spec import ModelSpec
from trainer.training.checkpoint import count_leaf_changes, overflow_text
from trainer.training.leaf_loading import LeafLoader
from trainer.training.optimizers.rounding import round_to_nearest
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes


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
