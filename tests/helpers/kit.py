"""Check families against transformers with tiny configs: `python -m tests.helpers.kit CONFIG.json …`.

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
from prepcli.console.ui import table
from tests.golden import make_greedy
from tests.golden.make_families import describe
from tests.helpers import decoders
from tests.helpers.decoder_configs import ODD
from tests.helpers.decoders import (
    ONE_BY_ONE,
    Decoder,
    batch_of,
    decoder,
    encodes,
    filled,
    logits_of,
    loss_and_gradients,
)
from tests.helpers.models import GPT2, GPT_NEO, LLAMA, RELATIVES
from tests.helpers.torch_decoders import loaded, torch_gradients, torch_logits, torch_model
from trainer.distributed.sharding import Shards
from trainer.generation.decode import Asked
from trainer.generation.generator import Generator
from trainer.models.errors import PrepError
from trainer.models.mesh import Mesh, parse
from trainer.models.parameters import Config
from trainer.models.registry import family_of
from trainer.models.tree import Tree, flat, nested
from trainer.nn import transformer as models
from trainer.nn.transformer import Compute
from trainer.training.optimizers import AdamW, Rate
from trainer.training.step import Setup, first_state, train_step

LOGITS = 2e-5
GRADIENTS = 1e-5  # of the norm of each tensor's
LOSS = 1e-5
MANY = 300  # tokens
SIDE_BY_SIDE = 4  # families in a table
MORE_ROWS = 3  # of the vocabulary
ADAMW = AdamW(Rate(1e-2, 1e-2, "constant", 0, 1), 0.9, 0.99, 1e-8, 0.1, False, 1.0)


class Subject:
    """A family by tiny configs of it, with all that several cells need of them; `work` is a folder to write in."""

    def __init__(self, configs: Sequence[Config], work: Path) -> None:
        self.config, self.meshed, self.work = dict(configs[0]), dict(configs[-1]), work

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return family_of(self.config).sizes(self.config)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return filled(self.config, seed=3)

    @cached_property
    def made(self) -> Decoder:
        return decoder(self.config)

    @cached_property
    def params(self) -> Tree:
        return self.made.params(self.tensors)

    @cached_property
    def theirs(self) -> Any:
        return torch_model(self.config, self.tensors)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """Random tokens, with a source where the model has an encoder."""
        return batch_of(self.sizes["vocab"], rows, length, 4, encodes(self.config))

    @cached_property
    def saved(self) -> Path:
        """As transformers saves it in float32."""
        return self.save("float32")

    def save(self, dtype: str) -> Path:
        """The folder that transformers makes of it in a dtype, in several files."""
        import torch

        folder = self.work / dtype
        copy.deepcopy(self.theirs).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
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
    check: Callable[[Subject], str]
    golden: bool = False
    needs_torch: bool = True


def names_and_shapes(subject: Subject) -> str:
    found = {place.tensor: list(place.row.source_shape) for place in subject.made.places}
    wanted = describe(subject.config)["tensors"]
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    lines = [f"{name}: {found.get(name)}, transformers has {wanted.get(name)}" for name in different]
    assert not lines, "; ".join(lines[:4])
    return f"{len(found)} tensors"


def export_to_transformers(subject: Subject) -> str:
    init = subject.run("save-init", subject.saved, "init", "--pad-vocab", "8")
    return _as_saved(subject.saved, subject.run("export", init, "back"))


def logits(subject: Subject) -> str:
    return _logits_apart(subject, (7, 7))


def padded_batch(subject: Subject) -> str:
    return _logits_apart(subject, (7, 4))


def many_tokens(subject: Subject) -> str:
    return _logits_apart(subject, (MANY,))


def gradients(subject: Subject) -> str:
    """By tensor, of a model with more rows of the vocabulary, which have none."""
    batch = subject.batch(2, 40)
    wanted_loss, wanted = torch_gradients(subject.theirs, batch)
    config, tensors = decoders.with_padding(subject.config, subject.tensors, MORE_ROWS, -50.0)
    made = decoder(config)
    loss, found = loss_and_gradients(made.model, made.params(tensors), batch, Compute(head_chunk=16))
    assert abs(loss / wanted_loss - 1) <= LOSS, f"loss {loss}, of transformers {wanted_loss}"
    ours = made.tensors(found)
    assert not any(ours[name][each.shape[0] :].any() for name, each in wanted.items()), "padding has gradients"
    errors = {name: decoders.apart(ours[name][: each.shape[0]], each) for name, each in wanted.items()}
    worst = max(errors, key=lambda name: errors[name])
    return _figure(errors[worst], GRADIENTS, worst)


def bfloat16_storage(subject: Subject) -> str:
    """There and back, and what is computed of the checkpoint."""
    saved = subject.save("bfloat16")
    init = subject.run("save-init", saved, "bfloat16-init")
    _as_saved(saved, subject.run("export", init, "bfloat16-back"))
    tree = ocp.PyTreeCheckpointer().restore(init.resolve())["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), tree)
    batch = subject.batch(1, 9)
    found, wanted = logits_of(subject.made.model, params, batch), torch_logits(loaded(saved), batch, (9,))
    return _figure(abs(found - wanted).max(), LOGITS)


def odd_vocabulary(subject: Subject) -> str:
    return _odd(subject, "vocab")


def odd_heads(subject: Subject) -> str:
    return _odd(subject, "heads")


def padded_vocabulary(subject: Subject) -> str:
    """Logits of the true vocabulary are the same bits."""
    padded = loaded(subject.run("pad-vocab", subject.saved, "padded", "--multiple", "8", "--init", "normal"))
    vocab, batch = subject.sizes["vocab"], subject.batch(2, 60)
    rows = padded.get_output_embeddings().weight.shape[0]
    assert rows == vocab + -vocab % 8, f"{rows} rows of the head"
    before, after = (torch_logits(model, batch, (60, 60))[..., :vocab] for model in (subject.theirs, padded))
    assert np.array_equal(before, after), f"logits differ by {abs(before - after).max():.1e}"
    return f"{vocab} to {rows}"


def step_on_a_mesh(subject: Subject) -> str:
    """The loss of one device, and every parameter moves and stays where it was."""
    vocab = subject.meshed["vocab_size"]
    config = {**subject.meshed, "vocab_size": vocab + -vocab % 8, "true_vocab_size": vocab}
    made, batch = decoder(config), batch_of(vocab, 4, 12, encodes=encodes(config))
    mesh = "1,2,4" if family_of(config).sizes(config)["heads"] % 4 == 0 else "1,2,1"
    before, leaves, on = flat(made.params(filled(config))), made.model.leaves, _on_devices(parse(mesh))
    params = nested({path: jax.device_put(leaf, on.of(leaves[path])) for path, leaf in before.items()})
    placed = {key: jax.device_put(value, on.activation(value.shape, "batch", "seq")) for key, value in batch.items()}
    setup = Setup(made.model, Compute(head_chunk=4, shards=on), ADAMW)
    step = jax.jit(partial(train_step, setup=setup))
    state, measured = step(first_state(params, setup), placed)
    plain = models.loss_sums(nested(before), {key: jnp.asarray(v) for key, v in batch.items()}, made.model, ONE_BY_ONE)
    apart = abs(float(measured["loss"]) / float(plain.loss) - 1)
    for path, leaf in flat(state["params"]).items():
        assert np.isfinite(leaf).all(), f"{path} is not finite"
        assert not np.array_equal(leaf, before[path]), f"{path} does not move"
        assert leaf.sharding.is_equivalent_to(on.of(leaves[path]), leaf.ndim), f"{path} is {leaf.sharding}"
    return f"{mesh}: {_figure(apart, LOSS)}"


def greedy_tokens(subject: Subject) -> str:
    """Those that transformers adds to prompts, by a model with small embeddings: see `make_greedy`."""
    config, made = subject.config, subject.made
    tensors = make_greedy.with_small_embeddings(config, subject.tensors)
    theirs = torch_model(config, tensors)
    entry = make_greedy.chosen(theirs, subject.sizes["vocab"])
    prompts, asked = entry["prompts"], Asked(make_greedy.NEW)
    own = Generator(made.params(tensors), made.model, Compute(), asked)
    found = own.batch([[0]] * len(prompts), prompts) if encodes(config) else own.batch(prompts)
    for prompt, tokens, wanted in zip(prompts, found, entry["tokens"]):
        assert tokens == wanted, f"after {len(prompt)} tokens {tokens}, of transformers {wanted}"
    return f"{len(found)} x {make_greedy.NEW}"


CELLS = (
    Cell("names and shapes", names_and_shapes, golden=True),
    Cell("export", export_to_transformers),
    Cell("logits", logits, golden=True),
    Cell("gradients", gradients, golden=True),
    Cell("padded batch", padded_batch, golden=True),
    Cell(f"{MANY} tokens", many_tokens, golden=True),
    Cell("bfloat16", bfloat16_storage),
    Cell("odd vocabulary", odd_vocabulary, needs_torch=False),
    Cell("odd heads", odd_heads, needs_torch=False),
    Cell("pad-vocab", padded_vocabulary),
    Cell("step on a mesh", step_on_a_mesh, needs_torch=False),
    Cell("greedy tokens", greedy_tokens, golden=True),
)


def _on_devices(mesh: Mesh) -> Shards:
    """A mesh on as many devices as it wants, not on all."""
    devices = np.array(jax.devices()[: math.prod(mesh.sizes)]).reshape(mesh.sizes)
    kinds = (AxisType.Auto,) * len(mesh.names)
    return Shards(mesh, devices=jax.sharding.Mesh(devices, mesh.names, axis_types=kinds))


def _logits_apart(subject: Subject, lengths: Sequence[int]) -> str:
    """At positions that count, of rows that are padded on the right."""
    batch = subject.batch(len(lengths), max(lengths))
    found, wanted = logits_of(subject.made.model, subject.params, batch), torch_logits(subject.theirs, batch, lengths)
    return _figure(max(abs(found[i, :n] - wanted[i, :n]).max() for i, n in enumerate(lengths)), LOGITS)


def _as_saved(saved: Path, back: Path) -> str:
    """Transformers finds in one folder what it wrote into the other."""
    import torch

    before, after = (loaded(folder, "auto").state_dict() for folder in (saved, back))
    assert before.keys() == after.keys()
    different = [n for n, t in before.items() if t.dtype != after[n].dtype or not torch.equal(t, after[n])]
    assert not different, f"{', '.join(different[:4])} changed"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved, back)]
    assert configs[0] == configs[1], "config.json changed"
    return f"{sum(tensor.numel() for tensor in before.values()):,} equal"


def _odd(subject: Subject, atom: str) -> str:
    size = subject.sizes[atom]
    assert size % 2, f"{atom} of the first config is {size}; what divides evenly proves less"
    return str(size)


def _figure(error: float, most: float, of: str = "") -> str:
    assert error <= most, f"{error:.1e} apart{of and f', {of}'}; allowed: {most:.0e}"
    return f"{error:.1e}"


def examine(subject: Subject, cells: Sequence[Cell] = CELLS) -> dict[str, tuple[bool, str]]:
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
    if len(results) > SIDE_BY_SIDE:
        return table([(name, *texts) for name, texts in zip(results, shown)], ("", *cells))
    return table(list(zip(cells, *shown)), ("", *results))


def own_configs() -> dict[str, list[Config]]:
    """Of each family that there is an odd config and one to train on a mesh."""
    meshed = {base["model_type"]: base for base in (GPT2, GPT_NEO, LLAMA)}
    meshed |= {name: base | {"num_hidden_layers": 2} for name, base in RELATIVES.items()}
    return {name: [odd, meshed[name]] for name, odd in ODD.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a cell fails."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(prog="python -m tests.helpers.kit", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG.json", help="default: all families")
    parser.add_argument("--cells", metavar="NAME,…", help=f"default: all: {', '.join(cell.name for cell in CELLS)}")
    given = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if given.cells is None or cell.name in given.cells.split(",")]
    jax.config.update("jax_num_cpu_devices", 8)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    configs: dict[str, list[Config]] = {}
    for config in (json.loads(path.read_text()) for path in given.configs):
        configs.setdefault(config["model_type"], []).append(config)
    results: dict[str, dict[str, tuple[bool, str]]] = {}
    for name, group in (configs or own_configs()).items():
        with tempfile.TemporaryDirectory() as work:
            results[name] = examine(Subject(group, Path(work)), cells)
        jax.clear_caches()  # of what was compiled for one family another has little use
    print(table_text(results))
    failures = [(name, cell, why) for name, found in results.items() for cell, (good, why) in found.items() if not good]
    for name, cell, why in failures:
        print(f"{name}, {cell}: {why}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
