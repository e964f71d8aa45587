"""Steps of a model with adapters, and initial parameters that are rounded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.lora_config import LoraConfig
from prepcli.models.param_tree import flatten_tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from tests.helpers.slow_cases import slow_except
from trainer.nn import transformer
from trainer.nn.initialization import init_adapters, init_params
from trainer.nn.model_spec import build_model
from trainer.training import feed
from trainer.training.checkpoint import digest_base_params, host_leaves, init_state
from trainer.training.step import StepSetup, TrainState, init_train_state, state_shapes

# Training steps of a model with adapters: only the adapters change, and frozen parameters keep their dtype.

LORA = LoraConfig(4, 8.0, ("attn.*", "mlp.*"))


def make_setup(
    mesh: str = "", dtype: str = "float32", scan_axis: int = 0, **options: Any
) -> StepSetup:
    """Return the setup of a tiny LLaMA with adapters whose frozen parameters have a dtype."""
    setup = runs.make_setup(runs.LLAMA, mesh, **options)
    model = build_model(
        FAMILIES["llama"], runs.LLAMA, is_tied=False, lora=LORA, scan_axis=scan_axis
    )
    return replace(setup, model=model, base_dtypes=dict.fromkeys(model.base_paths, dtype))


def make_state(setup: StepSetup) -> TrainState:
    """Return the state before the first step, with random parameters."""
    base = build_model(FAMILIES["llama"], runs.LLAMA, is_tied=False)
    leaves = {**flatten_tree(init_params(base, 0)), **flatten_tree(init_adapters(setup.model, 0))}
    cast = {
        path: leaf.astype(setup.base_dtypes.get(path, "float32")) for path, leaf in leaves.items()
    }
    state = init_train_state(unflatten_tree(cast), setup)
    if setup.sharding.device_mesh is None:
        return state
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup)))


def run_steps(setup: StepSetup, steps: int = 6) -> tuple[TrainState, TrainState, list[float]]:
    """Run training steps on one batch; return the first state, the last state, and the mean losses."""
    first = state = make_state(setup)
    job, step, losses = runs.make_job(setup), compile_step(setup), []
    for _ in range(steps):
        state, metrics = step(state, feed.load_batch(job.train, job.order.rows(0), setup.sharding))
        losses.append(float(metrics["loss"] / metrics["weight"]))
    return first, state, losses


@cache
def one_device_losses() -> list[float]:
    """Return the losses of three steps on one device."""
    return run_steps(make_setup(), 3)[2]


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], ["bfloat16"]))
def test_lora_step_changes_only_adapters(dtype: str):
    setup = make_setup(dtype=dtype)
    first, last, losses = run_steps(setup)
    before, after = flatten_tree(first["params"]), flatten_tree(last["params"])
    assert all(np.array_equal(before[path], after[path]) for path in setup.model.base_paths)
    assert {str(after[path].dtype) for path in setup.model.base_paths} == {dtype}
    assert not any(np.array_equal(before[path], after[path]) for path in setup.model.saved_leaves)
    assert losses[-1] < losses[0]


def test_optimizer_state_has_only_adapters():
    setup = make_setup()
    moments = flatten_tree(state_shapes(setup)["opt_state"]["adam"].mu)
    assert moments.keys() == setup.model.saved_leaves.keys()


def test_first_loss_equals_the_base_model():
    setup = runs.make_setup(runs.LLAMA)
    rows = runs.make_job(setup).order.rows(0)
    batch = feed.load_batch(runs.make_job(setup).train, rows, setup.sharding)

    @jax.jit
    def mean_loss(params: Any) -> jax.Array:
        sums = transformer.loss_sums(params, batch, setup.model, setup.forward_config)
        return sums.loss / sums.weight

    assert np.isclose(
        one_device_losses()[0], float(mean_loss(init_params(setup.model, 0))), rtol=1e-6
    )


OPTIONS = [
    {"mesh": "1,2,4"},
    {"mesh": "1,2,4", "accumulate": 2},
    {"mesh": "2,2,2", "accumulate": 2, "scan_layers": False},
]


@pytest.mark.parametrize("options", slow_except(OPTIONS, OPTIONS[2:]))
def test_lora_losses_do_not_depend_on_the_mesh(options: dict[str, Any]):
    mesh = options.pop("mesh", "")
    losses = run_steps(make_setup(mesh, **options), 3)[2]
    assert np.allclose(losses, one_device_losses(), rtol=1e-5)


def test_frozen_digest_does_not_depend_on_the_mesh():
    digests = set()
    for mesh in ("", "2,2,2"):
        setup = make_setup(mesh)
        leaves = flatten_tree(make_state(setup)["params"])
        digests.add(digest_base_params({path: leaves[path] for path in setup.model.base_paths}))
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_digest_changes_with_values_and_order_only(dtype: str):
    leaf = jnp.arange(1, 13, dtype=dtype).reshape(3, 4)
    digest = digest_base_params({"a": leaf})
    assert digest != digest_base_params({"a": leaf.at[2, 1].set(0.5)})
    assert digest != digest_base_params({"a": leaf[::-1]})
    assert digest != digest_base_params({"a": leaf, "b": leaf})
    assert digest == digest_base_params({"a": jnp.pad(leaf, ((0, 5), (0, 0)))})


# Initial parameters in bfloat16: they are rounded to nearest, and changed values are counted.

SPECIAL = np.array(
    [1.0, 1 + 2**-9, 1e-45, np.nan, -np.inf, 3.3895e38, -(2.0**-130), 0.1], np.float32
)


# Rounding changes four values of SPECIAL: the second, the third, the largest and the last.
NUM_CHANGED = 4


def stored_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return random parameters of a tiny model by name, as a checkpoint stores them."""
    leaves = host_leaves({"params": runs.make_state(runs.make_setup())["params"]})
    return {name: leaf.fetch().astype(dtype) for name, leaf in leaves.items()}


@pytest.mark.parametrize("mesh", slow_except(["", "1,2,4"], ["1,2,4"]))
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
    ("stored", "dtype"),
    slow_except(
        [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
        [("bfloat16", "float32")],
    ),
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


def test_adapters_have_the_dtype_and_the_base_keeps_its_own():
    setup = replace(make_setup(), param_dtype="bfloat16")
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
