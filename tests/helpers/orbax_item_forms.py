"""Write Orbax items in many storage forms with Orbax and TensorStore, and the bits of each leaf.

    python -m tests.helpers.orbax_item_forms FOLDER [PATTERN]

Writes FOLDER/NAME for each form with a name that matches the pattern, and to FOLDER/expected.json the dtype, shape and
bits (hexadecimal) of its leaves. It is a process of its own, because eight CPU devices are set before JAX is imported.
`tests/prepcli/formats/test_orbax_matrix.py` reads the items.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils
from orbax.checkpoint.experimental import v1

jax.config.update("jax_enable_x64", True)
Tree = dict[str, Any]
SaveForm = Callable[[Path], Tree]

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int4"),
    *("float16", "float32", "float64", "complex64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
SMALL_CHUNK_NBYTES = 600

# Codecs that Orbax itself does not write, but restores: TensorStore writes the arrays.
ZARR2_DOCUMENTS: dict[str, dict[str, Any]] = {
    "zstd-19": {"compressor": {"id": "zstd", "level": 19}},
    "gzip": {"compressor": {"id": "gzip", "level": 5}},
    "zlib": {"compressor": {"id": "zlib", "level": 9}},
    "bz2": {"compressor": {"id": "bz2", "level": 1}},
    "blosc-lz4": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    "blosc-lz4hc": {"compressor": {"id": "blosc", "cname": "lz4hc", "clevel": 9, "shuffle": 1}},
    "blosc-zstd": {"compressor": {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 2}},
    "blosc-blosclz": {"compressor": {"id": "blosc", "cname": "blosclz", "clevel": 5, "shuffle": 0}},
    "blosc-zlib": {"compressor": {"id": "blosc", "cname": "zlib", "clevel": 5, "shuffle": 1}},
    "f-order": {"compressor": None, "order": "F"},
    "slash-keys": {"compressor": None, "dimension_separator": "/"},
    "big-endian": {"compressor": None, "dtype": ">f4"},
    "fill-value": {"compressor": None, "fill_value": 7.0},
}
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD = {"name": "zstd", "configuration": {"level": 3}}
_CRC32C = {"name": "crc32c"}
_BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4},
}


def _sharded(codecs: list[Any], index_location: str = "end") -> list[Any]:
    """Return the codec of shards of two chunks of 8 rows."""
    settings = {
        "chunk_shape": [8, 12],
        "codecs": codecs,
        "index_codecs": [_BYTES, _CRC32C],
        "index_location": index_location,
    }
    return [{"name": "sharding_indexed", "configuration": settings}]


ZARR3_CODECS: dict[str, list[Any]] = {
    "gzip": [_BYTES, {"name": "gzip", "configuration": {"level": 5}}],
    "zstd-crc32c": [_BYTES, _ZSTD, _CRC32C],
    "crc32c": [_BYTES, _CRC32C],
    "blosc": [_BYTES, _BLOSC],
    "transpose": [{"name": "transpose", "configuration": {"order": [1, 0]}}, _BYTES],
    "big-endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "sharded-raw": _sharded([_BYTES]),
    "sharded-zstd": _sharded([_BYTES, _ZSTD]),
    "sharded-blosc": _sharded([_BYTES, _BLOSC]),
    "sharded-start": _sharded([_BYTES, _ZSTD], index_location="start"),
}


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an array of random bits."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    generator = np.random.default_rng(seed)
    if dtype == "int4":
        return generator.integers(-8, 8, shape).astype(kind)
    high = 2 if dtype == "bool" else 256
    nbytes = int(np.prod(shape)) * kind.itemsize
    return generator.integers(0, high, nbytes, np.uint8).view(kind).reshape(shape)


def random_tree(dtype: str = "float32") -> Tree:
    """Return a tree of three arrays, two of them sharded over eight devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "mp"))
    weight = random_array(dtype, (32, 24), seed=1)
    kernel = random_array(dtype, (4, 8, 12), seed=2)
    return {
        "weight": jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp", "mp"))),
        "bias": random_array(dtype, (24,), seed=3),
        "layers": {
            "kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(None, "fsdp", "mp")))
        },
    }


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by dotted path."""
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        arrays[".".join(keys)] = np.asarray(leaf)
    return arrays


def handler_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield forms of Orbax's handler: database or files, zarr 2 or 3, compressed or raw, in one or many chunks."""
    for zarr3, ocdbt, compressed, many in itertools.product((False, True), repeat=4):
        parts = [
            f"zarr{2 + zarr3}",
            "ocdbt" if ocdbt else "files",
            "zstd" if compressed else "raw",
            "many" if many else "one",
        ]

        def save(
            path: Path,
            zarr3: bool = zarr3,
            ocdbt: bool = ocdbt,
            compressed: bool = compressed,
            many: bool = many,
        ) -> Tree:
            tree = random_tree()
            _save_with_handler(
                path, tree, zarr3=zarr3, ocdbt=ocdbt, compressed=compressed, many=many
            )
            return tree

        yield "-".join(parts), save


