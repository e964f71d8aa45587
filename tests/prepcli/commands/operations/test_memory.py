"""What commands need: memory within `--memory`, and the imports of their own features only."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.algebra.axis_map import bind_row
from prepcli.commands.cli.main import main
from prepcli.formats.safetensors import lay_out_files
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from tests.helpers.adapters import make_adapter
from tests.helpers.fork_server import run_python
from tests.helpers.object_server import use_objects
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.run_cli import MonkeyPatch
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

MIB = 1 << 20
BUDGET = 32  # in MiB, the minimum
SLACK_NBYTES = 8 * MIB  # stacks of up to eight threads, which the limit counts whole
WIDTH = 256
# Thread stacks are 1 MiB, so that they hardly count. The script prints the data size of the process at the end.
LIMITED_SCRIPT = """
import resource, sys, threading
threading.stack_size(1 << 20)
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from prepcli.commands.cli.main import main
code = main(sys.argv[2:])
print([line for line in open("/proc/self/status") if line.startswith("VmData")][0], file=sys.stderr)
sys.exit(code)
"""
# The source is touched at each sync, so that it is compared before the publication.
TOUCHING_SCRIPT = """
import os
from prepcli.engine.files import Files
sync = Files.sync
def touch_and_sync(files):
    os.chmod("m/model.safetensors", 0o644)
    sync(files)
