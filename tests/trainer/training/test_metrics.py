"""The metrics of a run: its file, lines, timer and utilization, and losses against torch."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import prepcli as prep
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.commands.testing.tiny_model import (
    exact_log,
    has_encoder,
    load_torch_model,
    random_tensors,
    with_small_embeddings,
)
from prepcli.core.errors import OK, PrepError
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import FAMILIES, family_of
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, DENSE_CONFIGS
from tests.helpers.training_folder import write_tokenizer
from tests.helpers.training_plans import TINY, plan_text
from trainer.distributed.sharding import ShardingContext, peak_memory_nbytes
from trainer.nn.model_spec import build_model
from trainer.planning.step_time import ACCELERATORS, JAX_KINDS, accelerator_of
from trainer.training.events import StepTimer
from trainer.training.metrics import (
    METRICS_FILE,
    MetricsFileLog,
    metrics_file_name,
    read_metrics,
    remove_other_metrics,
    repeated_lines,
    step_line,
)
from trainer.training.setup import peak_step_s

# The metrics file of a run, and the timer of its steps.


def test_metrics_file_lines_are_visible_at_once(tmp_path: Path):
    log = MetricsFileLog(tmp_path / "m", 0)
    log.write({"step": 1, "loss": 2.5})
    log.write({"step": 2, "loss": None})
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_metrics_file_that_cannot_be_closed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A network file system may report a failed write only here. The error that ended the run is kept."""
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    for has_failed in (False, True):
        log = MetricsFileLog(tmp_path / "m", 0)
        expected = nullcontext() if has_failed else pytest.raises(PrepError, match="cannot write")
        with monkeypatch.context() as patch, expected:
            patch.setattr(os, "close", fail)
            log.close(has_failed=has_failed)
        log.close()


def test_metrics_file_drops_later_and_incomplete_lines(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text(
        '{"step": 1}\n{"step": 2, "eval_loss": 1.0}\nnonsense\n{"step": 3}\n{"step": 4, "lo'
    )
    MetricsFileLog(path, 2).write({"step": 3, "loss": 1.0})
    assert read_metrics(path) == [
        {"step": 1},
        {"step": 2, "eval_loss": 1.0},
        {"step": 3, "loss": 1.0},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_older_writer_does_not_write_to_the_file_of_a_newer_one(tmp_path: Path):
    """A bucket's lock may be taken over: both starts of the run then have the same local folder for some time."""
    path = tmp_path / "m"
    old = MetricsFileLog(path, 0)
    old.write({"step": 1, "loss": 1.0})
    new = MetricsFileLog(path, 0)
    old.write({"step": 2, "loss": 1.0})
    new.write({"step": 1, "loss": 2.0})
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]


def test_read_metrics_without_file_is_empty(tmp_path: Path):
    assert read_metrics(tmp_path / "none") == []


def test_metrics_file_reports_write_errors(tmp_path: Path):
    with pytest.raises(PrepError, match="cannot write"):
        MetricsFileLog(tmp_path / "no folder" / "m", 0)


def test_metrics_file_rejects_nan(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        MetricsFileLog(tmp_path / "m", 0).write({"step": 1, "loss": float("nan")})


def test_step_timer_excludes_pauses():
    times = iter([0.0, 4.0, 10.0, 12.0, 12.0])
    speed = StepTimer(clock=lambda: next(times))
    speed.resume()
    speed.count_step()
    speed.pause()  # 4 s of steps, 6 s of something else
    speed.resume()
    speed.count_step()
    assert speed.lap() == pytest.approx(3.0)


def test_step_timer_lap_without_steps_is_none():
    assert StepTimer().lap() is None


def test_metrics_file_at_step_0_drops_all_lines(tmp_path: Path):
    """After a kill before the first checkpoint, the run evaluates again before its first step."""
    path = tmp_path / "m"
    path.write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 1.0}\n')
    MetricsFileLog(path, 0)
    assert read_metrics(path) == []


def test_metrics_file_keeps_the_bytes_of_lines(tmp_path: Path):
    """Lines are copied, not written anew: NaN in a line that a user added is no error."""
    path = tmp_path / "m"
    lines = ['{"step":1, "loss":  1.0}', '{"loss": NaN, "step": 2}', '{"step": 3, "loss": 1.0}']
    broken = [
        '{"step": 1, "loss"',
        "[" * 100_000,
        '{"step": "1"}',
        '{"step": 1, "text": "' + "x" * (1 << 20) + '"}',
    ]
    path.write_text("".join(f"{line}\n" for line in [*lines, *broken]))
    MetricsFileLog(path, 2)
    assert path.read_text() == f"{lines[0]}\n{lines[1]}\n"


def test_metrics_file_follows_no_link(tmp_path: Path):
    (tmp_path / "target").write_text('{"step": 1}\n')
    for name in ("m", "m.new"):
        (tmp_path / name).symlink_to("target")
    with pytest.raises(PrepError, match="it is a symbolic link"):
        MetricsFileLog(tmp_path / "m", 0)
    assert (tmp_path / "target").read_text() == '{"step": 1}\n'


def test_metrics_of_a_fifo_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "m")
    with pytest.raises(PrepError, match="is not a"):
        MetricsFileLog(tmp_path / "m", 1)
    with pytest.raises(PrepError, match="is not a file"):
        read_metrics(tmp_path / "m")


