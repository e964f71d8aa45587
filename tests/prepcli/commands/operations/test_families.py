"""Bit-exact conversions of every family, and of the alternate forms of some families."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.models.param_tree import flatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)

Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not same_bits(actual[name], expected[name])] == []


def without_buffers(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Remove the buffers that old files contain."""
    family = FAMILIES[config["model_type"]]
    rules = [re.escape(rule).replace(r"\{i\}", r"\d+") for rule in family.dropped]
    bare = {name: name.removeprefix(family.prefix) for name in tensors}
    return {
        name: t
        for name, t in tensors.items()
        if not any(re.fullmatch(rule, bare[name]) for rule in rules)
    }


# A bias of the head and buffers, interleaved and fused projections, offset positions, separate, shared, fused and
# grouped experts, a tied head, and two stacks. The check `coverage` of
# tests/prepcli/commands/testing/test_checks.py has all families.
FAST_FAMILIES = (
    *("gptj", "gpt_neox", "phi3", "opt", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"),
    *("gemma3_text", "t5"),
)


@pytest.mark.parametrize("name", slow_except(FAMILY_CONFIGS, FAST_FAMILIES))
def test_pad_init_reshard_export_changes_no_bit(name: str):
    config = FAMILY_CONFIGS[name]
    tensors = make_checkpoint(Path("m"), config, "bfloat16", legacy=True)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "normal")
    run_ok("save-init", "m-padded", "--memory", "32MiB", "--mesh", "1,4,1")
    run_ok("reshard", "m-padded-init", "--mesh", "1,2,4", "--out", "other")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), without_buffers(config, tensors))
    before, after = (
        json.loads(Path(folder, "config.json").read_text()) for folder in ("m", "back")
    )
    assert after == before
    run_ok("verify", "back", "./m")
    run_ok("verify", "other", "m-padded")


@pytest.mark.parametrize(
    "name", slow_except(FAMILY_CONFIGS, ["gptj", "opt", "gemma3_text", "mixtral", "t5"])
)
def test_other_tying_without_scan_round_trips(name: str):
    config = FAMILY_CONFIGS[name]
    tensors = make_checkpoint(
        Path("m"), config, "float16", not FAMILIES[name].tying.tied_by_default
    )
    run_ok("save-init", "./m", "--pad-vocab", "8", "--no-scan")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_head_bias_is_padded_with_zeros():
    tensors = make_checkpoint(Path("m"), FAMILY_CONFIGS["gptj"])
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    assert actual["lm_head.bias"].shape == (136,)
    assert not actual["lm_head.bias"][131:].any()
    assert same_bits(actual["lm_head.bias"][:131], tensors["lm_head.bias"])
    assert actual["lm_head.weight"][131:].any()
    assert {name for name in actual if actual[name].shape != tensors[name].shape} == {
        "transformer.wte.weight", "lm_head.weight", "lm_head.bias"
    }  # fmt: skip


def test_padding_leaves_position_embeddings():
    tensors = make_checkpoint(Path("m"), FAMILY_CONFIGS["opt"], tied=False)
    run_ok("pad-vocab", "./m", "--size", "200")
    actual = read_tensors(Path("m-padded"))
    padded = {name for name in actual if actual[name].shape != tensors[name].shape}
    assert padded == {"model.decoder.embed_tokens.weight", "lm_head.weight"}


def fuse_experts(tensors: Tensors, experts: int) -> Tensors:
    """Fuse the experts of a Mixtral checkpoint, as transformers 5 does in memory."""
    fused = {name: tensor for name, tensor in tensors.items() if ".block_sparse_moe." not in name}
    for layer in range(3):
        unfused_prefix, fused_prefix = (
            f"model.layers.{layer}.block_sparse_moe",
            f"model.layers.{layer}.mlp",
        )
        w1, w2, w3 = (
            np.stack(
                [
                    tensors[f"{unfused_prefix}.experts.{expert}.{name}.weight"]
                    for expert in range(experts)
                ]
            )
            for name in ("w1", "w2", "w3")
        )
        fused[f"{fused_prefix}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        fused[f"{fused_prefix}.experts.down_proj"] = w2
        fused[f"{fused_prefix}.gate.weight"] = tensors[f"{unfused_prefix}.gate.weight"]
    return fused


def alternate_form(name: str) -> Tensors:
    config = FAMILY_CONFIGS[name]
    tensors = checkpoint_tensors(config, "bfloat16", False, False)
    if name == "mixtral":
        return fuse_experts(tensors, config["num_local_experts"])
    return {key.replace("embed_out", "lm_head"): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
def test_alternate_form_round_trips(name: str):
    tensors = alternate_form(name)
    write_checkpoint(Path("m"), FAMILY_CONFIGS[name], tensors)
    run_ok("pad-vocab", "./m", "--multiple", "8")
    run_ok("save-init", "m-padded")
    run_ok("verify", "m-padded-init", "m-padded")
    run_ok("reshard", "m-padded-init", "--mesh", "1,2,4", "--out", "other")
    run_ok("verify", "other", "m-padded")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
def test_both_forms_convert_to_the_same_tree(name: str):
    write_checkpoint(
        Path("a"),
        FAMILY_CONFIGS[name],
        checkpoint_tensors(FAMILY_CONFIGS[name], "bfloat16", False, False),
    )
    write_checkpoint(Path("b"), FAMILY_CONFIGS[name], alternate_form(name))
    trees = []
    for folder in ("a", "b"):
        run_ok("save-init", f"./{folder}", "--mesh", "1,2,1")
        trees.append(restore_with_orbax(Path(f"{folder}-init")))
    assert_same(*trees)


def restore_with_orbax(item: Path) -> Tensors:
    """Restore the leaves with Orbax."""
    import orbax.checkpoint as ocp

    return flatten_tree(ocp.PyTreeCheckpointer().restore(item.resolve()))


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
def test_both_forms_in_one_file_are_an_error(name: str, capsys: pytest.CaptureFixture[str]):
    both = {
        **checkpoint_tensors(FAMILY_CONFIGS[name], "bfloat16", False, False),
        **alternate_form(name),
    }
    write_checkpoint(Path("m"), FAMILY_CONFIGS[name], both)
    assert main(["save-init", "./m", "-q"]) == 1
    assert "a parameter is stored in two forms" in capsys.readouterr().err
