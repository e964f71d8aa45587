"""Script that writes interrupted.tar.gz beside this file: commands of an earlier version, each ended midway.

Run it by hand with the version of prep that the file is for: `python -m tests.golden.make_interrupted`. The archive
keeps the times of the files, because a resumed command compares them. It has the sources (`model`, `init`, `adapter`,
`recipe.toml`, `text.txt`), a staged folder `NAME.partial` of each conversion, a stopped run, and in `whole/` the
outputs of the same commands without a stop.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from prepcli.commands.cli.main import main
from prepcli.engine import pipeline
from prepcli.engine.files import Files
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer

ARCHIVE = Path(__file__).parent / "interrupted.tar.gz"
CONVERSIONS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,2,2", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,1"],
    "export": ["export", "init"],
    "merge": ["merge", "./adapter", "./model"],
}
TRAIN = ["train", "recipe.toml"]
STOP_AFTER = 3
RECIPE = """\
seed = 3
mesh = "2,2,2"
[model]
path = "init"
[data]
type = "text"
path = "text.txt"
seq_length = 16
[batch]
size = 8
[optimizer]
lr = 1e-2
[train]
steps = 6
log_every = 1
[checkpoint]
every = 3
"""
KILLED = 9
RANK = 2


def make_sources() -> None:
    """Write a model, its init, an adapter, a recipe and a text to the current folder."""
    make_checkpoint(
        Path("model"),
        LLAMA,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
    )
    write_tokenizer(Path("model"))
    assert main(["save-init", "./model", "--out", "init", "--pad-vocab", "8", "-q"]) == 0
    random = np.random.default_rng(1)
    matrices: dict[str, np.ndarray] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        matrices[f"{prefix}.lora_A.weight"] = random.standard_normal((RANK, 8), np.float32)
        matrices[f"{prefix}.lora_B.weight"] = random.standard_normal((8, RANK), np.float32)
    Path("adapter").mkdir()
    save_file(matrices, "adapter/adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 3,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    Path("adapter/adapter_config.json").write_text(json.dumps(settings))
    Path("recipe.toml").write_text(RECIPE)
    numbers = np.cumsum(random.integers(0, 3, 1000)) % len(WORDS)
    Path("text.txt").write_text(" ".join(WORDS[number] for number in numbers))


def round_times() -> None:
    """Round the times of all files to seconds. The archive would lose their nanoseconds."""
    for path in Path().rglob("*"):
        seconds = int(path.stat().st_mtime)
        os.utime(path, (seconds, seconds))


def end_midway(command: Sequence[str], *, syncs: int) -> None:
    """Run a command in a process that ends without a cleanup instead of its next sync."""
    pid = os.fork()
    if pid == 0:
        real_sync = Files.sync
        remaining = iter(range(syncs))

        def sync(files: Files) -> None:
            if next(remaining, None) is None:
                os._exit(KILLED)
            real_sync(files)

        with (
            mock.patch.object(Files, "sync", sync),
            mock.patch.object(pipeline, "MOST_UNSYNCED_NBYTES", 1_000),
        ):
            os._exit(main(command))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == KILLED, command


def make_archive() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_sources()
        round_times()
        for name, command in CONVERSIONS.items():
            end_midway([*command, "--out", name, "-q"], syncs=2)
            assert main([*command, "--out", f"whole/{name}", "-q"]) == 0
        main([*TRAIN, "-q", "--out", "run", "--stop-after", str(STOP_AFTER)])
        assert main([*TRAIN, "-q", "--out", "whole/run"]) == 0
        with tarfile.open(ARCHIVE, "w:gz", format=tarfile.PAX_FORMAT) as archive:
            archive.add(".", ".")


if __name__ == "__main__":
    make_archive()
