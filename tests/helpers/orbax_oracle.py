"""Save trees and open items with Orbax in every way a user may, in a separate process with eight devices.

Each line of stdin is a JSON list of a command and its paths; it is answered by a line with a JSON string: empty, or the
traceback of a failure.

save FOLDER                 save checkpoints with Orbax in several forms
compare EXPECTED ITEM       open the item in every way and compare with the JSON file
compare-step EXPECTED STEP  the same for a step folder with the item `state`, and its run
same A B                    check that two items hold the same tree
v1-paths INIT RUN STEP      check which paths `load_pytree` of Orbax v1 accepts
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

# JAX would cast 64-bit leaves to 32 bits.
jax.config.update("jax_enable_x64", True)
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "mp"))


def sharded(tree: Any) -> Any:
    """Return restore targets: arrays sharded over the mesh along their last two axes, if divisible."""

    def target(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        split = len(shape) >= 2 and shape[-2] % 4 == 0 and shape[-1] % 2 == 0 and all(shape)
        spec = PartitionSpec(*[None] * (len(shape) - 2), "fsdp", "mp") if split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(MESH, spec))

    return jax.tree.map(target, tree)


def v0_metadata(item: Path) -> Any:
    """Return the tree of an item with the shape and dtype of each leaf, by Orbax v0."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata(item).item_metadata.tree


def v0_standard(item: Path) -> Any:
    """Restore an item onto the mesh with StandardCheckpointer of v0."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(item, sharded(v0_metadata(item)))


def v0_standard_no_target(item: Path) -> Any:
    """Restore an item with StandardCheckpointer of v0, without target shapes and shardings."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(item)


def v0_pytree(item: Path) -> Any:
    """Restore an item with PyTreeCheckpointer of v0."""
    return ocp.PyTreeCheckpointer().restore(item)


def v0_pytree_numpy(item: Path) -> Any:
    """Restore an item as NumPy arrays with PyTreeCheckpointer of v0."""
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), v0_metadata(item))
    return ocp.PyTreeCheckpointer().restore(item, restore_args=as_numpy)


def v1_no_target(item: Path) -> Any:
    """Load an item with v1, without target shapes and shardings."""
    return v1.load(str(item))


def v1_sharded(item: Path) -> Any:
    """Load an item onto the mesh with v1."""
    target = sharded(v1.metadata(str(item), checkpointable_name=None).metadata)
    return v1.load(str(item), target, checkpointable_name=None)


def manager(item: Path) -> Any:
    """Restore a copy of an item as step 0 of a CheckpointManager of v0."""
    with tempfile.TemporaryDirectory(dir=item.parent) as root:
        shutil.copytree(item, Path(root) / "0" / "default")
        with ocp.CheckpointManager(root) as checkpoints:
            return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore())


WAYS = (
    v0_standard,
    v0_standard_no_target,
    v0_pytree,
    v0_pytree_numpy,
    v1_no_target,
    v1_sharded,
    manager,
)


def described(leaf: Any) -> list[Any]:
    """Return dtype, shape and bits of an array, or type and value of another leaf."""
    if hasattr(leaf, "dtype"):
        array = np.asarray(leaf)
        return [array.dtype.name, list(array.shape), array.tobytes().hex()]
    return [type(leaf).__name__, leaf]


def flat(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf
        for path, leaf in leaves
    }


def compare_item(expected_file: Path, item: Path) -> None:
    """Check that every way to open an item gives the leaves in a JSON file."""
    expected = json.loads(expected_file.read_text())
    for way in WAYS:
        leaves = flat(way(item))
        actual = {name: described(leaf) for name, leaf in leaves.items()}
        assert actual.keys() == expected.keys(), (
            way.__name__,
            sorted(actual.keys() ^ expected.keys()),
        )
        for name, leaf in actual.items():
            assert leaf == expected[name], (way.__name__, name, leaf[:2], expected[name][:2])
        if way in (v0_standard, v1_sharded):
            shards = {
                len({str(s.index) for s in leaf.addressable_shards}) for leaf in leaves.values()
            }
            assert shards == {1, 8}, (way.__name__, shards)


