"""Outputs and recipes of released versions: they are read, verified, converted and resumed.

`tests/golden/releases/VERSION.tar.gz` has the outputs of a release. `tests/golden/make_release.py` describes them.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.golden.make_release import (
    CONVERSIONS,
    INTERRUPTED,
    RELEASES,
    REPORTS,
    RUNS,
    STOP_AFTER,
    field_paths,
)
from tests.helpers.archives import extract_all
from tests.helpers.killing import read_files
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.training_states import read_params
from trainer.recipe import load_recipe

MANIFEST = "prep-manifest.json"
ARCHIVES = sorted(RELEASES.glob("*.tar.xz"))
# The checkpoint with the same values as an output
ORIGINS = {
    **dict.fromkeys(CONVERSIONS, "model"),
    "rounded": "rounded",
    "t5-init": "t5",
    **{run: run for run in RUNS},
}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def release(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Extract the archive of a release with its times, and make it the working directory."""
    with tarfile.open(request.param) as archive:
        extract_all(archive, tmp_path)
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.usefixtures("release")


@pytest.mark.parametrize("name", ORIGINS)
def test_release_output_is_verified(name: str):
    run_ok("verify", name)
    run_ok("verify", name, ORIGINS[name])


@pytest.mark.parametrize("name", CONVERSIONS)
def test_release_output_is_the_result_of_its_command(name: str, capsys: Capture):
    before = read_files(Path(name))
    report = run_json(capsys, *CONVERSIONS[name], "--out", name)
    assert report["already"]
    assert read_files(Path(name)) == before


@pytest.mark.parametrize("name", ["init", "compressed", "resharded", "t5-init", *RUNS])
def test_release_checkpoint_is_resharded_and_exported(name: str):
    origin = ORIGINS[name]
    run_ok("reshard", name, "--out", "again", "--mesh", "1,1,1")
    run_ok("verify", "again", origin)
    run_ok("export", name, "--out", "hf")
    run_ok("verify", "hf", origin)


@pytest.mark.parametrize("name", ["padded", "exported", "easylm", "flax"])
def test_release_folder_is_converted(name: str):
    run_ok("save-init", name, "--out", "again")
    run_ok("verify", "again", "model")


@pytest.mark.parametrize("name", ["init", "rounded", "run", "padded", "easylm"])
def test_release_checkpoint_is_loaded(name: str):
    params = prep.load_params(name)
    assert params["layers"]["attn"]["q"]["weight"].shape == (2, 2, 4, 8)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_half_done_output_of_a_release_needs_restart(name: str, capsys: Capture):
    partial = Path(f"half/{name}.partial")
    command = (*CONVERSIONS[name], "--out", f"half/{name}")
    before = read_files(partial)
    del before[".prep/lock"]
    error = run_failing(capsys, 1, *command)
    assert error.splitlines() == [
        f"error: {partial} belongs to another run",
        "  why: it was started by another version of prep",
        " hint: `--restart` deletes it",
    ]
    assert read_files(partial).items() >= before.items()
    run_ok(*command, "--restart")
    assert not partial.exists()
    written = read_files(Path("half", name))
    finished = read_files(Path(name))
    # newer manifests also list the digests of small files
    del written[MANIFEST], finished[MANIFEST]
    assert written == finished


def test_run_without_begin_tokens_names_the_key_that_keeps_it(capsys: Capture):
    """Version 0.1.0 had no `data.add_bos`, and put no begin token before documents."""
    error = run_failing(capsys, 1, "train", "recipe.toml", "--out", "half/run")
    assert "data.add_bos: false -> not set" in error
    assert "`--set data.add_bos=false` keeps it" in error


@pytest.mark.parametrize("name", RUNS)
def test_run_of_a_release_is_resumed(name: str, capsys: Capture):
    command = ("train", RUNS[name], "--set", "data.add_bos=false")
    report = run_json(capsys, *command, "--out", f"half/{name}")
    assert report["resumed_at"] == STOP_AFTER
    resumed = read_params(Path("half", name, "6"))
    finished = read_params(Path(name, "6"))
    assert resumed.keys() == finished.keys()
    for path, value in finished.items():
        # other versions and other CPUs round products otherwise
        np.testing.assert_allclose(resumed[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", RUNS)
def test_finished_run_of_a_release_stays_finished(name: str, capsys: Capture):
    steps = read_files(Path(name, "6"))
    command = ("train", RUNS[name], "--set", "data.add_bos=false")
    report = run_json(capsys, *command, "--out", name)
    assert report["step"] == 6
    assert read_files(Path(name, "6")) == steps


def test_recipes_of_a_release_are_read():
    shipped = sorted(Path("recipes").glob("*.toml"))
    kept = [Path(run, "recipe.toml") for run in RUNS]
    assert shipped
    for path in shipped:
        assert load_recipe(path).recipe.model.path
    for path, recipe in zip(kept, RUNS.values(), strict=True):
        assert load_recipe(path).recipe.optimizer == load_recipe(Path(recipe)).recipe.optimizer


@pytest.mark.parametrize("name", [*CONVERSIONS, *REPORTS])
def test_json_has_every_field_of_a_release(name: str, capsys: Capture):
    expected = json.loads(Path("reports.json").read_text())[name]
    words = REPORTS.get(name) or [*CONVERSIONS[name], "--out", "new"]
    capsys.readouterr()
    main([*words, "--json"])
    fields = field_paths(json.loads(capsys.readouterr().out))
    assert [field for field in expected if field not in fields] == []
