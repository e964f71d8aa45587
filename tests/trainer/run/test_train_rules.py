"""`prep train` with partition rules of the recipe: losses, stored steps, resuming and padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED, USAGE
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.train_runs import read_losses, set_keys, train_error

pytestmark = pytest.mark.usefixtures("work_dir")

RULES = ("--set", 'rules=["embed=mp", "heads=fsdp", "mlp=none"]')
OTHER_RULES = ("--set", "rules=embed=none")
# The rules of a run with RULES.
CHANGED = "vocab=mp, heads=fsdp, kv_heads=mp|none, mlp=none, embed=mp, layers=none, head_dim=none"
DEFAULTS = "vocab=mp, heads=mp, kv_heads=mp|none, mlp=mp, embed=fsdp, layers=none, head_dim=none"


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


# By default test_sharding compares losses with several rules, and tests below the rules of a run.
@pytest.mark.slow
def test_losses_do_not_depend_on_the_rules(capsys: pytest.CaptureFixture[str]):
    run_ok("train", "recipe.toml", "--out", "default")
    assert (
        run_code("train", "recipe.toml", "--out", "changed", "--stop-after", "5", *RULES) == STOPPED
    )
    assert read_manifest("changed/5")["rules"] == ["embed=mp", "heads=fsdp", "mlp=none"]
    capsys.readouterr()
    assert (
        main(["train", "recipe.toml", "--out", "changed", "--stop-after", "3", *OTHER_RULES])
        == STOPPED
    )
    assert DEFAULTS.replace("embed=fsdp", "embed=none") in capsys.readouterr().err
    assert read_manifest("changed/8")["rules"] == ["embed=none"]
    assert main(["train", "recipe.toml", "--out", "changed"]) == OK
    assert DEFAULTS.replace("embed=fsdp", "embed=none") in capsys.readouterr().err, (
        "the rules of the last step"
    )
    np.testing.assert_allclose(read_losses("changed"), read_losses("default"), rtol=1e-5)
    run_ok("verify", "changed")


def test_dry_run_prints_the_rules(capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    for words, text in (
        ((), DEFAULTS),
        (RULES, CHANGED),
    ):
        assert main(["train", "recipe.toml", "--dry-run", *words]) == OK
        assert f"rules {text}\n" in capsys.readouterr().err


def test_resumed_run_takes_the_rules_of_its_last_step(capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *RULES) == STOPPED
    capsys.readouterr()
    for words, text in (
        ((), CHANGED),
        (OTHER_RULES, DEFAULTS.replace("embed=fsdp", "embed=none")),
    ):
        assert main(["train", "recipe.toml", "--dry-run", *words]) == OK
        assert f"rules {text}\n" in capsys.readouterr().err


def test_empty_rules_replace_the_checkpoint_rules(capsys: pytest.CaptureFixture[str]):
    run_ok("reshard", "tiny-init", "--rule", "embed=none", "--mesh", "1,2,4", "--out", "whole")
    capsys.readouterr()
    for words, text in (
        ((), DEFAULTS.replace("embed=fsdp", "embed=none")),
        (("--set", "rules=[]"), DEFAULTS),
    ):
        assert (
            main(["train", "recipe.toml", "--dry-run", "--set", "model.path=whole", *words]) == OK
        )
        assert f"rules {text}\n" in capsys.readouterr().err


def test_padding_of_a_hf_folder_follows_the_rules():
    rules = set_keys('rules=["vocab=fsdp", "embed=none"]', "model.path=tiny")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *rules) == STOPPED
    manifest = read_manifest("runs/recipe/1")
    assert (manifest["rules"], manifest["config"]["vocab_size"]) == (
        ["vocab=fsdp", "embed=none"],
        132,
    )


def test_rules_that_do_not_divide_the_model_are_rejected(capsys: pytest.CaptureFixture[str]):
    code, what, *_ = train_error(capsys, *set_keys("mesh=1,1,8", "rules=kv_heads=mp"))
    assert (code, what) == (USAGE, "kv_heads 4 cannot be split over mp 8")
    code, what, *_ = train_error(capsys, "--set", "rules=kv_hads=mp")
    assert (code, what) == (USAGE, '`--set`: `rules = ["kv_hads=mp"]`: unknown dim `kv_hads`')


@pytest.mark.slow
def test_resume_changes_kind_of_rules(capsys: pytest.CaptureFixture[str]):
    kinds = [
        [r"re:^layers\.attn\.(q|k|v)\.weight$=none,fsdp,mp", "act:batch=none", "act:seq=fsdp|none"],
        ["flaxlm:1,1", "re:norm=none"],
        ["auto"],
    ]
    run_ok("train", "recipe.toml", "--out", "default")
    for step, rules in zip((4, 8, 12), kinds):
        stop = ("--stop-after", "4") if step < 12 else ()
        options = ("--set", f"rules={json.dumps(rules)}")
        assert (
            run_code("train", "recipe.toml", "--out", "changed", *stop, *options) == STOPPED
            if stop
            else OK
        )
        assert read_manifest(f"changed/{step}")["rules"] == rules
    np.testing.assert_allclose(read_losses("changed"), read_losses("default"), rtol=1e-5)
    run_ok("verify", "changed")
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--out", "changed", "--dry-run"]) == OK


def test_dry_run_prints_rules_of_leaves_and_activations(capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    rules = json.dumps(["re:^head=none", "flaxlm:1,1", "act:seq=sp|none"])
    assert main(["train", "recipe.toml", "--dry-run", "--set", f"rules={rules}"]) == OK
    params = DEFAULTS.replace("embed=fsdp", "embed=none")
    activations = "act:residual_seq=sp|none, act:heads=none, act:kv_heads=none, act:seq=sp|none"
    assert f"rules re:^head=none, {params}, {activations}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("re:^attn=none", "`re:^attn=none` matches no leaf"),
        ("re:^head=mp", "`re:^head=mp` has 1 dim, and head.weight has 2"),
        ("flaxlm:3,1", '`--set`: `rules = ["flaxlm:3,1"]`: unknown preset'),
        ("act:sq=sp", '`--set`: `rules = ["act:sq=sp"]`: unknown dim of activations `sq`'),
    ],
)
def test_rules_that_do_not_fit_the_model_are_rejected(
    rule: str, what: str, capsys: pytest.CaptureFixture[str]
):
    code, message, *_ = train_error(capsys, "--set", f'rules=["{rule}"]')
    assert (code, message) == (USAGE, what)


def test_batch_is_checked_with_the_rules_of_the_run(capsys: pytest.CaptureFixture[str]):
    options = ("--set", "batch.size=7", "--dry-run")
    code, message, *_ = train_error(capsys, *options)
    assert (code, message) == (USAGE, "a micro-batch of 7 does not divide among 2 replicas")
    assert main(["train", "recipe.toml", *options, "--set", "rules=act:batch=dp"]) == OK
    run_ok("reshard", "tiny-init", "--rule", "act:batch=dp", "--out", "whole-batch")
    assert main(["train", "recipe.toml", *options, "--set", "model.path=whole-batch"]) == OK