def test_repeated_lines_begin_at_the_step(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2, "eval_loss": 1.0}\n{"step": 3}\n')
    assert repeated_lines(path, 2) == {(2, True), (3, False)}


def test_remove_other_metrics_keeps_processes_that_log(tmp_path: Path):
    names = [*map(metrics_file_name, range(4)), "metrics.x.jsonl", "metrics.02.jsonl"]
    for name in names:
        (tmp_path / name).touch()
    remove_other_metrics(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {*names} - {"metrics.2.jsonl", "metrics.3.jsonl"}
    )


# Lines of a run's log: means over the tokens of a step, and null where there is none.

VALUES = {"loss": 6.0, "correct": 1.0, "weight": 4.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0}


def test_step_line_has_means_over_tokens_with_loss():
    line = step_line(3, {**VALUES, "z_loss": 2.0}, tokens=8)
    assert (line["loss"], line["accuracy"], line.get("z_loss")) == (1.5, 0.25, 0.5)


def test_step_line_without_tokens_with_loss_is_null():
    empty = {"loss": 0.0, "correct": 0.0, "weight": 0.0, "z_loss": 0.0, "skipped": 1.0}
    line = step_line(3, {**VALUES, **empty}, tokens=8)
    assert (line["loss"], line["accuracy"], line.get("z_loss")) == (None, None, None)
    assert line["skipped"] == 1


# Model FLOPs utilization of a run.


@dataclass
class FakeDevice:
    """A device with a kind and statistics of its memory."""

    device_kind: str = "cpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def sharding_of(*devices: FakeDevice) -> Any:
    """Return a sharding over fake devices."""
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices), local_devices=devices)
    return SimpleNamespace(
        mesh=parse_mesh(f"{len(devices)},1,1"), device_mesh=mesh, rules=DEFAULT_RULES
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("lora.rank=4",),
        ("lora.rank=4", "lora.modules_to_save=['head']"),
        ("lora.rank=4", "lora.modules_to_save=['embed.tokens', 'head']"),
        ("optimizer.freeze=layers.mlp.up.weight",),
    ],
    ids=str,
)
def test_mfu_counts_the_operations_of_the_plan(tmp_path: Path, overrides: tuple[str, ...]):
    plan = plan_text(tmp_path, "mesh=2,1,1", *overrides)
    family, lora = family_of(TINY), plan.recipe.lora.new_adapters
    model = build_model(family, TINY, is_tied=False, lora=lora)
    sharding = sharding_of(FakeDevice("NVIDIA H200"), FakeDevice("NVIDIA H200"))
    peak_flops = 2 * ACCELERATORS["H200"].peak_flops
    step_flops = plan.flops.model_flops_of_all_pairs
    default_flops = plan_text(tmp_path, "mesh=2,1,1").flops.model_flops_of_all_pairs
    assert peak_step_s(plan.recipe, model, sharding) == step_flops / peak_flops
    assert (step_flops < default_flops) == bool(overrides)
    assert (
        peak_step_s(plan.recipe, model, sharding_of(FakeDevice("cpu"), FakeDevice("cpu"))) is None
    )


