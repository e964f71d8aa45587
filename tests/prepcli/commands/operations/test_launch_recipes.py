"""The shipped recipes for several hosts: planned at full size, and trained on a tiny model with the same keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import OK, USAGE
from prepcli.formats.manifest import saved_steps
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, write_tokenizer

# Recipe, accelerator, devices, largest peak of one device in GB, and the words of `prep launch` in its comment
FULL_SIZE = [
    (
        "llama-13b",
        "H100",
        16,
        37,
        ["slurm", "--nodes", "2", "--devices-per-node", "8", "--time", "24:00:00"],
    ),
    (
        "gpt2",
        "A100-40",
        16,
        12,
        ["slurm", "--nodes", "2", "--devices-per-node", "8", "--time", "4:00:00"],
    ),
    ("gpt-j-6b", "v4", 32, 8, ["tpu", "--accelerator", "v4-64", "--zone", "us-central2-b"]),
]
TINY = [  # recipe, config, mesh, and other keys that depend on the size
    ("llama-13b", LLAMA, "2,1,4", []),
    ("gpt2", GPT2, "8,1,1", []),
    ("gpt-j-6b", FAMILY_CONFIGS["gptj"], "1,4,2", ["optimizer.warmup_steps=1"]),
]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "devices", "count", "peak_gb", "launch"), FULL_SIZE, ids=lambda value: str(value)
)
def test_launch_recipes_fit_and_are_launched(
    name: str,
    devices: str,
    count: int,
    peak_gb: float,
    launch: list[str],
    capsys: pytest.CaptureFixture[str],
):
    recipe = recipes_folder() / f"{name}.toml"
    capsys.readouterr()
    assert main(["plan", str(recipe), "--devices", devices, "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["devices"], report["kinds"][0]["fits"], report["warnings"]) == (count, True, [])
    assert report["memory"]["peak"] < peak_gb * 10**9
    target, *options = launch
    assert f"prep launch {target} {name} {' '.join(options)}" in recipe.read_text()
    assert main(["launch", target, name, *options]) == OK
    assert "prep train" in capsys.readouterr().out


LAUNCH_OPTIONS = {
    "slurm": (),
    "tpu": ("--accelerator", "v4-32", "--zone", "us-central2-b"),
    "gke": ("--image", "IMAGE", "--nodes", "2", "--devices-per-node", "8", "--claim", "runs"),
}


@pytest.mark.parametrize(
    ("target", "trained"),
    [
        ("slurm", "prep train gpt2"),
        ("tpu", 'prep train "$HOME"/gpt2.toml'),
        ("gke", "prep train /etc/prep/gpt2.toml"),
    ],
)
def test_launch_takes_the_name_of_a_shipped_recipe(
    target: str, trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", target, "gpt2", *LAUNCH_OPTIONS[target]]) == OK
    assert trained in capsys.readouterr().out


def test_launch_local_checks_a_shipped_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "gpt2", "--processes", "2"]) == USAGE
    assert "mesh 16,1,1 needs 16 devices, there are 2" in capsys.readouterr().err


def test_launch_suggests_a_shipped_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "gpt-neo"]) == USAGE
    assert "did you mean `gpt-neo-1.3b`" in capsys.readouterr().err


def test_comments_of_recipes_name_no_folder() -> None:
    """A wheel has the recipes in its package, and no folder `recipes` here."""
    for recipe in recipes_folder().glob("*.toml"):
        assert "recipes/" not in recipe.read_text(), recipe.name


# By default test_seed_recipes_train trains a shipped recipe, and a test above plans these.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "mesh", "values"),
    slow_except(TINY, TINY[1:2]),
    ids=[name for name, *_ in TINY],
)
def test_launch_recipes_train(
    name: str,
    config: dict[str, object],
    mesh: str,
    values: list[str],
    capsys: pytest.CaptureFixture[str],
):
    make_checkpoint(Path("tiny"), config)
    write_tokenizer(Path("tiny"))
    assert main(["save-init", "tiny", "--mesh", mesh, "--pad-vocab", "auto", "-q"]) == OK
    Path("train.jsonl").write_text(json.dumps({"text": " ".join(WORDS * 10)}) + "\n")
    values = [
        *values,
        f"mesh={mesh}",
        "model.path=tiny-init",
        "data.path=train.jsonl",
        "data.seq_length=16",
    ]
    sets = [word for value in values for word in ("--set", value)]
    capsys.readouterr()
    assert (
        main(["train", str(recipes_folder() / f"{name}.toml"), "--out", "run", "--json", *sets])
        == OK
    )
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["loss"] < 10
    assert saved_steps(Path("run")) == [report["steps"]]
