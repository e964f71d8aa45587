"""`prep launch ray` on a real Ray with two workers of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE
from prepcli.formats.manifest import saved_steps
from tests.helpers.killing import read_files
from tests.helpers.launched_jobs import kill_share, kill_training_process
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from tests.helpers.waiting import MAX_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]"),
]
LOG = Path("driver.log")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start_driver(*words: str) -> subprocess.Popen[str]:
    """Write the driver of a job with two workers, and start it. It starts Ray on this machine."""
    launch = ["launch", "ray", "--workers", "2", "--folder", str(Path.cwd()), "--out", "job.py"]
    # The tests themselves have eight CPU devices.
    launch += ["--env", "JAX_NUM_CPU_DEVICES=1"]
    assert main([*launch, "--", *words]) == OK
    # Ray starts its workers in another folder.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with LOG.open("w") as log:
        return subprocess.Popen(
            [sys.executable, "job.py"], stdout=log, stderr=subprocess.STDOUT, env=env, text=True
        )


def test_killed_share_of_a_conversion_is_written_again():
    make_checkpoint(Path("model"), LLAMA)
    words = ["save-init", "model", "--mesh", "1,2,1"]
    assert main([*words, "--out", "one", "--processes", "1/0"]) == OK
    driver = start_driver(*words, "--out", "two")
    killed = kill_share(2, 1)
    assert driver.wait(MAX_S) == OK, LOG.read_text()
    assert not Path(f"/proc/{killed}").exists()
    assert read_files(Path("two")) == read_files(Path("one"))


def test_two_workers_train_and_resume():
    make_training_folder()
    sets = ["--set", "mesh=1,2,1", "--set", "train.steps=60", "--set", "checkpoint.every=5"]
    driver = start_driver("train", "recipe.toml", "--out", "run", *sets)
    wait_until(lambda: "saved step" in LOG.read_text(), driver)
    kill_training_process(1)
    assert driver.wait(MAX_S) == OK, LOG.read_text()
    assert "resuming at step" in LOG.read_text()
    assert saved_steps(Path("run"))[-1] == 60


def test_error_of_a_training_ends_the_job_with_its_code():
    make_training_folder()
    Path("text.txt").unlink()
    driver = start_driver("train", "recipe.toml", "--set", "mesh=1,2,1", "--set", "model.path=none")
    assert driver.wait(MAX_S) in (1, USAGE), LOG.read_text()
    assert LOG.read_text().count("error: ") <= 2
