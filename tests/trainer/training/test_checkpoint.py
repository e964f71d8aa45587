"""Checkpoints: the state is restored exactly, on any mesh, and each shard is read once."""

from __future__ import annotations

import weakref

import jax
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from tests.helpers import runs
from trainer.training.checkpoint import host_leaves, init_state, restore_state


def reader_of(state: runs.TrainState, optimizer_state: bool = True) -> runs.MemoryReader:
    """Return a checkpoint in memory of a state."""
    return runs.MemoryReader(
        {name: leaf.fetch() for name, leaf in host_leaves(state, optimizer_state).items()}
    )


@pytest.mark.parametrize("mesh", ["1,2,4", "8,1,1", ""])
def test_restore_state_is_exact_on_any_mesh(mesh: str):
    before = runs.make_state(runs.make_setup(mesh="1,4,2"), seed=3)
    after = restore_state(reader_of(before), setup := runs.make_setup(mesh=mesh))
    assert runs.state_bytes(after) == runs.state_bytes(before)
    if mesh == "1,2,4":
        leaf = after["params"]["layers"]["mlp"]["up"]["weight"]
        assert leaf.sharding == setup.forward_config.sharding.param_sharding(
            setup.model.leaves["layers.mlp.up.weight"]
        )
        assert leaf.addressable_shards[0].data.shape == (2, 32, 16)


def test_restore_state_reads_each_shard_once():
    read_nbytes: dict[str, list[int]] = {}

    class CountingReader(runs.MemoryReader):
        def read(self, name, parts):
            read_nbytes.setdefault(name, []).append(sum(array.nbytes for array in parts.values()))
            super().read(name, parts)

    before = runs.make_state(runs.make_setup())
    restore_state(CountingReader(reader_of(before).arrays), runs.make_setup(mesh="2,1,4"))
    expected = {name: [array.nbytes] for name, array in reader_of(before).arrays.items()}
    assert read_nbytes == expected, "two replicas of each shard share one read"


def test_init_state_widens_half_precision_to_float32():
    import ml_dtypes

    arrays = reader_of(runs.make_state(runs.make_setup())).arrays
    half = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in arrays.items()
        if name.startswith("params.")
    }
    after = init_state(runs.MemoryReader(half), runs.make_setup(mesh="1,2,4"))
    leaf = after["params"]["embed"]["tokens"]
    assert leaf.dtype == np.float32
    assert np.array_equal(np.asarray(leaf), half["params.embed.tokens"].astype(np.float32))


def test_init_state_shards_moments_like_parameters():
    setup = runs.make_setup(mesh="1,2,4")
    after = init_state(reader_of(runs.make_state(setup), optimizer_state=False), setup)
    assert runs.state_bytes(after) == runs.state_bytes(runs.make_state(setup))
    moments = after["opt_state"]["adam"].mu
    same_sharding = jax.tree.map(lambda a, b: a.sharding == b.sharding, moments, after["params"])
    assert all(jax.tree.leaves(same_sharding))


def test_restore_state_names_missing_or_mismatched_leaf():
    setup = runs.make_setup()
    arrays = dict(reader_of(runs.make_state(setup)).arrays)
    lost = arrays.pop("opt_state.adam.nu.head.weight", None) or arrays.pop(
        "opt_state.adam.nu.embed.tokens"
    )
    assert lost is not None
    with pytest.raises(
        PrepError, match=r"the checkpoint has no opt_state\.adam\.nu\.embed\.tokens"
    ):
        restore_state(runs.MemoryReader(arrays), setup)
    arrays["opt_state.adam.nu.embed.tokens"] = lost[:-1]
    with pytest.raises(PrepError, match="has another shape"):
        restore_state(runs.MemoryReader(arrays), setup)


def test_host_leaves_do_not_keep_fetched_arrays():
    """A save holds one leaf at a time: no array caches its host copy."""
    leaves = host_leaves(runs.make_state(runs.make_setup(mesh="1,2,4")))
    fetched = [weakref.ref(leaf.fetch()) for leaf in leaves.values()]
    assert not [name for name, array in zip(leaves, fetched) if array() is not None]


@pytest.mark.parametrize("mesh", ["1,2,4", "2,2,2"])
def test_host_leaves_keep_their_values_in_later_steps(mesh: str):
    state = runs.make_state(runs.make_setup(mesh=mesh))
    expected = runs.state_bytes(jax.tree.map(jax.numpy.copy, state))
    leaves = {name: leaf.on_host() for name, leaf in host_leaves(state).items()}
    change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    for _ in range(3):
        state = jax.block_until_ready(change(state))
    assert {name: leaf.fetch().tobytes() for name, leaf in leaves.items()} == expected


def test_host_leaves_have_every_element_once():
    state = runs.make_state(runs.make_setup(mesh="4,2,1"))
    for leaf in host_leaves(state).values():
        counts = np.zeros(leaf.shape, int)
        for shard in leaf.shards:
            counts[tuple(slice(*ends) for ends in shard.box)] += 1
        assert (counts == 1).all()
