"""`check_family`: its results, and each check on all families. Checks that golden files make too are marked slow."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from prepcli.commands.testing import checks as module
from prepcli.commands.testing.checks import (
    CHECKS,
    CheckResult,
    FamilyUnderTest,
    check_bfloat16_storage,
    check_coverage,
    check_family,
    check_forward,
    check_step_on_mesh,
    run_checks,
)
from prepcli.core.errors import PrepError
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family, HFConfig, Parameter
from prepcli.models.registry import FAMILIES, family_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import DENSE_CONFIGS, FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA
from tests.helpers.tiny_configs import ODD_HEADS
from tests.helpers.wrong_family import use_family

MESH_CONFIGS = {base["model_type"]: base for base in (GPT2, GPT_NEO, LLAMA)} | {
    name: base | {"num_hidden_layers": 2} for name, base in FAMILY_CONFIGS.items()
}
MESH_CONFIGS |= DENSE_CONFIGS
# Their heads are in four shards, or in pairs.
EVEN_HEADS = ("codegen", "diffllama")
BY_NAME = {check.name: check for check in CHECKS}
# tests/golden has the results of transformers for these checks.
IN_GOLDEN_FILES = (
    *("names and shapes", "logits", "gradients", "padded batch", "300 tokens"),
    "greedy tokens",
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a family to its FamilyUnderTest. The checks share it."""
    return cache(
        lambda family: FamilyUnderTest(
            ODD_HEADS[family],
            tmp_path_factory.mktemp(family),
            mesh_config=MESH_CONFIGS[family],
        )
    )


# families whose rows or layers differ most; `coverage` compares the rows of all families with their tensors
FAST_FAMILIES = ("gpt2", "qwen3_moe", "t5")


def is_fast(case: tuple[str, str]) -> bool:
    """Return whether the default suite makes a check: golden files do not make it, and no similar family is fast."""
    check, family = BY_NAME[case[0]], case[1]
    if check.name in IN_GOLDEN_FILES or check.run is check_forward:
        return False
    if check.run is check_step_on_mesh:
        # test_sharding compares experts, and test_train_losses trains T5 on a mesh.
        return family == "llama"
    if check.run is check_bfloat16_storage:
        return family == "gemma3_text"
    return check.run is check_coverage or family in FAST_FAMILIES


@pytest.mark.parametrize(
    ("name", "family"), slow_except(((name, f) for f in ODD_HEADS for name in BY_NAME), is_fast)
)
def test_family_passes_check(name: str, family: str, subject):
    check = BY_NAME[name]
    if check.needs_torch:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    (result,) = run_checks(subject(family), [check])
    assert result.outcome == "passed", result.text


def test_configs_cover_all_families_with_odd_sizes():
    assert {*ODD_HEADS} == {*MESH_CONFIGS} == {*FAMILIES}
    for name, config in ODD_HEADS.items():
        sizes = family_of(config).sizes(config)
        assert sizes["vocab"] % 2
        # Mamba-2 has no attention.
        if "heads" in sizes and name not in EVEN_HEADS:
            assert sizes["heads"] % 2


def results_of(
    wrong: Family, names: list[str], work: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, CheckResult]:
    """Return the results of the named checks, by name, for a family with a mistake."""
    use_family(wrong, monkeypatch)
    subject = FamilyUnderTest(ODD_HEADS[wrong.name], work)
    return {
        result.check: result for result in run_checks(subject, [BY_NAME[name] for name in names])
    }


def change_rows(family: Family, rows: dict[str, str | None]) -> Family:
    """Return a family with other rows. None removes one."""
    changed = {path: Parameter(row) for path, row in rows.items() if row is not None}
    kept = {path: parameter for path, parameter in family.parameters.items() if path not in rows}
    return dataclasses.replace(family, parameters=kept | changed)


