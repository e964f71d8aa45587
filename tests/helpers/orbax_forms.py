"""Save one tree with Orbax in every storage form, in a separate process with eight devices.

Usage: orbax_forms.py FOLDER    writes FOLDER/<form>, and dtype, shape and bits of each leaf to FOLDER/expected.json
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils
from orbax.checkpoint.experimental import v1

jax.config.update("jax_enable_x64", True)
DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
)
DTYPES = (
    *DTYPES,
    "float64",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
)
SHAPE = (16, 40)


def values(dtype: str) -> np.ndarray:
    """Return an array of random bits."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    high = 2 if dtype == "bool" else 256
    bits = np.random.default_rng(len(dtype)).integers(
        0, high, int(np.prod(SHAPE)) * kind.itemsize, np.uint8
    )
    return bits.view(kind).reshape(SHAPE)


def tree() -> dict[str, Any]:
    """Return a tree with arrays of every dtype, sharded arrays, zeros, a number and a list."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
    arrays = {dtype: values(dtype) for dtype in DTYPES}
    return {
        "numpy": arrays,
        "sharded": {
            dtype: jax.device_put(arrays[dtype], sharding)
            for dtype in ("bfloat16", "float32", "int8")
        },
        "zeros": np.zeros((9, 5), np.float32),
        "number": np.array(7, np.int32),
        "list": [np.arange(600), {"x": np.ones(3, np.float16)}],
    }


def save_forms(folder: Path, tree: dict[str, Any]) -> None:
    """Save as zarr 2 and 3, in OCDBT and in files, with and without compression, in one and in many chunks."""
    flags = itertools.product((False, True), repeat=3)
    for (zarr3, ocdbt, compressed), nbytes in itertools.product(flags, (None, 200)):
        form = f"zarr{2 + zarr3}{'-ocdbt' * ocdbt}{'-zstd' * compressed}{'-many' * bool(nbytes)}"
        handler = ocp.PyTreeCheckpointHandler(
            use_zarr3=zarr3, use_ocdbt=ocdbt, use_compression=compressed
        )
        save_args = jax.tree.map(
            lambda _, nbytes=nbytes: ocp.SaveArgs(chunk_byte_size=nbytes), tree
        )
        ocp.Checkpointer(handler).save(
            folder / form, args=ocp.args.PyTreeSave(tree, save_args=save_args)
        )
    v1.save(str(folder / "v1"), tree)
    with ocp.CheckpointManager(folder / "run") as checkpoints:
        checkpoints.save(100, args=ocp.args.StandardSave(tree))


def save_from_two_processes(folder: Path, tree: dict[str, Any]) -> None:
    """Save one database per process, and merge them as Orbax does at the end of a save."""
    item_folder = folder / "processes"
    arrays = [(name, array) for name, array in flat(tree).items() if array.ndim]
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    for n, (name, array) in enumerate(arrays):
        base = f"file://{item_folder}/ocdbt.process_{n % 2}/"
        store = {
            "driver": "ocdbt",
            "base": base,
            "path": f"{name}/",
            "config": {"max_inline_value_bytes": 100},
        }
        chunk = [-(-extent // 2) for extent in array.shape]
        metadata = {"shape": array.shape, "chunks": chunk, "compressor": {"id": "gzip", "level": 1}}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
        spec["store_data_equal_to_fill_value"] = True
        ts.open(spec, dtype=ts.dtype(array.dtype.name)).result().write(array).result()
    from etils import epath

    asyncio.run(
        ocdbt_utils.merge_ocdbt_per_process_files(epath.Path(item_folder), context, use_zarr3=False)
    )
    saved_metadata = json.loads((folder / "zarr2-ocdbt-zstd/_METADATA").read_text())
    kept_keys = {str(tuple(name.split("."))) for name, _ in arrays}
    leaves = {
        key: leaf for key, leaf in saved_metadata["tree_metadata"].items() if key in kept_keys
    }
    (item_folder / "_METADATA").write_text(json.dumps(saved_metadata | {"tree_metadata": leaves}))


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by dotted path, as NumPy arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): np.asarray(x)
        for path, x in leaves
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]).absolute()
    saved = tree()
    save_forms(root, saved)
    save_from_two_processes(root, saved)
    bits = {
        name: [x.dtype.name, list(x.shape), x.tobytes().hex()] for name, x in flat(saved).items()
    }
    (root / "expected.json").write_text(json.dumps(bits))
