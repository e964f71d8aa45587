"""Exports restored by MaxText, Tunix, Levanter, torchtitan and vLLM themselves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import assert_same, read_tensors

torch = lazy_module("torch")
transformers = lazy_module("transformers")
HELPERS = Path(__file__).parents[3] / "helpers"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The rotary base of Tunix is fixed.
TUNIX_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
# Levanter rotates all layers of Gemma 3 with one base.
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# A window shorter than the 12 tokens of the test.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
# torchtitan fixes the heads of GPT-OSS.
GPT_OSS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
MAXTEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "gemma2": ("gemma2", GEMMA),
    "gemma3_text": ("gemma3_text", GEMMA | {"num_hidden_layers": 8}),
}
TUNIX_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": TUNIX_ROPE},
    "qwen2": {"rope_parameters": TUNIX_ROPE, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": TUNIX_ROPE, "head_dim": 16},
    "qwen3_moe": {"rope_parameters": TUNIX_ROPE, **QWEN3_MOE},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
}
LEVANTER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3.1": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "gemma": ("gemma", {"head_dim": 16}),
    # Levanter does not cap the logits of Gemma 2.
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": None},
    ),
    "gemma3_text": ("gemma3_text", TUNIX_MODELS["gemma3_text"] | {"rope_parameters": GEMMA3_ROPE}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "gpt2": ("gpt2", {"n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}),
}
TORCHTITAN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "gpt_oss": ("gpt_oss", GPT_OSS),
}
LEVANTER_CASES = [
    *(("levanter", model) for model in LEVANTER_MODELS if model != "olmo3"),
    *(("levanter-unscanned", model) for model in ("llama", "mixtral", "olmo3")),
]


def make_model(model_type: str, changes: dict[str, Any]) -> np.ndarray:
    """Save a random model of transformers to `model`, and return its logits for the tokens 1 to 12."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        # MaxText rounds a tied head to bfloat16. A sum of 1 and a bfloat16 value is exact in float32.
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained("model")
    with torch.no_grad():
        return model(torch.arange(1, 13)[None]).logits.numpy()


def run_oracle(variable: str, script: str, *words: str) -> None:
    """Run a script with the Python that an environment variable names, and skip the test without it."""
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} is not set")
    # The flags of the tests' jax may be unknown to another version.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    result = subprocess.run(
        [python, HELPERS / script, *words], capture_output=True, text=True, check=False, env=env
    )
    assert result.returncode == 0, result.stderr[-2000:]


def check_logits(expected: np.ndarray) -> None:
    logits = np.load("logits.npy")
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("model", MAXTEXT_MODELS)
@pytest.mark.parametrize("layout", ["maxtext", "maxtext-unscanned"])
def test_maxtext_restores_and_saves_every_bit(model: str, layout: str):
    expected = make_model(*MAXTEXT_MODELS[model])
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    item, saved = (str(Path(name).absolute()) for name in ("out/0/items", "saved"))
    words = ("model/config.json", item, layout, "logits.npy", saved)
    run_oracle("PREP_MAXTEXT_PYTHON", "maxtext_oracle.py", *words)
    check_logits(expected)
    prep.export("./saved", "back", config="model")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TUNIX_MODELS)
def test_tunix_restores_and_saves_every_bit(model_type: str):
    expected = make_model(model_type, TUNIX_MODELS[model_type])
    run_ok("export", "./model", "--layout", "tunix", "--out", "out")
    folders = (str(Path(name).absolute()) for name in ("out", "saved"))
    run_oracle("PREP_TUNIX_PYTHON", "tunix_oracle.py", "model/config.json", *folders, "logits.npy")
    check_logits(expected)
    prep.export("./saved", "back", config="model")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model"), LEVANTER_CASES)
def test_levanter_restores_and_saves_every_bit(layout: str, model: str):
    expected = make_model(*LEVANTER_MODELS[model])
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    exported, saved = (str(Path(name).absolute()) for name in ("out", "saved"))
    words = ("model/config.json", exported, layout, saved, "logits.npy")
    run_oracle("PREP_LEVANTER_PYTHON", "levanter_oracle.py", *words)
    check_logits(expected)
    prep.export("./saved", "back", config="model")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


@pytest.mark.slow
@pytest.mark.parametrize("model", TORCHTITAN_MODELS)
def test_torchtitan_restores_and_saves_every_bit(model: str):
    expected = make_model(*TORCHTITAN_MODELS[model])
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    words = ("model/config.json", "out", "saved", "logits.npy")
    run_oracle("PREP_TORCHTITAN_PYTHON", "torchtitan_oracle.py", *words)
    check_logits(expected)
    prep.export("./saved", "back", config="model")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


# Exports served by vLLM itself: it generates the tokens of transformers


ORACLE = Path(__file__).parents[3] / "helpers" / "vllm_oracle.py"
NUM_NEW = 16
PROMPTS = [[1, 5, 9, 44, 700, 3], [12, 13, 900, 4, 8]]
# A vocabulary that 2 does not divide, and heads of a size that vLLM has on CPUs.
VLLM_SIZES = {
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


@pytest.mark.slow
@pytest.mark.skipif("PREP_VLLM_PYTHON" not in os.environ, reason="needs vLLM")
@pytest.mark.parametrize("model_type", CLASSES)
def test_vllm_generates_the_tokens_of_transformers(model_type: str, tmp_path: Path):
    config_class, model_class = CLASSES[model_type]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**VLLM_SIZES)
    model = getattr(transformers, model_class)(config)
    source, init, export = (str(tmp_path / name) for name in ("model", "init", "hf"))
    model.save_pretrained(source)
    run_ok("save-init", source, "--mesh", "1,2,2", "--pad-vocab", "auto", "--out", init)
    run_ok("export", init, "--out", export)

    expected: list[list[int]] = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(ids[0, len(prompt) :].tolist())
    assert generate_with_vllm(export, tmp_path) == expected


def generate_with_vllm(model: str, folder: Path) -> list[list[int]]:
    """Return the new ids of each prompt."""
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [os.environ["PREP_VLLM_PYTHON"], ORACLE, model, prompts, str(NUM_NEW)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    # Other lines are the log of vLLM.
    lines = [line for line in result.stdout.splitlines() if line.startswith("new ids ")]
    return json.loads(lines[-1].removeprefix("new ids "))
