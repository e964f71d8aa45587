"""Convert `params.json` of Meta's LLaMA and of Mistral to the config.json of transformers. The functions are pure.

Mistral's checkpoints have Meta's names of tensors, and parameters of their own. Some properties of a model are only in
Meta's code: the context length, the rotary scaling and the special tokens. They are derived from the published models,
as in `convert_llama_weights_to_hf.py` and `convert_mistral_weights_to_hf.py` of transformers.
"""

from __future__ import annotations

import math

from prepcli.core.json_values import JsonObject

KNOWN_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
# Parameters of Mistral's dense models. Others have experts (`moe`), images (`vision_encoder`) or another attention.
MISTRAL_KEYS = {
    "dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "rope_theta",
    "sliding_window", "max_seq_len", "max_batch_size",
}  # fmt: skip
# Context length that the conversion of transformers takes for a params.json without one.
MISTRAL_CONTEXT = 32768
CODE_LLAMA_CONTEXT = 16384  # Code Llama has rope_theta 10^6
MIN_LLAMA_3_VOCAB_SIZE = 100_000  # earlier versions have smaller vocabularies


def to_hf_config(document: object, vocab_size: int, is_tied: bool) -> JsonObject:
    """Return the config.json of transformers for a params.json.

    Raises:
        ValueError: A parameter is unknown, missing or out of range.
    """
    params = _read_params(document)
    hidden_size, num_heads, num_layers = (
        _read_positive_int(params, key) for key in ("dim", "n_heads", "n_layers")
    )
    if hidden_size % (2 * num_heads):
        raise ValueError(f"dim {hidden_size} is not an even number for each of {num_heads} heads")
    rope_theta = _read_positive(params, "rope_theta", 10000.0)
    is_llama_3 = vocab_size >= MIN_LLAMA_3_VOCAB_SIZE
    config: JsonObject = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(params, hidden_size),
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads
        if params.get("n_kv_heads") is None
        else _read_positive_int(params, "n_kv_heads"),
        "vocab_size": vocab_size,
        "rms_norm_eps": _read_positive(params, "norm_eps", None),
        "rope_theta": rope_theta,
        "max_position_embeddings": _max_position_embeddings(params, rope_theta, is_llama_3),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 128000 if is_llama_3 else 1,
        "eos_token_id": 128001 if is_llama_3 else 2,
    }
    if params.get("use_scaled_rope") is True:
        # LLaMA 3.1, or 3.2: its models are narrower and have a larger factor
        factor = 32.0 if _read_positive_int(params, "dim") < 4096 else 8.0
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": _read_positive(params, "rope_scaling_factor", factor),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return config


def is_dense_mistral(document: object) -> bool:
    """Return whether a params.json is that of a dense model of Mistral. LLaMA states no size of its MLP."""
    return isinstance(document, dict) and "hidden_dim" in document and set(document) <= MISTRAL_KEYS


def mistral_to_hf_config(params: JsonObject, vocab_size: int, is_tied: bool) -> JsonObject:
    """Return the config.json of transformers for a params.json of Mistral. Arguments as for `to_hf_config`.

    Raises:
        ValueError: A parameter is missing or out of range.
    """
    names = ("dim", "n_layers", "n_heads", "hidden_dim")
    hidden_size, num_layers, num_heads, mlp_size = (_read_positive_int(params, n) for n in names)
    optional = {
        "n_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_seq_len": MISTRAL_CONTEXT,
    }
    optional |= {key: _read_positive_int(params, key) for key in optional if key in params}
    window = params.get("sliding_window")
    # Some files have a text.
    if isinstance(window, str) and window.isdecimal():
        window = int(window)
    if window is not None:
        window = _read_positive_int({"sliding_window": window}, "sliding_window")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": hidden_size,
        "intermediate_size": mlp_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": optional["n_kv_heads"],
        "head_dim": optional["head_dim"],
        "vocab_size": vocab_size,
        "rms_norm_eps": _read_positive(params, "norm_eps", None),
        "rope_theta": _read_positive(params, "rope_theta", 10000.0),
        "max_position_embeddings": optional["max_seq_len"],
        "sliding_window": window,
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def is_small_llama_3_2(document: object) -> bool:
    """Return whether this is LLaMA 3.2 1B or 3B, which stores the LM head although it is tied to the embedding."""
    params = _read_params(document)
    return params.get("use_scaled_rope") is True and _read_positive_int(params, "dim") < 4096


def _read_params(document: object) -> JsonObject:
    """Return the parameters, which some files nest under `model`. Raise ValueError for unknown keys."""
    params = document
    if isinstance(document, dict):
        params = document.get("model", document)
    if not isinstance(params, dict):
        raise ValueError("it is not a JSON object")
    if unknown := sorted(set(params) - KNOWN_KEYS):
        raise ValueError(
            f"it has {', '.join(unknown[:4])}, which LLaMA 1 to 3.2 do not have: another kind of model"
        )
    return params


def _read_positive_int(params: JsonObject, key: str) -> int:
    value = params.get(key)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{key} is {value!r:.40}, it must be a whole number from 1 to 2^31 - 1")
    return value


def _read_positive(params: JsonObject, key: str, default: float | None) -> float:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r:.40}, it must be a number above 0")
    return float(value)


def _intermediate_size(params: JsonObject, hidden_size: int) -> int:
    """Return `8/3 * hidden_size * ffn_dim_multiplier`, rounded up to a multiple of `multiple_of`."""
    multiple = _read_positive_int(params, "multiple_of") if "multiple_of" in params else 256
    if params.get("ffn_dim_multiplier") is None:
        factor = 1.0
    else:
        factor = _read_positive(params, "ffn_dim_multiplier", None)
    if factor > 1000:
        raise ValueError(f"ffn_dim_multiplier is {factor:g}, it must be at most 1000")
    return -(-int(factor * int(8 * hidden_size / 3)) // multiple) * multiple


def _max_position_embeddings(params: JsonObject, rope_theta: float, is_llama_3: bool) -> int:
    """Return the context length of the model's training (LLaMA 1: 2048, LLaMA 2: 4096)."""
    if params.get("use_scaled_rope") is True:
        return 131072
    if rope_theta > 10000:
        if is_llama_3:
            return 8192
        return CODE_LLAMA_CONTEXT
    is_grouped = params.get("n_kv_heads") is not None
    is_large = _read_positive_int(params, "dim") >= 8192
    if _read_positive(params, "norm_eps", None) < 1e-5 or (is_large and not is_grouped):
        return 2048
    return 4096
