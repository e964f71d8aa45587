"""Losses of whole training runs of every family, against the same runs of transformers, torch and torch's AdamW.

A run starts from the converted checkpoint of a tiny model, and trains on token ids in the order of a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
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
from prepcli.core.errors import OK
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import FAMILIES
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, DENSE_CONFIGS
from tests.helpers.training_folder import write_tokenizer
from trainer.training.metrics import METRICS_FILE, read_metrics

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
