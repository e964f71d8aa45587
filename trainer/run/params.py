"""Read the parameters of any checkpoint onto a device mesh, or draw random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prepcli.algebra.boxes import full_box
from prepcli.core.errors import GET_AGAIN_HINT, Command, Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.engine.fills import numpy_dtype
from prepcli.models.mesh import Mesh
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import parameter_rows
from prepcli.models.partition import vocab_multiple
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules, check_leaf_rules, merge_rules, with_default_preset
from prepcli.planning.tensors import cast_dtype, itemsize
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.source import Source, source_rows
from prepcli.sources.tensor_match import Vocabulary, read_vocabulary, with_vocabulary
from prepcli.stores.paths import AnyPath

if TYPE_CHECKING:
    import jax

    from prepcli.models.param_tree import Tree
    from trainer.distributed.leaf_slices import CheckpointReader
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint open for reading, its model and its mesh."""

    reader: ItemReader | WeightsReader
    model: ModelSpec
    sharding: ShardingContext

    def stored_dtypes(self) -> set[str]:
        """Return the dtypes of the parameters on disk."""
        leaves = self.reader.leaves.items()
        return {leaf.dtype for name, leaf in leaves if name.startswith("params.")}

    def stored_dtype(self, path: str) -> str:
        """Return the dtype of a parameter on disk.

        Raises:
            PrepError: The checkpoint does not have the parameter, or JAX supports its dtype only with
                `jax_enable_x64`.
        """
        import jax

        leaf = self.reader.leaves.get(f"params.{path}")
        if leaf is None:
            what = f"the checkpoint lacks the parameter {path}"
            raise PrepError(what, "the model of its config has this parameter", GET_AGAIN_HINT)
        if str(jax.dtypes.canonicalize_dtype(leaf.dtype)) != leaf.dtype:
            why = f"params.{path} is stored in {leaf.dtype}, and JAX computes in 32 bits"
            raise usage_error(
                "the dtype of a parameter cannot be kept",
                why,
                '`dtype="float32"`, or the setting jax_enable_x64',
            )
        return leaf.dtype

    def load(self, dtype_of: Callable[[str], str]) -> Tree:
        """Return the parameters as sharded arrays. `dtype_of` maps the dotted path of a leaf to its dtype."""
        from trainer.training.checkpoint import load_params

        return load_params(self.reader, self.model, sharding=self.sharding, dtype_of=dtype_of)


@contextmanager
def open_model(
    source: Source,
    path: AnyPath,
    mesh: str | None,
    *,
    verify: bool,
    on_unchecked: Callable[[], None],
) -> Iterator[OpenedModel]:
    """Open a checkpoint for reading its parameters onto a mesh, and close it at the end of the `with` block.

    A checkpoint in prep's default layout is read as it is, also from a bucket if it has checksums of its chunks. Any
    other source is converted while it is read: layers stacked on the first axis, the vocabulary padded to the size that
    the mesh divides.

    Args:
        source: The checkpoint.
        path: Its folder.
        mesh: `dp,fsdp,mp` sizes or named axes, or None for the first device.
        verify: Compare every byte with the checksums or digests of the checkpoint.
        on_unchecked: Called for a checkpoint without checksums of its parts, if `verify` is set.

    Raises:
        PrepError: JAX has no devices, or the mesh is invalid or does not divide a parameter.
    """
    from trainer.distributed.devices import local_devices
    from trainer.nn.model_spec import check_mesh_divides, model_from_manifest

    if source.tree_manifest.is_adapter:
        export = Command("export", source.display_name, Option("out", "ADAPTER"))
        hint = text("{}, then {}", export, Command("merge", "ADAPTER", "BASE"))
        raise usage_error(
            f"{source.display_name} is not a complete model", "it has only adapters", hint
        )
    # This raises any error about devices before the first read.
    local_devices()
    with open_checked_reader(source, path, mesh, verify, on_unchecked) as reader:
        model = model_from_manifest(reader.manifest)
        sharding = make_sharding(mesh, source.tree_manifest.rules)
        check_mesh_divides(model, sharding)
        yield OpenedModel(reader, model, sharding)


def open_checked_reader(
    source: Source, path: AnyPath, mesh: str | None, verify: bool, on_unchecked: Callable[[], None]
) -> ItemReader | WeightsReader:
    """Open the fastest reader of a source. See `open_model` for the arguments."""
    check_lock_verified(source, verify)
    manifest = source.tree_manifest
    if manifest and manifest.scan and manifest.scan_axis == 0:
        reader = open_reader(path, verify)
        if reader.is_checked or not (verify and reader.is_remote):
            if verify and not reader.is_checked:
                on_unchecked()
            if source.has_averages:
                reader.use_averages()
            return reader
        reader.close()
    sharding = make_sharding(mesh, manifest.rules)
    return open_weights(source, sharding.mesh, sharding.rules, verify=verify)


def check_lock_verified(source: Source, verify: bool) -> None:
    """Raise UsageError if a locked source is read without its digests."""
    if source.is_locked and not verify:
        what = text("{} has no effect without the check of digests", Option("lock"))
        why = "the digests of the lock are compared while the tensors are read"
        raise usage_error(what, why, text("remove {}", Option("verify", False)))


