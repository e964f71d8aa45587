"""Damaged checkpoints: `prep train` and `prep generate` stop at a flipped bit in any file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import saved_steps
from tests.helpers.manifests import changed_manifest, remove_file_records
from tests.helpers.run_cli import run_ok
from tests.prepcli.restore.test_checked_reads import chunk_locations

GENERATE = ("generate", "--tokens", "3,1,4", "--max-new-tokens", "1")


def flip_bit(path: Path, offset: int) -> Path:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    return path


def damage_parameter(item: Path) -> Path:
    """Flip one bit of a parameter of an item, and return its file."""
    draw = random.Random(1)
    chunks = sorted(
        (place for (name, _), place in chunk_locations(item).items() if name.startswith("params."))
    )
    path, offset, nbytes = draw.choice(chunks)
    return flip_bit(path, offset + draw.randrange(nbytes))


def run_error_and_notes(
    capsys: pytest.CaptureFixture[str], code: int, *words: str
) -> dict[str, str]:
    """Run a command, and return its JSON error with stderr as `notes`."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    out, notes = capsys.readouterr()
    return {**json.loads(out).get("error", {}), "notes": notes}


def remove_checksums(folder: Path) -> Path:
    """Change a checkpoint to the format of earlier versions, without checksums."""
    with changed_manifest(folder) as manifest:
        del manifest["checksums"]
    remove_file_records(folder)
    (folder / CHECKSUMS_FILE).unlink()
    return folder


def test_train_rejects_damaged_start_checkpoint(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    path = damage_parameter(Path("tiny-init"))
    error = run_error_and_notes(capsys, FAILED, "train", "recipe.toml")
    assert error["what"].startswith("params.")
    assert error["what"].endswith(" of tiny-init is damaged")
    assert str(path) in error["why"]
    assert "checksum" in error["why"]
    assert error["hint"].startswith("create the checkpoint again")
    assert not saved_steps(Path("runs/recipe"))


def test_train_rejects_damaged_step(work_dir: Path, capsys: pytest.CaptureFixture[str]):
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


def test_generate_rejects_damaged_init(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    path = damage_parameter(Path("tiny-init"))
    error = run_error_and_notes(capsys, FAILED, *GENERATE, "tiny-init")
    assert error["what"].endswith(" of tiny-init is damaged")
    assert str(path) in error["why"]
    run_error_and_notes(capsys, OK, *GENERATE, "tiny-init", "--no-verify")


@pytest.mark.parametrize(
    "command",
    [
        ("pad-vocab", "tiny", "--size", "136"),
        ("export", "tiny-init"),
        ("export", "tiny-init", "--layout", "hf-flax"),
        ("save-init", "tiny", "--no-scan"),
    ],
    ids=["pad-vocab", "export", "flax", "unstacked"],
)
def test_generate_rejects_damaged_tensors(
    work_dir: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
):
    """Sources whose tensors are read whole: folders written by prep, and inits with unstacked layers."""
    run_ok(*command, "--out", "made")
    run_error_and_notes(capsys, OK, *GENERATE, "made")
    files = [
        path
        for pattern in ("*.safetensors", "*.msgpack")
        for path in sorted(Path("made").glob(pattern))
    ]
    path = (
        flip_bit(files[0], files[0].stat().st_size - 1) if files else damage_parameter(Path("made"))
    )
    error = run_error_and_notes(capsys, FAILED, *GENERATE, "made")
    assert error["what"].endswith(" in made is damaged")
    assert path.name in error["why"]
    run_error_and_notes(capsys, OK, *GENERATE, "made", "--no-verify")


def test_conversion_names_the_command_of_a_damaged_source(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok("save-init", "tiny", "--pad-vocab", "64", "--out", "made")
    damage_parameter(Path("made"))
    error = run_error_and_notes(capsys, FAILED, "export", "made", "--out", "out")
    assert error["hint"] == "make it again: `prep save-init tiny --pad-vocab 64`"
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "damage",
    ["values", "config", "checksums", "metadata", "missing"],
)
def test_verify_names_the_command_of_a_damaged_output(
    work_dir: Path, capsys: pytest.CaptureFixture[str], damage: str
):
    run_ok("save-init", "tiny", "--pad-vocab", "64", "--out", "made")
    made = Path("made")
    if damage == "values":
        damage_parameter(made)
    elif damage == "missing":
        next((made / "d").iterdir()).unlink()
    else:
        names = {"config": "hf/config.json", "checksums": CHECKSUMS_FILE, "metadata": "_METADATA"}
        flip_bit(made / names[damage], 5)
    error = run_error_and_notes(capsys, FAILED, "verify", "made")
    assert error["hint"].endswith("make it again: `prep save-init tiny --pad-vocab 64`")
    if damage == "config":
        assert "--accept hf/config.json` if you changed it on purpose, else" in error["hint"]


def test_lock_names_the_command_of_a_damaged_output(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok("save-init", "tiny", "--pad-vocab", "64", "--out", "made")
    damage_parameter(Path("made"))
    error = run_error_and_notes(capsys, FAILED, "lock", "made")
    assert error["hint"] == "make it again: `prep save-init tiny --pad-vocab 64`"


def test_checkpoint_without_checksums_is_read_twice(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    init = remove_checksums(Path("tiny-init"))
    notes = run_error_and_notes(capsys, OK, *GENERATE, "tiny-init")["notes"]
    assert (
        "tiny-init has no prep-checksums.bin (written by an earlier prep): checking it reads another "
        in notes
    )
    assert (
        "has no"
        not in run_error_and_notes(capsys, OK, *GENERATE, "tiny-init", "--no-verify")["notes"]
    )
    path = damage_parameter(init)
    for words in (("train", "recipe.toml"), (*GENERATE, "tiny-init")):
        error = run_error_and_notes(capsys, FAILED, *words)
        assert error["what"].endswith(" in tiny-init is damaged")
        assert str(path) in error["why"]


def test_verify_checks_the_checksum_file(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    path = flip_bit(Path("tiny-init", CHECKSUMS_FILE), 3)
    assert (
        run_error_and_notes(capsys, FAILED, "verify", "tiny-init")["what"] == f"{path} is damaged"
    )
    path.unlink()
    run_ok("save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "--overwrite")
    run_error_and_notes(capsys, OK, "verify", "tiny-init")
