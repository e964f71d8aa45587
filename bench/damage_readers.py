"""The outputs that `bench.damage` damages, and the commands that read them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.manifest import MANIFEST_FILE
from tests.helpers.foreign_names import FAMILY_MAP, STACKED_MAP
from tests.helpers.object_server import FakeObjectStore
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.training_folder import write_tokenizer

URL = "gs://bucket/run"
OBJECTS = "bucket/run/"
STEP = "2"
NEXT_STEP = "3"
OUT = Path("out")
RESULT = Path("result.json")
SETTINGS = (
    "mesh=1,1,-1",
    "data.holdout=0",
    "checkpoint.every=1",
    "batch.size=2",
    f"train.steps={NEXT_STEP}",
)
SET = tuple(word for setting in SETTINGS for word in ("--set", setting))
LORA = ("--set", "lora.rank=2", "--set", 'lora.targets=["attn.q"]')
EVAL = ("--data", "text.txt", "--seq-length", "16", "--limit", "2")
GENERATE = ("--tokens", "3,1,4", "--max-new-tokens", "4")
# The model whose outputs are damaged, and its quantised form in each format.
MODEL = "tiny"
QUANTIZED = ("fp8", "gptq", "nf4", "int8")
PADDED = ("--pad-vocab", "8")
MAP = Path("every.map")
SUGGEST = "map suggest A B"
SUGGEST_BACK = "map suggest B A"
EXPORT_MAP = Path("export.map")

Read = Callable[[], object]


class RefusedError(Exception):
    """A command ended with an error."""


def run(*words: str, codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run a command, and return its JSON. Raise RefusedError if its exit code is not in `codes`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*words, "--json"])
    if code not in codes:
        raise RefusedError(out.getvalue())
    return json.loads(out.getvalue())


@dataclass(frozen=True)
class Subject:
    """An output to damage.

    Attributes:
        files: Its files by name.
        write: Writes a file of it.
        commands: Functions that read it, by the name of the command. Each returns what it computed.
    """

    files: Mapping[str, bytes]
    write: Callable[[str, bytes], object]
    commands: Mapping[str, Read]


def _folder_subject(folder: Path, commands: Mapping[str, Read]) -> Subject:
    def write(name: str, data: bytes) -> None:
        path = folder / name
        times = path.stat()
        path.write_bytes(data)
        # Rotting bits do not change the time of a file.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return Subject(_read_tree(folder), write, commands)


def _read_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _convert(*words: str) -> object:
    """Convert, and return the files of the output without its manifest, which records times of the source."""
    for folder in (OUT, OUT.with_name(f"{OUT}.partial")):
        shutil.rmtree(folder, ignore_errors=True)
    run(*words, "--out", str(OUT))
    return {name: data for name, data in _read_tree(OUT).items() if name != MANIFEST_FILE}


def _report(*words: str, keys: Sequence[str]) -> object:
    """Run a command, and return some keys of its JSON."""
    report = run(*words)
    return [report[key] for key in keys]


def _result_file(*words: str, key: str) -> object:
    """Run a command that writes a result file, and return one key of it."""
    RESULT.unlink(missing_ok=True)
    run(*words, "--out", str(RESULT))
    return json.loads(RESULT.read_text())[key]


def _suggested_map(*words: str) -> object:
    RESULT.unlink(missing_ok=True)
    # An incomplete map is written, and has the exit code of an error.
    result = run("map", "suggest", *words, "--out", str(RESULT), codes=(0, 1))
    if not RESULT.exists():
        raise RefusedError(str(result))
    return RESULT.read_text()


def _roundtrip(name: str) -> object:
    return _result_file(*("roundtrip", name, "--layout", "mesh", "--layout", "easylm"), key="ways")


def _load_params(name: str) -> object:
    try:
        params = prep.load_params(name)
    except prep.PrepError as error:
        raise RefusedError(str(error)) from error
    leaves, tree = jax.tree.flatten(params)
    return str(tree), [np.asarray(leaf).tobytes() for leaf in leaves]


def _train_from(name: str) -> object:
    """Start a run from a checkpoint, and return the content of its first step."""
    shutil.rmtree("started", ignore_errors=True)
    words = ("--set", f'model.path="{name}"', "--set", "train.steps=1")
    run("train", "recipe.toml", "--out", "started", *SET, *words)
    return _step_content(_read_tree(Path("started", "1")))


def _resume() -> object:
    """Resume a copy of the run at its damaged step, and return the tensors and settings of the next step."""
    shutil.rmtree("resumed", ignore_errors=True)
    shutil.copytree("run", "resumed", copy_function=shutil.copy2)
    run("train", "recipe.toml", "--out", "resumed", *SET)
    return _step_content(_read_tree(Path("resumed", NEXT_STEP)))


def _resume_in_bucket(store: FakeObjectStore) -> object:
    before = dict(store.objects)
    try:
        shutil.rmtree("runs", ignore_errors=True)
        run("train", "recipe.toml", "--out", URL, *SET)
        return _step_content(store.objects_below(f"{OBJECTS}{NEXT_STEP}/"))
    finally:
        store.objects.clear()
        store.objects.update(before)


def _step_content(files: Mapping[str, bytes]) -> object:
    """Return the digests of a step's tensors, its config, and the bytes of its settings."""
    manifest = json.loads(files[MANIFEST_FILE])
    settings = {name: data for name, data in files.items() if "/hf/" in name}
    return {key: manifest[key] for key in ("tensors", "slots", "others", "config")}, settings


