"""Check families against transformers with tiny configs: `python -m tests.helpers.family_kit CONFIG.json …`.

The configs of a family make one column of the table. The first config has an odd vocabulary and an odd number of heads.
The last one, which may be the same, is trained on a mesh: 1,2,4 if 4 divides its heads, else 1,2,1. Without configs the
kit checks all families. It needs the `parity` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType

from prepcli.cli.main import main as prep
from prepcli.console.ui import format_table
from tests.golden import make_greedy
from tests.golden.make_families import describe
from tests.helpers import tiny_transformers
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA
from tests.helpers.tiny_configs import ODD_HEADS
from tests.helpers.tiny_transformers import (
    UNSCANNED,
    TinyTransformer,
    has_encoder,
    loss_and_gradients,
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from tests.helpers.torch_transformers import load_torch_model, torch_gradients, torch_logits, torch_model
from trainer.distributed.sharding import ShardingContext
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator
from trainer.models.errors import PrepError
from trainer.models.mesh import Mesh, parse_mesh
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.models.parameters import HFConfig
from trainer.models.registry import family_of
from trainer.nn import transformer as models
from trainer.nn.model_spec import ForwardConfig
from trainer.training.optimizers.adamw import AdamW
from trainer.training.optimizers.lr_schedule import LRSchedule
from trainer.training.step import StepSetup, init_train_state, train_step

LOGITS_ATOL = 2e-5
GRADIENTS_RTOL = 1e-5  # relative to the norm of each tensor's gradient
LOSS_RTOL = 1e-5
LONG_LENGTH = 300  # tokens
MAX_FAMILY_COLUMNS = 4  # a table of more families has one row per family
PADDING_ROWS = 3  # additional rows of the padded vocabulary
ADAMW = AdamW(LRSchedule(1e-2, 1e-2, "constant", 0, 1), 0.9, 0.99, 1e-8, 0.1, False, 1.0)


class FamilyUnderTest:
    """Tiny models of a family and what several cells compute of them; `work` is a folder for files."""

    def __init__(self, configs: Sequence[HFConfig], work: Path) -> None:
        self.config, self.mesh_config, self.work = dict(configs[0]), dict(configs[-1]), work

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Atom -> extent of the first config."""
        return family_of(self.config).sizes(self.config)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Random tensors by their names in files."""
        return random_tensors(self.config, seed=3)

    @cached_property
    def decoder(self) -> TinyTransformer:
        """The model of prep."""
        return tiny_transformer(self.config)

    @cached_property
    def params(self) -> Tree:
        """The tensors as parameters of prep's model."""
        return self.decoder.params_from_tensors(self.tensors)

    @cached_property
    def torch_model(self) -> Any:
        """The model of transformers, with the same tensors."""
        return torch_model(self.config, self.tensors)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """Return a batch of random tokens, with source tokens if the model has an encoder."""
        return random_batch(self.sizes["vocab"], rows, length, 4, has_encoder(self.config))

    @cached_property
    def saved_folder(self) -> Path:
        """The checkpoint that transformers saves in float32."""
        return self.save_with_transformers("float32")

    def save_with_transformers(self, dtype: str) -> Path:
        """Save a checkpoint of several files in a dtype with transformers, and return its folder."""
        import torch

        folder = self.work / dtype
        copy.deepcopy(self.torch_model).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
        return folder

    def run(self, command: str, source: Path, name: str, *options: str) -> Path:
        """Run a command of prep and return its output folder; raise AssertionError with its messages if it fails."""
        out = self.work / name
        shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as messages:
            code = prep([command, str(source), "--out", str(out), "--quiet", *options])
        assert code == 0, f"prep {command}: {messages.getvalue().strip()}"
        return out


@dataclass(frozen=True, slots=True)
class Cell:
    """A check of a family.

    Attributes:
        name: Name in the table.
        check: Returns a figure for the table; raises AssertionError or PrepError if the check fails.
        in_golden_files: Whether golden files check the same for the supported families, in every run of the tests.
        needs_torch: Whether the check compares with transformers.
    """

    name: str
    check: Callable[[FamilyUnderTest], str]
    in_golden_files: bool = False
    needs_torch: bool = True


