"""Checks of a model family on tiny models, by themselves and against transformers.

Comparisons with transformers import it when they run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.export import export
from prepcli.commands.operations.model_outputs import missing_reference_packages
from prepcli.commands.operations.pad_vocab import pad_vocab
from prepcli.commands.operations.params import load_params
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.save_init import save_init
from prepcli.commands.operations.verify import verify
from prepcli.commands.testing.checkpoints import read_checkpoint, write_checkpoint
from prepcli.commands.testing.tiny_config import scale_down
from prepcli.commands.testing.tiny_model import (
    INSTALL_HINT,
    MAX_NEW_TOKENS,
    UNSCANNED,
    TinyTransformer,
    greedy_samples,
    has_encoder,
    load_torch_model,
    loss_and_gradients,
    model_logits,
    random_batch,
    random_tensors,
    relative_error,
    tensor_shapes,
    tiny_transformer,
    torch_gradients,
    torch_logits,
    torch_model,
    with_padded_vocab,
    with_small_embeddings,
)
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.formatting import count_text, did_you_mean
from prepcli.core.json_values import HFConfig
from prepcli.core.tables import Table
from prepcli.models.architecture import OUTPUT_SCALE, XIELU_CONSTANTS
from prepcli.models.layer_config import CORRECTION
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.registry import family_of
from prepcli.sources.references import CONFIG
from prepcli.sources.source import read_config
from trainer.distributed.sharding import make_sharding_context
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig
from trainer.recipe.lr_schedule import LRSchedule
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.training.optimizers import Optimizer
from trainer.training.step import StepSetup, init_train_state, train_step

# An odd number finds more mistakes.
NUM_HEADS = 3
# A mesh divides an even number.
NUM_MESH_HEADS = 4
LOGITS_ATOL = 2e-5
# Relative to the norm of each tensor's gradient.
GRADIENTS_RTOL = 1e-5
LOSS_RTOL = 1e-5
# Tokens of a sequence longer than the window and the pretraining context.
LONG_LENGTH = 300
# Devices of the CPU, for training on a mesh.
NUM_DEVICES = 8
# Additional rows of the padded vocabulary.
PADDING_ROWS = 3
ADAMW = Optimizer(
    AdamWTable(lr=1e-2, b1=0.9, b2=0.99, weight_decay=0.1, decay_embeddings=False),
    LRSchedule(1e-2, 1e-2, "constant", 0, 1),
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        check: Name of the check.
        outcome: `skipped` if the check cannot run on this machine.
        text: The measured value of a passed check, or why the check failed or was skipped.
    """

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a family.

    Attributes:
        name: Name in the table.
        run: Returns a figure for the table. Raises SkippedCheckError if it cannot run, FailedCheckError if it
            fails. Any other exception is a failure too.
        needs_torch: Whether the check compares with transformers.
    """

    name: str
    run: Callable[[FamilyUnderTest], str]
    needs_torch: bool = True


class FailedCheckError(AssertionError):
    """Raised by a check that fails, with the reason."""


class SkippedCheckError(Exception):
    """Raised by a check that cannot run here, with the reason."""


class FamilyUnderTest:
    """A tiny model of a family with the same random tensors in prep and in transformers.

    Attributes:
        config: Config of the compared model.
        mesh_config: Config of the model to train on a mesh.
        work: Folder for files.
    """

    def __init__(
        self, config: HFConfig, work: Path, *, mesh_config: HFConfig | None = None
    ) -> None:
        self.config = dict(config)
        self.mesh_config = dict(mesh_config or config)
        self.work = work

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each named axis, such as `heads`."""
        return family_of(self.config).sizes(self.config)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Random tensors by their names in files."""
        return random_tensors(self.config, seed=3)

    @cached_property
    def tiny(self) -> TinyTransformer:
        """The model in prep."""
        return tiny_transformer(self.config)

    @cached_property
    def params(self) -> Tree:
        """The tensors as parameters of prep's model."""
        return self.tiny.params_from_tensors(self.tensors)

    @cached_property
    def torch_model(self) -> Any:
        """The model of transformers."""
        return torch_model(self.config, self.tensors)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """Return a batch of random tokens, with source tokens if the model has an encoder."""
        return random_batch(self.sizes["vocab"], rows, length, 4, has_encoder(self.config))

    @cached_property
    def folder(self) -> Path:
        """A checkpoint with the tensors, written without transformers."""
        return write_checkpoint(self.work / "written", self.config, self.tensors)

    @cached_property
    def saved_folder(self) -> Path:
        """The checkpoint that transformers saves in float32."""
        return self.save_with_transformers("float32")

    def save_with_transformers(self, dtype: str) -> Path:
        """Save a checkpoint of several files in a dtype with transformers, and return its folder."""
        import torch

        folder = self.work / dtype
        # `Module.to` changes the model in place, and other checks need the float32 values. 20KB per file splits the
        # tiny model into several files with an index.
        copy.deepcopy(self.torch_model).to(getattr(torch, dtype)).save_pretrained(
            folder, max_shard_size="20KB"
        )
        return folder

    def convert(
        self, conversion: Callable[..., Conversion], source: Path, name: str, **options: Any
    ) -> Path:
        """Run a conversion of the public API into a new folder, and return the folder."""
        out = self.work / name
        # With an equal output of an earlier call, the conversion would return at once and write nothing.
        shutil.rmtree(out, ignore_errors=True)
        return conversion(source, out, **options).path


