"""Logits and hidden states of a model on prompts of token ids, by prep or by transformers.

A model with an encoder reads the prompt, and its decoder predicts the prompt: its input is the start token and the
prompt without its last token.

Both compute in float32. The modules of JAX and torch are imported inside the functions.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.models.param_tree import Tree
from prepcli.sources.references import CONFIG
from prepcli.stores.files import io_error
from prepcli.stores.paths import AnyPath, StorePath
from trainer.run.params import OpenedModel

if TYPE_CHECKING:
    from jax import Array

    from trainer.nn.model_spec import ForwardConfig
REFERENCE_PACKAGES = ("torch", "transformers")
# Longer prompts are computed with attention in tiles, because the scores of all pairs of tokens may exceed the memory.
MAX_DENSE_TOKENS = 2048
# Tokens whose logits are on the device at the same time: 134 MB for a vocabulary of 131,072.
BLOCK_TOKENS = 256
# Types of models whose hidden states in transformers begin after the first layer.
STATES_WITHOUT_EMBEDDING = {"mamba", "mamba2", "falcon_mamba"}


def temporary_folder() -> Path:
    """Return the folder of temporary files: `TMPDIR`, or the one of the system."""
    return Path(tempfile.gettempdir())


def file_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array in a temporary file without a name. The file is removed with the array."""
    nbytes = 4 * math.prod(shape)
    try:
        with tempfile.TemporaryFile() as file:
            # A write to a mapped page without a block on the disk would end the process with a signal.
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise io_error(temporary_folder(), error) from error


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The output of a model on one prompt.

    Attributes:
        logits: float32 [tokens, true vocabulary].
        states: Residual stream [tokens, width] before the first layer and after each layer. The last one is after the
            final norm.
        encoder_states: The same of the encoder. Empty for a decoder-only model.
    """

    logits: np.ndarray
    states: tuple[np.ndarray, ...]
    encoder_states: tuple[np.ndarray, ...] = ()


def prep_outputs(
    opened: OpenedModel, prompts: Sequence[Sequence[int]], decoder_start_id: int | None = None
) -> Iterator[PromptOutput]:
    """Load a model onto its mesh, and yield its output on each prompt.

    The arrays are in temporary files. Memory does not grow with the number of logits.
    """
    import jax

    params = opened.load(lambda path: "float32")
    # GPUs and TPUs multiply float32 matrices in fewer bits by default.
    with jax.default_matmul_precision("highest"):
        for prompt in prompts:
            yield _prep_output(opened, params, prompt, decoder_start_id)


def _prep_output(
    opened: OpenedModel, params: Tree, prompt: Sequence[int], decoder_start_id: int | None
) -> PromptOutput:
    """Compute the output on a prompt."""
    from trainer.nn import transformer
    from trainer.nn.attention_mask import EncoderOutput

    model = opened.model
    forward_config = _forward_config(opened, len(prompt))
    encoder_states: list[np.ndarray] = []
    encoder_output: EncoderOutput | None = None
    tokens = prompt
    if decoder_start_id is not None:
        tokens = decoder_inputs(prompt, decoder_start_id)
        source = _batch(opened, prompt)
        state = None
        for state in transformer.encoder_states_by_layer(params, source, model, forward_config):
            encoder_states.append(_first_row(state))
        assert state is not None
        encoder_output = EncoderOutput(state)
    states: list[np.ndarray] = []
    last = None
    for last in transformer.hidden_states_by_layer(
        params, _batch(opened, tokens), model, forward_config, encoder_output
    ):
        states.append(_first_row(last))
    assert last is not None
    hidden = transformer.lm_head_input(params, last, model, forward_config)
    logits = file_array((len(prompt), model.true_vocab_size))
    for start in range(0, len(prompt), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        block = transformer.logits_from_hidden(params, hidden[:, rows], model, forward_config)
        logits[rows] = np.asarray(block[0, :, : model.true_vocab_size])
    return PromptOutput(logits, tuple(states), tuple(encoder_states))


def _forward_config(opened: OpenedModel, num_tokens: int) -> ForwardConfig:
    """Return a computation in float32, with attention in tiles for a long prompt."""
    from trainer.nn.model_spec import AttentionOptions, ForwardConfig

    kernel = "reference" if num_tokens <= MAX_DENSE_TOKENS else "blockwise"
    return ForwardConfig(
        "float32",
        scan_layers=opened.model.has_stacked_layers,
        sharding=opened.sharding,
        attention_options=AttentionOptions(kernel),
    )


def _batch(opened: OpenedModel, tokens: Sequence[int]) -> Array:
    """Return int32 [B, T] with the same tokens in each row. The mesh divides B."""
    import jax.numpy as jnp

    return jnp.asarray([list(tokens)] * opened.sharding.data_parallel_size, jnp.int32)


def _first_row(state: Array) -> np.ndarray:
    """Return the first row [T, D] of an array [B, T, D], in a file."""
    copy = file_array(state.shape[1:])
    for start in range(0, len(copy), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        copy[rows] = np.asarray(state[0, rows])
    return copy


def decoder_inputs(prompt: Sequence[int], decoder_start_id: int) -> list[int]:
    """Return the input of a decoder to predict a prompt.

    >>> decoder_inputs([7, 8, 9], 0)
    [0, 7, 8]
    """
    return [decoder_start_id, *prompt[:-1]]


def transformers_outputs(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    true_vocab_size: int,
    decoder_start_id: int | None = None,
) -> Iterator[PromptOutput]:
    """Load a Hugging Face folder with transformers on the CPU, and yield the output on each prompt.

    Code of the folder is not run.
    """
    import torch

    model = _load_reference(folder, has_encoder=decoder_start_id is not None)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        words: dict[str, Any] = {}
        if decoder_start_id is not None:
            words["decoder_input_ids"] = torch.tensor([decoder_inputs(prompt, decoder_start_id)])
        try:
            with torch.no_grad():
                output = model(ids, use_cache=False, output_hidden_states=True, **words)
                if decoder_start_id is None:
                    encoder_stream = ()
                    stream = _residual_stream(model, ids, output.hidden_states)
                else:
                    encoder_stream = output.encoder_hidden_states
                    stream = output.decoder_hidden_states
        except Exception as error:
            why = f"{type(error).__name__}: {error!s:.300}"
            raise PrepError(
                f"transformers cannot compute {folder}", why, "check it with transformers"
            ) from error
        logits = output.logits[0, :, :true_vocab_size].numpy()
        yield PromptOutput(logits, _first_rows(stream), _first_rows(encoder_stream))


def _first_rows(states: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return the first row of each tensor of torch."""
    return tuple(state[0].numpy() for state in states)


def _residual_stream(model: Any, ids: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the states of `PromptOutput`, given the hidden states of transformers."""
    if model.config.model_type in STATES_WITHOUT_EMBEDDING:
        return (model.get_input_embeddings()(ids), *states[:-2], states[-1])
    return states


def missing_reference_packages() -> list[str]:
    """Return the names of the missing packages for a comparison with transformers."""
    return [name for name in REFERENCE_PACKAGES if find_spec(name) is None]


def transformers_folder(folder: AnyPath, display_name: str) -> Path:
    """Return the folder of a checkpoint that transformers can load."""
    option = Option("library", "transformers")
    if missing := missing_reference_packages():
        raise PrepError(
            text("{} is not available", option),
            f"{' and '.join(missing)} not installed",
            "`pip install 'prepcli[hf]' torch`",
        )
    if isinstance(folder, StorePath) or not (folder / CONFIG).is_file():
        raise usage_error(
            text("{} cannot read {}", option, display_name),
            "it is not a local Hugging Face folder",
            text("{} writes one", Command("export", display_name)),
        )
    return folder


def _load_reference(folder: Path, *, has_encoder: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    had_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The annotations of transformers do not describe the second result of `output_loading_info`.
    model_class: Any = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
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
