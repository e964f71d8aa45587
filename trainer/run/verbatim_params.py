"""Read the leaves of a verbatim checkpoint onto a device mesh, under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from prepcli.algebra.boxes import full_box
from prepcli.engine.fills import numpy_dtype
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.rule_text import with_default_preset
from prepcli.models.rules import check_leaf_rules
from prepcli.planning.tensors import cast_dtype, itemsize
from prepcli.sources.source import Source
from prepcli.stores.paths import AnyPath
from trainer.run.params import make_sharding, open_checked_reader

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

    from prepcli.engine.checkpoint_store import CheckpointReader

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
    from trainer.distributed.devices import local_devices
    from trainer.distributed.sharding import local_device_sharding
    from trainer.training.loading import make_loader

    local_devices()
    leaves = param_leaves(source.family, source.config, tied=False)
    arrays: dict[str, jax.Array | np.ndarray] = {}
    for tensor in source.tensors:
        if tensor.nbytes == 0:
            arrays[tensor.name] = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
    with open_checked_reader(source, path, mesh, verify, on_unchecked) as reader:
        sharding = make_sharding(mesh, _partition_rules(source))
        check_leaf_rules(sharding.rules, {name: leaf.dims for name, leaf in leaves.items()})
        loader = make_loader(reader)
        for name, leaf in leaves.items():
            leaf_dtype = cast_dtype(reader.leaves[f"params.{name}"].dtype, dtype)
            if itemsize(leaf_dtype) > MAX_JAX_ITEM_NBYTES:
                arrays[name] = _read_array(reader, leaf, leaf_dtype)
                continue
            placement = sharding.param_sharding(leaf) or local_device_sharding()
            arrays[name] = loader.load(
                f"params.{name}", _load_target(leaf, numpy_dtype(leaf_dtype), placement)
            )
    return arrays


def _partition_rules(source: Source) -> tuple[str, ...]:
    return with_default_preset(source.tree_manifest.rules)


def _load_target(leaf: ParamLeaf, dtype: np.dtype, sharding: Any) -> jax.ShapeDtypeStruct:
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _read_array(reader: CheckpointReader, leaf: ParamLeaf, dtype: str) -> np.ndarray:
    """Read a whole leaf into host memory."""
    array = np.empty(leaf.shape, numpy_dtype(dtype))
    parts: Mapping[Any, np.ndarray] = {full_box(leaf.shape): array}
    reader.read(f"params.{leaf.path}", parts)
    return array
