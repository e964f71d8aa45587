"""Script that writes `releases/VERSION.tar.xz` beside this file: outputs of a released version, finished and half-done.

Run it by hand, once per release, with the Python of an environment that has the release:

    python -m tests.golden.make_release PYTHON

It uses the release by its commands only. The archive keeps the times of the files, because a resumed command compares
them. It has

- the sources: `model`, `t5`, `recipe.toml` with `documents.jsonl`, and `pairs.toml` with `pairs.jsonl`,
- the outputs of CONVERSIONS and RUNS, and unfinished ones in `half`,
- in `reports.json` the fields that each command printed with `--json`, and in `recipes` the recipes of the release.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make_interrupted import RECIPE as TEXT_RECIPE
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer

RELEASES = Path(__file__).parent / "releases"
# In this order: each reads the outputs above it.
CONVERSIONS = {
    "padded": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "init": ["save-init", "./model", "--mesh", "1,2,2", "--pad-vocab", "auto"],
    "compressed": ["save-init", "./model", "--no-scan", "--compress", "zstd"],
    "rounded": ["save-init", "./model", "--dtype", "bfloat16", "--scan-axis", "1"],
    "resharded": ["reshard", "init", "--mesh", "1,4,1"],
    "exported": ["export", "init"],
    "easylm": ["export", "init", "--layout", "easylm"],
    "flax": ["export", "init", "--layout", "hf-flax"],
    "t5-init": ["save-init", "./t5", "--mesh", "1,2,2", "--pad-vocab", "auto"],
}
# Commands that write no output
REPORTS = {
    "verify": ["verify", "init"],
    "compare": ["verify", "padded", "rounded"],
    "inspect": ["inspect", "init"],
    "statistics": ["inspect", "model", "--stats"],
    "shards": ["inspect", "init", "--shards", "params.embed.tokens"],
    "dry-run": ["train", "recipe.toml", "--dry-run"],
    "missing": ["save-init", "./nowhere"],
    "models": ["models"],
    "recipes": ["recipes"],
    "environment": ["env"],
}
# Recipe of each run
RUNS = {"run": "recipe.toml", "pairs-run": "pairs.toml"}
# Conversions that are also ended midway, in the folder `half`
INTERRUPTED = ("padded", "init", "resharded", "exported")
STOP_AFTER = 3
RECIPE = TEXT_RECIPE.replace(
    'type = "text"\npath = "text.txt"', 'type = "json"\npath = "documents.jsonl"'
)
PAIRS = RECIPE.replace(
    'path = "documents.jsonl"',
    'path = "pairs.jsonl"\nfields = "[question], answer"\nsource_length = 8',
).replace("init", "t5-init")
# `prep` in the environment of the release. It ends without a cleanup in place of its sync number N, if N is not 0.
PROGRAM = """\
import os, sys
from importlib.metadata import entry_points
remaining = int(sys.argv.pop(1))
def wrap(sync):
    def counted(fd):
        global remaining
        remaining -= 1
        if remaining == 0:
            os._exit(9)
        return sync(fd)
    return counted
os.fsync, os.fdatasync = wrap(os.fsync), wrap(os.fdatasync)
(script,) = entry_points(group="console_scripts", name="prep")
sys.argv[0] = "prep"
sys.exit(script.load()())
"""
# A sync after the first values have reached the disk and are noted
SYNCS = 12


def run_release(python: str, *words: str, syncs: int = 0) -> str:
    """Run a command of the release, and return its stdout. With `syncs` it is ended in place of this sync."""
    done = subprocess.run(
        [python, "-c", PROGRAM, str(syncs), *words],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(f"exit code {done.returncode} of prep {shlex.join(words)}")
    return done.stdout


def make_sources() -> None:
    """Write a model, recipes and their data to the current folder."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    make_checkpoint(Path("model"), LLAMA, **sizes, **heads)
    t5_sizes: dict[str, Any] = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"], **t5_sizes)
    for name in ("model", "t5"):
        write_tokenizer(Path(name))
    _add_begin_token(Path("model/tokenizer.json"))
    random = np.random.default_rng(1)
    words = [WORDS[number] for number in np.cumsum(random.integers(0, 3, 1000)) % len(WORDS)]
    documents: list[str] = []
    pairs: list[str] = []
    for start in range(0, len(words), 10):
        question = " ".join(words[start : start + 4])
        answer = " ".join(words[start + 4 : start + 10])
        documents.append(json.dumps({"text": f"{question} {answer}"}))
        pairs.append(json.dumps({"question": question, "answer": answer}))
    Path("documents.jsonl").write_text("\n".join(documents))
    Path("pairs.jsonl").write_text("\n".join(pairs))
    Path("recipe.toml").write_text(RECIPE)
    Path("pairs.toml").write_text(PAIRS)


def _add_begin_token(path: Path) -> None:
    """Let a tokenizer begin each text with its first token, as the one of LLaMA does."""
    tokenizer = json.loads(path.read_text())
    begin = {"id": WORDS[0], "ids": [0], "tokens": [WORDS[0]]}
    text = [
        {"SpecialToken": {"id": WORDS[0], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {WORDS[0]: begin},
    }
    path.write_text(json.dumps(tokenizer))


def round_times() -> None:
    """Round the times of all files to seconds. The archive would lose their nanoseconds."""
    for path in Path().rglob("*"):
        seconds = int(path.stat().st_mtime)
        os.utime(path, (seconds, seconds))


def field_paths(value: object, path: str = "") -> set[str]:
    """Return the paths of all fields of a JSON value, e.g. {"a": [{"b": 1}]} -> {".a[].b"}."""
    paths: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            paths |= field_paths(item, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for item in value:
            paths |= field_paths(item, f"{path}[]")
    else:
        paths.add(path)
    return paths


def make_outputs(python: str) -> None:
    """Run the commands of the release in the current folder."""
    for folder in ("half", "recipes"):
        Path(folder).mkdir()
    reports: dict[str, str] = {}
    for name, command in CONVERSIONS.items():
        reports[name] = run_release(python, *command, "--out", name, "-q", "--json")
        round_times()
    for name in INTERRUPTED:
        run_release(python, *CONVERSIONS[name], "--out", f"half/{name}", "-q", syncs=SYNCS)
    for name, recipe in RUNS.items():
        reports[name] = run_release(python, "train", recipe, "--out", name, "-q", "--json")
        stop = ("--stop-after", str(STOP_AFTER))
        run_release(python, "train", recipe, "--out", f"half/{name}", "-q", *stop)
    for name, command in REPORTS.items():
        reports[name] = run_release(python, *command, "--json")
    fields = {name: sorted(field_paths(json.loads(report))) for name, report in reports.items()}
    Path("reports.json").write_text(json.dumps(fields))
    for recipe in json.loads(reports["recipes"])["recipes"]:
        text = run_release(python, "recipes", recipe["name"])
        Path("recipes", f"{recipe['name']}.toml").write_text(text)


def make_archive(python: str) -> None:
    """Write the archive of a release."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        version = run_release(python, "--version").split()[-1]
        make_sources()
        round_times()
        make_outputs(python)
        archive_path = RELEASES / f"{version}.tar.xz"
        with tarfile.open(archive_path, "w:xz", format=tarfile.PAX_FORMAT) as archive:
            archive.add(".", ".")


if __name__ == "__main__":
    make_archive(sys.argv[1])
