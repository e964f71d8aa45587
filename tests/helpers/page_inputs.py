"""Inputs that pages of the documentation name in their setup: tiny models, texts and runs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.foreign_names import write_foreign_folder
from tests.helpers.golden_inputs import copy_golden
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import write_model
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer


def _prep(*words: str | Path) -> None:
    """Run a command that writes an input."""
    assert main([*map(str, words), "-q"]) == OK, words


def _gpt_neo(path: Path) -> None:
    make_checkpoint(path, GPT_NEO, vocab_size=257, hidden_size=64, num_heads=8)
    write_tokenizer(path)


def _torch_files(path: Path) -> None:
    path.mkdir()
    with tempfile.TemporaryDirectory() as work:
        model = Path(work, "model")
        tensors = make_checkpoint(model, GPT_NEO, vocab_size=257, hidden_size=64, num_heads=8)
        shutil.copy(model / "config.json", path)
    (path / "pytorch_model.bin").write_bytes(make_torch_file(tensors))


def _llama(path: Path) -> None:
    make_checkpoint(path, LLAMA, vocab_size=256, hidden_size=64)


def _new_model(path: Path) -> None:
    """Write a model of a type without a family."""
    make_checkpoint(path, GPT_NEO, vocab_size=256, hidden_size=64, num_heads=8)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "new_model"}))


def _easylm_streams(path: Path) -> None:
    """Write streams of EasyLM without a config. `llama-7b` has it."""
    path.mkdir()
    copy_golden(path / "streaming_params", "flax/llama/streaming_params")
    copy_golden(path / "streaming_train_state_1000", "flax/llama/streaming_train_state")


def _redco_item(path: Path) -> None:
    """Write an item of Orbax without a manifest and a config."""
    with tempfile.TemporaryDirectory() as work:
        _gpt_neo(Path(work, "model"))
        _prep("save-init", Path(work, "model"), "--out", Path(work, "init"))
        ours = ("hf", "prep-manifest.json", "prep-checksums.bin")
        shutil.copytree(Path(work, "init"), path, ignore=shutil.ignore_patterns(*ours))


def _step_of_a_run(path: Path) -> None:
    """Write a step in place of a run, which takes a training. The folder of its source names it."""
    with tempfile.TemporaryDirectory() as work:
        make_trainer_checkpoint(Path(work, path.name), 400)
        _prep("save-init", Path(work, path.name), "--training-state", "--out", path)


def _foreign(path: Path) -> None:
    """Write a LLaMA under the names of another trainer."""
    with tempfile.TemporaryDirectory() as work:
        make_checkpoint(Path(work, "original"), LLAMA)
        write_foreign_folder(path, read_tensors(Path(work, "original")))


def _gguf(path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import make_gguf

    make_gguf(path, "llama")


def _jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": " ".join(WORDS * 4)}) + "\n" for _ in range(2)))


def _text(path: Path, repeats: int = 4) -> None:
    path.write_text(" ".join(WORDS * repeats))


# Writers of the inputs, by their paths in the folder of a page.
INPUTS: dict[str, Callable[[Path], object]] = {
    "gpt-neo-1.3B": _gpt_neo,
    "gpt-neo-1.3B-bin": _torch_files,
    "llama-7b": lambda path: copy_golden(path, "flax/llama/hf"),
    "llama-13b": _llama,
    "llama-13b-fp8": lambda path: make_quantized(path, "fp8", base=LLAMA | {"vocab_size": 256}),
    "llama-13b-Q4_K_M.gguf": _gguf,
    "my-model": write_model,
    "new-model": _new_model,
    "own": _foreign,
    "runs/7b": _easylm_streams,
    "ckpts/last": _redco_item,
    "out/checkpoint-400": lambda path: make_trainer_checkpoint(path, 400),
    "runs/tuned": _step_of_a_run,
    "text.txt": _text,
    "validation.txt": _text,
    "data/text.txt": lambda path: _text(path, repeats=40),
    "test.jsonl": _jsonl,
}


@cache
def _made_input(name: str) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with an input, which tests copy. It is deleted when this process exits."""
    folder = tempfile.TemporaryDirectory(prefix="prep-page-")
    INPUTS[name](Path(folder.name) / Path(name).name)
    return folder


def copy_input(name: str, folder: Path) -> None:
    """Copy an input to its path in the folder of a page."""
    source, target = Path(_made_input(name).name) / Path(name).name, folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
