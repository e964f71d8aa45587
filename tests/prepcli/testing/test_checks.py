"""The family kit on all families; checks that golden files make as well are marked slow."""

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

CONFIGS = default_configs()


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a family to its FamilyUnderTest; the cells share it."""
    return cache(lambda family: FamilyUnderTest(CONFIGS[family], tmp_path_factory.mktemp(family)))


def is_slow(cell: Cell, family: str) -> bool:
    """Return whether golden files make this check too, or a similar family trains the step in every run."""
    return cell.in_golden_files or (cell.check is check_step_on_mesh and family not in ("gpt_neo", "mixtral", "t5"))


@pytest.mark.parametrize(
    ("cell", "family"),
    [
        pytest.param(cell, family, id=f"{cell.name}-{family}", marks=[pytest.mark.slow] * is_slow(cell, family))
        for family in CONFIGS
        for cell in CELLS
    ],
)
def test_family_passes_cell(cell: Cell, family: str, subject):
    if cell.needs_torch:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    cell.check(subject(family))


def test_default_configs_cover_all_families():
    assert {*CONFIGS} == {*FAMILIES}


def test_main_prints_reason_of_failing_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2 | {"no_such_thing": 1, "vocab_size": 32}))
    assert main([str(path), "--cells", "odd vocabulary,odd heads"]) == 1
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["gpt2"], ["odd", "vocabulary", "FAILS"], ["odd", "heads", "FAILS"],
    ]  # fmt: skip
    assert "gpt2, odd vocabulary: vocab of the first config is 32" in err


def failing_cells(
    name: str, wrong: Family, cells: set[str], work: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Return the failing cells, with their reasons, for a family with a mistake."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setitem(FAMILIES, name, wrong)
    results = run_cells(FamilyUnderTest([ODD_HEADS[name]], work), [cell for cell in CELLS if cell.name in cells])
    assert results.keys() == cells
    return {cell: why for cell, (passed, why) in results.items() if not passed}


def test_run_cells_finds_wrong_sliding_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = FAMILIES["mistral"]

    def wrong_arch_config(config: HFConfig) -> ArchConfig:
        return dataclasses.replace(right.arch_config(config), sliding_windows=(6, 6))

    wrong = dataclasses.replace(right, arch_config=wrong_arch_config)
    failures = failing_cells("mistral", wrong, {"names and shapes", "export", "300 tokens"}, tmp_path, monkeypatch)
    assert failures.keys() == {"300 tokens"}
    assert "; allowed: 2e-05" in failures["300 tokens"]


def test_run_cells_finds_missing_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = FAMILIES["mistral"]
    parameters = {path: parameter for path, parameter in right.parameters.items() if path != "layers.mlp_norm.scale"}
    wrong = dataclasses.replace(right, parameters=parameters)
    failures = failing_cells("mistral", wrong, {"names and shapes"}, tmp_path, monkeypatch)
    name = "model.layers.0.post_attention_layernorm.weight"
    assert failures["names and shapes"].startswith(f"{name}: None, transformers has [24]; ")


def test_table_text_has_rows_per_family_if_many():
    results = {"logits": (True, "1e-06"), "step": (False, "why")}
    lines = [line.split() for line in table_text({"a": results, "b": results}).splitlines()]
    assert lines == [["a", "b"], ["logits", "1e-06", "1e-06"], ["step", "FAILS", "FAILS"]]
    lines = [line.split() for line in table_text(dict.fromkeys("abcde", results)).splitlines()]
    assert lines == [["logits", "step"], *([name, "1e-06", "FAILS"] for name in "abcde")]
