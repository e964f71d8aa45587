"""Adapters of PEFT and of prep, where peft is installed: equal logits, losses and gradients in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from prepcli.models.param_tree import flatten_tree
from prepcli.models.registry import FAMILIES
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.openers.peft_settings import read_adapter_family
from prepcli.sources.openers.tensor_files import open_adapter
from prepcli.sources.opening import open_source
from tests.helpers import runs
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model
from trainer.training.checkpoint import init_state
from trainer.training.step import StepSetup

torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 131
CASES = {
    "llama": (LLAMA, ["q_proj", "v_proj", "down_proj"]),
    "gpt2": (GPT2, ["c_attn", "c_proj", "c_fc"]),
    "phi3": (FAMILY_CONFIGS["phi3"], ["qkv_proj", "gate_up_proj"]),
    "gpt_neox": (FAMILY_CONFIGS["gpt_neox"], ["query_key_value", "dense"]),
    "gpt_neo": (GPT_NEO, ["q_proj", "out_proj"]),
    "mixtral": (FAMILY_CONFIGS["mixtral"], ["k_proj", "o_proj"]),
    "deepseek_v3": (FAMILY_CONFIGS["deepseek_v3"], ["q_b_proj", "kv_b_proj"]),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def load_torch_model(folder: str) -> Any:
    """Load a model of torch in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


def make_peft_model(config: dict[str, Any], modules: list[str]) -> Any:
    """Write a tiny model and a random adapter of PEFT, and return the model with the adapter."""
    make_checkpoint(Path("base"), config)
    is_transposed = config["model_type"] == "gpt2"
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, fan_in_fan_out=is_transposed
    )
    model = peft.get_peft_model(load_torch_model("base"), settings)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained("adapter")
    return model


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


@pytest.mark.parametrize("case", slow_except(list(CASES), ["llama", "gpt2", "phi3"]))
def test_adapter_of_peft_has_equal_logits(case: str):
    peft_model = make_peft_model(*CASES[case])
    model, params = load_ours("base", "adapter")
    with torch.no_grad():
        expected = peft_model(torch.from_numpy(TOKENS).long()).logits.numpy()
    logits = jax.jit(
        lambda params: transformer.compute_logits(
            params, jnp.asarray(TOKENS), model, ForwardConfig()
        )
    )(params)
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def adapter_gradients(model: ModelSpec, params: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Compute the mean loss of the next tokens, and its gradients by path of the adapters."""
    batch = {
        "tokens": TOKENS[:, :-1],
        "targets": TOKENS[:, 1:],
        "weights": np.ones((2, 11), np.float32),
    }
    setup = StepSetup(model, ForwardConfig(), runs.ADAMW)

    def mean_loss(trained: Any) -> Any:
        return (
            transformer.loss_sums(
                setup.with_trained_params(params, trained), batch, model, ForwardConfig()
            ).loss
            / 22
        )

    loss, gradients = jax.value_and_grad(mean_loss)(setup.trained_params(params))
    return float(loss), {path: np.asarray(leaf) for path, leaf in flatten_tree(gradients).items()}


def peft_gradients(model: Any, module: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of A and B of a module, stacked over layers."""
    named = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    a, b = (
        np.stack([grad for name, grad in named.items() if f".{module}.lora_{matrix}." in name])
        for matrix in "AB"
    )
    return a, b


@pytest.mark.parametrize(
    ("case", "modules"),
    slow_except(
        [
            ("llama", {"self_attn.q_proj": ["attn.q"], "mlp.down_proj": ["mlp.down"]}),
            ("gpt2", {"attn.c_attn": ["attn.q", "attn.k", "attn.v"], "mlp.c_proj": ["mlp.down"]}),
        ],
        lambda case: (
            case[0] == "gpt2"
        ),  # which fuses queries, keys and values, and transposes weights
    ),
)
def test_loss_and_gradients_equal_peft(case: str, modules: dict[str, list[str]]):
    peft_model = make_peft_model(*CASES[case])
    labels = torch.from_numpy(TOKENS).long()
    peft_loss = peft_model(labels, labels=labels).loss
    peft_loss.backward()
    loss, gradients = adapter_gradients(*load_ours("base", "adapter"))
    np.testing.assert_allclose(loss, peft_loss.item(), rtol=1e-5)
    for module, names in modules.items():
        expected_a, expected_b = peft_gradients(peft_model, module)
        a = gradients[f"layers.{names[0]}.lora_a"].reshape(expected_a.shape)
        b = np.concatenate(
            [gradients[f"layers.{name}.lora_b"].reshape(len(a), -1, 4) for name in names], 1
        )
        np.testing.assert_allclose(a, expected_a, atol=1e-5)
        np.testing.assert_allclose(b, expected_b, atol=1e-5)


@pytest.mark.parametrize(
    "config", slow_except([LLAMA, GPT2], [GPT2]), ids=lambda config: config["model_type"]
)
def test_trained_adapter_has_equal_logits_in_peft(config: dict[str, Any]):
    make_training_folder(config)
    lora = '\n[lora]\nrank = 4\ntargets = ["attn.q", "attn.o", "mlp.down"]\n'
    Path("recipe.toml").write_text(
        Path("recipe.toml").read_text().replace("tiny-init", "tiny") + lora
    )
    assert main(["train", "recipe.toml", "--set", "train.steps=4", "-q"]) == OK
    assert main(["export", "runs/recipe", "--out", "adapter", "-q"]) == OK
    assert main(["merge", "adapter", "tiny", "--out", "merged", "-q"]) == OK
    tokens = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        base = load_torch_model("tiny")(tokens).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(load_torch_model("tiny"), "adapter")(
            tokens
        ).logits.numpy()
        merged = load_torch_model("merged")(tokens).logits.numpy()
    model, params = load_ours("tiny", "adapter")
    logits = np.asarray(
        transformer.compute_logits(params, jnp.asarray(TOKENS), model, ForwardConfig())
    )
    np.testing.assert_allclose(adapted, logits, atol=2e-5)
    np.testing.assert_allclose(merged, logits, atol=2e-5)
    assert np.abs(adapted - base).max() > 1e-3
