"""Run commands on mutated small inputs: each must succeed or end with a short error, never with "a bug in prep"."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.commands.cli.main import main
from prepcli.core.unexpected import BUG
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, LLAMA, make_checkpoint

# An error of a recipe lists up to 20 problems.
MAX_MESSAGE_CHARS = {"recipe": 5000, "override": 5000}
EXIT_CODES = {0, 1, 2}

VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "9" * 5000, "a\x00b", "\ud800", "\u202e", "../x", "[" * 500, "NaN", "1e5", "auto",
    0, -1, 1, 2, 7, 131, 1 << 31, 1 << 63, 10**18, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300, math.nan, math.inf,
    -math.inf, [], {}, [[]], [1, "a", None], {"a": {"b": []}}, [0.0, math.inf], list(range(300)),
)  # fmt: skip
TOML_VALUES = (
    '""', '"x"', "true", "false", "0", "-1", "7", "9" * 30, "9" * 5000, f"0x{'f' * 6000}", "1e400", "nan", "-inf",
    "0.5", "[]", "[1]", '["a", 1]', "{}", "{a = 1}", "[" * 200 + "]" * 200, "1979-05-27", "07:32:00", '"${X}"',
    '"\\u0000"', '"gs://b/x"', '"1,1,1"', '"-1,-1,1"', '"/dev/null"', '"' + "x" * 5000 + '"', "'''", "[[",
    '"init"', '"hf"', '"d.txt"',
)  # fmt: skip
TEXTS = (
    "", "x", "0", "-1", "7", "1,1,1", "0,0,0", "-1,1,1", "1,2,4", "mp:2", "9" * 30, "9" * 5000, "9" * 18, "nan",
    "inf", "1e400", "5GB", "-5GB", "1e3", "0.1KB", "auto", "no", "zstd:99", "zstd", "embed=mp", "a=b", "re:(=mp", "[",
    "*", "..", "/", "~", "init", "hf", "nowhere", "gs://b", "s3://", "o/m@v", "x" * 5000, "a\nb", "\udcff", "é" * 200,
    "last", "best", "t.toml",
)  # fmt: skip
TOML_LINES = ("[x]", "[model.x]", "[[data]]", "[", "x", "model:", "  path: x", "{", "\\")
RECIPE = """\
seed = 1
[model]
path = "init"
[data]
path = "d.txt"
seq_length = 16
tokenizer = "tokenizer.json"
[optimizer]
lr = 1e-4
[train]
steps = 2
[batch]
size = 2
"""
KEYS = (
    "model.dtype", "model.path", "data.path", "data.seq_length", "optimizer.type", "optimizer.freeze", "train.steps",
    "mesh", "rules", "lora.rank", "lora.targets", "batch.size", "eval.path", "seed", "data.packing", "name",
)  # fmt: skip
# Command -> its options with a value
OPTIONS = {
    "save-init": "mesh rule pad-vocab init seed true-vocab dtype config memory",
    "pad-vocab": "multiple size mesh init seed true-vocab config drop memory",
    "reshard": "mesh rule pad-vocab dtype scan-axis compress memory",
    "export": "shard-size layout format dtype true-vocab step config memory",
    "inspect": "shards mesh diff sort revision",
    "plan": "mesh devices seq-length batch-size config",
    "verify": "memory config",
    "models": "",
    "launch slurm": "nodes devices-per-node env time job-name log setup",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that ended in another way than it must."""

    number: int
    words: tuple[str, ...]
    why: str


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part replaced, removed, added or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        kind = rng.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.15:
            return {**value, rng.choice(["x", "", "a" * 5000, "\u202e"]): rng.choice(VALUES)}
        if kind < 0.2:
            return {**value, key: nest(value[key], rng.choice([5, 90, 150, 800]))}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        index = rng.randrange(len(value))
        return [*value[:index], mutate_json(value[index], rng), *value[index + 1 :]]
    return rng.choice(VALUES)


def nest(value: Any, depth: int) -> Any:
    """Return a value inside of nested lists."""
    for _ in range(depth):
        value = [value]
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them changed, removed, repeated or cut off."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice([1, 1, 2, 30]))
        drawn = rng.randbytes(stop - start)
        repeated = data[start:stop] * 3
        part = rng.choice([b"", drawn, repeated, b"9" * 400, b"[" * 300, b'"', b"\n"])
        data = data[:start] + part + data[stop:]
    return data


def _mutate_file(path: Path, rng: random.Random) -> None:
    """Change the JSON values of a file, or some of its bytes."""
    data = path.read_bytes()
    if rng.random() < 0.75:
        text = json.dumps(mutate_json(json.loads(data), rng))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(mutate_bytes(data, rng))


def config_sample(rng: random.Random) -> list[str]:
    """Mutate the config.json of a Hugging Face folder; return a command that reads it."""
    folder = Path("changed")
    shutil.copytree(f"hf-{rng.randrange(len(ALL_CONFIGS))}", folder)
    others = ["model.safetensors.index.json", "generation_config.json"]
    path = folder / rng.choice(["config.json"] * 3 + others)
    if not path.exists():
        path.write_text('{"eos_token_id": 0, "temperature": 1.0}')
    _mutate_file(path, rng)
    command = rng.choice(["save-init", "pad-vocab", "inspect", "plan", "verify"])
    extra = {
        "plan": ["--mesh", "1,1,1"],
        "save-init": ["--out", "out"],
        "pad-vocab": ["--out", "out"],
    }.get(command, [])
    return [command, str(folder), *extra, *json_option(rng)]


