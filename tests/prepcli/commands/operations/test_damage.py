"""Damaged checkpoints: each command stops with one error that names the file or tensor."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import saved_steps
from tests.helpers.damage import flip_bit, largest_file, tensor_byte_ranges
from tests.helpers.faults import COMMANDS
from tests.helpers.manifests import changed_manifest, remove_file_records
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.train_runs import set_keys
from tests.prepcli.restore.test_checked_reads import chunk_locations

GENERATE = ("generate", "--tokens", "3,1,4", "--max-new-tokens", "1")


def damage_parameter(item: Path, slot: str = "params") -> Path:
    """Flip one bit of a parameter or of another slot of an item, and return its file."""
    draw = random.Random(1)
    chunks = sorted(
        (place for (name, _), place in chunk_locations(item).items() if name.startswith(f"{slot}."))
    )
    path, offset, nbytes = draw.choice(chunks)
    return flip_bit(path, offset + draw.randrange(nbytes))


def run_error_and_notes(capsys: Capture, code: int, *words: str) -> dict[str, str]:
    """Run a command, and return its JSON error with stderr as `notes`."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    out, notes = capsys.readouterr()
    return {**json.loads(out).get("error", {}), "notes": notes}


STATES = [  # overrides of the first run, the damaged slot, and overrides of the run that reads it
    ((), "opt_state.adam.mu", ("model.path=runs/recipe", "model.training_state=true")),
    (("lora.rank=2",), "params", ("lora.rank=2",)),
]


@pytest.mark.parametrize(("settings", "slot", "resumed"), slow_except(STATES, STATES[:1]))
def test_train_rejects_damaged_state_of_earlier_versions(
    work_dir: Path,
    capsys: Capture,
    settings: tuple[str, ...],
    slot: str,
    resumed: tuple[str, ...],
):
    assert main(["train", "recipe.toml", "--stop-after", "1", *set_keys(*settings)]) == STOPPED
    damage_parameter(remove_checksums(Path("runs/recipe/1")) / "state", slot)
    out = "next" if resumed != settings else "runs/recipe"
    words = ("train", "recipe.toml", "--out", out, *set_keys(*resumed))
    error = run_error_and_notes(capsys, FAILED, *words)
    assert "is damaged" in error["what"]
    assert "checking it reads another" in error["notes"]


def remove_checksums(folder: Path) -> Path:
    """Change a checkpoint to the format of earlier versions, without checksums."""
    with changed_manifest(folder) as manifest:
        del manifest["checksums"]
    remove_file_records(folder)
    (folder / CHECKSUMS_FILE).unlink()
    return folder


def test_train_rejects_damaged_start_checkpoint(work_dir: Path, capsys: Capture):
    path = damage_parameter(Path("tiny-init"))
    error = run_error_and_notes(capsys, FAILED, "train", "recipe.toml")
    assert error["what"].startswith("params.")
    assert error["what"].endswith(" of tiny-init is damaged")
    assert str(path) in error["why"]
    assert "checksum" in error["why"]
    assert error["hint"].startswith("create the checkpoint again")
    assert not saved_steps(Path("runs/recipe"))


@pytest.mark.slow
def test_train_rejects_damaged_step(work_dir: Path, capsys: Capture):
    Path("recipe.toml").write_text(
        Path("recipe.toml").read_text().replace("every = 3", 'every = 1\nkeep = "all"')
    )
    words = ("train", "recipe.toml", "--stop-after")
    run_error_and_notes(capsys, STOPPED, *words, "2")
    path = damage_parameter(Path("runs/recipe/2/state"))
    error = run_error_and_notes(capsys, FAILED, *words, "1")
    assert error["what"].endswith(" of runs/recipe/2/state is damaged")
    assert str(path) in error["why"]
    assert error["hint"] == "move runs/recipe/2 away: the run then resumes from step 1"
    assert saved_steps(Path("runs/recipe")) == [1, 2]
    run_error_and_notes(capsys, STOPPED, *words, "1", "--no-verify")
    for step in ("2", "3"):
        Path("runs/recipe", step).rename(f"away-{step}")
    damage_parameter(remove_checksums(Path("runs/recipe/1")) / "state")
    error = run_error_and_notes(capsys, FAILED, *words, "1")
    assert error["what"].endswith(" in runs/recipe/1 is damaged")
    assert "runs/recipe/1 has no prep-checksums.bin" in error["notes"]
    assert error["hint"] == "`--restart` starts the run again"


def test_generate_rejects_damaged_init(work_dir: Path, capsys: Capture):
    path = damage_parameter(Path("tiny-init"))
    error = run_error_and_notes(capsys, FAILED, *GENERATE, "tiny-init")
    assert error["what"].endswith(" of tiny-init is damaged")
    assert str(path) in error["why"]
    run_error_and_notes(capsys, OK, *GENERATE, "tiny-init", "--no-verify")


