"""Tests of the private parts of JAX that prep uses: a release that moves one fails here by name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from packaging.specifiers import SpecifierSet

from trainer.distributed import devices
from trainer.distributed.processes import CALLBACK, CLIENT_FACTORY

ROOT = Path(__file__).parents[3]
BOUND = ">=0.10,<0.13"
BACKENDS = """
import jax
from trainer.distributed.devices import backends_are_initialized

print(backends_are_initialized())
jax.devices()
print(backends_are_initialized())
"""


def test_backends_are_initialized_by_the_first_use_of_devices():
    command = [sys.executable, "-c", BACKENDS]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.split() == ["False", "True"]


def test_distributed_state_has_the_client_of_jax():
    state = devices.distributed_state()
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)


def test_this_machine_is_not_a_tpu_vm():
    assert devices.runs_on_tpu_vm() is False


def test_client_factory_of_jaxlib_has_the_error_callback():
    """Without it `RuntimeErrors` installs no hook, and a lost process 0 aborts all others."""
    assert CALLBACK in getattr(_jax, CLIENT_FACTORY).__doc__


def test_requirements_bound_jax_to_the_tested_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert f"jax{BOUND}" in project["dependencies"]
    assert extras["cuda"] == [f"jax[cuda13]{BOUND}"]
    assert extras["tpu"] == [f"jax[tpu]{BOUND}"]
    assert version("jax") in SpecifierSet(BOUND)
