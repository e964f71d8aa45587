"""Forged manifests, hostile names of tensors and mutated inputs end in a result or in one error."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE
from prepcli.formats.manifest import MANIFEST_FILE
from tests.helpers import towers
from tests.helpers.fuzz_commands import run_samples
from tests.helpers.killing import read_files
from tests.helpers.manifests import changed_manifest
from tests.helpers.object_server import use_objects
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import train_tokenizer, write_json, write_model

# Names of one model, by what is hostile about them.
HOSTILE_NAMES: dict[str, tuple[str, ...]] = {
    "parent": ("x/../../escaped",),
    "other checkpoint": ("x/../../mine/params.w",),
    "parent first": ("../escaped",),
    "only parent": ("..",),
    "only dot": (".",),
    "dots": ("...",),
    "absolute": ("/tmp/escaped",),
    "two slashes first": ("//tmp/escaped",),
    "dot inside": ("a/./b",),
    "parent inside": ("a/../b",),
    "slash": ("a/b",),
    "slash last": ("a/",),
    "only slash": ("/",),
    "two slashes": ("a//b",),
    "below another": ("x", "x/y"),
    "below a chunk": ("x", "x/0.0"),
    "below a chunk of zarr 3": ("x", "x/c/0"),
    "below a document": ("x", "x/.zarray"),
    "below a document of zarr 3": ("x", "x/zarr.json"),
    "NUL": ("a\0b",),
    "only NUL": ("\0",),
    "newline": ("a\nb",),
    "carriage return": ("a\rb",),
    "escape sequence": ("\x1b[2Jx",),
    "C1 control": ("a\x9b2Jx",),
    "direction": ("a\u202eb",),
    "line separator": ("a\u2028b",),
    "longest name": ("m" * 248,),
    "one byte more": ("m" * 249,),
    "long in UTF-8": ("\u00e9" * 130,),
    "huge": ("m" * 60_000,),
    "empty": ("",),
    "blank": (" ",),
    "stacked": ("layers.*.w", "layers.0.w", "layers.1.w"),
    "metadata": ("_METADATA",),
    "marker": ("../commit_success.txt",),
    "manifest": ("prep-manifest.json",),
    "work folder": (".prep",),
    "settings": ("hf/config.json",),
    "slot": ("towers/x", "opt_state.mu/x", "params/x"),
    "backslash": ("..\\..\\x",),
    "percent": ("a%2f..%2fb",),
    "query": ("a?b#c",),
    "home": ("~",),
    "option": ("--out",),
    "placeholder": ("{out}",),
    "both cases": ("X", "x"),
    "two spellings": ("\u00e9", "e\u0301"),
}


def write_hostile_model(folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Write a model of an unknown type with tensors of these names and `w`, and return its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    tensors: dict[str, np.ndarray] = {}
    for number, name in enumerate(dict.fromkeys([*names, "w"])):
        tensors[name] = np.arange(16, dtype=np.float32).reshape(4, 4) + 100 * number
    save_file(tensors, folder / "model.safetensors")
    return tensors


# A value of each type of JSON, in range and out of it. DELETED removes the key.
DELETED = "deleted"
WRONG_VALUES = (
    *(None, True, -1, 0, 7, 10**18, 1.5, "", "x", "1,2,2", DELETED),
    *([], [1], ["x"], [[]], [[0, 1]], [[0, 10**18, "0" * 32]], {}, {"a": 1}, {"x": {}}),
)
# Records of one kind have the same checks: some of them are enough.
MAX_KEYS = 3
Place = tuple[str | int, ...]


def write_llama() -> None:
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)


# Model, and the options of the command that converts `m` to the output `c`
OUTPUTS: dict[str, tuple[Callable[[], object], str]] = {
    "init": (write_llama, "save-init ./m --mesh 1,2,2"),
    "compressed": (
        write_llama,
        "save-init ./m --storage files --compress zstd --dtype bfloat16",
    ),
    "folder": (write_llama, "pad-vocab ./m --multiple 16"),
    "added": (lambda: write_model(Path("m")), "add-tokens ./m --tokens tokens.txt"),
    "verbatim": (
        lambda: write_hostile_model(Path("m"), ("layers.0.w", "layers.1.w", "b")),
        "save-init ./m",
    ),
    "towers": (lambda: towers.write_model("llava"), "save-init ./m"),
    "decoded": (
        lambda: make_quantized(Path("m"), "fp8"),
        "save-init ./m --quantized dequantize",
    ),
    "maxtext": (write_llama, "export ./m --layout maxtext"),
}


def make_output(kind: str) -> None:
    write, command = OUTPUTS[kind]
    write()
    Path("tokens.txt").write_text("<a>\n")
    run_ok(*command.split(), "--out", "c")


COMMANDS = (
    ("verify", "c"),
    ("verify", "c", "./m"),
    ("verify", "c", "--chain"),
    ("inspect", "c", "--stats"),
    ("save-init", "c", "--out", "out"),
    ("reshard", "c", "--no-scan", "--out", "out"),
    ("export", "c", "--out", "out"),
    ("remove-tokens", "c", "--out", "out"),
    ("lock", "c", "--out", "c.lock.json", "--overwrite"),
)


def places(value: object, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value in a JSON document, of long objects those of some entries."""
    if place:
        yield place
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        items = list(value.items()) if not place else list(value.items())[:MAX_KEYS]
    elif isinstance(value, list):
        items = list(enumerate(value))[:MAX_KEYS]
    for key, item in items:
        yield from places(item, (*place, key))


