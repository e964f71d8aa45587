"""The tiny models of `tiny_transformers` in the transformers library. torch is imported inside the functions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.testing.tiny_transformers import Tensors
from prepcli.core.errors import PrepError
from prepcli.core.json_types import HFConfig

REFERENCE_PACKAGES = ("torch", "transformers")
# Config fields with the number of experts per token, in models with experts.
TOP_K_FIELDS = ("num_experts_per_tok", "top_k_experts")
INSTALL_HINT = "pip install 'prepcli[hf]' torch"


class TensorMismatchError(ValueError):
    """A model of transformers with other names or shapes of parameters than expected."""


def missing_reference_packages() -> list[str]:
    """Return the names of the packages that a comparison needs and that are not installed."""
    return [name for name in REFERENCE_PACKAGES if find_spec(name) is None]


def require_reference_packages() -> None:
    """Raise PrepError if torch or transformers is not installed."""
    if missing := missing_reference_packages():
        raise PrepError(
            "cannot compare with transformers",
            f"{' and '.join(missing)} not installed",
            INSTALL_HINT,
        )


def tensor_shapes(config: HFConfig) -> dict[str, list[int]]:
    """Return the shape of each tensor in a file of transformers. Tied parameters are listed once.

    No weights are allocated.
    """
    require_reference_packages()
    import torch

    torch_config = _torch_config(config)
    with torch.device("meta"):
        model = torch_class(torch_config).from_config(torch_config)
    named = dict(model.named_parameters()) | _stored_buffers(model)
    # transformers 5 ties the head of T5 regardless of the config. The files store the head.
    if config.get("tie_word_embeddings") is False:
        named["lm_head.weight"] = model.lm_head.weight
    tensors = to_file_tensors(model, named)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _stored_buffers(model: Any) -> dict[str, Any]:
    """Return the buffers that files store, such as the corrections of DeepSeek's routers."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _torch_config(config: HFConfig) -> Any:
    """Return the config of transformers for these fields."""
    from transformers import AutoConfig

    # A copy, because transformers modifies nested fields.
    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    return AutoConfig.for_model(str(config["model_type"]), **fields)


def torch_model(config: HFConfig, tensors: Tensors) -> Any:
    """Build the float32 model of a config from these tensors. None may be missing or left over."""
    require_reference_packages()
    import torch

    model = torch_random_model(config)
    unique, parameters = (
        dict(model.named_parameters(remove_duplicate=flag)) for flag in (True, False)
    )
    # A tied parameter may be stored in a file.
    unique |= {name: parameters[name] for name in tensors if name in parameters}
    unique |= _stored_buffers(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in to_file_tensors(model, unique).items()}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise TensorMismatchError(f"transformers has {shapes}")
    # `from_pretrained` converts names and layouts of files to those of modules. `load_state_dict` would not.
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    return _from_pretrained(
        type(model), None, config=model.config, state_dict=state, dtype=torch.float32
    )


def torch_random_model(config: HFConfig) -> Any:
    """Build the float32 model of a config with random parameters."""
    torch_config = _torch_config(config)
    model = torch_class(torch_config).from_config(torch_config, attn_implementation="eager")
    return model.float().eval()


def load_torch_model(folder: Path, dtype: str = "float32") -> Any:
    """Load the model of a folder. Raise ValueError for a missing or unused tensor."""
    from transformers import AutoConfig

    return _from_pretrained(torch_class(AutoConfig.from_pretrained(folder)), folder, dtype=dtype)


def _from_pretrained(model_class: Any, source: Path | None, **options: Any) -> Any:
    """Load a model with eager attention and experts.

    Raise ValueError for a missing or unused tensor.
    """
    model, loading_info = model_class.from_pretrained(
        source, attn_implementation="eager", output_loading_info=True, **options
    )
    if any(loading_info.values()):
        raise ValueError(f"not loaded: {loading_info}")
    if any(hasattr(model.config, field) for field in TOP_K_FIELDS):
        model.set_experts_implementation("eager")
    return model.eval()


def torch_class(config: Any) -> Any:
    """Return the auto class for a config of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


@contextmanager
def exact_log() -> Iterator[None]:
    """Replace `torch.log` by the logarithm computed in float64 and rounded to the argument's dtype.

    transformers computes the relative position buckets of T5 from `torch.log`. In float32 its last bit depends on the
    CPU, and one bit changes the bucket of some distances.
    """
    import torch

    native_log = torch.log

    def rounded_log(values: Any) -> Any:
        return native_log(values.double()).to(values.dtype)

    torch.log = rounded_log
    try:
        yield
    finally:
        torch.log = native_log


def _forward_logits(model: Any, batch: Tensors, **options: Any) -> Any:
    """Compute the logits of a batch's tokens, with its source if it has one."""
    import torch

    ids = {
        name: torch.tensor(batch[name]).long()
        for name in ("tokens", "source", "present")
        if name in batch
    }
    if "source" not in ids:
        return model(ids["tokens"], use_cache=False, **options).logits
    source = {"input_ids": ids["source"], "attention_mask": ids["present"]}
    with exact_log():
        return model(decoder_input_ids=ids["tokens"], use_cache=False, **source).logits


def to_file_tensors(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Convert tensors from the names and layout of a model's parameters to those of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, named)


def torch_logits(model: Any, batch: Tensors, lengths: Sequence[int]) -> np.ndarray:
    """Compute logits [B, T, V] of right-padded tokens [B, T]. Row i has `lengths[i]` tokens."""
    import torch

    # lengths (7, 4) with T = 7: row 1 is [1, 1, 1, 1, 0, 0, 0].
    mask = np.arange(batch["tokens"].shape[1]) < np.array(lengths)[:, None]
    with torch.no_grad():
        return _forward_logits(model, batch, attention_mask=torch.tensor(mask).long()).numpy()


def torch_gradients(model: Any, batch: Tensors) -> tuple[float, dict[str, np.ndarray]]:
    """Compute the weighted mean loss of a batch and its gradient for each parameter that has one."""
    import torch

    model.zero_grad()
    logits = _forward_logits(model, batch)
    targets = torch.tensor(batch["targets"]).long()
    weights = torch.tensor(batch["weights"])
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    # The correction of a router is a parameter in some models, and no result depends on it smoothly.
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = to_file_tensors(model, trained)
    return loss.item(), {name: gradient.numpy().copy() for name, gradient in gradients.items()}
