"""`params.json` of Meta's LLaMA checkpoints, as the config.json that transformers has for the same model. Pure.

Meta's code knows some things of a model that its files do not say: how long a context is, by how much frequencies are
scaled, which token ends a text. They follow from the published models, as in transformers' own conversion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KNOWN_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
CODE_LLAMA_CONTEXT = 16384  # of Code Llama, whose base is 10^6
MIN_LLAMA_3_VOCAB_SIZE = 100_000  # its vocabulary is larger, that of those before smaller


def to_hf_config(document: object, vocab_size: int, is_tied: bool) -> dict[str, Any]:
    """The config for the content of a params.json, the rows of vocabulary that the tensors have, and whether the head
    is the embedding. Raises ValueError with the reason."""
    params = _params(document)
    dim, heads, layers = (_size(params, key) for key in ("dim", "n_heads", "n_layers"))
    if dim % (2 * heads):
        raise ValueError(f"dim {dim} is no even number for each of {heads} heads")
    theta, is_third = _number(params, "rope_theta", 10000.0), vocab_size >= MIN_LLAMA_3_VOCAB_SIZE
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": _feed_forward(params, dim),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads if params.get("n_kv_heads") is None else _size(params, "n_kv_heads"),
        "vocab_size": vocab_size,
        "rms_norm_eps": _number(params, "norm_eps", None),
        "rope_theta": theta,
        "max_position_embeddings": _context(params, theta, is_third),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 128000 if is_third else 1,
        "eos_token_id": 128001 if is_third else 2,
    }
    return config | ({"rope_scaling": _scaling(params)} if params.get("use_scaled_rope") is True else {})


def is_small_llama_3_2(document: object) -> bool:
    """Whether it is LLaMA 3.2 1B or 3B, whose head is the embedding although both are stored."""
    params = _params(document)
    return params.get("use_scaled_rope") is True and _size(params, "dim") < 4096


def _params(document: object) -> Mapping[str, Any]:
    """The parameters, which some have one level down; ValueError where there are some that LLaMA has not."""
    found = document.get("model", document) if isinstance(document, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError("it holds no JSON object")
    if unknown := sorted(set(found) - KNOWN_KEYS):
        raise ValueError(f"it has {', '.join(unknown[:4])}, which LLaMA 1 to 3.2 have not: it is another kind of model")
    return found


def _size(params: Mapping[str, Any], key: str) -> int:
    found = params.get(key)
    if type(found) is not int or not 1 <= found < 1 << 31:
        raise ValueError(f"{key} is {found!r:.40}, it has to be a whole number from 1 on")
    return found


def _number(params: Mapping[str, Any], key: str, default: float | None) -> float:
    found = params.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"{key} is {found!r:.40}, it has to be a number above 0")
    return float(found)


def _feed_forward(params: Mapping[str, Any], dim: int) -> int:
    """Two thirds of four times the width, times the multiplier, rounded up to a multiple."""
    multiple = _size(params, "multiple_of") if "multiple_of" in params else 256
    factor = 1.0 if params.get("ffn_dim_multiplier") is None else _number(params, "ffn_dim_multiplier", None)
    if factor > 1000:
        raise ValueError(f"ffn_dim_multiplier is {factor:g}, it has to be a small number")
    return -(-int(factor * int(8 * dim / 3)) // multiple) * multiple


def _context(params: Mapping[str, Any], theta: float, is_third: bool) -> int:
    """Positions that the model was trained for: LLaMA 1 has 2048, 2 has 4096."""
    if params.get("use_scaled_rope") is True:
        return 131072
    if theta > 10000:
        return 8192 if is_third else CODE_LLAMA_CONTEXT
    is_first = params["norm_eps"] < 1e-5 or (params["dim"] >= 8192 and params.get("n_kv_heads") is None)
    return 2048 if is_first else 4096


def _scaling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of 3.1; 3.2 has models of a smaller width, and another factor."""
    factor = 32.0 if _size(params, "dim") < 4096 else 8.0
    return {
        "rope_type": "llama3",
        "factor": _number(params, "rope_scaling_factor", factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
