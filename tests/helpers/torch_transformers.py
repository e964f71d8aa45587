"""The same decoders as transformers has them, by the names of files; torch is imported by whoever calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tiny_transformers import Tensors
from trainer.models.parameters import HFConfig


class TensorMismatchError(ValueError):
    """A model of transformers has parameters of other names or shapes than expected."""


def torch_model(config: HFConfig, tensors: Tensors) -> Any:
    """The model of a config in float32 with these tensors; every parameter is among them."""
    import torch

    plain = torch_random_model(config)
    named, every = (dict(plain.named_parameters(remove_duplicate=once)) for once in (True, False))
    named |= {name: every[name] for name in tensors if name in every}  # a tied one may be its own in files
    wanted = {name: tuple(tensor.shape) for name, tensor in to_file_tensors(plain, named).items()}
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        raise TensorMismatchError(f"transformers has {wanted}")
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    return _from_pretrained(type(plain), None, config=plain.config, state_dict=state, dtype=torch.float32)


def torch_random_model(config: HFConfig) -> Any:
    """The model of a config in float32 with first values."""
    from transformers import AutoConfig

    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})  # it writes into them
    made = AutoConfig.for_model(config["model_type"], **fields)
    return torch_class(made).from_config(made, attn_implementation="eager").float().eval()


def load_torch_model(folder: Path, dtype: str = "float32") -> Any:
    """The model of a folder, of which every tensor is used and none is missing."""
    from transformers import AutoConfig

    return _from_pretrained(torch_class(AutoConfig.from_pretrained(folder)), folder, dtype=dtype)


def _from_pretrained(kind: Any, source: Path | None, **options: Any) -> Any:
    model, told = kind.from_pretrained(source, attn_implementation="eager", output_loading_info=True, **options)
    if any(told.values()):
        raise ValueError(f"not loaded: {told}")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.eval()


def torch_class(config: Any) -> Any:
    """The class that makes models of a config of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _forward_logits(model: Any, batch: Tensors, **more: Any) -> Any:
    """The logits of a batch's tokens, with its source where there is one."""
    import torch

    given = {name: torch.tensor(batch[name]).long() for name in ("tokens", "source", "present") if name in batch}
    if "source" not in given:
        return model(given["tokens"], use_cache=False, **more).logits
    source = {"input_ids": given["source"], "attention_mask": given["present"]}
    return model(decoder_input_ids=given["tokens"], use_cache=False, **source).logits


def to_file_tensors(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Tensors by parameter as they are in memory -> as files have them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, named)


def torch_logits(model: Any, batch: Tensors, lengths: Sequence[int]) -> np.ndarray:
    """Of the tokens [B, T] of a batch, of which `lengths` count in each row: [B, T, V]."""
    import torch

    mask = np.arange(batch["tokens"].shape[1]) < np.array(lengths)[:, None]
    with torch.no_grad():
        return _forward_logits(model, batch, attention_mask=torch.tensor(mask).long()).numpy()


def torch_gradients(model: Any, batch: Tensors) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over the weights of a batch, and its gradient by each parameter."""
    import torch

    model.zero_grad()
    found = _forward_logits(model, batch)
    targets, weights = torch.tensor(batch["targets"]).long(), torch.tensor(batch["weights"])
    each = torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten(), reduction="none")
    loss = (each * weights.flatten()).sum() / weights.sum()
    loss.backward()
    found = to_file_tensors(model, {name: p.grad for name, p in model.named_parameters()})
    return loss.item(), {name: gradient.numpy().copy() for name, gradient in found.items()}
