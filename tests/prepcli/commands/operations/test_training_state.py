"""The training state of a step of prep, with the optimizer of the recipe in its manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.training_state import read_training_state
from prepcli.core.errors import OK, DamagedError
from prepcli.models.param_tree import DecayRule
from prepcli.planning.libraries import AdamSettings
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.training_folder import make_training_folder

OVERRIDES = (
    "train.steps=2",
    "checkpoint.every=2",
    "optimizer.lr=0.5",
    "optimizer.schedule=linear",
    "optimizer.warmup_steps=0",
    "optimizer.decay_steps=4",
    "optimizer.b2=0.5",
    "optimizer.clip_norm=3.0",
    "optimizer.weight_decay=0.25",
    'optimizer.decay_exclude=["re:mlp"]',
)


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with contextlib.chdir(tmp_path_factory.mktemp("run")):
        make_training_folder()
        words = ["train", "recipe.toml", "--out", "run", "-q"]
        for override in OVERRIDES:
            words += ["--set", override]
        assert main(words) == OK
        yield Path("run")


def test_state_of_a_run_has_the_optimizer_of_its_recipe(run: Path):
    state = read_training_state(open_source(locate(str(run))))
    assert (state.step, state.num_updates) == (2, 2)
    # Half of the decay from 0.5 to 0 is done after 2 of 4 steps.
    assert state.settings == AdamSettings(
        lr=0.25, peak_lr=0.5, b1=0.9, b2=0.5, eps=1e-8, weight_decay=0.25
    )
    assert state.clip_norm == 3.0
    assert state.decay_rule == DecayRule(exclude=("re:mlp",))


@pytest.mark.parametrize("recipe", ["[optimizer]\nlr = -1.0", "[data]", "lr ="])
def test_broken_recipe_in_a_manifest_is_damaged(run: Path, recipe: str):
    source = open_source(locate(str(run)))
    assert source.manifest is not None
    manifest = source.manifest | Manifest(recipe=recipe)
    with pytest.raises(DamagedError) as error:
        read_training_state(replace(source, manifest=manifest))
    assert error.value.what == "the recipe in the manifest of run is broken"
    assert error.value.why.startswith("its table `optimizer`: ")