def compare_step(expected_file: Path, step: Path) -> None:
    """Check the item, the step folder, and the run that contains the step."""

    def managed(args: Any) -> Any:
        with ocp.CheckpointManager(step.parent) as checkpoints:
            assert checkpoints.latest_step() == int(step.name)
            return checkpoints.restore(int(step.name), args=args)["state"]

    expected = json.loads(expected_file.read_text())
    ways = {
        "v0_standard": lambda: v0_standard(step / "state"),
        "v0_standard_no_target": lambda: v0_standard_no_target(step / "state"),
        "v0_pytree_numpy": lambda: v0_pytree_numpy(step / "state"),
        "v1_load": lambda: v1.load(str(step)),
        "v1_checkpointables": lambda: v1.load_checkpointables(str(step))["state"],
        "v1_checkpointer": lambda: v1.training.Checkpointer(str(step.parent)).load(),
        "manager": lambda: managed(None),
        "manager_standard": lambda: managed(ocp.args.Composite(state=ocp.args.StandardRestore())),
    }
    for name, way in ways.items():
        actual = {leaf: described(value) for leaf, value in flat(way()).items()}
        assert actual == expected, (
            name,
            sorted(leaf for leaf in {*actual, *expected} if actual.get(leaf) != expected.get(leaf)),
        )


def tree_of_arrays() -> dict[str, Any]:
    """Return a tree with sharded and small arrays, a number, a text, and empty values."""
    # The chunks are too large to be stored inline, in the index of the database.
    big = np.arange(4 * 64 * 64, dtype=np.float32).reshape(4, 64, 64)
    over_mesh = NamedSharding(MESH, PartitionSpec(None, "fsdp", "mp"))
    return {
        "params": {"big": jax.device_put(big, over_mesh), "small": np.arange(3, dtype=np.int8)},
        "opt": [{"mu": jax.numpy.ones((5, 2), jax.numpy.bfloat16)}, None],
        "step": 3,
        "name": "a name",
        "nothing": {},
    }


def save(folder: Path) -> None:
    """Save a tree raw and compressed (Orbax's default), and steps of a run."""
    tree = tree_of_arrays()
    raw = ocp.PyTreeCheckpointer(use_compression=False)
    raw.save(folder / "raw", tree)
    ocp.PyTreeCheckpointer().save(folder / "zstd", tree)
    # This is the command in RESAVE_HINT.
    raw.save(folder / "raw again", ocp.PyTreeCheckpointer().restore(folder / "zstd"))
    v1.save(str(folder / "v1"), {"w": np.ones(3)})
    with ocp.CheckpointManager(folder / "run") as checkpoints:
        for step in (9, 10):
            checkpoints.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}))


def same(a: Path, b: Path) -> None:
    """Check that two items have the same tree."""
    trees = [v0_pytree(item) for item in (a, b)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    descriptions = [{name: described(leaf) for name, leaf in flat(tree).items()} for tree in trees]
    assert descriptions[0] == descriptions[1]


def is_taken(path: Path) -> bool:
    """Return whether `load_pytree` of v1 accepts a path."""
    # ValueError is the base class of InvalidLayoutError.
    try:
        return bool(v1.load_pytree(path))
    except ValueError:
        return False


def v1_paths(init: Path, run: Path, step: Path) -> None:
    """Check that v1 loads an init and a step, but not the run or the item of a step."""
    assert set(v1.load_pytree(init)) == {"params"}
    assert {"params", "opt_state"} <= set(v1.load_pytree(step))
    assert not any(map(is_taken, (run, step / "state")))
    # This is the API of Orbax v0.
    restored = ocp.PyTreeCheckpointer().restore(step / "state")
    assert {"params", "opt_state"} <= set(restored)


COMMANDS: dict[str, Callable[..., None]] = {
    "save": save,
    "compare": compare_item,
    "compare-step": compare_step,
    "same": same,
    "v1-paths": v1_paths,
}


def answer(line: str) -> str:
    """Run the command of a line; return the traceback of its failure, or an empty string."""
    command, *paths = json.loads(line)
    try:
        COMMANDS[command](*map(Path, paths))
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=answers, flush=True)
