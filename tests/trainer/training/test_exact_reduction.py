"""Runs with exact reduction end in equal bytes on every mesh that splits the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prepcli.models.mesh import parse_mesh
from tests.helpers import runs
from tests.helpers.optimizers import make_optimizer
from trainer.distributed.sharding import make_sharding_context
from trainer.nn.model_spec import AttentionOptions
from trainer.training.loop import Loop
from trainer.training.metrics import METRICS_FILE, MetricsFileLog
from trainer.training.optimizers import Optimizer
from trainer.training.step import StepSetup

ONE_DEVICE = "1,1,1"
MESHES = ("2,1,1", "4,1,1", "8,1,1", "1,2,1", "1,8,1", "2,4,1")
TIMINGS = ("seconds", "tokens_per_s")
REFERENCE, BLOCKWISE = AttentionOptions(), AttentionOptions("blockwise", 8, 8)


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
    attention_options: AttentionOptions = REFERENCE
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
