"""Items with several experts in a chunk, where one expert a chunk would be more chunks than an index holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.inspection.contents import CheckpointContents, read_contents
from prepcli.sources.locate import locate
from prepcli.targets import orbax_item
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import assert_same, make_checkpoint, read_tensors
from tests.helpers.tiny_configs import MIXTRAL, QWEN3_MOE

jax = lazy_module("jax")
ocp = lazy_module("orbax.checkpoint")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_joined(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Write `joined`, an item with fewer chunks than one per expert."""
    with monkeypatch.context() as context:
        context.setattr(orbax_item, "MAX_ENTRIES", 20)
        prep.save_init("./m", "joined", **options)


def contents(folder: str) -> CheckpointContents:
    return read_contents(locate(folder))


def expert_chunks(folder: str) -> set[tuple[int, ...]]:
    """Return the layers and experts of a chunk of each leaf [layers, experts, ...]."""
    shapes: set[tuple[int, ...]] = set()
    for entry in contents(folder).entries:
        if entry.name.startswith("params.layers.mlp."):
            shapes.add(entry.placement[0].array.chunk_shape[:2])
    return shapes


def restore(folder: str) -> dict[str, np.ndarray]:
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(Path(folder).absolute())
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("mesh", [None, "1,2,1"])
@pytest.mark.parametrize(("config", "experts"), [(MIXTRAL, 3), (QWEN3_MOE, 5)])
def test_joined_experts_have_the_same_values(
    config: dict[str, Any], experts: int, mesh: str | None, monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(Path("m"), config)
    options: Any = {"mesh": mesh, "pad_vocab": "auto" if mesh else "no"}
    prep.save_init("./m", "single", **options)
    save_joined(monkeypatch, **options)
    assert expert_chunks("single") == {(1, 1)}
    assert expert_chunks("joined") == {(1, experts)}
    assert prep.verify("joined")
    assert prep.verify("joined", against="single")
    prep.export("joined", "exported")
    assert_same(read_tensors(Path("exported")), read_tensors(Path("m")))
    assert_same(restore("joined"), restore("single"))


def test_joined_experts_load_on_a_mesh(monkeypatch: pytest.MonkeyPatch):
    make_checkpoint(Path("m"), QWEN3_MOE)
    save_joined(monkeypatch)
    loaded = prep.load_params("joined", "8,1,1")
    expected = prep.load_params("./m", "8,1,1")
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
