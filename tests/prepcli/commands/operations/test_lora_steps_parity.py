"""Three steps of AdamW on an adapter of PEFT: prep in float32 against PEFT and torch in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, LLAMA, make_checkpoint
from tests.helpers.train_runs import read_losses
from tests.helpers.training_folder import WORDS, write_tokenizer

torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")

STEPS = 3
BATCH = 8
LENGTH = 16
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
# With eps = 1e-8, rounding errors decide the sign of the smallest updates.
EPS = 1e-6
RECIPE = f"""\
mesh = "1,2,4"
[model]
path = "init"
[data]
type = "ids"
path = "ids.npy"
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
clip_norm = 1.0
[train]
steps = {STEPS}
log_every = 1
[checkpoint]
every = 0
[lora]
path = "adapter"
"""
# Base model, and settings of PEFT.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (LLAMA, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all": (
        LLAMA,
        {
            "target_modules": "all-linear",
            "rank_pattern": {"mlp.down_proj": 8, "^model.layers.[0-9]+.self_attn.q_proj": 2},
            "alpha_pattern": {".*k_proj": 3},
            "modules_to_save": ["embed_tokens", "lm_head"],
            "use_rslora": True,
        },
    ),
    "tied": (
        FAMILY_CONFIGS["opt"],
        {
            "target_modules": ["q_proj", "fc1"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "transposed": (
        GPT2,
        {
            "target_modules": ["c_attn", "c_proj"],
            "rank_pattern": {"attn.c_proj": 8},
            "fan_in_fan_out": True,
        },
    ),
    "experts": (
        FAMILY_CONFIGS["mixtral"],
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "use_rslora": True,
        },
    ),
    "experts-transposed": (
        FAMILY_CONFIGS["gpt_oss"],
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def make_adapter(config: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Write a tiny model and a random adapter of PEFT, and return the model with it in float64."""
    make_checkpoint(Path("base"), config)
    write_tokenizer(Path("base"))
    # The grouped product of experts has no float64.
    base = transformers.AutoModelForCausalLM.from_pretrained(
        "base", dtype=torch.float32, experts_implementation="eager"
    )
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            # B is not zero, so that the first gradient of A is not zero either.
            parameter.data.normal_(std=0.1)
    model.save_pretrained("adapter")
    return model.double()


def train_with_torch(model: Any, ids: np.ndarray) -> list[float]:
    """Take all steps on the adapter of a model, write it to `expected`, and return the losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in parameters} == {torch.float64}
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=EPS, weight_decay=WEIGHT_DECAY
    )
    losses: list[float] = []
    for batch in torch.from_numpy(ids).split(BATCH):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained("expected")
    return losses


@pytest.mark.parametrize("name", slow_except(list(CASES), ["all"]))
def test_steps_of_adapters_equal_those_of_peft(name: str):
    config, settings = CASES[name]
    model = make_adapter(config, settings)
    random = np.random.default_rng(5)
    # 0 and 1 are special tokens of some models.
    ids = np.cumsum(random.integers(0, 3, (STEPS * BATCH, LENGTH)), axis=1) % (len(WORDS) - 2) + 2
    np.save("ids.npy", ids)
    Path("recipe.toml").write_text(RECIPE)
    assert main(["save-init", "base", "--out", "init", "--pad-vocab", "8", "-q"]) == OK
    assert main(["train", "recipe.toml", "--out", "run", "-q"]) == OK
    assert main(["export", "run", "--out", "actual", "-q"]) == OK

    losses = train_with_torch(model, ids)
    assert read_losses("run") == pytest.approx(losses, rel=1e-6)
    before = load_file("adapter/adapter_model.safetensors")
    expected = load_file("expected/adapter_model.safetensors")
    actual = load_file("actual/adapter_model.safetensors")
    assert actual.keys() == expected.keys()
    for tensor, values in expected.items():
        change = values - before[tensor]
        assert np.abs(change).max() > LEARNING_RATE
        error = actual[tensor] - values
        # Adam divides small gradients by their size, so that their rounding errors are the largest. PEFT in float32
        # differs from its float64 by up to 1.7e-3 of the learning rate, and by up to 7e-5 of the change.
        assert np.abs(error).max() < 1e-3 * LEARNING_RATE, tensor
        assert np.linalg.norm(error) < 1e-4 * np.linalg.norm(change), tensor
