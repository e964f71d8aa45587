"""The facts that the processes of `prep train` compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.process_group import SingleProcess
from trainer.distributed import agreement, processes
from trainer.recipe import load_recipe
from trainer.run.run import (
    TrainSettings,
    compare_settings,
    compare_start,
    connect_processes,
)

MANIFEST = {
    "config": {"hidden_size": 8},
    "tensors": {"a": {"digests": [[0, 1, "d"]]}},
    "source": {"mtime_ns": 1},
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a dict that receives the facts of each comparison."""
    all_facts: dict[str, str] = {}

    def check_agreement(group: object, facts: Mapping[str, str], **_: object) -> None:
        all_facts.update(facts)

    def start_processes(address: object, **_: object) -> SingleProcess:
        return SingleProcess()

    monkeypatch.setattr(agreement, "check_agreement", check_agreement)
    monkeypatch.setattr(processes, "start_processes", start_processes)
    return all_facts


def test_compare_settings_compares_versions_and_recipe(compared: dict[str, str]):
    path = recipes_folder() / "gpt-neo-1.3b.toml"
    settings = (
        "cluster.n_processes=2",
        "cluster.process_id=1",
        "cluster.host0_address=10.0.0.1",
        "optimizer.lr=0.5",
    )
    recipe = load_recipe(path, settings).recipe
    group, ui = connect_processes(recipe), open_ui("train", as_json=False, quiet=True, verbose=0)
    compare_settings(group, recipe, TrainSettings(path, restart=True), ui)
    assert {"python", "prepcli", "jax", "jaxlib", "seed", "train.steps"} <= compared.keys()
    assert compared["optimizer.lr"] == "0.5"
    assert compared["restart"] == "True"
    assert (
        not {"cluster.process_id", "cluster.host0_address", "data.train", "data.cache"}
        & compared.keys()
    )


def checkpoint_facts(compared: dict[str, str], manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a start checkpoint."""
    compare_start(SingleProcess(), manifest, step=3, data_identity="tokens", kernel="blockwise")
    return dict(compared)


def test_checkpoint_facts_change_with_digests_not_mtime(compared: dict[str, str]):
    facts = checkpoint_facts(compared, MANIFEST)
    assert (facts["last step"], facts["data"], facts["attention kernel"]) == (
        "3",
        "tokens",
        "blockwise",
    )
    assert checkpoint_facts(compared, MANIFEST | {"source": {"mtime_ns": 2}}) == facts
    changed = checkpoint_facts(compared, MANIFEST | {"tensors": {"a": {"digests": [[0, 1, "e"]]}}})
    assert changed["start checkpoint"] != facts["start checkpoint"]
