"""Check families against transformers with tiny configs: `python -m tests.helpers.family_kit CONFIG.json …`.

Configs of one family are a row of the table: the first one has an odd vocabulary and an odd number of heads, the last
one, which may be the same, is trained on a mesh: 1,2,4 where 4 divides its heads, else 1,2,1. Without configs: all
families that there are. Needs the `parity` extra.
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
from trainer.nn.transformer import ForwardConfig
from trainer.training.optimizers import AdamW, LRSchedule
from trainer.training.step import StepSetup, init_train_state, train_step

LOGITS_ATOL = 2e-5
GRADIENTS_RTOL = 1e-5  # of the norm of each tensor's
LOSS_RTOL = 1e-5
LONG_LENGTH = 300  # tokens
MAX_FAMILY_COLUMNS = 4  # families in a table
PADDING_ROWS = 3  # of the vocabulary
ADAMW = AdamW(LRSchedule(1e-2, 1e-2, "constant", 0, 1), 0.9, 0.99, 1e-8, 0.1, False, 1.0)


class FamilyUnderTest:
    """A family by tiny configs of it, with all that several cells need of them; `work` is a folder to write in."""

    def __init__(self, configs: Sequence[HFConfig], work: Path) -> None:
        self.config, self.meshed, self.work = dict(configs[0]), dict(configs[-1]), work

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return family_of(self.config).sizes(self.config)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return random_tensors(self.config, seed=3)

    @cached_property
    def decoder(self) -> TinyTransformer:
        return tiny_transformer(self.config)

    @cached_property
    def params(self) -> Tree:
        return self.decoder.params_from_tensors(self.tensors)

    @cached_property
    def torch_model(self) -> Any:
        return torch_model(self.config, self.tensors)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """Random tokens, with a source where the model has an encoder."""
        return random_batch(self.sizes["vocab"], rows, length, 4, has_encoder(self.config))

    @cached_property
    def saved_folder(self) -> Path:
        """As transformers saves it in float32."""
        return self.save_with_transformers("float32")

    def save_with_transformers(self, dtype: str) -> Path:
        """The folder that transformers makes of it in a dtype, in several files."""
        import torch

        folder = self.work / dtype
        copy.deepcopy(self.torch_model).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
        return folder

    def run(self, command: str, source: Path, name: str, *options: str) -> Path:
        """The output of a command of prep; AssertionError with what it says where it fails."""
        out = self.work / name
        shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = prep([command, str(source), "--out", str(out), "--quiet", *options])
        assert code == 0, f"prep {command}: {said.getvalue().strip()}"
        return out


@dataclass(frozen=True, slots=True)
class Cell:
    """What is asked: returns a figure, and raises AssertionError, or PrepError, where it is not so. `golden`: golden
    files say as much of the families that there are, so that tests need not ask it each time."""

    name: str
    check: Callable[[FamilyUnderTest], str]
    in_golden_files: bool = False
    needs_torch: bool = True


def check_names_and_shapes(subject: FamilyUnderTest) -> str:
    found = {place.tensor: list(place.axis_map.source_shape) for place in subject.decoder.locations}
    wanted = describe(subject.config)["tensors"]
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    lines = [f"{name}: {found.get(name)}, transformers has {wanted.get(name)}" for name in different]
    assert not lines, "; ".join(lines[:4])
    return f"{len(found)} tensors"


def check_export(subject: FamilyUnderTest) -> str:
    init = subject.run("save-init", subject.saved_folder, "init", "--pad-vocab", "8")
    return _check_same_checkpoint(subject.saved_folder, subject.run("export", init, "back"))


def check_logits(subject: FamilyUnderTest) -> str:
    return _check_logits(subject, (7, 7))


def check_padded_batch(subject: FamilyUnderTest) -> str:
    return _check_logits(subject, (7, 4))


def check_long_sequence(subject: FamilyUnderTest) -> str:
    return _check_logits(subject, (LONG_LENGTH,))


def check_gradients(subject: FamilyUnderTest) -> str:
    """By tensor, of a model with more rows of the vocabulary, which have none."""
    batch = subject.batch(2, 40)
    wanted_loss, wanted = torch_gradients(subject.torch_model, batch)
    config, tensors = tiny_transformers.with_padded_vocab(subject.config, subject.tensors, PADDING_ROWS, -50.0)
    made = tiny_transformer(config)
    loss, found = loss_and_gradients(
        made.model, made.params_from_tensors(tensors), batch, ForwardConfig(head_chunk_size=16)
    )
    assert abs(loss / wanted_loss - 1) <= LOSS_RTOL, f"loss {loss}, of transformers {wanted_loss}"
    ours = made.tensors_from_params(found)
    assert not any(ours[name][each.shape[0] :].any() for name, each in wanted.items()), "padding has gradients"
    errors = {
        name: tiny_transformers.relative_error(ours[name][: each.shape[0]], each) for name, each in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return _format_error(errors[worst], GRADIENTS_RTOL, worst)


def check_bfloat16_storage(subject: FamilyUnderTest) -> str:
    """There and back, and what is computed of the checkpoint."""
    saved = subject.save_with_transformers("bfloat16")
    init = subject.run("save-init", saved, "bfloat16-init")
    _check_same_checkpoint(saved, subject.run("export", init, "bfloat16-back"))
    tree = ocp.PyTreeCheckpointer().restore(init.resolve())["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), tree)
    batch = subject.batch(1, 9)
    found, wanted = (
        model_logits(subject.decoder.model, params, batch),
        torch_logits(load_torch_model(saved), batch, (9,)),
    )
    return _format_error(abs(found - wanted).max(), LOGITS_ATOL)


def check_odd_vocabulary(subject: FamilyUnderTest) -> str:
    return _check_odd(subject, "vocab")


def check_odd_heads(subject: FamilyUnderTest) -> str:
    return _check_odd(subject, "heads")


def check_padded_vocabulary(subject: FamilyUnderTest) -> str:
    """Logits of the true vocabulary are the same bits."""
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
    """The loss of one device, and every parameter moves and stays where it was."""
    vocab = subject.meshed["vocab_size"]
    config = {**subject.meshed, "vocab_size": vocab + -vocab % 8, "true_vocab_size": vocab}
    made, batch = tiny_transformer(config), random_batch(vocab, 4, 12, has_source=has_encoder(config))
    mesh = "1,2,4" if family_of(config).sizes(config)["heads"] % 4 == 0 else "1,2,1"
    before, leaves, on = (
        flatten_tree(made.params_from_tensors(random_tensors(config))),
        made.model.leaves,
        _mesh_sharding(parse_mesh(mesh)),
    )
    params = unflatten_tree(
        {path: jax.device_put(leaf, on.param_sharding(leaves[path])) for path, leaf in before.items()}
    )
    placed = {
        key: jax.device_put(value, on.activation_sharding(value.shape, "batch", "seq")) for key, value in batch.items()
    }
    setup = StepSetup(made.model, ForwardConfig(head_chunk_size=4, sharding=on), ADAMW)
    step = jax.jit(partial(train_step, setup=setup))
    state, measured = step(init_train_state(params, setup), placed)
    plain = models.loss_sums(
        unflatten_tree(before), {key: jnp.asarray(v) for key, v in batch.items()}, made.model, UNSCANNED
    )
    apart = abs(float(measured["loss"]) / float(plain.loss) - 1)
    for path, leaf in flatten_tree(state["params"]).items():
        assert np.isfinite(leaf).all(), f"{path} is not finite"
        assert not np.array_equal(leaf, before[path]), f"{path} does not move"
        assert leaf.sharding.is_equivalent_to(on.param_sharding(leaves[path]), leaf.ndim), f"{path} is {leaf.sharding}"
    return f"{mesh}: {_format_error(apart, LOSS_RTOL)}"


def check_greedy_tokens(subject: FamilyUnderTest) -> str:
    """Those that transformers adds to prompts, by a model with small embeddings: see `make_greedy`."""
    config, made = subject.config, subject.decoder
    tensors = make_greedy.with_small_embeddings(config, subject.tensors)
    theirs = torch_model(config, tensors)
    entry = make_greedy.generate_entry(theirs, subject.sizes["vocab"])
    prompts, asked = entry["prompts"], GenerationConfig(make_greedy.MAX_NEW_TOKENS)
    own = Generator(made.params_from_tensors(tensors), made.model, ForwardConfig(), asked)
    found = own.generate([[0]] * len(prompts), prompts) if has_encoder(config) else own.generate(prompts)
    for prompt, tokens, wanted in zip(prompts, found, entry["tokens"]):
        assert tokens == wanted, f"after {len(prompt)} tokens {tokens}, of transformers {wanted}"
    return f"{len(found)} x {make_greedy.MAX_NEW_TOKENS}"


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
    """A mesh on as many devices as it wants, not on all."""
    devices = np.array(jax.devices()[: math.prod(mesh.sizes)]).reshape(mesh.sizes)
    kinds = (AxisType.Auto,) * len(mesh.names)
    return ShardingContext(mesh, device_mesh=jax.sharding.Mesh(devices, mesh.names, axis_types=kinds))


def _check_logits(subject: FamilyUnderTest, lengths: Sequence[int]) -> str:
    """At positions that count, of rows that are padded on the right."""
    batch = subject.batch(len(lengths), max(lengths))
    found, wanted = (
        model_logits(subject.decoder.model, subject.params, batch),
        torch_logits(subject.torch_model, batch, lengths),
    )
    return _format_error(max(abs(found[i, :n] - wanted[i, :n]).max() for i, n in enumerate(lengths)), LOGITS_ATOL)


def _check_same_checkpoint(saved: Path, back: Path) -> str:
    """Transformers finds in one folder what it wrote into the other."""
    import torch

    before, after = (load_torch_model(folder, "auto").state_dict() for folder in (saved, back))
    assert before.keys() == after.keys()
    different = [n for n, t in before.items() if t.dtype != after[n].dtype or not torch.equal(t, after[n])]
    assert not different, f"{', '.join(different[:4])} changed"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved, back)]
    assert configs[0] == configs[1], "config.json changed"
    return f"{sum(tensor.numel() for tensor in before.values()):,} equal"


def _check_odd(subject: FamilyUnderTest, atom: str) -> str:
    size = subject.sizes[atom]
    assert size % 2, f"{atom} of the first config is {size}; what divides evenly proves less"
    return str(size)


def _format_error(error: float, most: float, of: str = "") -> str:
    assert error <= most, f"{error:.1e} apart{of and f', {of}'}; allowed: {most:.0e}"
    return f"{error:.1e}"


def run_cells(subject: FamilyUnderTest, cells: Sequence[Cell] = CELLS) -> dict[str, tuple[bool, str]]:
    """Of each cell whether it holds, and the figure, or why not."""
    found = {}
    for cell in cells:
        try:
            found[cell.name] = True, cell.check(subject)
        except (AssertionError, PrepError, ValueError) as error:
            found[cell.name] = False, str(error)
    return found


def table_text(results: Mapping[str, Mapping[str, tuple[bool, str]]]) -> str:
    """Cells one under the other; of many families cells beside one another."""
    cells = list(dict.fromkeys(cell for found in results.values() for cell in found))
    shown = [[text if good else "FAILS" for good, text in found.values()] for found in results.values()]
    if len(results) > MAX_FAMILY_COLUMNS:
        return format_table([(name, *texts) for name, texts in zip(results, shown)], ("", *cells))
    return format_table(list(zip(cells, *shown)), ("", *results))


def default_configs() -> dict[str, list[HFConfig]]:
    """Of each family that there is an odd config and one to train on a mesh."""
    meshed = {base["model_type"]: base for base in (GPT2, GPT_NEO, LLAMA)}
    meshed |= {name: base | {"num_hidden_layers": 2} for name, base in FAMILY_CONFIGS.items()}
    return {name: [odd, meshed[name]] for name, odd in ODD_HEADS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a cell fails."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.family_kit", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG.json", help="default: all families")
    parser.add_argument("--cells", metavar="NAME,…", help=f"default: all: {', '.join(cell.name for cell in CELLS)}")
    given = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if given.cells is None or cell.name in given.cells.split(",")]
    jax.config.update("jax_num_cpu_devices", 8)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    configs: dict[str, list[HFConfig]] = {}
    for config in (json.loads(path.read_text()) for path in given.configs):
        configs.setdefault(config["model_type"], []).append(config)
    results: dict[str, dict[str, tuple[bool, str]]] = {}
    for name, group in (configs or default_configs()).items():
        with tempfile.TemporaryDirectory() as work:
            results[name] = run_cells(FamilyUnderTest(group, Path(work)), cells)
        jax.clear_caches()  # of what was compiled for one family another has little use
    print(table_text(results))
    failures = [(name, cell, why) for name, found in results.items() for cell, (good, why) in found.items() if not good]
    for name, cell, why in failures:
        print(f"{name}, {cell}: {why}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