def forge(manifest: dict[str, Any], place: Place, value: object) -> None:
    """Replace the value of a manifest at a place, or remove its key."""
    *parents, key = place
    parent: Any = manifest
    for part in parents:
        parent = parent[part]
    if value == DELETED:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(value)


def check_commands(capsys: Capture, label: object) -> None:
    """Run all commands. Each succeeds, or ends in an error of its own."""
    for words in COMMANDS:
        for path in ("out", "out.partial"):
            shutil.rmtree(path, ignore_errors=True)
        code = main([*words, "-q"])
        error = capsys.readouterr().err
        assert "bug in prep" not in error, (label, words, error)
        assert code in (0, 1, 2), (label, words)


@pytest.mark.parametrize("kind", slow_except(OUTPUTS, ["init"]))
def test_forged_fields_are_errors(capsys: Capture, kind: str):
    make_output(kind)
    data = Path("c", MANIFEST_FILE).read_bytes()
    cases = [(place, value) for place in places(json.loads(data)) for value in WRONG_VALUES]
    count = 6 if kind == "init" else 120
    for place, value in random.Random(0).sample(cases, count):
        with changed_manifest(Path("c")) as manifest:
            forge(manifest, place, value)
        check_commands(capsys, (place, value))
        Path("c", MANIFEST_FILE).write_bytes(data)


NORM = ("tensors", "model.norm.weight")
SLOTS = {"opt_state.mu": {"w": {"digests": [], "dtype": "float32", "shape": 3}}}
FORGED: list[tuple[Place, object]] = [
    ((*NORM, "digests"), [[0, 10**18, "0" * 32]]),
    ((*NORM, "digests"), [[10**18, 10**18, "0" * 32]]),
    ((*NORM, "digests"), [[2, 1, "0" * 32]]),
    ((*NORM, "shape"), "x"),
    ((*NORM, "shape"), [-1]),
    ((*NORM, "dtype"), "float99"),
    (("slots",), SLOTS),
    (("rules",), [[]]),
    (("command",), ["save-init"]),
    (("vocab", "padded"), "136"),
    (("mesh",), "x"),
]


def test_forged_records_are_named():
    make_output("init")
    data = Path("c", MANIFEST_FILE).read_bytes()
    for place, value in FORGED:
        with changed_manifest(Path("c")) as manifest:
            forge(manifest, place, value)
        with pytest.raises(prep.PrepError) as caught:
            verify_and_reshard()
        assert "bug in prep" not in str(caught.value), (place, value)
        Path("c", MANIFEST_FILE).write_bytes(data)


def verify_and_reshard() -> None:
    prep.verify("c")
    prep.reshard("c", "out")


# Hostile names of tensors: refused in planning with one error, or written inside of the output, by every writer


STORAGES = ("ocdbt", "zarr3", "files", "zarr3-files")
# Options of a conversion to an Orbax item: each storage, raw and compressed.
FORMS = tuple(
    ("--storage", storage, *compress)
    for storage, compress in product(STORAGES, ((), ("--compress", "zstd")))
)
FAST_NAMES = ("parent", "one byte more")
# Names of towers that no folder may have, as a file of `--storage files` or below another one.
TOWER_NAMES = ("../../escaped", "NUL\0", "m" * 300, "x/../../../escaped")