def test_mfu_counts_a_trained_tied_embedding(tmp_path: Path):
    config = TINY | {"tie_word_embeddings": True}
    overrides = ("mesh=1,1,1", "lora.rank=4", "lora.modules_to_save=['embed.tokens']")
    plan = plan_text(tmp_path, *overrides, config=config)
    lora = plan.recipe.lora.new_adapters
    model = build_model(family_of(config), config, is_tied=True, lora=lora)
    step_s = peak_step_s(plan.recipe, model, sharding_of(FakeDevice("NVIDIA H100 80GB HBM3")))
    assert step_s is not None
    # The head of 96 tokens and width 32: y, dx and dW for 8 sequences of 16 tokens. Two layers without dW.
    head = 6 * 96 * 32
    layers = 4 * 2 * (4 * 32 * 32 + 3 * 32 * 64)
    adapters = plan_text(tmp_path, *overrides[:2]).inputs.saved_leaves.values()
    num_adapters = sum(math.prod(leaf.shape) for leaf in adapters)
    matmul = (head + layers + 6 * num_adapters) * 8 * 16
    assert plan.flops.matmul == matmul
    expected = matmul + plan.flops.attention_full
    assert step_s * ACCELERATORS["H100"].peak_flops == pytest.approx(expected)


def test_jax_kinds_name_known_accelerators():
    assert all(accelerator_of(kind) for kind in JAX_KINDS)
    assert accelerator_of("NVIDIA H100 PCIe") is None


def test_peak_memory_is_the_maximum_over_devices():
    full, empty = (
        FakeDevice(stats={"peak_bytes_in_use": 9}),
        FakeDevice(stats={"peak_bytes_in_use": 3}),
    )
    assert peak_memory_nbytes(sharding_of(empty, full)) == 9
    assert peak_memory_nbytes(sharding_of(FakeDevice())) is None
    assert peak_memory_nbytes(ShardingContext()) is None


# Losses of whole training runs of every family, against the same runs of transformers, torch and torch's AdamW.

torch = lazy_module("torch")
lazy_module("transformers")

CONFIGS = {config["model_type"]: config for config in (*ALL_CONFIGS, *DENSE_CONFIGS.values())}
# A family of each mechanism: dense, MoE, latent attention, attention sinks, ALiBi, an encoder, linear attention, state
# space layers, attention beside them, layers of one sublayer, short convolutions, heads in shards, differential
# attention, and scores of keys.
MESH_FAMILIES = (
    "llama",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "bloom",
    "t5",
    "qwen3_next",
    "mamba2",
    "mamba",
    "falcon_h1",
    "nemotron_h",
    "lfm2",
    "codegen",
    "diffllama",
    "doge",
)
STEPS = 20
BATCH = 4
LENGTH = 16
SOURCE_LENGTH = 12
LOSS_ATOL = 1e-5
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
# Adam divides by |g| + eps in the first step. With eps = 1e-8, rounding errors decide the sign of the smallest updates.
EPS = 1e-6
RECIPE = f"""\
mesh = "{{mesh}}"
[model]
path = "init"
[data]
{{data}}
seq_length = {LENGTH}
shuffle = false
[batch]
size = {BATCH}
[optimizer]
lr = {LEARNING_RATE}
schedule = "constant"
b1 = 0.9
b2 = 0.99
eps = {EPS}
weight_decay = {WEIGHT_DECAY}
clip_norm = 0
[train]
steps = {STEPS}
log_every = 1
[checkpoint]
every = 0
"""
PAIRS = f"""\
type = "json"
path = "ids.jsonl"
add_eos = false
fields = "[{{source}}], {{target}}"
source_length = {SOURCE_LENGTH}"""
IDS = """\
type = "ids"
path = "ids.npy\""""

