"""Fifty steps of each optimizer against torch, optax, or the formula of its paper, and the state after a resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.lora_config import LoraConfig
from prepcli.models.param_tree import flatten_tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers import runs
from tests.helpers.optimizers import (
    COMPACT,
    KEYS,
    WHOLE_STEP_RULES,
    by_layer,
    compile_step,
    compiled_run,
    make_optimizer,
    random_gradients,
    run_trajectory,
    take_steps,
    trajectory_params,
)
from tests.helpers.slow_cases import slow_except
from trainer.nn import transformer
from trainer.nn.initialization import init_adapters, init_params
from trainer.nn.model_spec import build_model
from trainer.training import feed
from trainer.training.checkpoint import digest_base_params, host_leaves, init_state, restore_state
from trainer.training.optimizers import Optimizer
from trainer.training.step import (
    StepSetup,
    TrainState,
    init_train_state,
    state_nbytes_per_device,
    state_shapes,
)

# Fifty steps of each optimizer against torch, optax, or the formula of its paper.

STEPS = 50

Tensors = dict[str, np.ndarray]


def gradients_of_steps() -> Iterator[Tensors]:
    """Yield the gradients of each step, one array per layer."""
    params = trajectory_params(runs.make_setup())
    for step in range(STEPS):
        yield by_layer(random_gradients(params, step))


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each step."""
    return [float(optimizer.lr_schedule.learning_rate(np.int32(step))) for step in range(STEPS)]  # pyright: ignore