def test_generate_rejects_damaged_tensors(work_dir: Path, capsys: Capture):
    """The tensors of a folder written by prep are read whole."""
    run_ok("pad-vocab", "tiny", "--size", "136", "--out", "made")
    run_error_and_notes(capsys, OK, *GENERATE, "made")
    path = min(Path("made").glob("*.safetensors"))
    flip_bit(path, path.stat().st_size - 1)
    error = run_error_and_notes(capsys, FAILED, *GENERATE, "made")
    assert error["what"].endswith(" in made is damaged")
    assert path.name in error["why"]
    run_error_and_notes(capsys, OK, *GENERATE, "made", "--no-verify")


MAKE_AGAIN = "make it again: `prep save-init tiny --pad-vocab 64`"
# File of the output, and how it is damaged
DAMAGED_FILES: list[tuple[str, Callable[[Path], object]]] = [
    ("hf/config.json", lambda path: flip_bit(path, 5)),
    (CHECKSUMS_FILE, lambda path: flip_bit(path, 5)),
    ("_METADATA", lambda path: flip_bit(path, 5)),
    ("d/*", Path.unlink),
]


def test_commands_name_the_command_of_a_damaged_output(work_dir: Path, capsys: Capture):
    run_ok("save-init", "tiny", "--pad-vocab", "64", "--out", "made")
    shutil.copytree("made", "whole")
    for pattern, damage in DAMAGED_FILES:
        damage(next(Path("made").glob(pattern)))
        hint = run_error_and_notes(capsys, FAILED, "verify", "made")["hint"]
        assert hint.endswith(MAKE_AGAIN)
        approves = "--accept hf/config.json` if you changed it on purpose, else" in hint
        assert approves == (pattern == "hf/config.json")
        shutil.rmtree("made")
        shutil.copytree("whole", "made")
    damage_parameter(Path("made"))
    for words in (("verify", "made"), ("lock", "made"), ("export", "made", "--out", "out")):
        assert run_error_and_notes(capsys, FAILED, *words)["hint"] == MAKE_AGAIN
    assert not Path("out").exists()


def test_checkpoint_without_checksums_is_read_twice(work_dir: Path, capsys: Capture):
    init = remove_checksums(Path("tiny-init"))
    notes = run_error_and_notes(capsys, OK, *GENERATE, "tiny-init")["notes"]
    assert (
        "tiny-init has no prep-checksums.bin (written by an earlier prep): checking it reads another "
        in notes
    )
    notes = run_error_and_notes(capsys, OK, *GENERATE, "tiny-init", "--no-verify")["notes"]
    assert "has no" not in notes
    path = damage_parameter(init)
    for words in (("train", "recipe.toml"), (*GENERATE, "tiny-init")):
        error = run_error_and_notes(capsys, FAILED, *words)
        assert error["what"].endswith(" in tiny-init is damaged")
        assert str(path) in error["why"]


def test_verify_checks_the_checksum_file(work_dir: Path, capsys: Capture):
    path = flip_bit(Path("tiny-init", CHECKSUMS_FILE), 3)
    error = run_error_and_notes(capsys, FAILED, "verify", "tiny-init")
    assert error["what"] == f"{path} is damaged"
    path.unlink()
    run_ok("save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "--overwrite")
    run_error_and_notes(capsys, OK, "verify", "tiny-init")


# `DamagedError` for each kind of damage to the files of a checkpoint


Damage = Callable[[Path], object]


def cut(path: Path, share: float = 0.5) -> None:
    """Keep this share of a file's first bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def flip(path: Path) -> None:
    """Invert the last byte of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=256)
    return tmp_path / "model"


@pytest.fixture
def init(model: Path, tmp_path: Path) -> Path:
    return prep.save_init(model, tmp_path / "init").path


# Pattern of a file, and its damage. The largest file of a pattern is damaged.
FOLDER_DAMAGES: list[tuple[str, Damage]] = [
    ("model.safetensors.index.json", cut),
    ("config.json", cut),
    ("*.safetensors", cut),
    ("*.safetensors", lambda path: cut(path, 0.001)),
    ("*.safetensors", Path.unlink),
]
ITEM_DAMAGES: list[tuple[str, Damage]] = [
    ("prep-manifest.json", cut),
    ("_METADATA", cut),
    ("manifest.ocdbt", cut),
    ("manifest.ocdbt", flip),
    ("manifest.ocdbt", Path.unlink),
    ("d/*", cut),
]
CHECKSUM_DAMAGES: list[Damage] = [cut, flip, lambda path: path.write_bytes(b"")]


def damage_largest(folder: Path, pattern: str, damage: Damage) -> None:
    damage(max(folder.glob(pattern), key=lambda path: path.stat().st_size))


