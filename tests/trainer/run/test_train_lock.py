"""The recipe key `model.lock`: a run starts only from the approved bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE, DamagedError, PrepError
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.signing_keys import make_key, needs_openssl

pytestmark = pytest.mark.usefixtures("work_dir")

ONE_STEP = ("train.steps=1", "data.holdout=0", "model.lock=start.json")


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_locked_model_trains_and_a_changed_one_does_not():
    prep.lock("tiny", "start.json")
    from_folder = (*ONE_STEP, "model.path=tiny")
    run_ok("train", "recipe.toml", *(word for key in from_folder for word in ("--set", key)))
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


@needs_openssl
def test_signed_lock_trains_and_another_one_does_not():
    pytest.importorskip("cryptography")
    make_key("author")
    make_key("other")
    signed = (*ONE_STEP, "model.public_key=author.pub")
    prep.lock("tiny-init", "start.json")
    with pytest.raises(DamagedError, match=r"start\.json is not signed"):
        prep.train("recipe.toml", "none", overrides=signed)
    prep.lock("tiny-init", "start.json", sign="other.pem")
    with pytest.raises(DamagedError, match=r"start\.json has a wrong signature"):
        prep.train("recipe.toml", "none", overrides=signed)
    prep.lock("tiny-init", "start.json", sign="author.pem", overwrite=True)
    prep.train("recipe.toml", overrides=signed)
    # A change of the approved list itself, with the old signature.
    lock = Path("start.json")
    lock.write_text(lock.read_text().replace('"source"', ' "source"', 1))
    with pytest.raises(DamagedError, match=r"start\.json has a wrong signature"):
        prep.train("recipe.toml", "none", overrides=signed)
    assert not Path("none").exists()


def test_batches_and_tokenize_check_the_lock():
    prep.lock("tiny", "start.json")
    tokenizer = Path("tiny/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text() + " ")
    for read_data in (prep.batches, prep.tokenize_shard):
        with pytest.raises(PrepError, match=r"tiny differs from start\.json"):
            read_data("recipe.toml", overrides=(*ONE_STEP, "model.path=tiny"))
    assert not Path("runs").exists()


@needs_openssl
def test_batches_and_tokenize_check_the_signature():
    pytest.importorskip("cryptography")
    make_key("author")
    prep.lock("tiny-init", "start.json")
    signed = (*ONE_STEP, "model.public_key=author.pub")
    for read_data in (prep.batches, prep.tokenize_shard):
        with pytest.raises(DamagedError, match=r"start\.json is not signed"):
            read_data("recipe.toml", overrides=signed)
    assert not Path("runs").exists()


def test_public_key_requires_a_lock(capsys: pytest.CaptureFixture[str]):
    err = run_failing(capsys, USAGE, "train", "recipe.toml", "--set", "model.public_key=k.pub")
    assert "only a lock is signed, and `model.lock` is not set" in " ".join(err.split())


@pytest.mark.parametrize(
    "words",
    [
        ["slurm"],
        ["tpu", "--accelerator", "v4-16", "--zone", "us-central2-b"],
        ["gke", "--image", "I", "--nodes", "1", "--devices-per-node", "8", "--claim", "runs"],
    ],
)
def test_launch_passes_lock_and_key_on(words: list[str], capsys: pytest.CaptureFixture[str]):
    keys = ["--set", "model.lock=start.json", "--set", "model.public_key=author.pub"]
    capsys.readouterr()
    assert main(["launch", words[0], "recipe.toml", *words[1:], "--", *keys]) == OK
    script = capsys.readouterr().out
    assert "model.lock=start.json" in script
    assert "model.public_key=author.pub" in script
