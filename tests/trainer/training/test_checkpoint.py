"""Checkpoints: the state comes back as it was, on any mesh, each part read for the devices that hold it."""

from __future__ import annotations

import weakref

import jax
import numpy as np
import pytest

from tests.helpers import runs
from trainer.models.errors import PrepError
from trainer.training.checkpoint import host_leaves, init_state, restore_state


def reader_of(state: runs.TrainState, optimizer_state: bool = True) -> runs.MemoryReader:
    return runs.MemoryReader({name: leaf.fetch() for name, leaf in host_leaves(state, optimizer_state).items()})


@pytest.mark.parametrize("mesh", ["1,2,4", "8,1,1", ""])
def test_a_state_comes_back_on_any_mesh(mesh: str):
    before = runs.make_state(runs.make_setup(mesh="1,4,2"), seed=3)
    after = restore_state(reader_of(before), made := runs.make_setup(mesh=mesh))
    assert runs.state_bytes(after) == runs.state_bytes(before)
    if mesh == "1,2,4":
        leaf = after["params"]["layers"]["mlp"]["up"]["weight"]
        assert leaf.sharding == made.forward_config.sharding.param_sharding(made.model.leaves["layers.mlp.up.weight"])
        assert leaf.addressable_shards[0].data.shape == (3, 32, 16)


def test_only_the_parts_of_this_mesh_are_read_each_once():
    asked: dict[str, list[int]] = {}

    class Counting(runs.MemoryReader):
        def read(self, name, parts):
            asked.setdefault(name, []).append(sum(array.nbytes for array in parts.values()))
            super().read(name, parts)

    before = runs.make_state(runs.make_setup())
    restore_state(Counting(reader_of(before).arrays), runs.make_setup(mesh="2,1,4"))
    wanted = {name: [array.nbytes] for name, array in reader_of(before).arrays.items()}
    assert asked == wanted, "two copies of each part, read once"


def test_what_was_stored_in_half_precision_becomes_float32():
    import ml_dtypes

    whole = reader_of(runs.make_state(runs.make_setup())).arrays
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in whole.items() if name.startswith("params.")}
    after = init_state(runs.MemoryReader(half), runs.make_setup(mesh="1,2,4"))
    leaf = after["params"]["embed"]["tokens"]
    assert leaf.dtype == np.float32
    assert np.array_equal(np.asarray(leaf), half["params.embed.tokens"].astype(np.float32))


def test_a_run_starts_with_empty_moments_that_lie_as_they_should():
    made = runs.make_setup(mesh="1,2,4")
    after = init_state(reader_of(runs.make_state(made), optimizer_state=False), made)
    assert runs.state_bytes(after) == runs.state_bytes(runs.make_state(made))
    moments = after["opt_state"]["adam"].mu
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, moments, after["params"])
    assert all(jax.tree.leaves(same))


def test_what_is_missing_or_of_another_model_is_named():
    made = runs.make_setup()
    arrays = dict(reader_of(runs.make_state(made)).arrays)
    lost = arrays.pop("opt_state.adam.nu.head.weight", None) or arrays.pop("opt_state.adam.nu.embed.tokens")
    assert lost is not None
    with pytest.raises(PrepError, match=r"the checkpoint has no opt_state\.adam\.nu\.embed\.tokens"):
        restore_state(runs.MemoryReader(arrays), made)
    arrays["opt_state.adam.nu.embed.tokens"] = lost[:-1]
    with pytest.raises(PrepError, match="is of another model"):
        restore_state(runs.MemoryReader(arrays), made)


def test_what_was_fetched_can_be_let_go():
    """A save takes one leaf at a time: none stays in memory because its array remembers it."""
    leaves = host_leaves(runs.make_state(runs.make_setup(mesh="1,2,4")))
    fetched = [weakref.ref(leaf.fetch()) for leaf in leaves.values()]
    assert not [name for name, array in zip(leaves, fetched) if array() is not None]
