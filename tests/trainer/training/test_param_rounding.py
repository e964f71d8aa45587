"""Initial parameters in bfloat16: they are rounded to nearest, and changed values are counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.param_tree import flatten_tree
from tests.helpers import runs
from tests.helpers.optimizers import make_optimizer
from tests.trainer.training.test_lora_step import make_setup as make_lora_setup
from trainer.training.checkpoint import host_leaves, init_state, random_state
from trainer.training.compiled_plan import compile_plan
from trainer.training.feed import batch_shapes

SPECIAL = np.array(
    [1.0, 1 + 2**-9, 1e-45, np.nan, -np.inf, 3.3895e38, -(2.0**-130), 0.1], np.float32
)
# Rounding changes four values of SPECIAL: the second, the third, the largest and the last.
NUM_CHANGED = 4


def stored_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return random parameters of a tiny model by name, as a checkpoint stores them."""
    leaves = host_leaves({"params": runs.make_state(runs.make_setup())["params"]})
    return {name: leaf.fetch().astype(dtype) for name, leaf in leaves.items()}


@pytest.mark.parametrize("mesh", ["", "1,2,4"])
def test_init_state_rounds_and_counts(mesh: str):
    arrays = stored_params()
    arrays["params.layers.mlp.up.weight"][0, 0, : len(SPECIAL)] = SPECIAL
    counts = []
    setup = runs.make_setup(mesh=mesh, param_dtype="bfloat16")
    state = init_state(runs.MemoryReader(arrays), setup, on_rounding=counts.append)
    num_changed = 0
    for path, leaf in flatten_tree(state["params"]).items():
        stored = arrays[f"params.{path}"]
        with np.errstate(all="ignore"):
            expected = stored.astype(ml_dtypes.bfloat16)
        assert np.array_equal(np.asarray(leaf), expected, equal_nan=True)
        num_changed += np.count_nonzero((expected.astype(np.float32) != stored) & ~np.isnan(stored))
    num_values = sum(array.size for array in arrays.values())
    assert counts == [
        {"from": "float32", "to": "bfloat16", "values": num_values, "changed": num_changed}
    ]


def test_changed_values_are_counted_exactly():
    arrays = {name: np.zeros_like(array) for name, array in stored_params().items()}
    arrays["params.layers.mlp.up.weight"][0, 0, : len(SPECIAL)] = SPECIAL
    counts = []
    init_state(
        runs.MemoryReader(arrays),
        runs.make_setup(param_dtype="bfloat16"),
        on_rounding=counts.append,
    )
    assert counts[0]["changed"] == NUM_CHANGED


def test_float16_values_are_rounded_and_counted():
    arrays = {
        name: np.full_like(array, 1 + 2**-10, np.float16) for name, array in stored_params().items()
    }
    counts = []
    init_state(
        runs.MemoryReader(arrays),
        runs.make_setup(param_dtype="bfloat16"),
        on_rounding=counts.append,
    )
    assert counts[0]["changed"] == counts[0]["values"]


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")]
)
def test_lossless_param_conversions_are_not_counted(stored: str, dtype: str):
    arrays, counts = stored_params(ml_dtypes.bfloat16 if stored == "bfloat16" else stored), []
    state = init_state(
        runs.MemoryReader(arrays), runs.make_setup(param_dtype=dtype), on_rounding=counts.append
    )
    for path, leaf in flatten_tree(state["params"]).items():
        assert leaf.dtype == dtype
        assert np.array_equal(
            np.asarray(leaf, np.float32), arrays[f"params.{path}"].astype(np.float32)
        )
    assert counts == []


def test_value_that_overflows_is_an_error():
    arrays = stored_params()
    arrays["params.embed.tokens"][3, 4] = np.finfo(np.float32).max
    with pytest.raises(PrepError) as caught:
        init_state(runs.MemoryReader(arrays), runs.make_setup(param_dtype="bfloat16"))
    assert caught.value.what == "parameters cannot be rounded to bfloat16"
    assert caught.value.why == "params.embed.tokens has values that are too large for it"


def test_random_parameters_are_rounded_on_any_mesh():
    wide = random_state(runs.make_setup(), 5)["params"]
    states = [
        random_state(runs.make_setup(mesh=mesh, param_dtype="bfloat16"), 5)
        for mesh in ("", "1,2,4")
    ]
    assert runs.state_bytes(states[0]) == runs.state_bytes(states[1])
    for path, leaf in flatten_tree(states[0]["params"]).items():
        assert np.array_equal(
            np.asarray(leaf), np.asarray(flatten_tree(wide)[path]).astype(ml_dtypes.bfloat16)
        )


def test_adapters_have_the_dtype_and_the_base_keeps_its_own():
    setup = replace(make_lora_setup(), param_dtype="bfloat16")
    base = {
        path: np.full(setup.model.leaves[path].shape, 0.1, np.float32)
        for path in setup.model.base_paths
    }
    reader, counts = runs.MemoryReader({f"params.{path}": leaf for path, leaf in base.items()}), []
    state = init_state(reader, setup, on_rounding=counts.append)
    dtypes = {path: leaf.dtype for path, leaf in flatten_tree(state["params"]).items()}
    assert {dtypes[path] for path in setup.model.base_paths} == {jnp.dtype("float32")}
    assert {dtypes[path] for path in setup.model.saved_leaves} == {jnp.dtype("bfloat16")}
    assert counts == []


# By default test_memory_estimate compares the estimate with recorded plans of XLA.
@pytest.mark.slow
def test_compiled_step_takes_2_bytes_less_per_parameter():
    sizes = []
    for dtype in ("float32", "bfloat16"):
        # SGD compiles fast.
        sgd = make_optimizer("sgd")
        setup = runs.make_setup(runs.LLAMA, "8,1,1", param_dtype=dtype, optimizer=sgd)
        batch = batch_shapes(runs.make_job(setup).train, 8, setup.sharding)
        sizes.append(compile_plan(setup, batch, "8 CPU devices").argument_nbytes)
    num_parameters = sum(
        math.prod(leaf.shape) for leaf in runs.make_setup(runs.LLAMA).model.leaves.values()
    )
    assert sizes[0] - sizes[1] == 2 * num_parameters
