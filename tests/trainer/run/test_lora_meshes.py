"""Adapters of experts, and modules trained as a whole, on meshes of 8 devices: the results of one device."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_folder import make_training_folder

# The vocabulary of 131 tokens is padded to 136 rows.
MIXTRAL = FAMILY_CONFIGS["mixtral"] | {"num_local_experts": 4}
GPT_OSS = FAMILY_CONFIGS["gpt_oss"] | {"num_local_experts": 4}
QWEN3_MOE = FAMILY_CONFIGS["qwen3_moe"] | {"num_experts": 4}
LORA = """
[lora]
rank = 4
targets = ["attn.*"]
target_parameters = ["mlp.*"]
modules_to_save = ["embed.tokens", "head"]
rank_pattern = {"mlp.down" = 8}
use_rslora = true
"""
MESHES = {
    "tensor": ("1,2,4", ()),
    "experts": ("2,2,2", ("experts=mp",)),
    "experts-fsdp": ("1,4,2", ("experts=fsdp",)),
    "experts-whole-axis": ("1,4,2", ("experts=mp", "embed=none")),
    "sequences": ("fsdp:2,mp:2,sp:2", ("experts=mp",)),
    "hidden": ("1,4,2", ("mlp=fsdp+mp", "embed=none")),
    "data": ("8,1,1", ()),
    "fsdp": ("1,8,1", ()),
}


def command(out: str, mesh: str, rules: Sequence[str] = ()) -> list[str]:
    """Return the command that trains four steps on a mesh."""
    settings = [f"mesh={mesh}", f"rules={list(rules)}", "train.steps=4"]
    options = set_keys(*settings)
    return ["train", "recipe.toml", "--out", out, *options, "-q"]


def train_on_one_device(out: str) -> None:
    """Train in a process with one device. The process of the tests has 8."""
    results = finish(start_processes(*command(out, "1,1,1"), count=1, devices=1))
    assert results[0][0] == OK, results


def export(run: str) -> dict[str, np.ndarray]:
    """Return the tensors of the exported adapter of a run."""
    run_ok("export", run, "--out", f"{run}-adapter")
    return load_file(f"{run}-adapter/adapter_model.safetensors")


def assert_equal_runs(run: str, expected: str) -> None:
    """Assert that two runs have the same losses and adapters, up to the order of sums in float32."""
    assert read_losses(run) == pytest.approx(read_losses(expected), rel=1e-6)
    tensors, expected_tensors = export(run), export(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, values in tensors.items():
        # Adam with a learning rate of 1e-2 scales the rounding of small gradients.
        np.testing.assert_allclose(values, expected_tensors[name], atol=5e-5, err_msg=name)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_recipe(config: dict[str, Any], table: str = LORA) -> None:
    """Write a training folder whose recipe has adapters."""
    make_training_folder(config)
    Path("recipe.toml").write_text(Path("recipe.toml").read_text() + table)


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training folder of Mixtral with a run on one device, `one`."""
    folder = tmp_path_factory.mktemp("mixtral")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(MIXTRAL)
        train_on_one_device("one")
    return folder


@pytest.mark.parametrize("name", slow_except(list(MESHES), ["tensor", "experts"]))
def test_adapters_of_experts_do_not_depend_on_the_mesh(name: str, mixtral_folder: Path):
    shutil.copytree(mixtral_folder, ".", dirs_exist_ok=True)
    assert main(command("many", *MESHES[name])) == OK
    assert_equal_runs("many", "one")
    tensors = load_file("many-adapter/adapter_model.safetensors")
    saved = {f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")}
    assert {name: len(tensors[name]) for name in saved} == dict.fromkeys(saved, 131)


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPT_OSS, QWEN3_MOE], ids=["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("name", ["tensor", "experts", "experts-fsdp"])
def test_adapters_of_experts_on_meshes_of_families(config: dict[str, Any], name: str):
    write_recipe(config)
    train_on_one_device("one")
    assert main(command("many", *MESHES[name])) == OK
    assert_equal_runs("many", "one")


SAVED = '\n[lora]\nrank = 4\ndropout = 0.2\nmodules_to_save = ["embed.tokens"{head}]\n'


@pytest.mark.parametrize("name", slow_except(["opt", "llama"], ["opt"]))
def test_saved_modules_do_not_depend_on_the_mesh(name: str):
    """The head of OPT is its embedding. Dropout has the masks of one device."""
    config = FAMILY_CONFIGS.get(name, LLAMA)
    write_recipe(config, SAVED.format(head="" if name == "opt" else ', "head"'))
    train_on_one_device("one")
    assert main([*command("many", "1,2,4"), "--stop-after", "2"]) == STOPPED
    assert main(command("many", "2,2,2", ("vocab=fsdp", "embed=mp"))) == OK
    assert_equal_runs("many", "one")


@pytest.mark.slow
def test_continued_saved_modules_do_not_depend_on_the_mesh():
    """The embedding of an exported adapter has 131 rows, and that of its base 136."""
    write_recipe(LLAMA, SAVED.format(head=', "head"'))
    assert main(command("first", "1,2,4")) == OK
    assert len(export("first")["base_model.model.lm_head.weight"]) == 131
    write_recipe(LLAMA, '\n[lora]\npath = "first-adapter"\n')
    train_on_one_device("one")
    assert main(command("many", "2,2,2")) == OK
    assert_equal_runs("many", "one")