def open_weights(source: Source, mesh: Mesh | None, rules: Rules, *, verify: bool) -> WeightsReader:
    """Open a source for reading leaves, with a vocabulary padded to a size that the mesh divides."""
    dims = {path: row.leaf_dims for path, row in source_rows(source).items()}
    return WeightsReader(source, vocab_multiple(dims, mesh, rules), verify)


def make_sharding(mesh: str | None, rules: Sequence[str]) -> ShardingContext:
    """Return the sharding context of a mesh, with partition rules. `mesh=None`: one device."""
    from prepcli.models.mesh import parse_mesh
    from trainer.distributed.sharding import ShardingContext, make_sharding_context

    if mesh is None:
        return ShardingContext()
    return make_sharding_context(parse_mesh(mesh), merge_rules(rules), origin=Option("mesh"))


def build_model_on_mesh(config: HFConfig, mesh: str | None) -> tuple[ModelSpec, ShardingContext]:
    """Return the model of a config, with stacked layers and a vocabulary padded to the size that a mesh divides.

    Args:
        config: Content of a config.json.
        mesh: `dp,fsdp,mp` sizes or named axes, or None for the first device.

    Raises:
        PrepError: The config or the mesh is invalid, or the mesh does not divide a parameter.
    """
    from trainer.nn.model_spec import build_model, check_mesh_divides

    family = family_of(config)
    sharding = make_sharding(mesh, ())
    vocabulary = read_vocabulary(config, family.sizes(config)["vocab"])
    dims = {path: row.leaf_dims for path, row in parameter_rows(family, config).items()}
    multiple = vocab_multiple(dims, sharding.mesh, sharding.rules)
    padded = Vocabulary(vocabulary.true_size, -(-vocabulary.stored_size // multiple) * multiple)
    model = build_model(family, with_vocabulary(config, padded), family.is_tied(config))
    check_mesh_divides(model, sharding)
    return model, sharding


def init_random_params(
    model: ModelSpec, sharding: ShardingContext, *, seed: int, dtype: str
) -> Tree:
    """Return random parameters in shards of a mesh. Each device computes its shards.

    Args:
        model: The model.
        sharding: The mesh and its rules.
        seed: Seed of the random key.
        dtype: Dtype of the arrays.
    """
    import jax

    from prepcli.models.param_tree import unflatten_tree
    from trainer.nn.initialization import init_params

    def make_params() -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(model, seed))

    # One compiled program makes all leaves in their shards: no device or host holds a whole leaf.
    shardings = {path: sharding.param_sharding(leaf) for path, leaf in model.leaves.items()}
    return jax.jit(make_params, out_shardings=unflatten_tree(shardings))()


# JAX stores 64-bit values in 32 bits, unless a setting of the process says otherwise.
MAX_JAX_ITEM_NBYTES = 4


def load_verbatim_params(
    source: Source,
    path: AnyPath,
    mesh: str | None,
    *,
    dtype: str | None,
    verify: bool,
    on_unchecked: Callable[[], None],
) -> dict[str, jax.Array | np.ndarray]:
    """Return the leaves of a checkpoint by path. 64-bit leaves, and leaves without elements, are NumPy arrays.

    Args:
        source: A source of the verbatim family.
        path: Its folder.
        mesh: `dp,fsdp,mp` sizes or named axes, or None for the first device.
        dtype: Dtype of the floating-point leaves of 16, 32 and 64 bits, or None for the stored one.
        verify: Compare every byte with the checksums or digests of the checkpoint.
        on_unchecked: Called for a checkpoint without checksums of its parts, if `verify` is set.

    Raises:
        PrepError: JAX has no devices, or the mesh is invalid or does not divide a leaf.
    """
    import jax

    from trainer.distributed.devices import local_devices
    from trainer.distributed.sharding import local_device_sharding
    from trainer.training.checkpoint import make_loader

    local_devices()
    leaves = param_leaves(source.family, source.config, tied=False)
    arrays: dict[str, jax.Array | np.ndarray] = {}
    for tensor in source.tensors:
        if tensor.nbytes == 0:
            arrays[tensor.name] = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
    with open_checked_reader(source, path, mesh, verify, on_unchecked) as reader:
        sharding = make_sharding(mesh, with_default_preset(source.tree_manifest.rules))
        check_leaf_rules(sharding.rules, {name: leaf.dims for name, leaf in leaves.items()})
        loader = make_loader(reader)
        for name, leaf in leaves.items():
            leaf_dtype = cast_dtype(reader.leaves[f"params.{name}"].dtype, dtype)
            if itemsize(leaf_dtype) > MAX_JAX_ITEM_NBYTES:
                arrays[name] = _read_array(reader, leaf, leaf_dtype)
                continue
            placement = sharding.param_sharding(leaf) or local_device_sharding()
            target = jax.ShapeDtypeStruct(leaf.shape, numpy_dtype(leaf_dtype), sharding=placement)
            arrays[name] = loader.load(f"params.{name}", target)
    return arrays


def _read_array(reader: CheckpointReader, leaf: ParamLeaf, dtype: str) -> np.ndarray:
    """Read a whole leaf into host memory."""
    array = np.empty(leaf.shape, numpy_dtype(dtype))
    parts: Mapping[Any, np.ndarray] = {full_box(leaf.shape): array}
    reader.read(f"params.{leaf.path}", parts)
    return array
