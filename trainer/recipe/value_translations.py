"""Values of settings in other trainers, as values of recipe keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainer.models.decimal_text import parse_decimal
from trainer.recipe.synonyms import SYNONYMS, name_suffixes


def _mesh_with_mp(degree: Any) -> str:
    return f"-1,1,{degree}"


def _override(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def _preset(family: str, size: str) -> str:
    return f"{family}-{size}" if re.fullmatch(r"[\w.]+", size) else size


def _hub_dataset(name: str) -> str:
    """Return the URL of a dataset on the hub; paths of files stay as they are."""
    is_hub_id = re.fullmatch(r"[\w-]+(/[\w-]+)?", name)
    return f"hf://datasets/{name if '/' in name else f'OWNER/{name}'}" if is_hub_id else name


class ValueAdvice(str):
    """Advice for a value of another trainer without an equivalent in a recipe."""


def _best_loss(value: Any) -> str:
    """Return the value of `checkpoint.best` for a switch or a metric."""
    if value in (False, "false", "False"):
        return ValueAdvice("remove it: the best step is not kept by default")
    is_switch = value in (True, "true", "True")
    return (
        "eval_loss" if is_switch or "loss" in str(value) else ValueAdvice("`checkpoint.best` compares eval_loss only")
    )


def _repository(value: Any) -> Any:
    """Return the value of `checkpoint.push` for a switch or a name."""
    if value in (False, "false", "False"):
        return ValueAdvice("remove it: nothing is pushed by default")
    return "OWNER/NAME" if value in (True, "true", "True") else value


def _device_count(ids: Any) -> Any:
    """Return the number of devices in a list or a text such as `0,1,2,3`."""
    return len([part for part in ids.split(",") if part.strip()] if isinstance(ids, str) else ids)


def _profile(steps: Any) -> Any:
    """Return the value of `train.profile` for a switch or a number of steps."""
    if steps in (0, "0", "false", "False"):
        return ValueAdvice("remove it: no steps are recorded by default")
    if steps is True or steps in ("true", "True"):
        return {"start": 10, "steps": 3}
    number = parse_decimal(steps) if isinstance(steps, str) else steps
    return {"start": 10, "steps": number} if isinstance(number, int) else steps


# Functions that translate a value of another trainer. A dotted name applies only in its table.
VALUE_TRANSLATIONS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("bf16", "bfloat16", "use_bf16"), lambda enabled: "bfloat16" if enabled else "float32"),
    **dict.fromkeys(("fp16", "float16"), lambda enabled: "float16" if enabled else "float32"),
    **dict.fromkeys(
        ("bf16_momentum", "bf16_accumulate_momentum"), lambda enabled: "bfloat16" if enabled else "float32"
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing", "remat"),
        lambda enabled: "nothing_saveable" if enabled else "none",
    ),
    **dict.fromkeys(
        ("n_model_shards", "tensor_parallel_degree", "tensor_parallel_size", "tp_size", "mp_num"), _mesh_with_mp
    ),
    **dict.fromkeys(("save_only_model", "last_save_model_only"), lambda enabled: not enabled),
    **dict.fromkeys(("attn_pdrop", "attention_dropout"), lambda rate: {"attention": rate}),
    **dict.fromkeys(
        ("resid_pdrop", "residual_dropout", "resid_dropout", "residue_dropout", "hidden_dropout"),
        lambda rate: {"residual": rate},
    ),
    **dict.fromkeys(("embd_pdrop", "embedding_dropout", "embed_dropout"), lambda rate: {"embedding": rate}),
    **{
        name: partial(_override, name)
        for name in SYNONYMS["model.overrides"]
        if not name.endswith(("overrides", "config"))
    },
    **dict.fromkeys(("dataset_name", "huggingface_dataset.path", "data_args.train.dataset"), _hub_dataset),
    **dict.fromkeys(("data_args.train.dataset_name", "data_args.eval.dataset_name"), str),  # a configuration
    "load_llama_config": partial(_preset, "llama"),
    "load_opt_config": partial(_preset, "opt"),
    "base_model": lambda name: name.replace("_", "-"),
    **dict.fromkeys(SYNONYMS["checkpoint.best"], _best_loss),
    "push_to_hub": _repository,
    "local_device_ids": _device_count,
    "save_bf16": lambda enabled: "bfloat16" if enabled else "float32",
    "profile_steps": _profile,
    "half_precision": lambda enabled: "bfloat16" if enabled else "float32",
    "use_dropout": lambda enabled: "config" if enabled else 0.0,
    "fcm_max_ratio": lambda ratio: [0.0, ratio],
    "fcm_min_ratio": lambda ratio: [ratio, ratio],
    "validation_split_percentage": lambda percent: percent / 100,
}


def translate_value(name: str, value: Any) -> Any:
    """Translate the value of another trainer's setting to the recipe key's value, or to a `ValueAdvice`."""
    translate = next(
        (VALUE_TRANSLATIONS[suffix] for suffix in name_suffixes(name) if suffix in VALUE_TRANSLATIONS), None
    )
    try:
        return value if translate is None else translate(value)
    except (AttributeError, TypeError):  # the value already had the wrong type
        return value