def check_names_and_shapes(subject: FamilyUnderTest) -> str:
    """Compare the names and shapes of all tensors."""
    shapes = {location.tensor: list(location.axis_map.source_shape) for location in subject.decoder.locations}
    expected = describe(subject.config)["tensors"]
    different = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    lines = [f"{name}: {shapes.get(name)}, transformers has {expected.get(name)}" for name in different]
    assert not lines, "; ".join(lines[:4])
    return f"{len(shapes)} tensors"


def check_export(subject: FamilyUnderTest) -> str:
    """Export an init to Hugging Face files and compare them with the original files."""
    init = subject.run("save-init", subject.saved_folder, "init", "--pad-vocab", "8")
    return _check_same_checkpoint(subject.saved_folder, subject.run("export", init, "back"))


def check_logits(subject: FamilyUnderTest) -> str:
    """Compare the logits of sequences of equal length."""
    return _check_logits(subject, (7, 7))


def check_padded_batch(subject: FamilyUnderTest) -> str:
    """Compare the logits of sequences of different lengths."""
    return _check_logits(subject, (7, 4))


def check_long_sequence(subject: FamilyUnderTest) -> str:
    """Compare the logits of a sequence longer than windows and pretraining."""
    return _check_logits(subject, (LONG_LENGTH,))


def check_gradients(subject: FamilyUnderTest) -> str:
    """Compare loss and gradients, in prep with a padded vocabulary whose extra rows must have no gradient."""
    batch = subject.batch(2, 40)
    expected_loss, expected = torch_gradients(subject.torch_model, batch)
    config, tensors = tiny_transformers.with_padded_vocab(subject.config, subject.tensors, PADDING_ROWS, -50.0)
    padded = tiny_transformer(config)
    loss, param_gradients = loss_and_gradients(
        padded.model, padded.params_from_tensors(tensors), batch, ForwardConfig(head_chunk_size=16)
    )
    assert abs(loss / expected_loss - 1) <= LOSS_RTOL, f"loss {loss}, of transformers {expected_loss}"
    gradients = padded.tensors_from_params(param_gradients)
    errors = {}
    for name, gradient in expected.items():
        rows = gradient.shape[0]
        assert not gradients[name][rows:].any(), f"padding of {name} has gradients"
        errors[name] = tiny_transformers.relative_error(gradients[name][:rows], gradient)
    worst = max(errors, key=lambda name: errors[name])
    return _check_error(errors[worst], GRADIENTS_RTOL, worst)


