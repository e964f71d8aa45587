"""The page that follows a run through the code: every function that it names exists, in the order of the calls."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from trainer import run

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "a-training-run.md"
NAME = re.compile(r"`([a-z_]+(?:\.\w+)+)`")
STAGES = {module.name for module in pkgutil.iter_modules(run.__path__)}
PARTS_OF_STAGES = {"checks", "summary"}
# They load the arrays of a model, and read the records of a run that has ended.
WITHOUT_A_RUN = {"params", "run_record"}


def named_objects() -> list[str]:
    """Return the names on the page, with the package of a stage such as `start`."""
    names: list[str] = []
    for name in NAME.findall(PAGE.read_text()):
        root = name.partition(".")[0]
        if root in STAGES:
            names.append(f"{run.__name__}.{name}")
        elif root in ("prepcli", "trainer") and name != run.__name__:
            names.append(name)
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("name", named_objects())
def test_page_names_existing_functions(name: str):
    module, _, attribute = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_page_names_every_stage():
    stages = {name.split(".")[2] for name in named_objects() if name.startswith("trainer.run.")}
    assert stages >= STAGES - PARTS_OF_STAGES - WITHOUT_A_RUN


def test_page_has_the_order_of_the_functions_in_the_source():
    source = Path(str(run.__path__[0]), "train.py").read_text()
    defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    prefix = f"{run.__name__}.train."
    named = [name.removeprefix(prefix) for name in named_objects() if name.startswith(prefix)]
    assert named == [name for name in defined if name in named]