@pytest.mark.parametrize(("pattern", "damage"), FOLDER_DAMAGES)
def test_damaged_safetensors_folder_is_a_damaged_error(model: Path, pattern: str, damage: Damage):
    damage_largest(model, pattern, damage)
    with pytest.raises(prep.DamagedError):
        prep.save_init(model, "init")


@pytest.mark.parametrize(("pattern", "damage"), ITEM_DAMAGES)
def test_damaged_orbax_item_is_a_damaged_error(init: Path, pattern: str, damage: Damage):
    damage_largest(init, pattern, damage)
    with pytest.raises(prep.DamagedError):
        prep.reshard(init, "again", mesh="1,2,1")


def test_damaged_checksum_file_is_a_damaged_error(init: Path):
    path = init / CHECKSUMS_FILE
    content = path.read_bytes()
    for damage in CHECKSUM_DAMAGES:
        damage(path)
        with pytest.raises(prep.DamagedError):
            prep.load_params(init)
        with pytest.raises(prep.DamagedError):
            prep.verify(init)
        path.write_bytes(content)


def test_damaged_zarr_metadata_is_a_damaged_error(tmp_path: Path):
    from prepcli.formats.zarr import parse_zarr_document
    from prepcli.planning.item_storage import ZARR2

    with pytest.raises(prep.DamagedError):
        parse_zarr_document("a", ZARR2, b'{"shape": [')


def test_data_cut_during_a_load_is_a_damaged_error(init: Path, monkeypatch: MonkeyPatch):
    from prepcli.restore import item_reader

    read_item = item_reader.read_item

    def cut_after_reading(folder: Path, **options: Any) -> object:
        item = read_item(folder, **options)
        cut(largest_file(init / "d"))
        return item

    monkeypatch.setattr(item_reader, "read_item", cut_after_reading)
    with pytest.raises(prep.DamagedError, match="cannot read"):
        prep.load_params(init)


# Flipped bits in an output or a source: the error names the tensor, and no damaged value is written


@pytest.mark.usefixtures("sources")
def test_verify_names_the_tensor_of_a_flipped_bit(capsys):
    run_ok(*COMMANDS["pad-vocab"], "--out", "whole")
    draw = random.Random(2)
    places: list[tuple[Path, str, int, int]] = []
    for path in sorted(Path("whole").glob("*.safetensors")):
        places += [(path, *place) for place in tensor_byte_ranges(path) if place[1] < place[2]]
    for path, name, low, high in draw.sample(places, 12):
        capsys.readouterr()
        before = path.read_bytes()
        flip_bit(path, draw.randrange(low, high))
        assert main(["verify", "whole", "-q"]) == 1
        err = capsys.readouterr().err
        assert "whole is damaged (1 of " in err
        assert f"({name}) rows " in err
        path.write_bytes(before)
    assert main(["verify", "whole", "-q"]) == 0


# Recorded digests that do not cover all rows of a tensor, each once, are refused by every reader


NAME = "model.layers.0.self_attn.q_proj.weight"
READERS = {
    "verify": ("verify", "init"),
    "pair": ("verify", "init", "./m"),
    "lock": ("lock", "init"),
    "export": ("export", "init", "--out", "hf"),
    "reshard": ("reshard", "init", "--no-scan", "--out", "other"),
}
# Ranges of rows of a tensor with 32 rows. Ranges that do not follow each other are refused with the manifest, and only
# the tensor has the number of rows.
ROWS = {
    "none": [(0, 0)],
    "first missing": [(1, 32)],
    "last missing": [(0, 31)],
    "gap": [(0, 5), (6, 32)],
    "overlap": [(0, 6), (5, 32)],
    "too many": [(0, 33)],
}


@pytest.mark.parametrize("reader", slow_except(list(READERS), ["verify", "lock"]))
@pytest.mark.parametrize("rows", slow_except(list(ROWS), ["gap"]))
def test_digests_of_other_rows_are_refused(reader: str, rows: str, capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "init")
    values = read_tensors(Path("m"))[NAME]
    assert len(values) == 32
    # Each digest is the one of its rows, so that only their ranges are wrong.
    digests = [
        [low, high, xxh3_128_hexdigest(values[low:high].tobytes())] for low, high in ROWS[rows]
    ]
    with changed_manifest(Path("init")) as manifest:
        manifest["tensors"][NAME]["digests"] = digests
    capsys.readouterr()
    lines = error_lines(capsys, *READERS[reader])
    if rows in ("none", "last missing", "too many"):
        assert lines[0].startswith("error: the manifest records ")
        assert "layers.0.self_attn.q_proj.weight" in lines[0]
        assert lines[1].startswith("  why: the tensor has 32 rows")
    else:
        assert lines[0] == "error: init/prep-manifest.json is broken"
        assert NAME in lines[1]