def test_logits_find_wrong_sliding_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    right = FAMILIES["mistral"]

    def wrong_arch_config(config: HFConfig) -> ArchConfig:
        return dataclasses.replace(right.arch_config(config), sliding_windows=(6, 6))

    wrong = dataclasses.replace(right, arch_config=wrong_arch_config)
    results = results_of(wrong, ["names and shapes", "export", "300 tokens"], tmp_path, monkeypatch)
    assert [result.outcome for result in results.values()] == ["passed", "passed", "failed"]
    assert "; allowed: 2e-05" in results["300 tokens"].text


def test_names_and_shapes_find_missing_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    wrong = change_rows(FAMILIES["mistral"], {"layers.mlp_norm.scale": None})
    (result,) = results_of(wrong, ["names and shapes"], tmp_path, monkeypatch).values()
    assert result.outcome == "failed"
    name = "model.layers.0.post_attention_layernorm.weight"
    assert result.text.startswith(f"{name}: None, transformers has [24]; ")


def test_forward_pass_finds_missing_row_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = change_rows(FAMILIES["mistral"], {"layers.mlp_norm.scale": None})
    (result,) = results_of(wrong, ["forward pass"], tmp_path, monkeypatch).values()
    assert result.outcome == "failed"
    assert result.text.startswith("KeyError: ")


def test_coverage_finds_a_part_that_no_row_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = "layers embed <- layers.{layers}.input_layernorm.weight: (>embed | embed)"
    wrong = change_rows(FAMILIES["mistral"], {"layers.attn_norm.scale": row})
    results = results_of(wrong, ["coverage", "round trip"], tmp_path, monkeypatch)
    name = "model.layers.0.input_layernorm.weight"
    assert {result.outcome for result in results.values()} == {"failed"}
    assert f"elements of {name}" in results["coverage"].text
    assert "are not mapped exactly once" in results["coverage"].text


def test_round_trip_finds_two_rows_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = FAMILIES["mistral"].parameters["layers.attn_norm.scale"].row
    wrong = change_rows(FAMILIES["mistral"], {"layers.mlp_norm.scale": right})
    results = results_of(wrong, ["coverage", "round trip"], tmp_path, monkeypatch)
    assert {result.outcome for result in results.values()} == {"failed"}


def test_checks_are_skipped_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "missing_reference_packages", lambda: ["torch"])
    subject = FamilyUnderTest(ODD_HEADS["gpt2"], tmp_path)
    results = list(run_checks(subject, [BY_NAME["coverage"], BY_NAME["logits"]]))
    assert [result.outcome for result in results] == ["passed", "skipped"]
    assert results[1].text == "torch not installed: pip install 'prepcli[hf]' torch"


def test_step_is_skipped_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prepcli.commands.testing.checks.jax.devices", lambda: ["cpu:0"])
    (result,) = run_checks(
        FamilyUnderTest(ODD_HEADS["gpt2"], tmp_path), [BY_NAME["step on a mesh"]]
    )
    assert result.outcome == "skipped"
    assert result.text == "needs 2 devices, jax has 1; set JAX_NUM_CPU_DEVICES=2"


# Checks without transformers and without a mesh.
ALONE = [check for check in CHECKS if not check.needs_torch and check.run is not check_step_on_mesh]


def test_check_family_runs_checks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[CheckResult] = []
    results = check_family({"model_type": "mistral"}, ALONE, on_result=seen.append)
    assert [result.check for result in results] == [
        "coverage",
        "round trip",
        "parameters",
        "forward pass",
    ]
    assert {result.outcome for result in results} == {"passed"}
    assert seen == results
    assert list(tmp_path.iterdir()) == []


def test_check_family_rejects_an_unknown_family():
    with pytest.raises(PrepError, match="model_type `zamba2` is not supported"):
        check_family({"model_type": "zamba2"})


def test_package_imports_neither_torch_nor_transformers():
    script = (
        "import sys, prepcli; prepcli.check_family;"
        "sys.exit(bool({'torch', 'transformers', 'orbax'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_checks_hold_with_python_o():
    """Python -O removes assert statements, and a check without them would always pass."""
    paths = [*Path(module.__file__).parent.glob("*.py")]
    assert len(paths) > 3
    for path in paths:
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(node, ast.Assert) for node in nodes), path
