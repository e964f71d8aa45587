"""`prep check-family`: each check on all families, its lines, exit codes and errors."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from bench.published import PUBLISHED
from prepcli.commands.cli.main import main
from prepcli.commands.testing import checks
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
from prepcli.models import registry
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family, HFConfig, Parameter
from prepcli.models.registry import FAMILIES, family_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import DENSE_CONFIGS, FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA
from tests.helpers.tiny_configs import MISTRAL, ODD_HEADS


def use_family(wrong: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry return another family for its model type."""
    find = registry._declared_family
    monkeypatch.setattr(
        registry, "_declared_family", lambda name: wrong if name == wrong.name else find(name)
    )


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


FAST = ["coverage", "round trip", "forward pass"]
FAST_OPTIONS = [word for name in FAST for word in ("--check", name)]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """Return the path of a tiny config of Mistral."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MISTRAL))
    return path


def test_check_family_command_passes_valid_family(
    config_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["check-family", str(config_path), *FAST_OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()] == ["mistral", *FAST]
    assert [line.split()[-3] for line in out.splitlines()[1:2]] == ["passed"]
    assert "mistral: vocab 29, layers 2, embed 24" in err


def test_check_family_command_compares_with_transformers(
    config_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert (
        main(
            [
                "check-family",
                str(config_path),
                "--check",
                "names and shapes",
                "--check",
                "logits",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert [(result["check"], result["outcome"]) for result in document["checks"]] == [
        ("names and shapes", "passed"), ("logits", "passed"),
    ]  # fmt: skip
    assert document["checks"][0]["text"] == "21 tensors"
    assert float(document["checks"][1]["text"]) <= 2e-5


def test_folder_of_a_large_model_is_scaled_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama-3-8b"]))
    assert main(["check-family", str(tmp_path), *FAST_OPTIONS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "llama"
    assert document["config"]["hidden_size"] == 144
    assert {result["outcome"] for result in document["checks"]} == {"passed"}


def test_broken_row_fails_with_the_reason(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    right = FAMILIES["mistral"]
    row = Parameter("layers mlp embed <- layers.{layers}.mlp.gate.weight: mlp embed")
    wrong = dataclasses.replace(
        right, parameters={**right.parameters, "layers.mlp.gate.weight": row}
    )
    use_family(wrong, monkeypatch)
    assert (
        main(
            ["check-family", str(config_path), "--check", "coverage", "--check", "names and shapes"]
        )
        == 1
    )
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:2] == ["coverage", "passed"]
    assert "failed" in out.splitlines()[2]
    assert "error: mistral fails 1 of 2 checks" in err
    assert (
        "names and shapes: model.layers.0.mlp.gate.weight: [20, 24], transformers has None" in err
    )


def test_skipped_checks_are_not_passed(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checks, "missing_reference_packages", lambda: ["torch", "transformers"])
    assert main(["check-family", str(config_path), "--check", "logits"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert (
        line
        == "logits   skipped  torch and transformers not installed: pip install 'prepcli[hf]' torch"
    )


def test_check_family_command_warns_about_even_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "even.json"
    path.write_text(json.dumps(ODD_HEADS["gpt2"] | {"vocab_size": 32}))
    assert main(["check-family", str(path), "--check", "coverage"]) == 0
    assert (
        "vocab of the tiny model is 32; an odd number finds more mistakes"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "options", "code", "message"),
    [
        ('{"model_type": "zamba2"}', [], 1, "model_type `zamba2` is not supported"),
        ('{"model_type": "lama"}', [], 1, "the most similar family is llama"),
        ("{", [], 1, "config.json is broken"),
        ("[]", [], 1, "it is not a JSON object"),
        ('{"model_type": "llama", "vocab_size": 0}', [], 1, "vocab_size is 0"),
        (None, [], 2, "config.json does not exist"),
        ("{}", ["--check", "logit"], 2, "did you mean `logits`?"),
    ],
)
def test_check_family_command_reports_one_error(
    text: str | None,
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["check-family", str(path), *options]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("error:")) == ("", 1)
    assert message in err
