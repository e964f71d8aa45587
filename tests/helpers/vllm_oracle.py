"""Generate greedily with vLLM on a CPU, from prompts of token ids, and print the new ids as JSON.

It runs in the environment of vLLM: `python vllm_oracle.py MODEL PROMPTS.json NEW_TOKENS`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    """Print a line with the new ids of each prompt. vLLM prints its log before it."""
    model, prompts_path, num_new = sys.argv[1:]
    # By name, because pyright runs in an environment without vLLM.
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=int(num_new), ignore_eos=True, detokenize=False
    )
    prompts = json.loads(Path(prompts_path).read_text())
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    print("new ids", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


# vLLM starts its engine in a new process, which imports this module again.
if __name__ == "__main__":
    main()