def family_report(path: Path, names: Sequence[str], ui: Ui) -> Report:
    """Check the family of a config, and return a report with one line per check.

    The report has an error if a check failed.

    Args:
        path: A config.json, or a folder with one.
        names: Checks to run, empty for all.
        ui: Receives notes.

    Raises:
        PrepError: The config cannot be read, its family is not supported, or a check is unknown.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise usage_error(f"unknown check `{unknown[0]}`", f"known: {', '.join(known)}", hint)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise usage_error(f"{file} does not exist", hint=f"name a {CONFIG}, or a folder with one")
    config = read_config(file)
    tiny = scale_down(config, NUM_HEADS)
    # It fails if jax has started already.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if not missing_reference_packages():
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
    family = family_of(tiny)
    sizes = family.sizes(tiny)
    ui.note(f"{family.name}: {', '.join(f'{axis} {size}' for axis, size in sizes.items())}")
    for axis in ("vocab", "heads"):
        if sizes.get(axis, 1) % 2 == 0:
            ui.warn(f"{axis} of the tiny model is {sizes[axis]}; an odd number finds more mistakes")
    results = check_family(
        config,
        [check for check in CHECKS if not names or check.name in names],
        on_result=lambda result: ui.note(f"{result.outcome}  {result.check}"),
    )
    rows = [(result.check, result.outcome, result.text) for result in results]
    table = Table((family.name, "", ""), rows)
    fields = {"family": family.name, "config": tiny, "checks": results}
    failed = [result for result in results if result.outcome == "failed"]
    if not failed:
        return Report([table], fields)
    what = f"{family.name} fails {len(failed)} of {len(results)} checks"
    reasons = "\n".join(f"{result.check}: {result.text}" for result in failed)
    hint = "`prep docs add-a-family` lists common causes"
    return Report([table], fields, error=PrepError(what, reasons, hint))


def check_family(
    config: HFConfig,
    checks: Sequence[Check] | None = None,
    *,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Check the family of a config on a tiny model, against transformers where it is installed.

    The sizes of a large config are scaled down (see `scale_down`). No file stays.

    Args:
        config: Fields of a config.json.
        checks: Checks to run, of `CHECKS`. None means all.
        on_result: Called with each result as soon as it is known.

    Returns:
        One result for each check, in their order.

    Raises:
        PrepError: The family is not supported, or the config is invalid.
    """
    tiny, mesh_config = (scale_down(config, heads) for heads in (NUM_HEADS, NUM_MESH_HEADS))
    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="prep-family-") as work:
        subject = FamilyUnderTest(tiny, Path(work), mesh_config=mesh_config)
        for result in run_checks(subject, CHECKS if checks is None else checks):
            results.append(result)
            if on_result is not None:
                on_result(result)
    return results


