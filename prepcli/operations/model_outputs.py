"""Logits and hidden states of a decoder-only model on prompts of token ids, by prep or by transformers.

Both compute in float32. The modules of JAX and torch are imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.errors import Command, Option, PrepError, text, usage_error
from prepcli.restore.params import OpenedModel
from prepcli.sources.source import CONFIG

REFERENCE_PACKAGES = ("torch", "transformers")
# Types of models whose hidden states in transformers begin after the first layer.
STATES_WITHOUT_EMBEDDING = {"mamba", "mamba2"}


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The output of a model on one prompt.

    Attributes:
        logits: float32 [tokens, true vocabulary].
        states: Residual stream [tokens, width] before the first layer and after each layer. The last one is after the
            final norm.
    """

    logits: np.ndarray
    states: tuple[np.ndarray, ...]


def prep_outputs(opened: OpenedModel, prompts: Sequence[Sequence[int]]) -> Iterator[PromptOutput]:
    """Load a model onto the first device, and yield its output on each prompt.

    Raises:
        PrepError: A parameter is missing or damaged, or the device lacks memory.
    """
    import jax
    import jax.numpy as jnp

    from trainer.nn import transformer
    from trainer.nn.model_spec import ForwardConfig

    model = opened.model
    params = opened.load(lambda path: "float32")
    forward_config = ForwardConfig("float32", scan_layers=model.has_stacked_layers)
    # GPUs and TPUs multiply float32 matrices in fewer bits by default.
    with jax.default_matmul_precision("highest"):
        for prompt in prompts:
            tokens = jnp.asarray([prompt], jnp.int32)
            states: list[np.ndarray] = []
            last = None
            for last in transformer.hidden_states_by_layer(params, tokens, model, forward_config):
                states.append(np.asarray(last[0]))
            assert last is not None
            hidden = transformer.lm_head_input(params, last, model, forward_config)
            logits = transformer.logits_from_hidden(params, hidden, model, forward_config)
            yield PromptOutput(np.asarray(logits[0, :, : model.true_vocab_size]), tuple(states))


def transformers_outputs(
    folder: Path, prompts: Sequence[Sequence[int]], true_vocab_size: int
) -> Iterator[PromptOutput]:
    """Load a Hugging Face folder with transformers on the CPU, and yield the output on each prompt.

    Code of the folder is not run.

    Raises:
        PrepError: torch or transformers is not installed, or transformers cannot load the folder.
    """
    import torch

    model = _load_reference(folder)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        try:
            with torch.no_grad():
                output = model(ids, use_cache=False, output_hidden_states=True)
                stream = _residual_stream(model, ids, output.hidden_states)
        except Exception as error:
            why = f"{type(error).__name__}: {error!s:.300}"
            raise PrepError(
                f"transformers cannot compute {folder}", why, "check it with transformers"
            ) from error
        states: list[np.ndarray] = []
        for state in stream:
            states.append(state[0].numpy())
        yield PromptOutput(output.logits[0, :, :true_vocab_size].numpy(), tuple(states))


def _residual_stream(model: Any, ids: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the states of `PromptOutput`, given the hidden states of transformers.

    Args:
        model: Model of transformers.
        ids: Token ids [1, tokens].
        states: Hidden states [1, tokens, width]. Mamba's lack the embedding, and include the last layer.
    """
    if model.config.model_type in STATES_WITHOUT_EMBEDDING:
        return (model.get_input_embeddings()(ids), *states[:-2], states[-1])
    return states


def check_transformers_can_load(folder: Path, display_name: str, *, is_remote: bool) -> None:
    """Raise PrepError if transformers is not installed, or UsageError if a checkpoint is no folder for it.

    Args:
        folder: Folder of the checkpoint.
        display_name: Name of the checkpoint in messages.
        is_remote: Whether the folder has placeholders of remote files. Their weights would load as zeros.
    """
    option = Option("library", "transformers")
    missing = [name for name in REFERENCE_PACKAGES if find_spec(name) is None]
    if missing:
        raise PrepError(
            text("{} is not available", option),
            f"{' and '.join(missing)} not installed",
            "`pip install 'prepcli[hf]' torch`",
        )
    if is_remote or not (folder / CONFIG).is_file():
        raise usage_error(
            text("{} cannot read {}", option, display_name),
            "it is not a local Hugging Face folder",
            text("{} writes one", Command("export", display_name)),
        )


def _load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    had_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The annotations of transformers do not describe the second result of `output_loading_info`.
    model_class: Any = AutoModelForCausalLM
    try:
        model, loading_info = model_class.from_pretrained(
            folder,
            dtype="float32",
            attn_implementation="eager",
            # The default refuses experts whose rows are no multiple of 16 bytes.
            experts_implementation="eager",
            # The default asks at a terminal whether to run code of the folder.
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        why = f"{type(error).__name__}: {error!s:.300}"
        raise PrepError(
            f"transformers cannot load {folder}", why, "check it with transformers"
        ) from error
    finally:
        if had_progress:
            logging.enable_progress_bar()
    for key in ("missing_keys", "mismatched_keys"):
        if names := loading_info.get(key):
            why = f"{key.replace('_', ' ')}: {', '.join(map(str, sorted(names)[:3]))}"
            hint = "use a complete Hugging Face folder"
            raise PrepError(f"transformers cannot load {folder}", why, hint)
    return model.eval()
