"""Adapters of PEFT and of prep: equal logits, merges and training steps, in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from prepcli.core.errors import FAILED
from prepcli.models.registry import FAMILIES
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.openers.peft_settings import read_adapter_family
from prepcli.sources.openers.tensor_files import open_adapter
from prepcli.sources.opening import open_source
from tests.helpers import runs
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer
from tests.trainer.run.test_train import read_losses
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model
from trainer.training.checkpoint import init_state
from trainer.training.step import StepSetup

torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 131


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def load_torch_model(folder: str) -> Any:
    """Load a model of torch in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        # The grouped product of experts has no float64.
        experts_implementation="eager",
        dtype=torch.float32,
    )


def load_ours(base: str, adapter: str) -> tuple[ModelSpec, Any]:
    """Load a model and an adapter with prep."""
    config = json.loads(Path(base, "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    adapter_family, lora = read_adapter_family(Path(adapter), family, config)
    source = open_source(locate(base))
    model = build_model(
        family, config, source.family.is_tied(config, {t.name for t in source.tensors}), lora=lora
    )
    setup = StepSetup(model, ForwardConfig(), runs.ADAMW)
    adapters = open_adapter(Path(adapter), adapter_family, config)
    with WeightsReader(source) as reader, WeightsReader(adapters) as adapter_reader:
        return model, init_state(reader, setup, adapter_reader)["params"]


LOGITS = {"atol": 2e-5, "rtol": 0}


@dataclass(frozen=True)
class SettingsCase:
    """An adapter: the model, the table of a recipe, and the settings of PEFT."""

    config: dict[str, Any]
    recipe: str
    peft: dict[str, Any] = field(default_factory=dict[str, Any])


SETTINGS_CASES = {
    "patterns": SettingsCase(
        LLAMA,
        'rank = 4\ntargets = ["attn.*", "mlp.*"]\nrank_pattern = {"mlp.down" = 8, "q_proj" = 2}\n'
        'alpha_pattern = {"attn.[kv]" = 3.5}\n',
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"mlp.down_proj": 8, "^model.layers.[0-9]+.self_attn.q_proj": 2},
            "alpha_pattern": {".*k_proj": 3},
        },
    ),
    "patterns-gpt2": SettingsCase(
        GPT2,
        'rank = 4\ntargets = ["attn.*", "mlp.*"]\nrank_pattern = {"attn.o" = 8}\n',
        {
            "target_modules": ["c_attn", "c_proj"],
            "rank_pattern": {"attn.c_proj": 8},
            "fan_in_fan_out": True,
        },
    ),
    "all-linear": SettingsCase(
        LLAMA, 'rank = 4\ntargets = "all-linear"\n', {"target_modules": "all-linear"}
    ),
    "all-linear-moe": SettingsCase(
        FAMILY_CONFIGS["qwen2_moe"],
        'rank = 4\ntargets = "all-linear"\n',
        {"target_modules": "all-linear"},
    ),
    "saved": SettingsCase(
        LLAMA,
        'rank = 4\nmodules_to_save = ["embed.tokens", "head"]\n',
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved-tied": SettingsCase(
        FAMILY_CONFIGS["opt"],
        'rank = 4\nmodules_to_save = ["embed.tokens"]\n',
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "experts": SettingsCase(
        FAMILY_CONFIGS["mixtral"],
        'rank = 4\ntarget_parameters = ["mlp.*"]\n',
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts-transposed": SettingsCase(
        FAMILY_CONFIGS["gpt_oss"],
        'rank = 4\ntargets = []\ntarget_parameters = ["mlp.down"]\nuse_rslora = true\n',
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}
# Settings of PEFT for families with fused and transposed weights
MODULE_CASES = {
    "gpt_neox": ["query_key_value", "dense"],
    "gpt_neo": ["q_proj", "out_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "deepseek_v3": ["q_b_proj", "kv_b_proj"],
}
PEFT_CASES = SETTINGS_CASES | {
    name: SettingsCase(FAMILY_CONFIGS.get(name, GPT_NEO), "", {"target_modules": modules})
    for name, modules in MODULE_CASES.items()
}


def our_logits(base: str, adapter: str) -> np.ndarray:
    """Compute the logits of a model with an adapter with prep."""
    model, params = load_ours(base, adapter)
    tokens = jnp.asarray(TOKENS)
    return np.asarray(
        jax.jit(lambda p: transformer.compute_logits(p, tokens, model, ForwardConfig()))(params)
    )


def torch_logits(model: Any) -> np.ndarray:
    """Compute the logits of a model of torch."""
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


def check_merge(base: str, adapter: str) -> None:
    """Compare the merge of prep with that of PEFT: each tensor of its state dict, within a rounding."""
    run_ok("merge", adapter, base, "--out", "merged")
    model = peft.PeftModel.from_pretrained(load_torch_model(base), adapter).merge_and_unload()
    expected = {name: values.numpy() for name, values in model.state_dict().items()}
    merged = load_torch_model("merged").state_dict()
    assert merged.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(merged[name].numpy(), values, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", slow_except(list(SETTINGS_CASES), ["saved-tied"]))
def test_trained_adapter_is_the_same_in_peft(name: str):
    case = SETTINGS_CASES[name]
    make_training_folder(case.config)
    recipe = Path("recipe.toml")
    content = recipe.read_text().replace("tiny-init", "tiny")
    recipe.write_text(f"{content}\n[lora]\n{case.recipe}")
    run_ok("train", "recipe.toml", "--set", "train.steps=4")
    run_ok("export", "runs/recipe", "--out", "adapter")
    base = torch_logits(load_torch_model("tiny"))
    loaded = peft.PeftModel.from_pretrained(load_torch_model("tiny"), "adapter")
    adapted = torch_logits(loaded)
    np.testing.assert_allclose(our_logits("tiny", "adapter"), adapted, **LOGITS)
    assert np.abs(adapted - base).max() > 1e-3
    check_merge("tiny", "adapter")


def make_peft_adapter(case: SettingsCase, drawn: str = "") -> Any:
    """Write a tiny model, `base`, and an adapter of PEFT, and return the model with it.

    Trained parameters with `drawn` in their name have random values.
    """
    make_checkpoint(Path("base"), case.config)
    settings = peft.LoraConfig(r=4, lora_alpha=6, **case.peft)
    model = peft.get_peft_model(load_torch_model("base"), settings)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and drawn in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained("adapter")
    return model


@pytest.mark.parametrize("name", slow_except(list(PEFT_CASES), ["patterns-gpt2"]))
def test_adapter_of_peft_has_equal_logits(name: str):
    expected = torch_logits(make_peft_adapter(PEFT_CASES[name]))
    np.testing.assert_allclose(our_logits("base", "adapter"), expected, **LOGITS)
    check_merge("base", "adapter")


# PEFT ties `embed_tokens` alone. It warns, and trains only the embedding of GPT-2.
UNTIED = SettingsCase(
    GPT2,
    "",
    {
        "target_modules": ["c_attn"],
        "modules_to_save": ["wte"],
        "ensure_weight_tying": True,
        "fan_in_fan_out": True,
    },
)
TIED = SETTINGS_CASES["saved-tied"]
REFUSED = [
    (UNTIED, "a trained embedding without its head is not supported"),
    (
        SettingsCase(TIED.config, "", TIED.peft | {"ensure_weight_tying": False}),
        "modules_to_save without ensure_weight_tying is not supported",
    ),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_adapter_of_peft_with_an_untied_embedding_is_an_error(
    case: SettingsCase, message: str, capsys: Capture
):
    make_peft_adapter(case)
    assert message in run_failing(capsys, FAILED, "merge", "adapter", "base", "--out", "merged")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patterns", "saved", "saved-tied", "experts"])
def test_adapter_of_peft_is_continued(name: str):
    case = SETTINGS_CASES[name]
    make_training_folder(case.config)
    settings = peft.LoraConfig(r=4, lora_alpha=6, **case.peft)
    model = peft.get_peft_model(load_torch_model("tiny"), settings)
    model.save_pretrained("adapter")
    recipe = Path("recipe.toml")
    # The vocabulary of `tiny-init` is padded, and that of the adapter is not.
    recipe.write_text(f'{recipe.read_text()}\n[lora]\npath = "adapter"\n')
    run_ok("train", "recipe.toml", "--set", "train.steps=4")
    run_ok("export", "runs/recipe", "--out", "next")
    first = load_file("adapter/adapter_model.safetensors")
    second = load_file("next/adapter_model.safetensors")
    assert second.keys() == first.keys()
    for tensor, values in second.items():
        assert values.shape == first[tensor].shape
        assert not np.array_equal(values, first[tensor])
    # Embeddings have moved from the values of the adapter by a few steps of Adam.
    for tensor in first.keys() - {tensor for tensor in first if ".lora_" in tensor}:
        assert np.abs(second[tensor] - first[tensor]).max() < 0.05
    check_merge("tiny", "next")


# Three steps of AdamW on an adapter of PEFT: prep in float32 against PEFT and torch in float64


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
STEP_CASES = {
    **PEFT_CASES,
    "all": SettingsCase(
        LLAMA,
        "",
        {
            **SETTINGS_CASES["patterns"].peft,
            "target_modules": "all-linear",
            "modules_to_save": ["embed_tokens", "lm_head"],
            "use_rslora": True,
        },
    ),
}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["all", "saved-tied", "patterns-gpt2", "experts", "experts-transposed"]
)
def test_steps_of_adapters_equal_those_of_peft(name: str):
    model = make_peft_adapter(STEP_CASES[name], drawn=".lora_").double()
    random = np.random.default_rng(5)
    write_tokenizer(Path("base"))
    # 0 and 1 are special tokens of some models.
    ids = np.cumsum(random.integers(0, 3, (STEPS * BATCH, LENGTH)), axis=1) % (len(WORDS) - 2) + 2
    np.save("ids.npy", ids)
    Path("recipe.toml").write_text(RECIPE)
    run_ok("save-init", "base", "--out", "init", "--pad-vocab", "8")
    run_ok("train", "recipe.toml", "--out", "run")
    run_ok("export", "run", "--out", "actual")

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
