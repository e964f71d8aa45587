"""`check_family`: the checks of a config's family, with results in order and no files left."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prepcli.commands.testing import torch_transformers
from prepcli.commands.testing.checks import CHECKS, check_step_on_mesh
from prepcli.commands.testing.kit import CheckResult, check_family
from prepcli.core.errors import PrepError
from tests.helpers.tiny_configs import ODD_HEADS

CONVERSIONS = [
    check for check in CHECKS if not check.needs_torch and check.run is not check_step_on_mesh
]


def test_check_family_runs_checks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[CheckResult] = []
    results = check_family({"model_type": "mistral"}, CONVERSIONS, on_result=seen.append)
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
    with pytest.raises(PrepError, match="model_type `falcon_mamba` is not supported"):
        check_family({"model_type": "falcon_mamba"})


def test_package_imports_neither_torch_nor_transformers():
    script = (
        "import sys, prepcli; prepcli.check_family;"
        "sys.exit(bool({'torch', 'transformers', 'orbax'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_checks_hold_with_python_o():
    """Python -O removes assert statements, and a check without them would always pass."""
    for path in (Path(__file__).parents[4] / "prepcli" / "testing").glob("*.py"):
        assert not [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)
        ], path


def test_missing_reference_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_transformers, "find_spec", lambda name: None)
    with pytest.raises(PrepError) as caught:
        torch_transformers.tensor_shapes(ODD_HEADS["gpt2"])
    assert caught.value.why == "torch and transformers not installed"
    assert caught.value.hint == "pip install 'prepcli[hf]' torch"
