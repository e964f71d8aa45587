"""Settings of adapters that PEFT and prep share: equal logits and equal merges, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, LLAMA, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from tests.prepcli.commands.operations.test_lora_parity import TOKENS, load_ours, load_torch_model
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig

torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")

LOGITS = {"atol": 2e-5, "rtol": 0}


@dataclass(frozen=True)
class Case:
    """An adapter: the model, the table of a recipe, and the settings of PEFT."""

    config: dict[str, Any]
    recipe: str
    peft: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "patterns": Case(
        LLAMA,
        'rank = 4\ntargets = ["attn.*", "mlp.*"]\nrank_pattern = {"mlp.down" = 8, "q_proj" = 2}\n'
        'alpha_pattern = {"attn.[kv]" = 3.5}\n',
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"mlp.down_proj": 8, "^model.layers.[0-9]+.self_attn.q_proj": 2},
            "alpha_pattern": {".*k_proj": 3},
        },
    ),
    "patterns-gpt2": Case(
        GPT2,
        'rank = 4\ntargets = ["attn.*", "mlp.*"]\nrank_pattern = {"attn.o" = 8}\n',
        {
            "target_modules": ["c_attn", "c_proj"],
            "rank_pattern": {"attn.c_proj": 8},
            "fan_in_fan_out": True,
        },
    ),
    "all-linear": Case(
        LLAMA, 'rank = 4\ntargets = "all-linear"\n', {"target_modules": "all-linear"}
    ),
    "all-linear-moe": Case(
        FAMILY_CONFIGS["qwen2_moe"],
        'rank = 4\ntargets = "all-linear"\n',
        {"target_modules": "all-linear"},
    ),
    "saved": Case(
        LLAMA,
        'rank = 4\nmodules_to_save = ["embed.tokens", "head"]\n',
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved-tied": Case(
        FAMILY_CONFIGS["opt"],
        'rank = 4\nmodules_to_save = ["embed.tokens"]\n',
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "experts": Case(
        FAMILY_CONFIGS["mixtral"],
        'rank = 4\ntarget_parameters = ["mlp.*"]\n',
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts-transposed": Case(
        FAMILY_CONFIGS["gpt_oss"],
        'rank = 4\ntargets = []\ntarget_parameters = ["mlp.down"]\nuse_rslora = true\n',
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}
DEFAULT_CASES = ["patterns", "saved-tied", "experts"]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


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
    assert main(["merge", adapter, base, "--out", "merged", "-q"]) == OK
    model = peft.PeftModel.from_pretrained(load_torch_model(base), adapter).merge_and_unload()
    expected = {name: values.numpy() for name, values in model.state_dict().items()}
    merged = load_torch_model("merged").state_dict()
    assert merged.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(merged[name].numpy(), values, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", slow_except(list(CASES), DEFAULT_CASES))
def test_trained_adapter_is_the_same_in_peft(name: str):
    case = CASES[name]
    make_training_folder(case.config)
    recipe = Path("recipe.toml")
    content = recipe.read_text().replace("tiny-init", "tiny")
    recipe.write_text(f"{content}\n[lora]\n{case.recipe}")
    assert main(["train", "recipe.toml", "--set", "train.steps=4", "-q"]) == OK
    assert main(["export", "runs/recipe", "--out", "adapter", "-q"]) == OK
    base = torch_logits(load_torch_model("tiny"))
    loaded = peft.PeftModel.from_pretrained(load_torch_model("tiny"), "adapter")
    adapted = torch_logits(loaded)
    np.testing.assert_allclose(our_logits("tiny", "adapter"), adapted, **LOGITS)
    assert np.abs(adapted - base).max() > 1e-3
    check_merge("tiny", "adapter")


def make_peft_adapter(case: Case) -> Any:
    """Write a tiny model, `base`, and an adapter of PEFT with random values, and return the model with it."""
    make_checkpoint(Path("base"), case.config)
    settings = peft.LoraConfig(r=4, lora_alpha=6, **case.peft)
    model = peft.get_peft_model(load_torch_model("base"), settings)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    model.save_pretrained("adapter")
    return model


@pytest.mark.parametrize("name", slow_except(list(CASES), DEFAULT_CASES))
def test_adapter_of_peft_is_the_same_in_prep(name: str):
    expected = torch_logits(make_peft_adapter(CASES[name]))
    np.testing.assert_allclose(our_logits("base", "adapter"), expected, **LOGITS)
    check_merge("base", "adapter")


def test_adapter_of_peft_with_an_untied_embedding_is_an_error(
    capsys: pytest.CaptureFixture[str],
):
    case = CASES["saved-tied"]
    make_peft_adapter(Case(case.config, "", case.peft | {"ensure_weight_tying": False}))
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert "modules_to_save without ensure_weight_tying is not supported" in error


def test_adapter_of_peft_with_an_embedding_that_it_does_not_tie_is_an_error(
    capsys: pytest.CaptureFixture[str],
):
    """PEFT ties `embed_tokens` alone. It warns, and trains only the embedding of GPT-2."""
    settings = {"modules_to_save": ["wte"], "ensure_weight_tying": True, "fan_in_fan_out": True}
    make_peft_adapter(Case(GPT2, "", {"target_modules": ["c_attn"], **settings}))
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    assert "a trained embedding without its head is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", slow_except(["patterns", "saved", "saved-tied", "experts"], ["saved"])
)
def test_adapter_of_peft_is_continued(name: str):
    case = CASES[name]
    make_training_folder(case.config)
    settings = peft.LoraConfig(r=4, lora_alpha=6, **case.peft)
    model = peft.get_peft_model(load_torch_model("tiny"), settings)
    model.save_pretrained("adapter")
    recipe = Path("recipe.toml")
    # The vocabulary of `tiny-init` is padded, and that of the adapter is not.
    recipe.write_text(f'{recipe.read_text()}\n[lora]\npath = "adapter"\n')
    assert main(["train", "recipe.toml", "--set", "train.steps=4", "-q"]) == OK
    assert main(["export", "runs/recipe", "--out", "next", "-q"]) == OK
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