def run_checks(subject: FamilyUnderTest, checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Run the checks one after another, and yield the result of each."""
    missing = missing_reference_packages()
    for check in checks:
        try:
            if check.needs_torch and missing:
                raise SkippedCheckError(f"{' and '.join(missing)} not installed: {INSTALL_HINT}")
            result = CheckResult(check.name, "passed", check.run(subject))
        except SkippedCheckError as skipped:
            result = CheckResult(check.name, "skipped", str(skipped))
        except (FailedCheckError, PrepError) as failure:
            result = CheckResult(check.name, "failed", str(failure))
        except Exception as error:
            # A mistake in a family can raise anything.
            result = CheckResult(check.name, "failed", f"{type(error).__name__}: {error}")
        yield result


def check_coverage(subject: FamilyUnderTest) -> str:
    """Check that the axis-map rows map each element of the tensors and of the leaves exactly once."""
    leaves = subject.tiny.model.leaves
    leaf_counts = {path: np.zeros(leaf.shape, np.int32) for path, leaf in leaves.items()}
    counts = {n: np.zeros(shape, np.int32) for n, shape in subject.tiny.tensor_shapes().items()}
    for views in subject.tiny.views(counts, leaf_counts):
        for view in views:
            view += 1
    wrong = [name for name, array in (counts | leaf_counts).items() if not (array == 1).all()]
    _require(not wrong, f"elements of {', '.join(wrong[:4])} are not mapped exactly once")
    return count_text(sum(array.size for array in counts.values()), "element")


def check_round_trip(subject: FamilyUnderTest) -> str:
    """Convert a checkpoint to an init, back, and to an init again. Both formats must keep every bit."""
    init = subject.convert(save_init, subject.folder, "written-init")
    back = subject.convert(export, init, "written-back")
    tensors = read_checkpoint(back)
    _require_same(subject.tensors, tensors)
    verification = verify(subject.convert(save_init, back, "written-again"), init)
    _require(verification.is_equal, f"{[*verification.differences[:4]]} changed")
    return f"{sum(tensor.size for tensor in tensors.values()):,} equal"


def check_params(subject: FamilyUnderTest) -> str:
    """Compare the parameters that prep loads with the tensors of the file, transposed and stacked by NumPy."""
    loaded = flatten_tree(load_params(subject.folder))
    _require_same(flatten_tree(subject.params), loaded)
    return count_text(len(loaded), "leaf", "leaves")


def check_forward(subject: FamilyUnderTest) -> str:
    """Compute logits, which must be finite."""
    logits = model_logits(subject.tiny.model, subject.params, subject.batch(2, 7))
    _require(np.isfinite(logits).all(), "logits are not finite")
    return "finite"


def check_names_and_shapes(subject: FamilyUnderTest) -> str:
    """Compare the names and shapes of all tensors."""
    shapes = subject.tiny.tensor_shapes()
    expected = tensor_shapes(subject.config)
    lines = [
        f"{name}: {shapes.get(name)}, transformers has {expected.get(name)}"
        for name in sorted(shapes.keys() | expected.keys())
        if shapes.get(name) != expected.get(name)
    ]
    _require(not lines, "; ".join(lines[:4]))
    return count_text(len(shapes), "tensor")


def check_export(subject: FamilyUnderTest) -> str:
    """Export an init to Hugging Face files and compare them with the original files."""
    init = subject.convert(save_init, subject.saved_folder, "init", pad_vocab="8")
    return check_same_checkpoint(subject.saved_folder, subject.convert(export, init, "back"))


def check_logits(subject: FamilyUnderTest, lengths: Sequence[int]) -> str:
    """Compare the logits with transformers, for right-padded rows of these lengths."""
    batch = subject.batch(len(lengths), max(lengths))
    logits = model_logits(subject.tiny.model, subject.params, batch)
    errors = abs(logits - torch_logits(subject.torch_model, batch, lengths))
    error = max(float(errors[row, :length].max()) for row, length in enumerate(lengths))
    return _check_tolerance(error, LOGITS_ATOL)


def check_gradients(
    subject: FamilyUnderTest, scan_layers: bool = True, loss_rtol: float = LOSS_RTOL
) -> str:
    """Compare loss and gradients. In prep the vocabulary is padded, and its padding must have no gradient."""
    batch = subject.batch(2, 40)
    expected_loss, expected = torch_gradients(subject.torch_model, batch)
    # Rows of -50 give huge logits: a loss that includes padding would be wrong by far more.
    config, tensors = with_padded_vocab(subject.config, subject.tensors, PADDING_ROWS, -50.0)
    padded = tiny_transformer(config)
    params = padded.params_from_tensors(tensors)
    forward_config = ForwardConfig(scan_layers=scan_layers, head_chunk_size=16)
    loss, gradient_tree = loss_and_gradients(padded.model, params, batch, forward_config)
    is_close = abs(loss / expected_loss - 1) <= loss_rtol
    _require(is_close, f"the loss is {loss}, transformers computes {expected_loss}")
    gradients = padded.tensors_from_params(gradient_tree)
    errors: dict[str, float] = {}
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
    check_same_checkpoint(saved, subject.convert(export, init, "bfloat16-back"))
    batch = subject.batch(1, 9)
    logits = model_logits(subject.tiny.model, load_params(init), batch)
    expected = torch_logits(load_torch_model(saved), batch, (9,))
    return _check_tolerance(float(abs(logits - expected).max()), LOGITS_ATOL)


def check_padded_vocabulary(subject: FamilyUnderTest) -> str:
    """Pad the vocabulary and check that transformers computes bit-identical logits of the true vocabulary."""
    options = {"multiple": 8, "init": "normal"}
    padded = load_torch_model(subject.convert(pad_vocab, subject.saved_folder, "padded", **options))
    vocab = subject.sizes["vocab"]
    rows = padded.get_output_embeddings().weight.shape[0]
    _require(rows == vocab + -vocab % 8, f"the padded head has {rows} rows")
    batch = subject.batch(2, 60)
    before = torch_logits(subject.torch_model, batch, (60, 60))[..., :vocab]
    after = torch_logits(padded, batch, (60, 60))[..., :vocab]
    _require(np.array_equal(before, after), f"logits differ by {abs(before - after).max():.1e}")
    return f"{vocab} to {rows}"


def check_step_on_mesh(subject: FamilyUnderTest) -> str:
    """Train a step on a mesh: the loss equals the loss on one device.

    Parameters change and keep their sharding.
    """
    sizes = family_of(subject.mesh_config).sizes(subject.mesh_config)
    # Rounded up to a multiple of 8: 29 + (-29 % 8) = 29 + 3 = 32.
    padded_vocab = sizes["vocab"] + -sizes["vocab"] % 8
    config = {
        **subject.mesh_config,
        "vocab_size": padded_vocab,
        "true_vocab_size": sizes["vocab"],
    }
    tiny = tiny_transformer(config)
    batch = random_batch(sizes["vocab"], 4, 12, has_source=has_encoder(config))
    # A model without attention has no heads.
    mesh = "1,2,4" if sizes.get("heads", 1) % 4 == 0 else "1,2,1"
    device_mesh = parse_mesh(mesh)
    count = device_mesh.n_devices
    devices = jax.devices()
    if len(devices) < count:
        why = f"needs {count} devices, jax has {len(devices)}; set JAX_NUM_CPU_DEVICES={count}"
        raise SkippedCheckError(why)
    sharding = make_sharding_context(device_mesh, devices=devices[:count])
    before = flatten_tree(tiny.params_from_tensors(random_tensors(config)))
    leaf_shardings = {path: sharding.param_sharding(tiny.model.leaves[path]) for path in before}
    params = {path: jax.device_put(leaf, leaf_shardings[path]) for path, leaf in before.items()}
    sharded_batch = {
        key: jax.device_put(value, sharding.activation_sharding(value.shape, "batch", "seq"))
        for key, value in batch.items()
    }
    setup = StepSetup(tiny.model, ForwardConfig(head_chunk_size=4, sharding=sharding), ADAMW)
    step = jax.jit(partial(train_step, setup=setup))
    state, metrics = step(init_train_state(unflatten_tree(params), setup), sharded_batch)
    array_batch = {key: jnp.asarray(value) for key, value in batch.items()}
    expected = transformer.loss_sums(unflatten_tree(before), array_batch, tiny.model, UNSCANNED)
    error = abs(float(metrics["loss"]) / float(expected.loss) - 1)
    for path, leaf in flatten_tree(state["params"]).items():
        _require(np.isfinite(leaf).all(), f"{path} is not finite")
        has_changed = not np.array_equal(leaf, before[path])
        is_constant = path == OUTPUT_SCALE or path.endswith((CORRECTION, *XIELU_CONSTANTS))
        _require(has_changed or is_constant, f"{path} does not change")
        keeps_sharding = leaf.sharding.is_equivalent_to(leaf_shardings[path], leaf.ndim)
        _require(keeps_sharding, f"{path} is {leaf.sharding}")
    return f"{mesh}: {_check_tolerance(error, LOSS_RTOL)}"


def check_greedy_tokens(subject: FamilyUnderTest) -> str:
    """Compare greedy decoding of models with small embeddings, which vary their output."""
    tensors = with_small_embeddings(subject.config, subject.tensors)
    samples = greedy_samples(torch_model(subject.config, tensors), subject.sizes["vocab"])
    prompts = samples["prompts"]
    generator = Generator(
        subject.tiny.params_from_tensors(tensors),
        subject.tiny.model,
        forward_config=ForwardConfig(),
        generation_config=GenerationConfig(MAX_NEW_TOKENS),
    )
    if has_encoder(subject.config):
        # Token 0 starts the decoder, as in the configs of T5.
        generated = generator.generate([[0]] * len(prompts), prompts)
    else:
        generated = generator.generate(prompts)
    for prompt, tokens, expected in zip(prompts, generated, samples["tokens"]):
        reason = (
            f"from {count_text(len(prompt), 'token')}: {tokens}, transformers generates {expected}"
        )
        _require(tokens == expected, reason)
    return f"{len(generated)} x {MAX_NEW_TOKENS}"


CHECKS = (
    Check("coverage", check_coverage, needs_torch=False),
    Check("round trip", check_round_trip, needs_torch=False),
    Check("parameters", check_params, needs_torch=False),
    Check("forward pass", check_forward, needs_torch=False),
    Check("names and shapes", check_names_and_shapes),
    Check("export", check_export),
    Check("logits", partial(check_logits, lengths=(7, 7))),
    Check("gradients", check_gradients),
    Check("padded batch", partial(check_logits, lengths=(7, 4))),
    Check(f"{LONG_LENGTH} tokens", partial(check_logits, lengths=(LONG_LENGTH,))),
    Check("bfloat16", check_bfloat16_storage),
    Check("pad-vocab", check_padded_vocabulary),
    Check("step on a mesh", check_step_on_mesh, needs_torch=False),
    Check("greedy tokens", check_greedy_tokens),
)


def check_same_checkpoint(saved: Path, exported: Path) -> str:
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


def _require(condition: object, reason: str) -> None:
    """Raise FailedCheckError with the reason unless the condition holds. `python -O` would skip an assertion."""
    if not condition:
        raise FailedCheckError(reason)


def _require_same(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Require arrays of equal names, bits, dtypes and shapes."""
    only_one = sorted(expected.keys() ^ actual.keys())
    _require(not only_one, f"in only one of both: {', '.join(only_one[:4])}")
    changed: list[str] = []
    for name, value in expected.items():
        before, after = np.asarray(value), np.asarray(actual[name])
        has_same_form = before.dtype == after.dtype and before.shape == after.shape
        if not has_same_form or before.tobytes() != after.tobytes():
            changed.append(name)
    _require(not changed, f"{', '.join(changed[:4])} changed")


def _check_tolerance(error: float, tolerance: float, name: str = "") -> str:
    """Check that an error is at most `tolerance`, and return it as text. `name` is the tensor with the error."""
    where = f" in {name}" if name else ""
    _require(error <= tolerance, f"error {error:.1e}{where}; allowed: {tolerance:.0e}")
    return f"{error:.1e}"