def check_bfloat16_storage(subject: FamilyUnderTest) -> str:
    """Convert a bfloat16 checkpoint and back, and compare the logits of the converted parameters."""
    saved = subject.save_with_transformers("bfloat16")
    init = subject.run("save-init", saved, "bfloat16-init")
    _check_same_checkpoint(saved, subject.run("export", init, "bfloat16-back"))
    tree = ocp.PyTreeCheckpointer().restore(init.resolve())["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), tree)
    batch = subject.batch(1, 9)
    logits = model_logits(subject.decoder.model, params, batch)
    expected = torch_logits(load_torch_model(saved), batch, (9,))
    return _check_error(abs(logits - expected).max(), LOGITS_ATOL)


def check_odd_vocabulary(subject: FamilyUnderTest) -> str:
    """Require an odd vocabulary in the first config."""
    return _check_odd(subject, "vocab")


def check_odd_heads(subject: FamilyUnderTest) -> str:
    """Require an odd number of heads in the first config."""
    return _check_odd(subject, "heads")


def check_padded_vocabulary(subject: FamilyUnderTest) -> str:
    """Pad the vocabulary and check that transformers computes bit-identical logits of the true vocabulary."""
    padded = load_torch_model(
        subject.run("pad-vocab", subject.saved_folder, "padded", "--multiple", "8", "--init", "normal")
    )
    vocab, batch = subject.sizes["vocab"], subject.batch(2, 60)
    rows = padded.get_output_embeddings().weight.shape[0]
    assert rows == vocab + -vocab % 8, f"{rows} rows of the head"
    before, after = (torch_logits(model, batch, (60, 60))[..., :vocab] for model in (subject.torch_model, padded))
    assert np.array_equal(before, after), f"logits differ by {abs(before - after).max():.1e}"
    return f"{vocab} to {rows}"


def check_step_on_mesh(subject: FamilyUnderTest) -> str:
    """Train a step on a mesh: the loss equals that of one device, parameters change and keep their sharding."""
    vocab = subject.mesh_config["vocab_size"]
    config = {**subject.mesh_config, "vocab_size": vocab + -vocab % 8, "true_vocab_size": vocab}
    decoder, batch = tiny_transformer(config), random_batch(vocab, 4, 12, has_source=has_encoder(config))
    mesh = "1,2,4" if family_of(config).sizes(config)["heads"] % 4 == 0 else "1,2,1"
    sharding, leaves = _mesh_sharding(parse_mesh(mesh)), decoder.model.leaves
    before = flatten_tree(decoder.params_from_tensors(random_tensors(config)))
    params = unflatten_tree(
        {path: jax.device_put(leaf, sharding.param_sharding(leaves[path])) for path, leaf in before.items()}
    )
    sharded_batch = {
        key: jax.device_put(value, sharding.activation_sharding(value.shape, "batch", "seq"))
        for key, value in batch.items()
    }
    setup = StepSetup(decoder.model, ForwardConfig(head_chunk_size=4, sharding=sharding), ADAMW)
    step = jax.jit(partial(train_step, setup=setup))
    state, metrics = step(init_train_state(params, setup), sharded_batch)
    array_batch = {key: jnp.asarray(value) for key, value in batch.items()}
    expected = models.loss_sums(unflatten_tree(before), array_batch, decoder.model, UNSCANNED)
    error = abs(float(metrics["loss"]) / float(expected.loss) - 1)
    for path, leaf in flatten_tree(state["params"]).items():
        leaf_sharding = sharding.param_sharding(leaves[path])
        assert np.isfinite(leaf).all(), f"{path} is not finite"
        assert not np.array_equal(leaf, before[path]), f"{path} does not change"
        assert leaf.sharding.is_equivalent_to(leaf_sharding, leaf.ndim), f"{path} is {leaf.sharding}"
    return f"{mesh}: {_check_error(error, LOSS_RTOL)}"


def check_greedy_tokens(subject: FamilyUnderTest) -> str:
    """Compare greedy decoding, by models with small embeddings (see `make_greedy`)."""
    config, decoder = subject.config, subject.decoder
    tensors = make_greedy.with_small_embeddings(config, subject.tensors)
    entry = make_greedy.generate_entry(torch_model(config, tensors), subject.sizes["vocab"])
    prompts, params = entry["prompts"], decoder.params_from_tensors(tensors)
    generation_config = GenerationConfig(make_greedy.MAX_NEW_TOKENS)
    generator = Generator(params, decoder.model, forward_config=ForwardConfig(), generation_config=generation_config)
    first_tokens = [[0]] * len(prompts)
    generated = generator.generate(first_tokens, prompts) if has_encoder(config) else generator.generate(prompts)
    for prompt, tokens, expected in zip(prompts, generated, entry["tokens"]):
        assert tokens == expected, f"after {len(prompt)} tokens {tokens}, of transformers {expected}"
    return f"{len(generated)} x {make_greedy.MAX_NEW_TOKENS}"


CELLS = (
    Cell("names and shapes", check_names_and_shapes, in_golden_files=True),
    Cell("export", check_export),
    Cell("logits", check_logits, in_golden_files=True),
    Cell("gradients", check_gradients, in_golden_files=True),
    Cell("padded batch", check_padded_batch, in_golden_files=True),
    Cell(f"{LONG_LENGTH} tokens", check_long_sequence, in_golden_files=True),
    Cell("bfloat16", check_bfloat16_storage),
    Cell("odd vocabulary", check_odd_vocabulary, needs_torch=False),
    Cell("odd heads", check_odd_heads, needs_torch=False),
    Cell("pad-vocab", check_padded_vocabulary),
    Cell("step on a mesh", check_step_on_mesh, needs_torch=False),
    Cell("greedy tokens", check_greedy_tokens, in_golden_files=True),
)


def _mesh_sharding(mesh: Mesh) -> ShardingContext:
    """Return the sharding on the first devices, as many as the mesh has."""
    devices = np.array(jax.devices()[: math.prod(mesh.sizes)]).reshape(mesh.sizes)
    axis_types = (AxisType.Auto,) * len(mesh.names)
    return ShardingContext(mesh, device_mesh=jax.sharding.Mesh(devices, mesh.names, axis_types=axis_types))


def _check_logits(subject: FamilyUnderTest, lengths: Sequence[int]) -> str:
    """Compare logits at the positions of the tokens, in a batch with padding on the right."""
    batch = subject.batch(len(lengths), max(lengths))
    logits = model_logits(subject.decoder.model, subject.params, batch)
    expected = torch_logits(subject.torch_model, batch, lengths)
    error = max(abs(logits[row, :length] - expected[row, :length]).max() for row, length in enumerate(lengths))
    return _check_error(error, LOGITS_ATOL)


def _check_same_checkpoint(saved: Path, exported: Path) -> str:
    """Check that transformers reads equal tensors and configs from two folders."""
    import torch

    before, after = (load_torch_model(folder, "auto").state_dict() for folder in (saved, exported))
    assert before.keys() == after.keys()
    different = [n for n, t in before.items() if t.dtype != after[n].dtype or not torch.equal(t, after[n])]
    assert not different, f"{', '.join(different[:4])} changed"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved, exported)]
    assert configs[0] == configs[1], "config.json changed"
    return f"{sum(tensor.numel() for tensor in before.values()):,} equal"