Rows = Mapping[str, npt.NDArray[np.int64]]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def random_rows(config: dict[str, Any]) -> Rows:
    """Return the token ids of all steps: targets, and sources if the model has an encoder.

    Each id is the one before it plus 0, 1 or 2. There are no special ids, which are 0 and 1.
    """
    rng = np.random.default_rng(5)
    rows: dict[str, npt.NDArray[np.int64]] = {}
    lengths = {"target": LENGTH}
    if has_encoder(config):
        lengths["source"] = SOURCE_LENGTH
    for name, length in lengths.items():
        ids = np.cumsum(rng.integers(0, 3, (STEPS * BATCH, length)), axis=1)
        ids += rng.integers(0, config["vocab_size"], (STEPS * BATCH, 1))
        rows[name] = ids % (config["vocab_size"] - 2) + 2
    return rows


def prep_losses(rows: Rows, mesh: str) -> list[float]:
    """Return the losses of a run of `prep train` from the model in `m`."""
    prep.save_init("m", out="init", pad_vocab="8", mesh=mesh)
    if "source" in rows:
        data = PAIRS
        lines = zip(rows["source"].tolist(), rows["target"].tolist(), strict=True)
        text = [json.dumps({"source": source, "target": target}) for source, target in lines]
        Path("ids.jsonl").write_text("\n".join(text))
    else:
        data = IDS
        np.save("ids.npy", rows["target"])
    Path("recipe.toml").write_text(RECIPE.format(mesh=mesh, data=data))
    # A mesh has all devices of a process.
    devices = str(parse_mesh(mesh).n_devices)
    variables = {**os.environ, "JAX_NUM_CPU_DEVICES": devices}
    process = run_python(PREP, "train", "recipe.toml", "--out", "run", "-q", env=variables)
    assert process.returncode == OK, process.stderr
    return [line["loss"] for line in read_metrics(Path("run") / METRICS_FILE)]


def torch_losses(rows: Rows) -> list[float]:
    """Return the losses of the same run of transformers and torch's AdamW."""
    model = load_torch_model(Path("m"))
    optimizer = torch_adamw(model)
    losses: list[float] = []
    for step in range(STEPS):
        batch: dict[str, Any] = {}
        for name, ids in rows.items():
            batch[name] = torch.tensor(ids[step * BATCH : (step + 1) * BATCH])
        # A model without an encoder shifts the labels by itself.
        inputs = batch.get("source", batch["target"])
        optimizer.zero_grad()
        with exact_log():
            loss = model(input_ids=inputs, labels=batch["target"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def torch_adamw(model: Any) -> Any:
    """Return torch's AdamW with weight decay for the parameters that transformers' Trainer chooses."""
    from transformers.trainer import Trainer

    names = Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    # The Trainer tells norms by their names, and does not know `norm_f` of Mamba-2 and `post_norm1` of HyperCLOVA X.
    names = [name for name in names if not re.search(r"norm(_f|\d)\.weight$", name)]
    decayed: list[Any] = []
    others: list[Any] = []
    for name, parameter in model.named_parameters():
        group = decayed if name in names else others
        group.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=EPS)


def check_losses(model_type: str, mesh: str) -> None:
    """Compare the losses of each step."""
    config = dict(CONFIGS[model_type])
    if has_encoder(config):
        # transformers pads the shifted labels with it.
        config["pad_token_id"] = 0
    # With large embeddings, some losses are about 20, and a last bit of them is 2e-6.
    tensors = with_small_embeddings(config, random_tensors(config, seed=2))
    write_checkpoint(Path("m"), config, dict(tensors))
    write_tokenizer(Path("m"))
    rows = random_rows(config)
    actual = prep_losses(rows, mesh)
    expected = torch_losses(rows)
    assert len(actual) == STEPS
    errors = abs(np.array(actual) - np.array(expected))
    losses = f"losses {expected[0]:.4f} to {expected[-1]:.4f}"
    print(f"{model_type} {mesh}: {losses}, difference {errors.max():.1e}")
    assert errors.max() <= LOSS_ATOL


def test_every_family_has_a_config():
    assert CONFIGS.keys() == FAMILIES.keys()


# tests/README.md names the tests of the parts of a step.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONFIGS)
def test_losses_match_torch(model_type: str):
    check_losses(model_type, "1,1,1")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MESH_FAMILIES)
def test_losses_on_a_mesh_match_torch(model_type: str):
    check_losses(model_type, "2,2,2")
