"""Checks of a model family on tiny models.

Comparisons with transformers import it when they run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from prepcli.commands.operations.export import export
from prepcli.commands.operations.load_params import load_params
from prepcli.commands.operations.pad_vocab import pad_vocab
from prepcli.commands.operations.save_init import save_init
from prepcli.commands.operations.verify import verify
from prepcli.commands.testing.checkpoints import read_checkpoint
from prepcli.commands.testing.greedy import MAX_NEW_TOKENS, greedy_samples, with_small_embeddings
from prepcli.commands.testing.subject import FamilyUnderTest
from prepcli.commands.testing.tiny_transformers import (
    UNSCANNED,
    has_encoder,
    loss_and_gradients,
    model_logits,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
    with_padded_vocab,
)
from prepcli.commands.testing.torch_transformers import (
    load_torch_model,
    tensor_shapes,
    torch_gradients,
    torch_logits,
    torch_model,
)
from prepcli.core.counts import count_text
from prepcli.models.architecture import OUTPUT_SCALE, XIELU_CONSTANTS
from prepcli.models.mesh import Mesh, parse_mesh
from prepcli.models.moe_config import CORRECTION
from prepcli.models.param_tree import flatten_tree, unflatten_tree
from prepcli.models.registry import family_of
from trainer.distributed.sharding import ShardingContext
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator
from trainer.nn import transformer as models
from trainer.nn.model_spec import ForwardConfig
from trainer.recipe.lr_schedule import LRSchedule
from trainer.training.optimizers.adamw import AdamW
from trainer.training.optimizers.optimizer import Optimizer
from trainer.training.optimizers.weight_decay import WeightDecay
from trainer.training.step import StepSetup, init_train_state, train_step

LOGITS_ATOL = 2e-5
# Relative to the norm of each tensor's gradient.
GRADIENTS_RTOL = 1e-5
LOSS_RTOL = 1e-5
# Tokens of a long sequence.
LONG_LENGTH = 300
# Additional rows of the padded vocabulary.
PADDING_ROWS = 3
ADAMW = Optimizer(
    AdamW(0.9, 0.99, 1e-8),
    LRSchedule(1e-2, 1e-2, "constant", 0, 1),
    WeightDecay(0.1, False),
    clip_norm=1.0,
)


class FailedCheckError(AssertionError):
    """Raised by a check that fails, with the reason."""


class SkippedCheckError(Exception):
    """Raised by a check that cannot run here, with the reason."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a family.

    Attributes:
        name: Name in the table.
        run: Returns a figure for the table. Raises SkippedCheckError if it cannot run, FailedCheckError if it
            fails. Any other exception is a failure too.
        in_golden_files: Whether the default tests cover this check by golden files for the supported families.
        needs_torch: Whether the check compares with transformers.
    """

    name: str
    run: Callable[[FamilyUnderTest], str]
    in_golden_files: bool = False
    needs_torch: bool = True


def _require(condition: object, reason: str) -> None:
    """Raise FailedCheckError with the reason unless the condition holds.

    `python -O` would skip an assertion.
    """
    if not condition:
        raise FailedCheckError(reason)


def check_coverage(subject: FamilyUnderTest) -> str:
    """Check that the axis-map rows map each element of the tensors and of the leaves exactly once."""
    leaves = {
        path: np.zeros(leaf.shape, np.int32)
        for path, leaf in subject.tiny_model.model.leaves.items()
    }
    tensors = {
        location.tensor: np.zeros(location.axis_map.source_shape, np.int32)
        for location in subject.tiny_model.locations
    }
    for location in subject.tiny_model.locations:
        for view in location.views_of_same_elements(
            tensors[location.tensor], leaves[location.leaf_path]
        ):
            view += 1
    wrong = [name for name, counts in (tensors | leaves).items() if not (counts == 1).all()]
    _require(not wrong, f"elements of {', '.join(wrong[:4])} are not mapped exactly once")
    return count_text(sum(counts.size for counts in tensors.values()), "element")


def check_round_trip(subject: FamilyUnderTest) -> str:
    """Convert a checkpoint to an init, back, and to an init again.

    Both formats must keep every bit.
    """
    init = subject.convert(save_init, subject.folder, "written-init")
    back = subject.convert(export, init, "written-back")
    tensors = read_checkpoint(back)
    _require(
        tensors.keys() == subject.tensors.keys(),
        f"tensors in only one checkpoint: {sorted(tensors.keys() ^ subject.tensors.keys())}",
    )
    changed = [
        name for name, tensor in subject.tensors.items() if not _same_bits(tensor, tensors[name])
    ]
    _require(not changed, f"{', '.join(changed[:4])} changed")
    verification = verify(subject.convert(save_init, back, "written-again"), init)
    _require(verification.is_equal, f"{[*verification.differences[:4]]} changed")
    return f"{sum(tensor.size for tensor in tensors.values()):,} equal"


def check_params(subject: FamilyUnderTest) -> str:
    """Compare the parameters that prep loads with the tensors of the file, transposed and stacked by NumPy."""
    loaded = flatten_tree(load_params(subject.folder))
    expected = flatten_tree(subject.params)
    _require(
        loaded.keys() == expected.keys(),
        f"leaves in only one tree: {sorted(loaded.keys() ^ expected.keys())}",
    )
    changed = [
        path
        for path, leaf in expected.items()
        if not _same_bits(np.asarray(leaf), np.asarray(loaded[path]))
    ]
    _require(not changed, f"{', '.join(changed[:4])} differs")
    return count_text(len(loaded), "leaf", "leaves")


def check_forward(subject: FamilyUnderTest) -> str:
    """Compute logits, which must be finite."""
    logits = model_logits(subject.tiny_model.model, subject.params, subject.batch(2, 7))
    _require(np.isfinite(logits).all(), "logits are not finite")
    return "finite"


def check_names_and_shapes(subject: FamilyUnderTest) -> str:
    """Compare the names and shapes of all tensors."""
    shapes = {
        location.tensor: list(location.axis_map.source_shape)
        for location in subject.tiny_model.locations
    }
    expected = tensor_shapes(subject.config)
    different = sorted(
        name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)
    )
    lines = [
        f"{name}: {shapes.get(name)}, transformers has {expected.get(name)}" for name in different
    ]
    _require(not lines, "; ".join(lines[:4]))
    return count_text(len(shapes), "tensor")


def check_export(subject: FamilyUnderTest) -> str:
    """Export an init to Hugging Face files and compare them with the original files."""
    init = subject.convert(save_init, subject.saved_folder, "init", pad_vocab="8")
    return _check_same_checkpoint(subject.saved_folder, subject.convert(export, init, "back"))


def check_logits(subject: FamilyUnderTest) -> str:
    """Compare the logits with transformers, for sequences of equal length."""
    return _check_logits(subject, (7, 7))


def check_padded_batch(subject: FamilyUnderTest) -> str:
    """Compare the logits with transformers, for sequences of different lengths, the shorter one padded."""
    return _check_logits(subject, (7, 4))


def check_long_sequence(subject: FamilyUnderTest) -> str:
    """Compare the logits with transformers, for a sequence longer than the window and the pretraining context."""
    return _check_logits(subject, (LONG_LENGTH,))


def check_gradients(subject: FamilyUnderTest) -> str:
    """Compare loss and gradients.

    In prep the vocabulary is padded, and its padding must have no gradient.
    """
    batch = subject.batch(2, 40)
    expected_loss, expected = torch_gradients(subject.torch_model, batch)
    # Rows of -50 give huge logits: a loss that includes padding would be wrong by far more than LOSS_RTOL.
    config, tensors = with_padded_vocab(subject.config, subject.tensors, PADDING_ROWS, -50.0)
    padded = tiny_transformer(config)
    loss, param_gradients = loss_and_gradients(
        padded.model, padded.params_from_tensors(tensors), batch, ForwardConfig(head_chunk_size=16)
    )
    _require(
        abs(loss / expected_loss - 1) <= LOSS_RTOL,
        f"the loss is {loss}, transformers computes {expected_loss}",
    )
    gradients = padded.tensors_from_params(param_gradients)
    errors = {}
    for name, gradient in expected.items():
        rows = gradient.shape[0]
        _require(not gradients[name][rows:].any(), f"padding of {name} has gradients")
        errors[name] = relative_error(gradients[name][:rows], gradient)
    worst = max(errors, key=lambda name: errors[name])
    return _check_tolerance(errors[worst], GRADIENTS_RTOL, worst)


def check_bfloat16_storage(subject: FamilyUnderTest) -> str:
    """Convert a bfloat16 checkpoint and back, and compare the logits of the converted parameters."""
    saved = subject.save_with_transformers("bfloat16")
    init = subject.convert(save_init, saved, "bfloat16-init")
    _check_same_checkpoint(saved, subject.convert(export, init, "bfloat16-back"))
    batch = subject.batch(1, 9)
    logits = model_logits(subject.tiny_model.model, load_params(init), batch)
    expected = torch_logits(load_torch_model(saved), batch, (9,))
    return _check_tolerance(float(abs(logits - expected).max()), LOGITS_ATOL)


def check_padded_vocabulary(subject: FamilyUnderTest) -> str:
    """Pad the vocabulary and check that transformers computes bit-identical logits of the true vocabulary."""
    padded = load_torch_model(
        subject.convert(pad_vocab, subject.saved_folder, "padded", multiple=8, init="normal")
    )
    vocab = subject.sizes["vocab"]
    batch = subject.batch(2, 60)
    rows = padded.get_output_embeddings().weight.shape[0]
    _require(rows == vocab + -vocab % 8, f"the padded head has {rows} rows")
    before, after = (
        torch_logits(model, batch, (60, 60))[..., :vocab] for model in (subject.torch_model, padded)
    )
    _require(np.array_equal(before, after), f"logits differ by {abs(before - after).max():.1e}")
    return f"{vocab} to {rows}"


def check_step_on_mesh(subject: FamilyUnderTest) -> str:
    """Train a step on a mesh: the loss equals the loss on one device.

    Parameters change and keep their sharding.
    """
    vocab = family_of(subject.mesh_config).sizes(subject.mesh_config)["vocab"]
    # Rounded up to a multiple of 8: 29 + (-29 % 8) = 29 + 3 = 32.
    config = {**subject.mesh_config, "vocab_size": vocab + -vocab % 8, "true_vocab_size": vocab}
    tiny_model = tiny_transformer(config)
    batch = random_batch(vocab, 4, 12, has_source=has_encoder(config))
    # A model without attention has no heads.
    num_heads = family_of(config).sizes(config).get("heads", 1)
    mesh = "1,2,4" if num_heads % 4 == 0 else "1,2,1"
    sharding = _mesh_sharding(parse_mesh(mesh))
    leaves = tiny_model.model.leaves
    before = flatten_tree(tiny_model.params_from_tensors(random_tensors(config)))
    params = unflatten_tree(
        {
            path: jax.device_put(leaf, sharding.param_sharding(leaves[path]))
            for path, leaf in before.items()
        }
    )
    sharded_batch = {
        key: jax.device_put(value, sharding.activation_sharding(value.shape, "batch", "seq"))
        for key, value in batch.items()
    }
    setup = StepSetup(tiny_model.model, ForwardConfig(head_chunk_size=4, sharding=sharding), ADAMW)
    step = jax.jit(partial(train_step, setup=setup))
    state, metrics = step(init_train_state(params, setup), sharded_batch)
    array_batch = {key: jnp.asarray(value) for key, value in batch.items()}
    expected = models.loss_sums(unflatten_tree(before), array_batch, tiny_model.model, UNSCANNED)
    error = abs(float(metrics["loss"]) / float(expected.loss) - 1)
    for path, leaf in flatten_tree(state["params"]).items():
        leaf_sharding = sharding.param_sharding(leaves[path])
        _require(np.isfinite(leaf).all(), f"{path} is not finite")
        has_changed = not np.array_equal(leaf, before[path])
        is_constant = path == OUTPUT_SCALE or path.endswith((CORRECTION, *XIELU_CONSTANTS))
        _require(has_changed or is_constant, f"{path} does not change")
        _require(
            leaf.sharding.is_equivalent_to(leaf_sharding, leaf.ndim), f"{path} is {leaf.sharding}"
        )
    return f"{mesh}: {_check_tolerance(error, LOSS_RTOL)}"


def check_greedy_tokens(subject: FamilyUnderTest) -> str:
    """Compare greedy decoding of models with small embeddings, which vary their output."""
    config = subject.config
    tiny_model = subject.tiny_model
    tensors = with_small_embeddings(config, subject.tensors)
    entry = greedy_samples(torch_model(config, tensors), subject.sizes["vocab"])
    prompts = entry["prompts"]
    generation_config = GenerationConfig(MAX_NEW_TOKENS)
    generator = Generator(
        tiny_model.params_from_tensors(tensors),
        tiny_model.model,
        forward_config=ForwardConfig(),
        generation_config=generation_config,
    )
    if has_encoder(config):
        # Token 0 starts the decoder, as in the configs of T5.
        generated = generator.generate([[0]] * len(prompts), prompts)
    else:
        generated = generator.generate(prompts)
    for prompt, tokens, expected in zip(prompts, generated, entry["tokens"]):
        _require(
            tokens == expected,
            f"from {count_text(len(prompt), 'token')}: {tokens}, transformers generates {expected}",
        )
    return f"{len(generated)} x {MAX_NEW_TOKENS}"


CHECKS = (
    Check("coverage", check_coverage, needs_torch=False),
    Check("round trip", check_round_trip, needs_torch=False),
    Check("parameters", check_params, needs_torch=False),
    Check("forward pass", check_forward, needs_torch=False),
    Check("names and shapes", check_names_and_shapes, in_golden_files=True),
    Check("export", check_export),
    Check("logits", check_logits, in_golden_files=True),
    Check("gradients", check_gradients, in_golden_files=True),
    Check("padded batch", check_padded_batch, in_golden_files=True),
    Check(f"{LONG_LENGTH} tokens", check_long_sequence, in_golden_files=True),
    Check("bfloat16", check_bfloat16_storage),
    Check("pad-vocab", check_padded_vocabulary),
    Check("step on a mesh", check_step_on_mesh, needs_torch=False),
    Check("greedy tokens", check_greedy_tokens, in_golden_files=True),
)


def _mesh_sharding(mesh: Mesh) -> ShardingContext:
    """Return the sharding on the first devices, as many as the mesh has."""
    devices = jax.devices()
    num_needed = math.prod(mesh.sizes)
    if len(devices) < num_needed:
        raise SkippedCheckError(
            f"needs {num_needed} devices, jax has {len(devices)}; set JAX_NUM_CPU_DEVICES={num_needed}"
        )
    # `jax.make_mesh` may order devices by their links. The first devices in their order suffice for a check.
    grid = np.array(devices[:num_needed]).reshape(mesh.sizes)
    axis_types = (AxisType.Auto,) * len(mesh.names)
    return ShardingContext(
        mesh, device_mesh=jax.sharding.Mesh(grid, mesh.names, axis_types=axis_types)
    )


def _check_logits(subject: FamilyUnderTest, lengths: Sequence[int]) -> str:
    """Compare logits at the positions of the tokens, in a batch with padding on the right."""
    batch = subject.batch(len(lengths), max(lengths))
    logits = model_logits(subject.tiny_model.model, subject.params, batch)
    expected = torch_logits(subject.torch_model, batch, lengths)
    error = max(
        float(abs(logits[row, :length] - expected[row, :length]).max())
        for row, length in enumerate(lengths)
    )
    return _check_tolerance(error, LOGITS_ATOL)


def _check_same_checkpoint(saved: Path, exported: Path) -> str:
    """Check that transformers reads equal tensors and configs from two folders."""
    import torch

    before, after = (load_torch_model(folder, "auto").state_dict() for folder in (saved, exported))
    _require(before.keys() == after.keys(), "the names of tensors differ")
    different = [
        n for n, t in before.items() if t.dtype != after[n].dtype or not torch.equal(t, after[n])
    ]
    _require(not different, f"{', '.join(different[:4])} changed")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved, exported)]
    _require(configs[0] == configs[1], "config.json changed")
    return f"{sum(tensor.numel() for tensor in before.values()):,} equal"


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _check_tolerance(error: float, tolerance: float, name: str = "") -> str:
    """Check that an error is at most `tolerance`, and return it as text. `name` is the tensor with the error."""
    _require(
        error <= tolerance, f"error {error:.1e}{name and f' in {name}'}; allowed: {tolerance:.0e}"
    )
    return f"{error:.1e}"