Files.sync = touch_and_sync
"""


def make_large_model(folder: Path, tensor_nbytes: int) -> None:
    """Write a model with an embedding of `tensor_nbytes`, as a sparse file of zeros."""
    config = {**GPT_NEO, "vocab_size": tensor_nbytes // WIDTH // 4, "hidden_size": WIDTH, "num_layers": 1,
              "attention_types": [[["global"], 1]], "torch_dtype": "float32"}  # fmt: skip
    family, entries = FAMILIES["gpt_neo"], []
    for path, row in parameter_rows(family, config).items():
        bound = bind_row(row, family.sizes(config))
        for name, _ in bound.tensors() if path != family.tying.head_leaf else ():
            full = name if name in family.unprefixed else family.prefix + name
            entries.append((full, "float32", bound.source_shape, 4 * math.prod(bound.source_shape)))
    _write_sparse(folder, entries)
    (folder / "config.json").write_text(json.dumps(config))
    # The same model with a transposed embedding.
    transposed = [
        (n, d, s[::-1] if nbytes == tensor_nbytes else s, nbytes) for n, d, s, nbytes in entries
    ]
    _write_sparse(folder.with_name("transposed"), transposed)


def _write_sparse(folder: Path, entries: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    """Write a safetensors file of zeros."""
    (layout,) = lay_out_files([("model.safetensors", entries, None)])
    folder.mkdir(parents=True)
    with (folder / layout.name).open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


class MemoryLimits:
    """Sources with a tensor of four times the budget, and the data size of `prep inspect` for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_large_model(folder / "m", 4 * BUDGET * MIB)
        make_adapter(folder / "adapter", {"transformer.wte": (BUDGET * MIB // WIDTH, WIDTH)})
        for name, more in {"init": [], "packed": ["--compress", "zstd"]}.items():
            self.run_limited(0, "save-init", "./m", "--mesh", "1,2,4", "--out", name, *more)
        self.inspect_nbytes = {
            name: self.measure_inspect_nbytes(name) for name in ("./m", "init", "packed")
        }

    def run_limited(self, limit: int, *words: str, prelude: str = "") -> str:
        """Run a command with a limit in bytes on its data (0: none), and return stderr."""
        script = prelude + LIMITED_SCRIPT
        # Only the notes of a run with a prelude are looked at.
        quiet = ["--progress", "none"] if prelude else ["-q"]
        run = run_python(script, str(limit), *words, *quiet, cwd=self.folder)
        assert run.returncode == 0, run.stderr
        return run.stderr

    def measure_inspect_nbytes(self, name: str) -> int:
        """Return the data size in bytes of `prep inspect` for a source."""
        match = re.search(r"VmData:\s+(\d+) kB", self.run_limited(0, "inspect", name))
        assert match
        return int(match[1]) * 1024

    def check_within_budget(self, *words: str, prelude: str = "") -> str:
        """Check that a command needs at most the budget more than `prep inspect` of its source. Return stderr."""
        base = max(nbytes for name, nbytes in self.inspect_nbytes.items() if name in words)
        memory = () if words[0] == "inspect" else ("--memory", f"{BUDGET}MiB")
        try:
            limit = base + BUDGET * MIB + SLACK_NBYTES
            return self.run_limited(limit, *words, *memory, prelude=prelude)
        finally:
            shutil.rmtree(self.folder / "out", ignore_errors=True)


FAST_COMMANDS = [
    ["save-init", "./m", "--scan-axis", "1", "--dtype", "bfloat16", "--out", "out"],
    ["pad-vocab", "./m", "--multiple", "1000", "--init", "mean", "--out", "out"],
    ["reshard", "packed", "--mesh", "1,2,2", "--out", "out"],
    ["merge", "adapter", "./m", "--out", "out"],
]
COMMANDS = [
    *FAST_COMMANDS,
    ["save-init", "./m", "--mesh", "1,2,4", "--out", "out"],
    ["save-init", "./m", "--verbatim", "--mesh", "1,2,4", "--out", "out"],
    ["save-init", "./m", "--compress", "zstd", "--out", "out"],
    ["export", "init", "--out", "out"],
    ["verify", "packed"],
    ["inspect", "packed", "--stats"],
    ["pad-vocab", "./m", "--multiple", "1000", "--init", "normal", "--out", "out"],
    ["reshard", "init", "--mesh", "1,4,2", "--out", "out"],
    ["verify", "init"],
    ["verify", "init", "./m"],
    ["inspect", "./m", "--stats"],
    ["inspect", "init", "--stats"],
    ["map", "suggest", "./m", "./transposed", "--overwrite"],
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> MemoryLimits:
    return MemoryLimits(tmp_path_factory.mktemp("small") / "bench")


@pytest.mark.parametrize("words", slow_except(COMMANDS, FAST_COMMANDS), ids=" ".join)
def test_command_fits_in_minimum_budget(small: MemoryLimits, words: list[str]):
    small.check_within_budget(*words)


def test_comparison_with_the_source_fits_in_the_budget(small: MemoryLimits):
    words = ["save-init", "./m", "--mesh", "1,2,4", "--out", "out"]
    notes = small.check_within_budget(*words, prelude=TOUCHING_SCRIPT)
    assert "may have changed while it was read: comparing" in notes


def test_out_of_memory_is_reported(small: MemoryLimits):
    limit = small.inspect_nbytes["./m"] + 8 * MIB
    words = ("pad-vocab", "./m", "--multiple", "1000", "--out", "starved", "--memory", "512MiB")
    run = run_python(LIMITED_SCRIPT, str(limit), *words, "-q", cwd=small.folder)
    assert run.returncode == 1
    assert "error: the system is out of memory" in run.stderr
    assert "`--memory`" in run.stderr


# Imports of the commands: conversions import no jax, orbax or torch, and no readers of other formats


HEAVY_MODULES = (
    *("jax", "jaxlib", "orbax", "tensorstore", "flax", "torch", "transformers", "safetensors"),
)
SCRIPT = """
import json, sys
from prepcli.commands.cli.main import main
modules, commands = map(json.loads, sys.argv[1:])
for words in commands:
    if code := main(words):
        sys.exit(code)
    if loaded := [name for name in modules if name in sys.modules]:
        sys.exit(f"{words} imported {loaded}")
"""
LIGHT_COMMANDS = [
    ["pad-vocab", "./m", "--init", "mean"],
    ["save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto"],
    ["reshard", "init", "--mesh", "1,4,1", "--out", "again"],
    ["export", "init"],
    ["export", "init", "--layout", "hf-flax", "--out", "flax"],
    ["verify", "init", "./m"],
    ["inspect", "init", "--stats"],
    ["save-init", "./of-torch", "--out", "from-torch"],
    ["inspect", "./of-torch"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("light")
    tensors = make_checkpoint(path / "m")
    (path / "of-torch").mkdir()
    (path / "of-torch/config.json").write_bytes((path / "m/config.json").read_bytes())
    (path / "of-torch/pytorch_model.bin").write_bytes(make_torch_file(tensors))
    assert main(["save-init", str(path / "m"), "--out", str(path / "init"), "-q"]) == 0
    return path


def check_imports(folder: Path, modules: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
    """Run commands in one new process, and check after each that none of the modules was imported."""
    arguments = [json.dumps(modules), json.dumps([[*words, "-q"] for words in commands])]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_conversions_import_no_framework(folder: Path):
    check_imports(folder, HEAVY_MODULES, LIGHT_COMMANDS)


# Modules that the commands do not import
UNUSED = {
    # Typer converts values of other types than texts, such as choices, with pydantic. Its import takes 0.1 s.
    "texts": (
        ["pydantic"],
        [
            ["inspect", "./m"],
            ["save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto", "--out", "no-pydantic"],
            ["verify", "init", "./m"],
        ],
    ),
    "help": (
        ["pydantic", "prepcli.algebra", "prepcli.launch", "prepcli.planning.plan"],
        [["save-init", "--help"]],
    ),
    # The models of recipe tables take 0.3 s to build. Only the export of a training state reads a recipe.
    "item": (
        ["trainer.recipe"],
        [
            ["inspect", "init"],
            ["verify", "init"],
            ["reshard", "init", "--mesh", "1,2,1", "--out", "no-recipe"],
            ["export", "init", "--out", "no-recipe-hf"],
        ],
    ),
    "dry-run": (
        [*HEAVY_MODULES, "ml_dtypes"],
        [["save-init", "./m", "--dry-run", "--out", "x"]],
    ),
}


@pytest.mark.parametrize("name", slow_except(UNUSED, ["texts", "help"]))
def test_commands_import_no_unused_module(name: str, folder: Path):
    check_imports(folder, *UNUSED[name])


@pytest.mark.slow
def test_copied_files_are_sent_to_a_bucket_in_pieces(small: MemoryLimits, monkeypatch: MonkeyPatch):
    make_checkpoint(small.folder / "copied")
    for number in range(3):
        with (small.folder / f"copied/large-{number}.dat").open("wb") as file:
            file.truncate(100 * MIB)
    words = ("save-init", "./copied", "--copy", "large-*", "--out", "gs://bucket/out")
    # The client of the store has threads of its own.
    limit = small.inspect_nbytes["./m"] + BUDGET * MIB + 128 * MIB
    with use_objects(monkeypatch) as store:
        small.run_limited(limit, *words, "--memory", f"{BUDGET}MiB")
        sent = [content for path, content in store.objects.items() if path.endswith(".dat")]
        assert sent == [bytes(100 * MIB)] * 3
        assert prep.verify("gs://bucket/out")
