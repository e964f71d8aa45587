"""The training step: independence of mesh and micro-batches, dropout, loss scale, and skipped steps."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from prepcli.models.mesh import parse_mesh
from tests.helpers import runs
from tests.helpers.optimizers import compile_step, make_optimizer, take_steps
from tests.helpers.slow_cases import slow_except
from trainer.data.packing import DocumentDataset, document_dataset
from trainer.distributed.sharding import make_sharding_context
from trainer.nn.lm_head import LossTerms
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed
from trainer.training.checkpoint import host_leaves, restore_state
from trainer.training.evaluation import evaluate, jit_eval_step
from trainer.training.loop import Loop
from trainer.training.metrics import METRICS_FILE, MetricsFileLog
from trainer.training.optimizers import Optimizer
from trainer.training.step import (
    GROWTH_STEPS,
    MAX_SCALE,
    LossScale,
    ScaleState,
    StepSetup,
    TrainState,
    state_shapes,
    train_step,
)

# Tests of the training step: independence of mesh and micro-batches, and skipping of non-finite steps.

STEPS = 20

RING = AttentionOptions("blockwise", 2, 3)


def train_losses(setup: StepSetup, steps: int = STEPS) -> tuple[np.ndarray, TrainState]:
    """Run training steps; return the mean loss of each step, and the final state."""
    state, step, job = runs.make_state(setup), compile_step(setup), runs.make_job(setup)
    losses = []
    for number in range(steps):
        state, metrics = step(
            state, feed.load_batch(job.train, job.order.rows(number), setup.sharding)
        )
        losses.append(float(metrics["loss"]) / float(metrics["weight"]))
    return np.array(losses), state


@pytest.fixture(scope="module")
def one_device_losses() -> np.ndarray:
    """Losses of steps on one device without micro-batches."""
    return train_losses(runs.make_setup())[0]


@pytest.mark.parametrize(
    ("mesh", "accumulate", "forward_options"),
    slow_except(
        [
            ("8,1,1", 1, {}),
            ("1,8,1", 1, {}),
            ("1,2,4", 1, {}),
            ("1,2,4", 4, {"remat_policy": "nothing_saveable"}),
            ("2,2,2", 2, {"scan_layers": False}),
            ("fsdp:2,mp:2,sp:2", 1, {"attention_options": RING, "ffn_chunk_size": 3}),
            (
                "dp:2,sp:4",
                2,
                {
                    "attention_options": RING,
                    "remat_policy": "nothing_saveable",
                    "scan_layers": False,
                },
            ),
            ("", 4, {}),
            ("2,2,2", 2, {"rules": ("heads=dp", "mlp=dp+fsdp", "embed=mp", "vocab=none")}),
        ],
        # test_loop covers the usual meshes.
        lambda case: case[0] == "2,2,2" and case[1] == 2 and "rules" in case[2],
    ),
)
def test_losses_do_not_depend_on_mesh_or_micro_batches(
    one_device_losses: np.ndarray, mesh: str, accumulate: int, forward_options: dict[str, Any]
):
    losses, _ = train_losses(runs.make_setup(mesh=mesh, accumulate=accumulate, **forward_options))
    np.testing.assert_allclose(losses, one_device_losses, rtol=1e-5)


def updated_weight(accumulate: int, weights: np.ndarray) -> jax.Array:
    """Return a weight after a step with these token weights."""
    setup = runs.make_setup(accumulate=accumulate)
    job = runs.make_job(setup)
    batch = {
        **feed.load_batch(job.train, job.order.rows(0), setup.sharding),
        "weights": jnp.asarray(weights),
    }
    state, metrics = compile_step(setup)(runs.make_state(setup), batch)
    assert float(metrics["weight"]) == weights.sum()
    return state["params"]["layers"]["mlp"]["up"]["weight"]


@pytest.mark.parametrize("accumulate", slow_except((2, 8), (8,)))
def test_micro_batches_count_by_their_token_weights(accumulate: int):
    """The gradient is that of the sum over all tokens, and a micro-batch without tokens is not nan."""
    weights = np.zeros((8, runs.LENGTH), np.float32)
    weights[0] = 1
    # Row 1 is in another micro-batch than row 0. Of 8 micro-batches most have no token.
    weights[1, :3] = 1
    np.testing.assert_allclose(
        updated_weight(accumulate, weights), updated_weight(1, weights), atol=1e-7
    )


@pytest.mark.parametrize("accumulate", slow_except([1, 2], [2]))
def test_z_loss_is_apart_from_the_loss(accumulate: int):
    """The loss compares with that of an evaluation, and the z-loss changes the gradient."""
    setup = runs.make_setup(accumulate=accumulate)
    job = runs.make_job(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)

    def first_step(terms: LossTerms) -> dict[str, jax.Array]:
        return compile_step(replace(setup, loss_terms=terms))(runs.make_state(setup), batch)[1]

    plain, penalized = first_step(LossTerms()), first_step(LossTerms(z_loss=0.5))
    assert penalized.keys() - plain.keys() == {"z_loss"}
    assert float(penalized["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-6)
    assert float(penalized["z_loss"]) > 0.1 * float(plain["weight"])
    assert float(penalized["grad_norm"]) != pytest.approx(float(plain["grad_norm"]), rel=1e-2)


CompiledStep = Callable[[TrainState, feed.TokenBatch], tuple[TrainState, dict[str, jax.Array]]]


@pytest.fixture(scope="module")
def mesh_setup_and_step() -> tuple[StepSetup, CompiledStep]:
    """Return a setup on a mesh, and its step, which is compiled once."""
    setup = runs.make_setup(mesh="1,2,4")
    return setup, compile_step(setup)


@pytest.mark.parametrize("cause", ["infinite loss", "no tokens"])
def test_skipped_step_changes_only_counters(
    mesh_setup_and_step: tuple[StepSetup, CompiledStep], cause: str
):
    setup, step = mesh_setup_and_step
    job = runs.make_job(setup)
    state, _ = step(
        runs.make_state(setup), feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    )
    batch = feed.load_batch(job.train, job.order.rows(1), setup.sharding)
    if cause == "infinite loss":
        batch["weights"] = batch["weights"].at[3, 2].set(jnp.inf)
    else:
        batch["weights"] = jnp.zeros_like(batch["weights"])
    skipped_state, metrics = step(state, batch)
    before, after = runs.state_bytes(state), runs.state_bytes(skipped_state)
    assert {name for name in before if before[name] != after[name]} == {
        "step",
        "skipped",
        "skipped_in_row",
    }
    assert (int(skipped_state["step"]), int(skipped_state["skipped"]), int(metrics["in_row"])) == (
        2,
        1,
        1,
    )
    next_state, _ = step(
        skipped_state, feed.load_batch(job.train, job.order.rows(2), setup.sharding)
    )
    assert (int(next_state["skipped"]), int(next_state["skipped_in_row"])) == (1, 0)
    assert runs.state_bytes(next_state)["params.embed.tokens"] != after["params.embed.tokens"]


def test_skipped_step_does_not_advance_learning_rate():
    setup = runs.make_setup()
    job, step = runs.make_job(setup), compile_step(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    state, first = step(runs.make_state(setup), batch)
    state, _ = step(state, {**batch, "weights": jnp.zeros_like(batch["weights"])})
    _, third = step(state, batch)
    assert float(first["lr"]) == 0.0
    second_rate = setup.optimizer.lr_schedule.learning_rate(jnp.int32(1))
    assert float(third["lr"]) == pytest.approx(float(second_rate), rel=1e-6)


def test_train_step_updates_state_in_place():
    setup = runs.make_setup(mesh="1,2,4")
    shapes = state_shapes(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    step = jax.jit(
        partial(train_step, setup=setup), donate_argnums=0, out_shardings=(shardings, None)
    )
    batch = feed.batch_shapes(runs.make_job(setup).train, 8, setup.sharding)
    memory = step.lower(shapes, batch).compile().memory_analysis()
    state_nbytes = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(shapes)
    )
    assert memory is not None
    assert memory.alias_size_in_bytes == state_nbytes


@pytest.mark.parametrize(
    ("rules", "spec"),
    [((), PartitionSpec("mp", "fsdp")), (("embed=mp", "vocab=fsdp"), PartitionSpec("fsdp", "mp"))],
)
def test_moments_are_sharded_like_params(rules: tuple[str, ...], spec: PartitionSpec):
    shapes = state_shapes(runs.make_setup(mesh="1,2,4", rules=rules))
    params, moments = shapes["params"], shapes["opt_state"]["adam"]
    assert params["embed"]["tokens"].sharding.spec == spec
    for moment in (moments.mu, moments.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moment) == jax.tree.map(
            lambda leaf: leaf.sharding, params
        )
    assert moments.count.sharding.is_fully_replicated


# Tests of dropout in training steps: masks do not depend on the mesh or on micro-batches, and differ between steps.


def test_masks_differ_between_steps():
    """The same batch and parameters: the learning rate of the first step is 0."""
    setup = runs.make_setup(runs.LLAMA, dropout=runs.DROPOUT)
    job, state = runs.make_job(setup), runs.make_state(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    step = compile_step(setup)
    second_state, first = step(state, batch)
    _, again = step(state, batch)
    _, second = step(second_state, batch)
    assert float(first["loss"]) == float(again["loss"])
    assert abs(float(first["loss"]) - float(second["loss"])) > 0.1


def test_step_without_dropout_has_no_random_numbers():
    setup = runs.make_setup(runs.LLAMA)
    batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in batch_shapes(setup).items()}
    assert "shift_left" not in str(
        jax.make_jaxpr(partial(train_step, setup=setup))(runs.make_state(setup), batch)
    )
    dropping = runs.make_setup(runs.LLAMA, dropout=runs.DROPOUT)
    assert "shift_left" in str(
        jax.make_jaxpr(partial(train_step, setup=dropping))(runs.make_state(setup), batch)
    )


def batch_shapes(setup: StepSetup) -> dict[str, jax.ShapeDtypeStruct]:
    return feed.batch_shapes(runs.make_job(setup).train, 8, setup.sharding)


# Training in float16 with a loss scale.

DYNAMIC = LossScale()


def float16_setup(
    scale: LossScale | None = DYNAMIC, dtype: str = "float16", **options: Any
) -> StepSetup:
    """Return a setup in float16."""
    return dataclasses.replace(runs.make_setup(dtype=dtype, **options), loss_scale=scale)


def scale_and_steps(state: ScaleState) -> tuple[float, int]:
    """Return the dynamic scale of a state, and the steps since its last change."""
    assert "loss_scale" in state
    assert "loss_scale_steps" in state
    return float(state["loss_scale"]), int(state["loss_scale_steps"])


@cache
def losses(scale: LossScale | None, dtype: str = "float16", accumulate: int = 1) -> list[float]:
    """Return the mean losses of 8 steps."""
    setup = float16_setup(scale, dtype, accumulate=accumulate)
    step, job, state = compile_step(setup), runs.make_job(setup), runs.make_state(setup)
    means = []
    for number in range(8):
        state, metrics = step(
            state, feed.load_batch(job.train, job.order.rows(number), setup.sharding)
        )
        means.append(float(metrics["loss"]) / float(metrics["weight"]))
    assert int(state["skipped"]) == 0
    return means


def test_float16_follows_float32():
    expected = losses(None, "float32")
    np.testing.assert_allclose(losses(DYNAMIC, accumulate=2), expected, rtol=5e-3)


def overflowing(setup: StepSetup) -> TrainState:
    """Return a first state with a scale at which gradients overflow."""
    state = runs.make_state(setup)
    assert scale_and_steps(state) == (DYNAMIC.initial, 0)
    return {**state, "loss_scale": jnp.float32(2.0**40)}


def test_overflow_is_skipped_and_halves_the_scale():
    setup = float16_setup(accumulate=2)
    state = take_steps(setup, overflowing(setup), until=3)
    assert int(state["skipped"]) == 3
    assert scale_and_steps(state) == (2.0**37, 0)
    before = runs.make_state(setup)["params"]["embed"]["tokens"]
    assert np.array_equal(state["params"]["embed"]["tokens"], before)


def test_step_without_tokens_keeps_the_scale():
    setup = float16_setup(accumulate=2)
    job = runs.make_job(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    state, _ = compile_step(setup)(
        runs.make_state(setup), {**batch, "weights": jnp.zeros_like(batch["weights"])}
    )
    assert (int(state["skipped"]), float(state["loss_scale"])) == (1, 2.0**15)


def test_scale_grows_up_to_its_maximum():
    scale, finite = LossScale(), jnp.array(True)
    state = ScaleState(loss_scale=jnp.float32(8), loss_scale_steps=jnp.int32(GROWTH_STEPS - 2))
    state = scale.next_state(state, finite)
    assert scale_and_steps(state) == (8, GROWTH_STEPS - 1)
    state = scale.next_state(state, finite)
    assert scale_and_steps(state) == (16, 0)
    largest = ScaleState(
        loss_scale=jnp.float32(MAX_SCALE), loss_scale_steps=jnp.int32(GROWTH_STEPS - 1)
    )
    assert scale_and_steps(scale.next_state(largest, finite)) == (MAX_SCALE, 0)


def test_static_scale_has_no_state():
    scale = LossScale(256.0, is_dynamic=False)
    assert "loss_scale" not in runs.make_state(float16_setup(scale))
    assert losses(scale, accumulate=2)[:2] == pytest.approx(
        losses(DYNAMIC, accumulate=2)[:2], rel=1e-3
    )


def test_resume_keeps_the_scale():
    setup = float16_setup(accumulate=2)
    at_2 = take_steps(setup, overflowing(setup), until=2)
    arrays = {name: leaf.fetch().copy() for name, leaf in host_leaves(at_2).items()}
    resumed = take_steps(setup, restore_state(runs.MemoryReader(arrays), setup), until=4)
    assert runs.state_bytes(resumed) == runs.state_bytes(
        take_steps(setup, jax.tree.map(jnp.copy, at_2), until=4)
    )


# Training steps on packed documents: independent of the mesh, of micro-batches, and of padding.

PACKED_STEPS, ROWS = 3, 8

# Numbers of logical shards: 0 for a step without exact reduction.
REFERENCE, EXACT = 0, 8


def make_dataset(packing: str = "documents") -> DocumentDataset:
    """Return the tokens of `runs` as documents of 1 to 24 tokens."""
    tokens = runs.make_tokens()
    lengths = np.random.default_rng(0).integers(1, 25, 100)
    ends = np.minimum(np.cumsum(lengths), tokens.n_tokens)
    ends[-1] = tokens.n_tokens
    return document_dataset(replace(tokens, ends=ends.astype("<u8")), packing)


def make_setup(mesh: str, accumulate: int, num_shards: int) -> StepSetup:
    """Return the setup of steps on some of the devices."""
    setup, parsed = runs.make_setup(runs.LLAMA, accumulate=accumulate), parse_mesh(mesh)
    sharding = make_sharding_context(parsed, devices=jax.devices()[: parsed.n_devices])
    forward_config = replace(setup.forward_config, sharding=sharding)
    return replace(setup, forward_config=forward_config, reduction_shards=num_shards)


def test_evaluation_does_not_depend_on_packing():
    setup = make_setup("1,1,1", 1, REFERENCE)
    params, eval_step = (
        runs.make_state(setup)["params"],
        jit_eval_step(setup.model, setup.forward_config),
    )
    packed, padded = (
        evaluate(
            params,
            make_dataset(packing),
            eval_step=eval_step,
            sharding=setup.sharding,
            batch_size=ROWS,
        )
        for packing in ("documents", "none")
    )
    assert packed.num_tokens == padded.num_tokens
    assert packed.mean_loss == pytest.approx(padded.mean_loss, rel=1e-6)
    assert packed.accuracy == padded.accuracy


# Runs with exact reduction end in equal bytes on every mesh that splits the batch.

ONE_DEVICE = "1,1,1"
MESHES = ("2,1,1", "4,1,1", "8,1,1", "1,2,1", "1,8,1", "2,4,1")
TIMINGS = ("seconds", "tokens_per_s")
EXACT_REFERENCE, BLOCKWISE = AttentionOptions(), AttentionOptions("blockwise", 8, 8)

OPTIONS = ("scan_layers", "remat_policy", "dtype", "attention_options", "optimizer", "param_dtype")
COMPACT = {"moment_dtype": "bfloat16", "ema": 0.9, "freeze": ("re:attn\\.o",)}


@dataclass(frozen=True)
class Variant:
    """A model and its options."""

    family: str
    dropout: bool = False
    scan_layers: bool = True
    remat_policy: str = "none"
    dtype: str = "float32"
    attention_options: AttentionOptions = EXACT_REFERENCE
    optimizer: Optimizer = runs.ADAMW
    param_dtype: str = "float32"

    def setup(self, mesh: str, accumulate: int = 1) -> StepSetup:
        """Return the setup of exact steps with 8 logical shards on some of the devices."""
        options = {name: getattr(self, name) for name in OPTIONS}
        dropout = runs.DROPOUT if self.dropout else runs.NO_DROPOUT
        setup = runs.make_setup(
            runs.CONFIGS[self.family], accumulate=accumulate, dropout=dropout, **options
        )
        parsed = parse_mesh(mesh)
        sharding = make_sharding_context(parsed, devices=jax.devices()[: parsed.n_devices])
        forward_config = replace(setup.forward_config, sharding=sharding)
        return replace(setup, forward_config=forward_config, reduction_shards=8)


VARIANTS = (
    Variant("llama"),
    Variant("llama", dropout=True),
    Variant("llama", dropout=True, scan_layers=False, remat_policy="dots_saveable"),
    Variant(
        "llama", remat_policy="nothing_saveable", dtype="bfloat16", attention_options=BLOCKWISE
    ),
    Variant("gpt_neo", dropout=True, remat_policy="nothing_saveable"),
    Variant("gpt_neo", scan_layers=False),
    Variant("mixtral"),
    Variant("llama", optimizer=make_optimizer("lion", lr=1e-2, clip_norm=0.5, **COMPACT)),
    Variant("llama", optimizer=make_optimizer("sgd", lr=1.0, clip_norm=0.5)),
    Variant(
        "llama",
        optimizer=make_optimizer("lion", lr=1e-2, clip_norm=0.5, **COMPACT),
        param_dtype="bfloat16",
    ),
)


@dataclass(frozen=True)
class FinishedRun:
    """The state of a run after its last step, and its log lines without timings."""

    state: dict[str, bytes]
    lines: list[dict[str, Any]]


def run(setup: StepSetup, folder: Path) -> FinishedRun:
    """Run ten steps of 16 sequences, with evaluations."""
    state, recording = runs.make_state(setup), runs.RecordingLog()
    loop = Loop(
        runs.make_job(setup, batch_size=16, steps=10, eval_every=5),
        state,
        checkpoints=runs.MemoryCheckpoints(),
        logs=[MetricsFileLog(folder / METRICS_FILE, 0), recording],
    )
    loop.run()
    lines = [{key: line[key] for key in line if key not in TIMINGS} for line in recording.lines]
    return FinishedRun(runs.state_bytes(loop.state), [*lines, *map(dict, recording.evaluations)])


def check_equal_runs(result: FinishedRun, expected: FinishedRun, variant: Variant) -> None:
    """Check that two runs have equal bytes and log lines, and that they have learned and clipped."""
    assert result.lines == expected.lines
    assert [name for name in result.state if result.state[name] != expected.state[name]] == []
    assert result.lines[9]["loss"] < result.lines[0]["loss"] - 0.3
    assert (
        max(line["grad_norm"] for line in result.lines[:10]) > variant.optimizer.table.clip_norm
    ), "nothing is clipped"


@lru_cache
def one_device_run(variant: Variant, folder: Path) -> FinishedRun:
    """Run a variant on one device."""
    return run(variant.setup(ONE_DEVICE), folder)


# By default test_two_processes_train_like_one compares two processes with one.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_runs_end_in_equal_bytes(
    variant: Variant, mesh: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    expected = one_device_run(variant, tmp_path_factory.getbasetemp())
    check_equal_runs(run(variant.setup(mesh), tmp_path), expected, variant)


@pytest.mark.slow
def test_exact_runs_do_not_depend_on_micro_batches(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    expected = one_device_run(VARIANTS[1], tmp_path_factory.getbasetemp())
    result = run(VARIANTS[1].setup("2,2,1", accumulate=2), tmp_path)
    check_equal_runs(result, expected, VARIANTS[1])


@pytest.mark.slow
def test_exact_step_equals_fast_step_up_to_rounding(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    expected = one_device_run(VARIANTS[1], tmp_path_factory.getbasetemp())
    fast = run(replace(VARIANTS[1].setup("1,2,1"), reduction_shards=0), tmp_path)
    losses, fast_losses = (
        [line["loss"] for line in result.lines[:10]] for result in (expected, fast)
    )
    np.testing.assert_allclose(losses, fast_losses, rtol=1e-4)


@pytest.mark.slow
def test_exact_runs_end_in_equal_bytes_with_the_flags_of_users():
    """The flags of the tests disable optimizations; those of XLA's defaults are set after them."""
    flags = "--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true --xla_cpu_max_isa=AVX"
    test = f"{__file__}::{test_exact_runs_do_not_depend_on_micro_batches.__name__}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-m",
        "slow",
        "-p",
        "no:cacheprovider",
        test,
    ]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