def dtype_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield each dtype in Orbax's default form, and as zarr 2 in files."""
    for dtype in DTYPES:
        for zarr3, ocdbt in ((True, True), (False, False)):

            def save(
                path: Path, dtype: str = dtype, zarr3: bool = zarr3, ocdbt: bool = ocdbt
            ) -> Tree:
                tree = random_tree(dtype)
                _save_with_handler(
                    path, tree, zarr3=zarr3, ocdbt=ocdbt, compressed=True, many=False
                )
                return tree

            storage = "ocdbt" if ocdbt else "files"
            yield f"zarr{2 + zarr3}-{storage}-{dtype}", save


def _save_with_handler(
    path: Path, tree: Tree, *, zarr3: bool, ocdbt: bool, compressed: bool, many: bool
) -> None:
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=zarr3, use_ocdbt=ocdbt, use_compression=compressed
    )
    chunk_nbytes = SMALL_CHUNK_NBYTES if many else None
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk_nbytes), tree)
    ocp.Checkpointer(handler).save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))


def codec_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield forms with arrays of TensorStore in codecs that Orbax does not write itself."""
    for name, document in ZARR2_DOCUMENTS.items():
        yield f"zarr2-files-{name}", _codec_form("zarr", False, document)
    for name, codecs in ZARR3_CODECS.items():
        yield f"zarr3-files-{name}", _codec_form("zarr3", False, {"codecs": codecs})
    for name in ("gzip", "blosc-lz4"):
        yield f"zarr2-ocdbt-{name}", _codec_form("zarr", True, ZARR2_DOCUMENTS[name])
    for name in ("gzip", "blosc", "sharded-zstd"):
        yield f"zarr3-ocdbt-{name}", _codec_form("zarr3", True, {"codecs": ZARR3_CODECS[name]})


def _codec_form(driver: str, ocdbt: bool, document: Mapping[str, Any]) -> SaveForm:
    def save(path: Path) -> Tree:
        tree = {"weight": random_array("float32", (32, 24), seed=1)}
        # Orbax writes the metadata of the tree, and TensorStore the array in its place.
        _save_with_handler(
            path, tree, zarr3=driver == "zarr3", ocdbt=ocdbt, compressed=False, many=False
        )
        _delete_arrays(path)
        base = f"file://{path}/"
        store: dict[str, Any] = {"driver": "file", "path": f"{path}/weight/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": base, "path": "weight/"}
        metadata = {"dtype": "<f4", **document}
        if driver == "zarr":
            metadata["chunks"] = [16, 12]
            metadata["shape"] = [32, 24]
        else:
            del metadata["dtype"]
            metadata["chunk_grid"] = {
                "name": "regular",
                "configuration": {"chunk_shape": [16, 12]},
            }
            metadata["shape"] = [32, 24]
            metadata["data_type"] = "float32"
        spec = {"driver": driver, "kvstore": store, "metadata": metadata, "create": True}
        spec["store_data_equal_to_fill_value"] = True
        ts.open(spec, dtype=ts.float32).result().write(tree["weight"]).result()
        return tree

    return save


def _delete_arrays(path: Path) -> None:
    """Delete the arrays of an item, and keep the metadata of its tree."""
    for child in path.iterdir():
        if child.is_dir() and child.name != "array_metadatas":
            shutil.rmtree(child)
        elif child.name == "manifest.ocdbt":
            child.unlink()


def api_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield items of Orbax's checkpointers and managers, under the names that trainers use."""

    def standard(path: Path) -> Tree:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, random_tree())
        return random_tree()

    def pytree(path: Path) -> Tree:
        ocp.PyTreeCheckpointer().save(path, random_tree())
        return random_tree()

    def manager(path: Path) -> Tree:
        with ocp.CheckpointManager(path) as checkpoints:
            checkpoints.save(10, args=ocp.args.StandardSave(random_tree("int8")))
            checkpoints.save(20, args=ocp.args.StandardSave(random_tree()))
        return random_tree()

    def named(item: str) -> SaveForm:
        def save(path: Path) -> Tree:
            with ocp.CheckpointManager(path) as checkpoints:
                composite = ocp.args.Composite(**{item: ocp.args.PyTreeSave(random_tree())})
                checkpoints.save(7, args=composite)
            return random_tree()

        return save

    def params_and_state(path: Path) -> Tree:
        with ocp.CheckpointManager(path) as checkpoints:
            composite = ocp.args.Composite(
                params=ocp.args.StandardSave(random_tree()),
                opt_state=ocp.args.StandardSave(random_tree("float16")),
                meta=ocp.args.JsonSave({"step": 3}),
            )
            checkpoints.save(3, args=composite)
        return random_tree()

    def model_and_optimizer(path: Path) -> Tree:
        with ocp.CheckpointManager(path) as checkpoints:
            composite = ocp.args.Composite(
                model_params=ocp.args.PyTreeSave(random_tree()),
                optimizer_state=ocp.args.PyTreeSave(random_tree("float16")),
            )
            checkpoints.save(3, args=composite)
        return random_tree()

    def v1_pytree(path: Path) -> Tree:
        v1.save(str(path), random_tree())
        return random_tree()

    def v1_steps(path: Path) -> Tree:
        with v1.training.Checkpointer(str(path)) as checkpointer:
            checkpointer.save(7, random_tree())
        return random_tree()

    yield "standard-checkpointer", standard
    yield "pytree-checkpointer", pytree
    yield "manager-steps", manager
    yield "manager-items", named("items")
    yield "manager-state", named("state")
    yield "manager-model_params", named("model_params")
    yield "manager-params-opt_state", params_and_state
    yield "manager-model_params-optimizer_state", model_and_optimizer
    yield "v1-save", v1_pytree
    yield "v1-checkpointer", v1_steps