@pytest.mark.parametrize(
    "command", slow_except(["save-init", "pad-vocab --multiple 8", "lock"], ["save-init"])
)
def test_name_that_no_manifest_can_record_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
):
    """The output would have a manifest that prep does not read: JSON is UTF-8."""
    make_checkpoint(Path("m"), LLAMA)
    Path("m").rename(os.fsdecode(b"mod\xe9le"))
    make_checkpoint(Path("renamed"), LLAMA)
    Path("renamed/model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(Path("renamed").glob("*.safetensors"))):
        path.rename(path.with_name(os.fsdecode(b"p\xe9%d.safetensors" % number)))
    for source in (os.fsdecode(b"mod\xe9le"), "renamed"):
        name, *options = command.split()
        error = run_failing(capsys, USAGE, name, source, *options, "--out", "out")
        assert "is not UTF-8" in error
        assert not Path("out").exists()


def test_side_file_without_a_utf8_name_is_left_out(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    Path("m", os.fsdecode(b"caf\xe9.txt")).write_text("notes")
    assert main(["pad-vocab", "m", "--multiple", "8", "--out", "padded"]) == OK
    assert "left out: caf\\udce9.txt (not UTF-8)" in capsys.readouterr().err
    run_ok("verify", "padded", "m")
    assert not any(path.suffix == ".txt" for path in Path("padded").iterdir())


def test_map_of_a_name_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    shutil.copytree("m", os.fsdecode(b"mod\xe9le"))
    error = run_failing(capsys, USAGE, "map", "suggest", os.fsdecode(b"mod\xe9le"), "m")
    assert "is not UTF-8" in error


def writes_inside(capsys: Capture, *words: str) -> bool:
    """Run a conversion to `out`, and return whether it wrote the output. It writes nothing else."""
    before = read_files(Path())
    codes: list[int] = []
    for dry_run in (["--dry-run"], []):
        capsys.readouterr()
        codes.append(main([*words, "--out", "out", "-q", *dry_run]))
        errors = capsys.readouterr().err.splitlines()
        if codes[-1]:
            # A refusal leaves nothing behind, also no unfinished output.
            assert sorted(path.name for path in Path().iterdir()) == sorted(
                {path.split("/")[0] for path in before}
            )
            assert [line for line in errors if line.startswith("error: ")] == errors[:1]
            assert "bug in prep" not in "".join(errors)
    # The dry run shows what the run does.
    assert codes[0] == codes[1] in (0, 1, 2), (words, codes)
    after = read_files(Path())
    assert {path: after.pop(path) for path in before} == before
    assert all(path.startswith("out/") for path in after), words
    return codes[1] == 0


@pytest.mark.parametrize("kind", slow_except(HOSTILE_NAMES, FAST_NAMES))
def test_hostile_names_stay_inside(capsys: Capture, kind: str):
    tensors = write_hostile_model(Path("m"), HOSTILE_NAMES[kind])
    run_ok("save-init", "./m", "--out", "mine")
    written: dict[tuple[str, ...], bool] = {}
    for words in FORMS:
        written[words] = writes_inside(capsys, "save-init", "./m", *words)
        if written[words]:
            run_ok("export", "./out", "--out", "back")
            assert_same(read_tensors(Path("back")), tensors)
            shutil.rmtree("back")
            shutil.rmtree("out")
        # Another source of the same tensors is refused, too.
        assert writes_inside(capsys, "reshard", "./mine", *words) == written[words]
        shutil.rmtree("out", ignore_errors=True)
    # A database has no limit, and compression changes nothing about names.
    assert all(written[words] for words in FORMS if words[1] in ("ocdbt", "zarr3"))
    assert len({written[words] for words in FORMS if words[1].endswith("files")}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(HOSTILE_NAMES, ["parent"]))
def test_workers_and_buckets_refuse_the_same_names(
    capsys: Capture, monkeypatch: MonkeyPatch, kind: str
):
    write_hostile_model(Path("m"), HOSTILE_NAMES[kind])
    for words in FORMS:
        is_written = writes_inside(capsys, "save-init", "./m", *words)
        shutil.rmtree("out", ignore_errors=True)
        if not is_written:
            assert not writes_inside(capsys, "save-init", "./m", *words, "--workers", "2")
        with use_objects(monkeypatch, {"bucket/other/config.json": b"{}"}) as store:
            before = dict(store.objects)
            code = main(["save-init", "./m", *words, "--out", "gs://bucket/out", "-q"])
            assert (code == 0) == is_written, (words, capsys.readouterr().err)
            after = dict(store.objects)
            assert {path: after.pop(path) for path in before} == before
            assert all(path.startswith("bucket/out/") for path in after)
            assert bool(after) == is_written


@pytest.mark.parametrize("name", slow_except(TOWER_NAMES, ["../../escaped"]))
@pytest.mark.parametrize(
    "compress",
    [pytest.param((), marks=pytest.mark.slow), ("--compress", "zstd")],
    ids=["raw", "zstd"],
)
def test_names_of_towers_stay_inside(capsys: Capture, name: str, compress: tuple[str, ...]):
    tensors = towers.write_model("llava")
    tower = next(key for key in tensors if "vision_tower" in key)
    tensors[f"{tower}/{name}"] = tensors.pop(tower)
    write_safetensors(Path("m/model.safetensors"), tensors)
    for storage in STORAGES:
        words = ("save-init", "./m", "--storage", storage, *compress)
        assert writes_inside(capsys, *words) == (storage in ("ocdbt", "zarr3"))
        shutil.rmtree("out", ignore_errors=True)
    run_ok("save-init", "./m", "--out", "init")
    assert writes_inside(capsys, "export", "./init")
    assert safetensors_bytes(Path("out")) == tensors


@pytest.mark.parametrize("level", slow_except([None, "zstd"], ["zstd"]))
def test_added_tokens_keep_names_inside(capsys: Capture, level: str | None):
    tensors = towers.write_model("llava")
    tower = next(key for key in tensors if "vision_tower" in key)
    tensors[f"{tower}/../../../escaped"] = tensors.pop(tower)
    write_safetensors(Path("m/model.safetensors"), tensors)
    tokenizer = train_tokenizer("wordlevel", 0)
    tokenizer.save("m/tokenizer.json")
    write_json(Path("tokens.json"), ["<tool>"])
    size = str(tokenizer.get_vocab_size())
    run_ok("pad-vocab", "./m", "--true-vocab", size, "--size", "128", "--out", "padded")
    run_ok("save-init", "./padded", "--out", "init")
    words = ("add-tokens", "./init", "--tokens", "tokens.json")
    if level is not None:
        with changed_manifest(Path("init")) as manifest:
            manifest["compress"] = level
    assert writes_inside(capsys, *words)
    shutil.rmtree("out")
    # The output has the storage that the manifest of its source names.
    with changed_manifest(Path("init")) as manifest:
        manifest["storage"] = "files"
    assert not writes_inside(capsys, *words)


PRINTING_COMMANDS = (
    "verify FOLDER ./other",
    "verify FOLDER-init FOLDER",
    "inspect FOLDER --stats --html page.html",
    "lock FOLDER --html page.html",
    "roundtrip FOLDER --layout init",
    "map suggest FOLDER ./other",
    "export FOLDER-init --out out",
)


@pytest.mark.parametrize(
    "command", slow_except(PRINTING_COMMANDS, [PRINTING_COMMANDS[0], PRINTING_COMMANDS[2]])
)
def test_control_characters_reach_neither_terminal_nor_page(capsys: Capture, command: str):
    folder = Path("m\x1b]0;title\x07\r\x9b2J\u202e")
    names = [name for kind in HOSTILE_NAMES for name in HOSTILE_NAMES[kind] if len(name) < 100]
    write_hostile_model(folder, names)
    write_hostile_model(Path("other"), [*names[::2], "y"])
    run_ok("save-init", f"./{folder}", "--out", f"{folder}-init")
    capsys.readouterr()
    words = [word.replace("FOLDER", f"./{folder}") for word in command.split()]
    main([*words, "--progress", "lines", "-v"])
    captured = capsys.readouterr()
    texts = [captured.out, captured.err]
    if "page.html" in words:
        texts.append(Path("page.html").read_text())
    for text in texts:
        assert {char for char in text if not char.isprintable()} <= {"\n"}, words


# Mutated configs, manifests, recipes and option values end in a result or in one short error


@pytest.fixture(autouse=True)
def _offline(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


SEEDS = slow_except([(0, 30), *((seed, 1000) for seed in range(1, 5))], [(0, 30)])


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_mutated_inputs_end_in_one_short_message(seed: int, count: int) -> None:
    assert run_samples(range(count), seed) == []
