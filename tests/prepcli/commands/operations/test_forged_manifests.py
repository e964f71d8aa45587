"""Forged manifests, with their own digest recomputed: each field of a wrong type or value ends in one error."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.manifest import MANIFEST_FILE
from tests.helpers import towers
from tests.helpers.hostile_names import write_hostile_model
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.tokenizer_folders import write_model

# A value of each type of JSON, in range and out of it. DELETED removes the key.
DELETED = "deleted"
WRONG_VALUES = (
    *(None, True, -1, 0, 7, 10**18, 1.5, "", "x", "1,2,2", DELETED),
    *([], [1], ["x"], [[]], [[0, 1]], [[0, 10**18, "0" * 32]], {}, {"a": 1}, {"x": {}}),
)
# Records of one kind have the same checks: some of them are enough.
MAX_KEYS = 3
Place = tuple[str | int, ...]


def make_init() -> None:
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    run_ok("save-init", "./m", "--mesh", "1,2,2", "--out", "c")


def make_compressed() -> None:
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    cast = ("--dtype", "bfloat16")
    run_ok("save-init", "./m", "--storage", "files", "--compress", "zstd", *cast, "--out", "c")


def make_folder() -> None:
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    run_ok("pad-vocab", "./m", "--multiple", "16", "--out", "c")


def make_added() -> None:
    write_model(Path("m"))
    Path("tokens.txt").write_text("<a>\n")
    run_ok("add-tokens", "./m", "--tokens", "tokens.txt", "--out", "c")


def make_verbatim() -> None:
    write_hostile_model(Path("m"), ("layers.0.w", "layers.1.w", "b"))
    run_ok("save-init", "./m", "--out", "c")


def make_towers() -> None:
    towers.write_model("llava")
    run_ok("save-init", "./m", "--out", "c")


def make_decoded() -> None:
    make_quantized(Path("m"), "fp8")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--out", "c")


def make_maxtext() -> None:
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    run_ok("save-init", "./m", "--out", "init")
    run_ok("export", "init", "--layout", "maxtext", "--out", "c")


OUTPUTS: dict[str, Callable[[], None]] = {
    "init": make_init,
    "compressed": make_compressed,
    "folder": make_folder,
    "added": make_added,
    "verbatim": make_verbatim,
    "towers": make_towers,
    "decoded": make_decoded,
    "maxtext": make_maxtext,
}
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


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def check_commands(capsys: pytest.CaptureFixture[str], label: object) -> None:
    """Run all commands. Each succeeds, or ends in an error of its own."""
    for words in COMMANDS:
        for path in ("out", "out.partial"):
            shutil.rmtree(path, ignore_errors=True)
        code = main([*words, "-q"])
        error = capsys.readouterr().err
        assert "bug in prep" not in error, (label, words, error)
        assert code in (0, 1, 2), (label, words)


@pytest.mark.parametrize("kind", slow_except(OUTPUTS, ["init"]))
def test_forged_fields_are_errors(capsys: pytest.CaptureFixture[str], kind: str):
    OUTPUTS[kind]()
    data = Path("c", MANIFEST_FILE).read_bytes()
    cases = [(place, value) for place in places(json.loads(data)) for value in WRONG_VALUES]
    count = 12 if kind == "init" else 120
    for place, value in random.Random(0).sample(cases, count):
        with changed_manifest(Path("c")) as manifest:
            forge(manifest, place, value)
        check_commands(capsys, (place, value))
        Path("c", MANIFEST_FILE).write_bytes(data)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tensors", "model.norm.weight", "digests"), [[0, 10**18, "0" * 32]]),
        (("tensors", "model.norm.weight", "digests"), [[10**18, 10**18, "0" * 32]]),
        (("tensors", "model.norm.weight", "digests"), [[2, 1, "0" * 32]]),
        (("tensors", "model.norm.weight", "shape"), "x"),
        (("tensors", "model.norm.weight", "shape"), [-1]),
        (("tensors", "model.norm.weight", "dtype"), "float99"),
        (("slots",), {"opt_state.mu": {"w": {"digests": [], "dtype": "float32", "shape": 3}}}),
        (("rules",), [[]]),
        (("command",), ["save-init"]),
        (("vocab", "padded"), "136"),
        (("mesh",), "x"),
    ],
)
def test_forged_records_are_named(place: Place, value: object):
    make_init()
    with changed_manifest(Path("c")) as manifest:
        forge(manifest, place, value)
    with pytest.raises(prep.PrepError) as caught:
        verify_and_reshard()
    assert "bug in prep" not in str(caught.value)


def verify_and_reshard() -> None:
    prep.verify("c")
    prep.reshard("c", "out")
