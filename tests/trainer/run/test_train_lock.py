"""The recipe key `model.lock`: a run starts only from the approved bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, DamagedError, PrepError
from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import set_keys

pytestmark = pytest.mark.usefixtures("work_dir")

ONE_STEP = ("train.steps=1", "data.holdout=0", "model.lock=start.json")


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_locked_model_trains_and_a_changed_one_does_not():
    prep.lock("tiny", "start.json")
    from_folder = (*ONE_STEP, "model.path=tiny")
    run_ok("train", "recipe.toml", *set_keys(*from_folder))
    change_byte(max(Path("tiny").glob("*.safetensors")))
    with pytest.raises(DamagedError, match="is damaged"):
        prep.train("recipe.toml", "other", overrides=from_folder)


def test_other_init_is_refused_by_its_manifest():
    prep.lock("tiny-init", "start.json")
    Path("tiny-init").rename("first")
    prep.save_init("tiny", "tiny-init", scan=False)
    with pytest.raises(PrepError, match=r"tiny-init differs from start\.json") as caught:
        prep.train("recipe.toml", overrides=ONE_STEP)
    assert "`prep-manifest.json` has" in caught.value.why


def test_lock_is_refused_with_no_verify():
    prep.lock("tiny-init", "start.json")
    with pytest.raises(PrepError, match="has no effect without the check"):
        prep.train("recipe.toml", overrides=ONE_STEP, verify=False)


def test_batches_and_tokenize_check_the_lock():
    prep.lock("tiny", "start.json")
    tokenizer = Path("tiny/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text() + " ")
    for read_data in (prep.batches, prep.tokenize_shard):
        with pytest.raises(PrepError, match=r"tiny differs from start\.json"):
            read_data("recipe.toml", overrides=(*ONE_STEP, "model.path=tiny"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["slurm"],
        ["tpu", "--accelerator", "v4-16", "--zone", "us-central2-b"],
        ["gke", "--image", "I", "--nodes", "1", "--devices-per-node", "8", "--claim", "runs"],
    ],
)
def test_launch_passes_the_lock_on(words: list[str], capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    words = ["launch", words[0], "recipe.toml", *words[1:], "--", "--set", "model.lock=start.json"]
    assert main(words) == OK
    assert "model.lock=start.json" in capsys.readouterr().out
