"""All families through the kit; what other tests say of them too is asked again where `slow` tests run."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.family_kit import (
    CELLS,
    Cell,
    FamilyUnderTest,
    check_step_on_mesh,
    default_configs,
    main,
    run_cells,
    table_text,
)
from tests.helpers.tiny_configs import GPT2, ODD_HEADS
from trainer.models.architecture import ArchConfig
from trainer.models.parameters import Family, HFConfig
from trainer.models.registry import FAMILIES

OWN = default_configs()


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    """By family; what is computed for one cell is there for the next."""
    return cache(lambda family: FamilyUnderTest(OWN[family], tmp_path_factory.mktemp(family)))


def is_slow(cell: Cell, family: str) -> bool:
    """Whether golden files say it too, or a step is much the same as that of another family."""
    return cell.in_golden_files or (cell.check is check_step_on_mesh and family not in ("gpt_neo", "mixtral", "t5"))


@pytest.mark.parametrize(
    ("cell", "family"),
    [
        pytest.param(cell, family, id=f"{cell.name}-{family}", marks=[pytest.mark.slow] * is_slow(cell, family))
        for family in OWN
        for cell in CELLS
    ],
)
def test_it_holds(cell: Cell, family: str, subject):
    if cell.needs_torch:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    cell.check(subject(family))


def test_all_families_are_there():
    assert {*OWN} == {*FAMILIES}


def test_a_cell_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2 | {"no_such_thing": 1, "vocab_size": 32}))
    assert main([str(path), "--cells", "odd vocabulary,odd heads"]) == 1
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["gpt2"], ["odd", "vocabulary", "FAILS"], ["odd", "heads", "FAILS"],
    ]  # fmt: skip
    assert "gpt2, odd vocabulary: vocab of the first config is 32" in err


def seen(name: str, changed: Family, cells: set[str], work: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the kit says of cells that fail with a family that is not what it was."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setitem(FAMILIES, name, changed)
    found = run_cells(FamilyUnderTest([ODD_HEADS[name]], work), [cell for cell in CELLS if cell.name in cells])
    assert found.keys() == cells
    return {cell: why for cell, (good, why) in found.items() if not good}


def test_a_wrong_trait_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = FAMILIES["mistral"]

    def wrong(config: HFConfig) -> ArchConfig:
        return dataclasses.replace(right.arch_config(config), sliding_windows=(6, 6))

    changed = dataclasses.replace(right, arch_config=wrong)
    found = seen("mistral", changed, {"names and shapes", "export", "300 tokens"}, tmp_path, monkeypatch)
    assert found.keys() == {"300 tokens"}
    assert "apart; allowed: 2e-05" in found["300 tokens"]


def test_a_row_that_is_missing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = FAMILIES["mistral"]
    table = {path: parameter for path, parameter in right.parameters.items() if path != "layers.mlp_norm.scale"}
    changed = dataclasses.replace(right, parameters=table)
    found = seen("mistral", changed, {"names and shapes"}, tmp_path, monkeypatch)
    name = "model.layers.0.post_attention_layernorm.weight"
    assert found["names and shapes"].startswith(f"{name}: None, transformers has [24]; ")


def test_few_families_are_columns_and_many_are_rows():
    found = {"logits": (True, "1e-06"), "step": (False, "why")}
    lines = [line.split() for line in table_text({"a": found, "b": found}).splitlines()]
    assert lines == [["a", "b"], ["logits", "1e-06", "1e-06"], ["step", "FAILS", "FAILS"]]
    lines = [line.split() for line in table_text(dict.fromkeys("abcde", found)).splitlines()]
    assert lines == [["logits", "step"], *([name, "1e-06", "FAILS"] for name in "abcde")]