def tree_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield trees with unusual leaves."""
    trees: dict[str, Callable[[], Tree]] = {
        "tree-zeros": lambda: {"zeros": np.zeros((64, 64), np.float32), **random_tree()},
        "tree-scalars": lambda: {"number": np.array(7, np.int32), **random_tree()},
        "tree-lists": lambda: {"list": [np.arange(600), {"x": np.ones(3, np.float16)}]},
        "tree-dotted-names": lambda: {"a.b": np.arange(5.0), "c": {"d e": np.ones(3)}},
        "tree-slashes": lambda: {"a/b": np.arange(5.0), "a": np.ones(3)},
    }
    for name, make_tree in trees.items():

        def save(path: Path, make_tree: Callable[[], Tree] = make_tree) -> Tree:
            tree = make_tree()
            _save_with_handler(path, tree, zarr3=False, ocdbt=True, compressed=True, many=False)
            return tree

        yield name, save


def process_forms() -> Iterator[tuple[str, SaveForm]]:
    """Yield databases of two processes, merged as at the end of Orbax's save, and as a kill before the merge leaves."""

    def save(path: Path, is_merged: bool) -> Tree:
        tree = {"weight": random_array("float32", (32, 24), 1), "bias": np.arange(24.0)}
        _save_with_handler(path, tree, zarr3=False, ocdbt=True, compressed=False, many=False)
        _delete_arrays(path)
        for process, (name, array) in enumerate(tree.items()):
            store = {
                "driver": "ocdbt",
                "base": f"file://{path}/ocdbt.process_{process}/",
                "path": f"{name}/",
            }
            metadata = {"shape": array.shape, "chunks": [8] * array.ndim, "compressor": None}
            spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
            spec["store_data_equal_to_fill_value"] = True
            ts.open(spec, dtype=ts.dtype(array.dtype.name)).result().write(array).result()
        if is_merged:
            context = tensorstore_utils.get_ts_context(use_ocdbt=True)
            folder = epath.Path(path)
            asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(folder, context, use_zarr3=False))
        return tree

    yield "two-processes-merged", lambda path: save(path, is_merged=True)
    yield "two-processes-not-merged", lambda path: save(path, is_merged=False)


def write_items(folder: Path, pattern: str) -> None:
    """Write the items that match a pattern, and the file of expected bits."""
    forms = itertools.chain(
        handler_forms(), dtype_forms(), codec_forms(), api_forms(), tree_forms(), process_forms()
    )
    expected: dict[str, dict[str, Any]] = {}
    for name, save in forms:
        if not fnmatch.fnmatch(name, pattern):
            continue
        leaves: dict[str, Any] = {}
        for leaf, array in flat(save(folder / name)).items():
            leaves[leaf] = [array.dtype.name, list(array.shape), array.tobytes().hex()]
        expected[name] = leaves
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    root = Path(sys.argv[1]).absolute()
    root.mkdir(parents=True)
    write_items(root, sys.argv[2] if len(sys.argv) > 2 else "*")