def _check_odd(subject: FamilyUnderTest, atom: str) -> str:
    size = subject.sizes[atom]
    assert size % 2, f"{atom} of the first config is {size}; an odd number finds more mistakes"
    return str(size)


def _check_error(error: float, tolerance: float, name: str = "") -> str:
    assert error <= tolerance, f"error {error:.1e}{name and f' in {name}'}; allowed: {tolerance:.0e}"
    return f"{error:.1e}"


def run_cells(subject: FamilyUnderTest, cells: Sequence[Cell] = CELLS) -> dict[str, tuple[bool, str]]:
    """Return for each cell whether it passes, and its figure or the reason of the failure."""
    results = {}
    for cell in cells:
        try:
            results[cell.name] = True, cell.check(subject)
        except (AssertionError, PrepError, ValueError) as error:
            results[cell.name] = False, str(error)
    return results


def table_text(results: Mapping[str, Mapping[str, tuple[bool, str]]]) -> str:
    """Return the results as a table: a column per family, or a row per family if there are many."""
    cells = list(dict.fromkeys(cell for family_results in results.values() for cell in family_results))
    figures = [
        [figure if passed else "FAILS" for passed, figure in family_results.values()]
        for family_results in results.values()
    ]
    if len(results) > MAX_FAMILY_COLUMNS:
        return format_table([(name, *texts) for name, texts in zip(results, figures)], ("", *cells))
    return format_table(list(zip(cells, *figures)), ("", *results))


def default_configs() -> dict[str, list[HFConfig]]:
    """Return for each supported family a config with odd sizes, and one to train on a mesh."""
    mesh_configs = {base["model_type"]: base for base in (GPT2, GPT_NEO, LLAMA)}
    mesh_configs |= {name: base | {"num_hidden_layers": 2} for name, base in FAMILY_CONFIGS.items()}
    return {name: [odd_config, mesh_configs[name]] for name, odd_config in ODD_HEADS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return 1 if a cell fails."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.family_kit", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG.json", help="default: all families")
    parser.add_argument("--cells", metavar="NAME,…", help=f"default: all: {', '.join(cell.name for cell in CELLS)}")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if options.cells is None or cell.name in options.cells.split(",")]
    jax.config.update("jax_num_cpu_devices", 8)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    configs: dict[str, list[HFConfig]] = {}
    for config in (json.loads(path.read_text()) for path in options.configs):
        configs.setdefault(config["model_type"], []).append(config)
    results: dict[str, dict[str, tuple[bool, str]]] = {}
    for name, family_configs in (configs or default_configs()).items():
        with tempfile.TemporaryDirectory() as work:
            results[name] = run_cells(FamilyUnderTest(family_configs, Path(work)), cells)
        jax.clear_caches()  # no other family uses what was compiled for this one
    print(table_text(results))
    failures = [
        (name, cell, why)
        for name, family_results in results.items()
        for cell, (passed, why) in family_results.items()
        if not passed
    ]
    for name, cell, why in failures:
        print(f"{name}, {cell}: {why}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