def assert_close(actual: Tensors, expected: Tensors, rtol: float = 2e-5) -> None:
    """Check that all tensors differ by rounding at most, relative to their largest values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), f"{name} is not finite: nan equals nan in assert_allclose"
        np.testing.assert_allclose(
            actual[name], value, rtol=rtol, atol=rtol * np.abs(value).max(), err_msg=name
        )


def decays(name: str) -> bool:
    """Return whether weight decay applies to a tensor: not to biases and norms."""
    return name.split()[0].rpartition(".")[2] not in ("bias", "scale")


def train_torch(optimizer: Optimizer, make: Callable[[Any, Any], Any]) -> Tensors:
    """Take the steps with an optimizer of torch, made of the tensors with and without weight decay."""
    torch = pytest.importorskip("torch")
    params = by_layer(trajectory_params(runs.make_setup()))
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    groups = [
        [tensor for name, tensor in tensors.items() if decays(name) is flag]
        for flag in (True, False)
    ]
    reference = make(*groups)
    for gradients, rate in zip(gradients_of_steps(), rates_of(optimizer), strict=True):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[name])
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def train_optax(optimizer: Optimizer, reference: optax.GradientTransformation) -> Tensors:
    """Take the steps with an optimizer of optax that knows the schedule, on one tensor per layer."""
    params: Any = by_layer(trajectory_params(runs.make_setup()))
    return jax.device_get(follow_optax(reference, params, gradients_of_steps()))


def train_optax_stacked(reference: optax.GradientTransformation) -> Tensors:
    """Take the steps as `train_optax` does, on the leaves with all layers."""
    tree = trajectory_params(runs.make_setup())
    gradients = (flatten_tree(random_gradients(tree, step)) for step in range(STEPS))
    params = follow_optax(reference, flatten_tree(tree), gradients)
    return by_layer(unflatten_tree(jax.device_get(params)))


def follow_optax(
    reference: optax.GradientTransformation, params: Any, all_gradients: Iterable[Any]
) -> Any:
    """Return the parameters after one step with each of the gradients."""
    state = reference.init(params)
    update = jax.jit(lambda gradients, state, params: reference.update(gradients, state, params))
    for gradients in all_gradients:
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def mask(params: Any) -> dict[str, bool]:
    """Return the mask of weight decay."""
    return {name: decays(name) for name in params}


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.95)])
def test_adamw_follows_torch(b1: float, b2: float):
    torch = pytest.importorskip("torch")
    optimizer = make_optimizer(
        "adamw", b1=b1, b2=b2, schedule="cosine", warmup_steps=5, end_lr=1e-3
    )

    def make(decayed: Any, others: Any) -> Any:
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1.0, betas=(b1, b2), eps=1e-8)

    assert_close(run_trajectory(optimizer, STEPS)[-1], train_torch(optimizer, make))


@pytest.mark.parametrize("nesterov", slow_except([False, True], [True]))
def test_sgd_follows_torch(nesterov: bool):
    torch = pytest.importorskip("torch")
    optimizer = make_optimizer("sgd", weight_decay=0.0, nesterov=nesterov)
    expected = train_torch(
        optimizer, lambda a, b: torch.optim.SGD([*a, *b], lr=1.0, momentum=0.9, nesterov=nesterov)
    )
    assert_close(run_trajectory(optimizer, STEPS)[-1], expected)


def test_adafactor_follows_torch():
    """The rates are below 1 / sqrt(step), the limit of torch."""
    torch = pytest.importorskip("torch")
    optimizer = make_optimizer("adafactor", momentum=0.0, min_factored_size=1, schedule="constant")

    def make(decayed: Any, others: Any) -> Any:
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.Adafactor(groups, lr=1.0, eps=(1e-30, 1e-3))

    assert_close(run_trajectory(optimizer, STEPS)[-1], train_torch(optimizer, make), rtol=1e-4)


@pytest.mark.parametrize(("factored", "momentum", "clip"), [(True, 0.0, 1.0), (False, 0.9, 0.0)])
def test_adafactor_follows_optax(factored: bool, momentum: float, clip: float):
    """The second case is the parameter-scaled AdamW of llamabpt."""
    keys = {"factored": factored, "momentum": momentum, "clip_threshold": clip}
    optimizer = make_optimizer(
        "adafactor", weight_decay=0.0, schedule="cosine", warmup_steps=5, **keys
    )
    rate: Any = optimizer.lr_schedule.learning_rate
    reference = optax.adafactor(
        rate,
        min_dim_size_to_factor=8,
        momentum=momentum or None,
        factored=factored,
        clipping_threshold=clip or None,
    )
    assert_close(run_trajectory(optimizer, STEPS)[-1], train_optax(optimizer, reference))


PALM = {"lr": 5e-4, "warmup_steps": 8, "weight_decay": 2e-3}


def easylm_palm() -> optax.GradientTransformation:
    """EasyLM/optimizers.py: adafactor, then weight decay by the square of the learning rate; keys of PALM."""

    def rate(step: Any) -> Any:
        return 5e-4 / 0.01 / jax.numpy.sqrt(jax.numpy.maximum(step, 8))

    return optax.chain(
        optax.adafactor(
            rate, multiply_by_parameter_scale=True, momentum=0.9, decay_rate=0.99, factored=False,
            clipping_threshold=None,
        ),
        optax.add_decayed_weights(lambda step: -(2e-3 / 1e-4) * rate(step) ** 2, mask),
    )  # fmt: skip


def test_palm_equals_the_optax_chain_of_easylm():
    optimizer = make_optimizer("palm", **PALM)
    assert_close(run_trajectory(optimizer, STEPS)[-1], train_optax(optimizer, easylm_palm()))


def test_palm_scales_stacked_layers_as_llamabpt_does():
    expected = train_optax_stacked(easylm_palm())
    assert_close(
        run_trajectory(make_optimizer("palm", **PALM, scale_by="stacked"), STEPS)[-1], expected
    )
    by_matrix = run_trajectory(make_optimizer("palm", **PALM), STEPS)[-1]
    differences = {
        name: np.abs(by_matrix[name] - value).max() / np.abs(value).max()
        for name, value in expected.items()
    }
    assert max(differences.values()) > 1e-3, "both scales are equal"


def test_lion_follows_its_paper():
    """Algorithm 2 of arXiv:2302.06675. The sign of a direction of 0 plus rounding is not compared."""
    optimizer = make_optimizer("lion", schedule="cosine", warmup_steps=5)
    actual = run_trajectory(optimizer, STEPS)
    momentum = {name: np.zeros_like(value) for name, value in actual[0].items()}
    for step, (gradients, rate) in enumerate(
        zip(gradients_of_steps(), rates_of(optimizer), strict=True)
    ):
        for name, gradient in gradients.items():
            direction, before = 0.9 * momentum[name] + 0.1 * gradient, actual[step][name]
            expected = before - rate * (np.sign(direction) + 0.1 * decays(name) * before)
            is_clear = np.abs(direction) > 1e-6
            np.testing.assert_allclose(
                actual[step + 1][name][is_clear], expected[is_clear], rtol=1e-5, atol=1e-7
            )
            momentum[name] = 0.99 * momentum[name] + 0.01 * gradient


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    """Compute five Newton-Schulz iterations of Muon (https://kellerjordan.github.io/posts/muon/) in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("bias_correction", slow_except([True, False], [True]))
def test_muon_follows_its_formula(bias_correction: bool):
    """Compare with orthogonalized Nesterov momentum, scaled to the root mean square of arXiv:2502.16982.

    The original post has no bias correction.
    """
    optimizer = make_optimizer(
        "muon", schedule="constant", lr=1e-3, bias_correction=bias_correction
    )
    actual = run_trajectory(optimizer, STEPS)
    params = {name: value.astype(float) for name, value in actual[0].items() if is_muon(name)}
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for step, gradients in enumerate(gradients_of_steps(), start=1):
        for name, value in params.items():
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradients[name]
            next_bias = 1 - 0.95 ** (step + 1) if bias_correction else 1
            bias = 1 - 0.95**step if bias_correction else 1
            direction = orthogonalize(
                0.95 * momentum[name] / next_bias + 0.05 * gradients[name] / bias
            )
            params[name] = value - 1e-3 * (0.2 * max(value.shape) ** 0.5 * direction + 0.1 * value)
    assert_close({name: actual[-1][name] for name in params}, params, rtol=1e-4)


def is_muon(name: str) -> bool:
    """Return whether Muon updates a tensor: the matrices of layers."""
    return name.startswith("layers.") and decays(name)


# Every optimizer: its state is restored exactly, on any mesh, and a resumed run equals the uninterrupted one.

RESUMED_STEPS = 6

CASES = [
    (name, is_compact, k)
    for is_compact in (False, True)
    for name in KEYS
    for k in range(1, RESUMED_STEPS)
]


def save_and_restore(state: TrainState, setup: StepSetup) -> TrainState:
    """Return the state, copied to a checkpoint in memory and back, onto the mesh of a setup."""
    arrays = {name: leaf.fetch().copy() for name, leaf in host_leaves(state).items()}
    return restore_state(runs.MemoryReader(arrays), setup)


# test_state_moves_to_any_mesh restores the states of other rules.
@pytest.mark.parametrize(
    ("name", "is_compact", "k"),
    slow_except(CASES, [(name, True, 3) for name in WHOLE_STEP_RULES]),
)
def test_resume_equals_the_uninterrupted_run(name: str, is_compact: bool, k: int):
    setup, step = compiled_run(name, is_compact=is_compact)
    at_k = take_steps(setup, runs.make_state(setup), until=k, step=step)
    whole = take_steps(setup, at_k, until=RESUMED_STEPS, step=step)
    resumed = take_steps(setup, save_and_restore(at_k, setup), until=RESUMED_STEPS, step=step)
    assert runs.state_bytes(resumed) == runs.state_bytes(whole)


@pytest.mark.parametrize("name", slow_except(KEYS, ("adamw", "adafactor")))
@pytest.mark.parametrize("mesh", slow_except(["1,2,4", "8,1,1"], ["1,2,4"]))
def test_state_moves_to_any_mesh(name: str, mesh: str):
    optimizer = make_optimizer(name, **COMPACT)
    before = runs.make_state(
        runs.make_setup(mesh="1,4,2", optimizer=optimizer, param_dtype="bfloat16")
    )
    after = save_and_restore(
        before, runs.make_setup(mesh=mesh, optimizer=optimizer, param_dtype="bfloat16")
    )
    assert runs.state_bytes(after) == runs.state_bytes(before)


@pytest.mark.parametrize("name", slow_except(KEYS, ("adamw", "adafactor")))
def test_state_nbytes_match_the_shards_of_each_device(name: str):
    setup = runs.make_setup(mesh="1,2,4", optimizer=make_optimizer(name, **COMPACT))
    nbytes_by_device = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(runs.make_state(setup)):
        for shard in leaf.addressable_shards:
            nbytes_by_device[shard.device] += shard.data.nbytes
    assert {*nbytes_by_device.values()} == {state_nbytes_per_device(setup)}


# All other optimizers compute each element alone.
@pytest.mark.parametrize("name", slow_except(KEYS, ("adafactor",)))
def test_updates_do_not_depend_on_the_mesh(name: str):
    optimizer = make_optimizer(name)
    before, _, _, expected = run_trajectory(optimizer, 3)
    actual = run_trajectory(optimizer, 3, mesh="1,2,4")[-1]
    for path, value in expected.items():
        change = np.abs(value - before[path]).max()
        np.testing.assert_allclose(actual[path], value, atol=1e-4 * change, err_msg=path)


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
