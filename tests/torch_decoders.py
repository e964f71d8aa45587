"""The same decoders as transformers has them; torch is imported by whoever calls."""

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
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    names = {name for name, _ in model.named_parameters()}
    if names != {*tensors}:
        raise ValueError(f"tensors that only one side has: {sorted(names ^ {*tensors})}")
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()}, strict=False)
    return model


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
    return loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
