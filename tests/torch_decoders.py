"""The same decoders as transformers has them, by the names of files; torch is imported by whoever calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.decoders import Tensors
from trainer.table import Config


def torch_model(config: Config, tensors: Tensors) -> Any:
    """The model of a config in float32 with these tensors; every parameter is among them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})  # it writes into them
    made = AutoConfig.for_model(config["model_type"], **fields)
    plain = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float()
    wanted = {name: tuple(tensor.shape) for name, tensor in as_files(plain, dict(plain.named_parameters())).items()}
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        raise ValueError(f"transformers has {wanted}")
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    model, told = type(plain).from_pretrained(
        None, config=made, state_dict=state, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    if any(told.values()):
        raise ValueError(f"not loaded: {told}")
    if hasattr(made, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.eval()


def as_files(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Tensors by parameter as they are in memory -> as files have them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, named)


def torch_logits(model: Any, tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[B, T] of which `lengths` count in each row -> [B, T, V]."""
    import torch

    mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    with torch.no_grad():
        out = model(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long(), use_cache=False)
    return out.logits.numpy()


def torch_gradients(model: Any, batch: Tensors) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over the weights of a batch, and its gradient by each parameter."""
    import torch

    model.zero_grad()
    found = model(torch.tensor(batch["tokens"]).long(), use_cache=False).logits
    targets, weights = torch.tensor(batch["targets"]).long(), torch.tensor(batch["weights"])
    each = torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten(), reduction="none")
    loss = (each * weights.flatten()).sum() / weights.sum()
    loss.backward()
    found = as_files(model, {name: p.grad for name, p in model.named_parameters()})
    return loss.item(), {name: gradient.numpy().copy() for name, gradient in found.items()}