def _checking_readers(name: str, other: str) -> dict[str, Read]:
    """Return the commands that compare and show the tensors of any output."""
    values = ("ok", "differences")
    return {
        "verify": partial(_report, "verify", name, keys=values),
        "verify A B": partial(_report, "verify", name, other, keys=values),
        "verify B A": partial(_report, "verify", other, name, keys=values),
        "verify --tolerance": partial(
            *(_report, "verify", name, other, "--tolerance", "1e30"), keys=("distances",)
        ),
        "verify --chain": partial(_report, "verify", name, "--chain", keys=("links",)),
        "lock": partial(_result_file, "lock", name, key="tensors"),
        "inspect": partial(_report, "inspect", name, keys=("tensors",)),
        "inspect --stats": partial(_report, "inspect", name, "--stats", keys=("tensors",)),
        "inspect PATTERN": partial(
            _report, "inspect", name, "*norm*", "--stats", keys=("tensors",)
        ),
        "roundtrip": partial(_roundtrip, name),
    }


def _suggesting_readers(name: str, other: str) -> dict[str, Read]:
    """Return the proposals of maps between an output and another checkpoint of the same tensors."""
    return {
        SUGGEST: partial(_suggested_map, name, other),
        SUGGEST_BACK: partial(_suggested_map, other, name),
    }


def _computing_readers(name: str, other: str) -> dict[str, Read]:
    """Return the commands that compute with a model."""
    logits = ("verify", name, other, "--logits", "--tolerance", "1e30")
    return {
        "eval": partial(_report, "eval", name, *EVAL, keys=("loss", "perplexity")),
        "generate": partial(_report, "generate", name, *GENERATE, keys=("tokens",)),
        "load_params": partial(_load_params, name),
        "train": partial(_train_from, name),
        "verify --logits": partial(_report, *logits, keys=("prompts",)),
    }


MESH = ("--mesh", "1,2,2", "--pad-vocab", "auto")
# The conversions of a checkpoint, by the words after its name.
SAVE_INIT = {
    "save-init": (),
    "save-init --pad-vocab": ("--pad-vocab", "64"),
    "save-init --dtype": ("--dtype", "bfloat16"),
    "save-init --no-scan": ("--no-scan",),
    "save-init --mesh": MESH,
    "save-init --layers": ("--layers", "2"),
    "save-init --compress": ("--compress", "zstd", "--storage", "zarr3-files"),
}
SAVE_INIT_STATE = {
    "save-init": (),
    "save-init --training-state": ("--training-state",),
}
DEQUANTIZE = ("--quantized", "dequantize")
SAVE_INIT_MAPPED = {"save-init --map": ("--map", str(MAP))}
SAVE_INIT_QUANTIZED = {
    "save-init": (),
    "save-init dequantize": DEQUANTIZE,
    "save-init dequantize --dtype": (*DEQUANTIZE, "--dtype", "float32"),
    "save-init dequantize --mesh": (*DEQUANTIZE, "--no-verbatim", *MESH),
    "save-init dequantize --layers": (*DEQUANTIZE, "--layers", "2"),
    "save-init dequantize --map": (*DEQUANTIZE, "--map", str(MAP)),
}
EXPORT = {
    "export": (),
    "export --dtype": ("--dtype", "bfloat16"),
    "export --layout easylm": ("--layout", "easylm"),
    "export --layout maxtext": ("--layout", "maxtext"),
    "export --format dcp": ("--format", "dcp"),
    "export --map": ("--map", str(EXPORT_MAP)),
}
RESHARD = {
    "reshard": ("--mesh", "1,1,2"),
    "reshard --no-scan": ("--no-scan",),
    "reshard --storage": ("--storage", "zarr3-files"),
}