def json_option(rng: random.Random) -> list[str]:
    return ["--json"] if rng.random() < 0.3 else []


def manifest_sample(rng: random.Random) -> list[str]:
    """Mutate the manifest or the metadata of an init; return a command that reads it."""
    shutil.copytree("init", "changed")
    names = ["prep-manifest.json", "prep-manifest.json", "_METADATA", "hf/config.json"]
    _mutate_file(Path("changed", rng.choice(names)), rng)
    command = rng.choice(["export", "reshard", "inspect", "plan", "verify"])
    extra = {
        "plan": ["--mesh", "1,1,1"],
        "export": ["--out", "out"],
        "reshard": ["--out", "out", "--mesh", "1,1,1"],
    }
    return [command, "changed", *extra.get(command, []), *json_option(rng)]


def recipe_sample(rng: random.Random) -> list[str]:
    """Mutate a recipe; return a command that reads it."""
    lines: list[str] = list(RECIPE.splitlines())
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(lines))
        key, equals, _ = lines[index].partition(" = ")
        kind = rng.random()
        if equals and kind < 0.6:
            lines[index] = f"{key} = {rng.choice(TOML_VALUES)}"
        elif kind < 0.75:
            names = [key.rpartition(".")[2] for key in KEYS]
            name = rng.choice([*names, ".".join("a" * 500), '"\\n"', "x" * 3000])
            lines.insert(index, f"{name} = {rng.choice(TOML_VALUES)}")
        elif kind < 0.85:
            lines.insert(index, rng.choice(TOML_LINES))
        else:
            del lines[index]
        lines = lines or [""]
    data = "\n".join(lines).encode()
    Path("recipe.toml").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.15 else data)
    commands = ["plan recipe.toml --mesh 1,1,1", "launch slurm recipe.toml"]
    return rng.choice(commands).split()


def override_sample(rng: random.Random) -> list[str]:
    """Return a command with mutated `--set` options."""
    Path("recipe.toml").write_text(RECIPE)
    words = list[str]()
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*KEYS, *KEYS, *KEYS, "x", "", "a.b.c", ".".join("a" * 3000), "model"])
        value = rng.choice([*TOML_VALUES, *TEXTS])
        words += ["--set", rng.choice([f"{key}={value}", f"{key}={value}", key])]
    return ["launch", "slurm", "recipe.toml", "--", *words]


def option_sample(rng: random.Random) -> list[str]:
    """Return a command with mutated values of its options."""
    command = rng.choice([*OPTIONS])
    subject = {"models": [], "launch slurm": ["t.toml"]}.get(
        command, [rng.choice(["hf-2", "init", "init"])]
    )
    words = [*command.split(), *subject]
    options = OPTIONS[command].split()
    for option in rng.sample(options, min(len(options), rng.randint(1, 2))):
        words += [f"--{option}", rng.choice(TEXTS)]
    if command in ("save-init", "pad-vocab", "reshard", "export"):
        words += ["--dry-run"]
    return words


SAMPLES: dict[str, Callable[[random.Random], list[str]]] = {
    "config": config_sample,
    "manifest": manifest_sample,
    "recipe": recipe_sample,
    "override": override_sample,
    "option": option_sample,
}


def run_sample(number: int, seed: int) -> Failure | None:
    """Run one sample in the current folder, and return its failure if there is one."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice([*SAMPLES])
    for name in ("changed", "out", "out.partial"):
        shutil.rmtree(name, ignore_errors=True)
    words = SAMPLES[kind](rng)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    message = err.getvalue()[max(0, err.getvalue().find("error: ")) :]
    why = ""
    if code not in EXIT_CODES:
        why = f"exit code {code}"
    elif BUG in message:
        why = message.partition("why: ")[2].partition("\n")[0]
    elif code and len(message) > MAX_MESSAGE_CHARS.get(kind, 1000):
        why = f"a message of {len(message):,} characters: {message[:300]}"
    elif "--json" in words:
        json.loads(out.getvalue())
    return Failure(number, tuple(words), why) if why else None


def prepare_folder() -> None:
    """Write the inputs that are mutated into the current folder."""
    for number, config in enumerate(ALL_CONFIGS):
        make_checkpoint(Path(f"hf-{number}"), config)
    make_checkpoint(Path("hf"), LLAMA)
    Path("t.toml").write_text(RECIPE)
    Path("d.txt").write_text("1 2 3 " * 100)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["save-init", "hf", "--out", "init", "-q"]) == 0


def run_samples(numbers: Sequence[int], seed: int) -> list[Failure]:
    """Run samples in the current folder, and return the failures."""
    prepare_folder()
    failures = [run_sample(number, seed) for number in numbers]
    return [failure for failure in failures if failure is not None]
