"""Tiny models with random tensors, as prep and as transformers compute them.

torch and transformers are imported inside the functions that compare with them.

Axes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.commands.operations.model_outputs import missing_reference_packages
from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from trainer.nn import transformer
from trainer.nn.initialization import RESIDUAL_WEIGHTS
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model

Tensors = Mapping[str, np.ndarray]
UNSCANNED = ForwardConfig(scan_layers=False)
INSTALL_HINT = "pip install 'prepcli[hf]' torch"
# Config fields with the number of experts per token, in models with experts.
TOP_K_FIELDS = ("num_experts_per_tok", "top_k_experts")
# Lengths of prompts: below and beyond sliding windows and the positions of pretraining.
PROMPT_LENGTHS = (5, 1, 50)
MAX_NEW_TOKENS = 32
# Random prompts per length. The one with the most varied output is used.
PROMPT_TRIES = 4


class TensorMismatchError(ValueError):
    """A model of transformers with other names or shapes of parameters than expected."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The elements of the tensor `tensor` in the leaf `leaf_path` at `leaf_index`, which is empty for a whole leaf."""

    tensor: str
    leaf_path: str
    leaf_index: tuple[Any, ...]
    axis_map: AxisMap


def split_into_atoms(row: AxisMap, tensor: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return the part of a tensor that an axis map uses, as a view with one dim per axis, and the names of the axes."""
    parts = [slice(dim.start, dim.start + dim.selected_extent) for dim in row.source_dims]
    factors = [factor for dim in row.source_dims for factor in dim.factors]
    # With the ellipsis, a tensor without dims or of one element gives a view too.
    values = tensor[(*parts, ...)].reshape([factor.extent for factor in factors])
    # E.g. the k of a fused (three heads head_dim): `three` is fixed at 1, the others are free.
    index = [slice(None) if factor.fixed is None else factor.fixed for factor in factors]
    return values[(*index, ...)], [factor.atom for factor in factors if factor.fixed is None]


@dataclass(frozen=True, slots=True)
class TinyTransformer:
    """A model with the location of each tensor."""

    model: ModelSpec
    locations: tuple[TensorLocation, ...]

    def params_from_tensors(self, tensors: Tensors) -> Tree:
        """Build the parameter tree of Hugging Face tensors."""
        # NaN marks elements that no tensor fills. They make every later comparison fail.
        leaves = {
            path: np.full(leaf.shape, np.nan, np.float32)
            for path, leaf in self.model.leaves.items()
        }
        for tensor_view, leaf_view in self.views(tensors, leaves):
            leaf_view[...] = tensor_view
        # `jnp.asarray` would compile a program per shape.
        return jax.device_put(unflatten_tree(leaves))

    def tensors_from_params(self, tree: Tree) -> dict[str, np.ndarray]:
        """Build the Hugging Face tensors of a parameter tree."""
        leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(tree).items()}
        tensors = {
            name: np.full(shape, np.nan, np.float32) for name, shape in self.tensor_shapes().items()
        }
        for tensor_view, leaf_view in self.views(tensors, leaves):
            tensor_view[...] = leaf_view
        return tensors

    def tensor_shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor."""
        return {location.tensor: [*location.axis_map.source_shape] for location in self.locations}

    def views(self, tensors: Tensors, leaves: Tensors) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield views of the same elements in a tensor and in a leaf, in the order of the leaf, for each location."""
        for location in self.locations:
            values, atoms = split_into_atoms(location.axis_map, tensors[location.tensor])
            factors = itertools.chain(*location.axis_map.leaf_dims)
            tensor_view = values.transpose(
                [atoms.index(f.atom) for f in factors if f.atom in atoms]
            )
            # With the ellipsis, a leaf of one element per layer gives a view too, and no scalar.
            leaf_part = leaves[location.leaf_path][(*location.leaf_index, ...)]
            yield tensor_view, leaf_part.reshape(tensor_view.shape)


def tiny_transformer(
    config: HFConfig, scan: bool = True, scan_axis: int = 0, has_stored_head: bool = False
) -> TinyTransformer:
    """Build the model of a config.

    Args:
        config: Fields of config.json.
        scan: Whether layers are stacked.
        scan_axis: The axis over which layers are stacked.
        has_stored_head: Whether the checkpoint stores an LM head, which some families then use although the config
            ties it to the embedding.
    """
    family = family_of(config)
    is_tied = family.is_tied(config, (family.tying.head_tensor,) if has_stored_head else ())
    model = build_model(family, config, is_tied, scan=scan, scan_axis=scan_axis)
    locations: list[TensorLocation] = []
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        axis_map = bind_row(row, family.sizes(config))
        for name, atom_indices in axis_map.tensors():
            leaf = model.leaves.get(path.format(**atom_indices))
            if leaf is not None:
                full_name = name if name in family.unprefixed else family.prefix + name
                index = tuple(atom_indices.get(atom, slice(None)) for atom, *_ in leaf.dims)
                locations.append(TensorLocation(full_name, leaf.path, index, axis_map))
    return TinyTransformer(model, tuple(locations))


def random_tensors(
    config: HFConfig, seed: int = 0, has_stored_head: bool = False
) -> dict[str, np.ndarray]:
    """Generate every tensor of a config. Biases are not 0 and scales are not the identity."""
    rng = np.random.default_rng(seed)
    tiny = tiny_transformer(config, has_stored_head=has_stored_head)
    arch_config = tiny.model.arch_config
    tensors: dict[str, np.ndarray] = {}
    for location in tiny.locations:
        if location.tensor in tensors:
            continue
        shape = location.axis_map.source_shape
        values = rng.standard_normal(shape)
        leaf = tiny.model.leaves[location.leaf_path]
        match leaf.role:
            case "scale":
                # An rms_offset norm multiplies by 1 + scale, so its scales are around 0. Other
                # scales are around 1.
                values = 1.0 - arch_config.norm_scale_offset + 0.2 * values
            case "bias":
                values = 0.1 * values
            case "embedding":
                values = 0.5 * values / arch_config.lm_head_input_scale
            case "matrix" if leaf.path.endswith(RESIDUAL_WEIGHTS):
                # The layers of a trained model keep most of the residual stream.
                values = 1.0 + 0.2 * values
            case "matrix":
                # Variance 0.64 / shape[-1], the fan-in of a matrix [out, in].
                values = 0.8 * values / math.sqrt(shape[-1])
        tensors[location.tensor] = values.astype(np.float32)
    return tensors


def with_padded_vocab(
    config: HFConfig, tensors: Tensors, num_padding_rows: int, value: float
) -> tuple[HFConfig, dict[str, np.ndarray]]:
    """Append rows of `value` to every tensor with a vocabulary axis, and set `true_vocab_size`."""
    vocab = family_of(config).sizes(config)["vocab"]
    tiny = tiny_transformer(config)
    padded = {**tensors}
    for location in tiny.locations:
        if ("vocab",) in tiny.model.leaves[location.leaf_path].dims:
            tensor = tensors[location.tensor]
            padding = np.full((num_padding_rows, *tensor.shape[1:]), value, np.float32)
            padded[location.tensor] = np.concatenate([tensor, padding])
    return {**config, "vocab_size": vocab + num_padding_rows, "true_vocab_size": vocab}, padded


def with_small_embeddings(config: HFConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with embeddings and heads multiplied by 0.1.

    With large embeddings, above all if the head is tied, a token predicts itself forever.
    """
    vocab = config["vocab_size"]
    return {
        name: tensor * np.float32(0.1 if tensor.shape[:1] == (vocab,) else 1)
        for name, tensor in tensors.items()
    }


def random_batch(
    vocab: int, rows: int, length: int, seed: int = 0, has_source: bool = False
) -> dict[str, np.ndarray]:
    """Generate tokens, targets and weights [rows, length]. The target of a token of weight 0 is -100.

    `has_source` adds a right-padded source and its mask. A source is longer than a short target.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    weights = rng.choice(np.array([0, 1, 1, 2], np.float32), (rows, length))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": np.where(weights > 0, tokens[:, 1:], -100),
        "weights": weights,
    }
    if has_source:
        # E.g. 8 target and 13 source tokens: exchanged axes then fail on the shape.
        source_length = length + 5 if length < 100 else length
        source = rng.integers(0, vocab, (rows, source_length), dtype=np.int32)
        lengths = rng.integers(source_length // 2, source_length, (rows, 1))
        batch |= {"source": source, "present": np.arange(source_length) < lengths}
    return batch


def has_encoder(config: HFConfig) -> bool:
    """Return whether the model of a config has an encoder."""
    return family_of(config).arch_config(config).encoder is not None


def _inputs(batch: Tensors) -> dict[str, np.ndarray]:
    return {name: batch[name] for name in ("tokens", "source", "present") if name in batch}


def model_logits(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> np.ndarray:
    """Compute logits [B, T, V] of a batch's tokens."""

    @jax.jit
    def compute(params: Tree, arrays: Mapping[str, jax.Array]) -> jax.Array:
        encoder_output = None
        if "source" in arrays:
            encoder_output = transformer.encode(
                params, arrays["source"], model, forward_config, arrays["present"]
            )
        return transformer.compute_logits(
            params, arrays["tokens"], model, forward_config, encoder_output
        )

    return np.asarray(compute(params, _inputs(batch)))


def loss_and_gradients(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> tuple[float, Tree]:
    """Compute the weighted mean loss of a batch and its gradients."""

    def mean_loss(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        sums = transformer.loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(params, batch)
    return float(loss), gradients


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Compute the norm of the difference, relative to the norm of `expected`, which counts as 0.01 at least.

    The minimum hides the rounding of exact zeros, e.g. the gradient of a bias shared by all keys.
    """
    # ||actual - expected|| / max(||expected||, 0.01)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-2))


def torch_class(torch_config: Any) -> Any:
    """Return the auto class for a config of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if torch_config.is_encoder_decoder else AutoModelForCausalLM


def torch_random_model(config: HFConfig) -> Any:
    """Build the float32 model of a config with eager attention and the random parameters of transformers."""
    torch_config = _torch_config(config)
    model = torch_class(torch_config).from_config(torch_config, attn_implementation="eager")
    return model.float().eval()


def _torch_config(config: HFConfig) -> Any:
    if missing := missing_reference_packages():
        why = f"{' and '.join(missing)} not installed"
        raise PrepError("cannot compare with transformers", why, INSTALL_HINT)
    from transformers import AutoConfig

    # A copy, because transformers modifies nested fields.
    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    return AutoConfig.for_model(str(config["model_type"]), **fields)


def to_file_tensors(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Convert tensors from the names and layout of a model's parameters to those of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, named)


def _file_shapes(model: Any, stored: Iterable[str]) -> dict[str, list[int]]:
    """Return the shape of each tensor in a file. Tied parameters are listed once, unless they are in `stored`."""
    named = dict(model.named_parameters())
    all_named = dict(model.named_parameters(remove_duplicate=False))
    named |= {name: all_named[name] for name in stored if name in all_named}
    # Files store some buffers too, such as the corrections of DeepSeek's routers.
    state = model.state_dict().keys()
    named |= {name: buffer for name, buffer in model.named_buffers() if name in state}
    return {name: [*tensor.shape] for name, tensor in to_file_tensors(model, named).items()}


def _meta_model(config: HFConfig) -> Any:
    """Build the model of a config without allocating weights."""
    torch_config = _torch_config(config)
    import torch

    with torch.device("meta"):
        return torch_class(torch_config).from_config(torch_config)


def tensor_shapes(config: HFConfig) -> dict[str, list[int]]:
    """Return the shape of each tensor in a file of transformers. No weights are allocated."""
    # transformers 5 ties the head of T5 regardless of the config. The files store the head.
    is_untied = config.get("tie_word_embeddings") is False
    return _file_shapes(_meta_model(config), ["lm_head.weight"] if is_untied else [])


def torch_model(config: HFConfig, tensors: Tensors) -> Any:
    """Build the float32 model of a config from these tensors. None may be missing or left over."""
    model = _meta_model(config)
    import torch

    shapes = _file_shapes(model, tensors)
    if shapes != {name: [*tensor.shape] for name, tensor in tensors.items()}:
        raise TensorMismatchError(f"transformers has {shapes}")
    # `from_pretrained` converts names and layouts of files to those of modules. `load_state_dict` would not.
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    return _from_pretrained(
        type(model), None, config=model.config, state_dict=state, dtype=torch.float32
    )


def load_torch_model(folder: Path, dtype: str = "float32") -> Any:
    """Load the model of a folder. Raise ValueError for a missing or unused tensor."""
    from transformers import AutoConfig

    return _from_pretrained(torch_class(AutoConfig.from_pretrained(folder)), folder, dtype=dtype)


def _from_pretrained(model_class: Any, source: Path | None, **options: Any) -> Any:
    """Load a model with eager attention and experts."""
    model, loading_info = model_class.from_pretrained(
        source, attn_implementation="eager", output_loading_info=True, **options
    )
    if any(loading_info.values()):
        raise ValueError(f"not loaded: {loading_info}")
    if any(hasattr(model.config, field) for field in TOP_K_FIELDS):
        model.set_experts_implementation("eager")
    return model.eval()


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

    ids = {name: torch.tensor(array).long() for name, array in _inputs(batch).items()}
    if "source" not in ids:
        return model(ids["tokens"], use_cache=False, **options).logits
    source = {"input_ids": ids["source"], "attention_mask": ids["present"]}
    with exact_log():
        return model(decoder_input_ids=ids["tokens"], use_cache=False, **source).logits


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


def greedy_tokens(model: Any, prompt: Sequence[int]) -> list[int]:
    """Return MAX_NEW_TOKENS greedy tokens of transformers after a prompt, which is the source of an encoder.

    No token ends the text. Encoder-decoder models run without a KV cache, because the cache of transformers has the
    layers of the encoder.
    """
    import torch

    encodes = model.config.is_encoder_decoder
    tokens = torch.tensor([prompt])
    with exact_log():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=1,
            max_new_tokens=MAX_NEW_TOKENS, eos_token_id=None, pad_token_id=0, use_cache=not encodes,
        )  # fmt: skip
    return output[0, 1 if encodes else len(prompt) :].tolist()


def greedy_samples(model: Any, vocab: int) -> dict[str, list[list[int]]]:
    """Return a random prompt of each length under `prompts`, and the greedy tokens after it under `tokens`."""
    samples: dict[str, list[list[int]]] = {"prompts": [], "tokens": []}
    for length in PROMPT_LENGTHS:
        prompts = np.random.default_rng(length).integers(0, vocab, (PROMPT_TRIES, length)).tolist()
        outputs = ((prompt, greedy_tokens(model, prompt)) for prompt in prompts)
        prompt, tokens = max(outputs, key=lambda pair: len({*pair[1]}))
        samples["prompts"].append(prompt)
        samples["tokens"].append(tokens)
    return samples