def _conversions(name: str, requests: Mapping[str, Sequence[str]]) -> dict[str, Read]:
    """Return conversions of a checkpoint. The first word of the name of a request is the command."""
    return {
        request: partial(_convert, request.split()[0], name, *words)
        for request, words in requests.items()
    }


def _folder_readers(name: str, other: str) -> dict[str, Read]:
    """Return all readers of a Hugging Face folder."""
    return {
        **_conversions(name, SAVE_INIT | SAVE_INIT_MAPPED),
        **_conversions(name, {"pad-vocab": (), "add-tokens": ("--tokens", "added.txt")}),
        "merge": partial(_convert, "merge", "adapter", name, "--no-verify"),
        **_checking_readers(name, other),
        **_suggesting_readers(name, other),
        **_computing_readers(name, other),
    }


def _foreign_readers(name: str, other: str) -> dict[str, Read]:
    """Return all readers of a checkpoint in the layout of another library."""
    return {
        **_conversions(name, SAVE_INIT),
        **_checking_readers(name, other),
        **_suggesting_readers(name, other),
        **_computing_readers(name, other),
    }


def _without(readers: Mapping[str, Read], *names: str) -> dict[str, Read]:
    """Return readers without those that refuse an intact output of its kind."""
    assert {*names} <= readers.keys()
    return {name: read for name, read in readers.items() if name not in names}


def _init_readers(name: str, other: str) -> dict[str, Read]:
    """Return all readers of an Orbax checkpoint of prep."""
    return {
        **_conversions(name, EXPORT | RESHARD),
        "merge": partial(_convert, "merge", "adapter", name, "--no-verify"),
        **_checking_readers(name, other),
        **_computing_readers(name, other),
    }


def _quantized_readers(name: str, other: str) -> dict[str, Read]:
    """Return all readers of a model with quantised weights."""
    readers = {
        **_conversions(name, SAVE_INIT_QUANTIZED),
        "add-tokens": partial(_convert, "add-tokens", name, "--tokens", "added.txt"),
        **_checking_readers(name, other),
    }
    # A round trip needs dense weights, and recorded digests do not show decoded values.
    readers = _without(readers, "roundtrip", "verify --chain")
    words = ("inspect", name, "--stats", *DEQUANTIZE)
    readers["inspect --stats dequantize"] = partial(_report, *words, keys=("tensors",))
    return readers


TRAINER_LAYOUTS = ("maxtext", "tunix", "levanter", "torchtitan")
# Outputs in the layouts and under the names of other libraries.
FOREIGN = ("easylm", "flax", *TRAINER_LAYOUTS, "dcp", "mapped")
# Layouts with the optimizer's state.
STATE_LAYOUTS = ("hf", "levanter", "maxtext")


def make_outputs() -> None:
    """Write all outputs to the current folder, which has a recipe, a model and its init."""
    run("train", "recipe.toml", "--out", "run", *SET, "--stop-after", STEP, codes=(75,))
    run("train", "recipe.toml", "--out", "lora", *SET, *LORA)
    run("export", "lora", "--out", "adapter")
    run("pad-vocab", MODEL, "--multiple", "64", "--out", "padded")
    MAP.write_text(STACKED_MAP)
    EXPORT_MAP.write_text(FAMILY_MAP)
    run("export", "tiny-init", "--map", str(EXPORT_MAP), "--out", "mapped")
    for storage in ("files", "zarr3-files"):
        run("save-init", MODEL, *PADDED, "--storage", storage, "--out", f"init-{storage}")
    run("save-init", MODEL, *PADDED, "--compress", "zstd", "--out", "init-zstd")
    run("reshard", "tiny-init", "--mesh", "1,4,2", "--out", "resharded")
    for layout in ("hf", *TRAINER_LAYOUTS, "easylm"):
        run("export", "tiny-init", "--layout", layout, "--out", layout)
    run("export", "tiny-init", "--format", "dcp", "--out", "dcp")
    for layout in STATE_LAYOUTS:
        words = ("--layout", layout, "--training-state", "--out", f"state-{layout}")
        run("export", f"run/{STEP}", *words)
    shutil.copytree(f"run/{STEP}", "intact-step")
    run("export", "tiny-init", "--layout", "hf-flax", "--out", "flax")
    for name in QUANTIZED:
        make_quantized(Path(f"src-{name}"), name)
        write_tokenizer(Path(f"src-{name}"))
        run("save-init", f"src-{name}", *DEQUANTIZE, "--out", f"init-{name}")
        source = ("--quantized-source", f"src-{name}")
        run("export", f"init-{name}", *source, "--out", name)
    run("train", "recipe.toml", "--out", URL, *SET, "--stop-after", STEP, codes=(75,))
    Path("added.txt").write_text("<new>\n")


def make_subjects(store: FakeObjectStore) -> dict[str, Subject]:
    """Return the outputs of `make_outputs` with the commands that read them."""
    subjects: dict[str, Subject] = {}
    subjects["hf"] = _folder_subject(Path("hf"), _folder_readers("hf", MODEL))
    subjects["padded"] = _folder_subject(Path("padded"), _folder_readers("padded", MODEL))
    inits = {
        "init": "tiny-init",
        **{name: name for name in ("init-files", "init-zarr3-files", "init-zstd", "resharded")},
    }
    for name, folder in inits.items():
        subjects[name] = _folder_subject(Path(folder), _init_readers(folder, MODEL))
    for name in FOREIGN:
        readers = _foreign_readers(name, MODEL)
        if name != "mapped":
            readers |= _conversions(name, {"save-init --verbatim": ("--verbatim",)})
        # A scale is no row of a map, and the names of an exported map are those of the model already.
        if name in ("mapped", "maxtext"):
            readers = _without(readers, SUGGEST, SUGGEST_BACK)
        subjects[name] = _folder_subject(Path(name), readers)
    for layout in STATE_LAYOUTS:
        name = f"state-{layout}"
        readers = _conversions(name, SAVE_INIT_STATE) | _checking_readers(name, "intact-step")
        if layout == "hf":
            # The files of Trainer are not those of the step.
            readers = _without(readers, "verify --chain")
        subjects[name] = _folder_subject(Path(name), readers)
    for name in QUANTIZED:
        subjects[name] = _folder_subject(Path(name), _quantized_readers(name, f"src-{name}"))
    step_readers = {**_init_readers(f"run/{STEP}", "intact-step"), "resume": _resume}
    subjects["step"] = _folder_subject(Path("run", STEP), step_readers)
    adapter_readers = {
        "merge": partial(_convert, "merge", "adapter", "tiny-init", "--no-verify"),
        "verify": partial(_report, "verify", "adapter", keys=("ok", "differences")),
    }
    subjects["adapter"] = _folder_subject(Path("adapter"), adapter_readers)
    prefix = f"{OBJECTS}{STEP}/"
    bucket = f"{URL}/{STEP}"

    def write_object(name: str, data: bytes) -> None:
        store.objects[prefix + name] = data

    bucket_readers = {
        "export": partial(_convert, "export", bucket),
        "verify": partial(_report, "verify", bucket, keys=("differences",)),
        "eval": partial(_report, "eval", bucket, *EVAL, keys=("loss", "perplexity")),
        "merge": partial(_convert, "merge", "adapter", bucket, "--no-verify"),
        "resume": lambda: _resume_in_bucket(store),
    }
    subjects["bucket"] = Subject(store.objects_below(prefix), write_object, bucket_readers)
    return subjects
