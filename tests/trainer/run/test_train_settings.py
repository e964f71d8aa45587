"""`prep train` with another rotary embedding, rules, dropout or lock: the line of the summary, resuming and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE, DamagedError, PrepError
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from tests.helpers.train_runs import set_keys, train_error, train_json
from tests.helpers.training_folder import write_tokenizer
from trainer.run.summary import dropout_text

# `prep train` with another rotary embedding: resuming, exporting, and models that do not support it.

pytestmark = pytest.mark.usefixtures("work_dir")


YARN = ("--set", "model.rope_scaling={rope_type='yarn', factor=4.0}")


LONG = (*YARN, *set_keys("model.max_position_embeddings=256", "data.seq_length=96"))


ROPE_LINE = "rotary embedding yarn (theta 10,000, factor 4, original positions 64); 256 positions"


def read_configs(*paths: str) -> list[dict[str, Any]]:
    return [json.loads(Path(path).read_text()) for path in paths]


def test_resumed_run_and_export_keep_the_rope(capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "2", *LONG) == STOPPED
    capsys.readouterr()
    code, what, why, _ = train_error(capsys, *LONG, "--set", "model.rope_theta=5e5")
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "model.rope_theta: not set -> 500000.0"
    code, what, why, _ = train_error(capsys, *LONG[2:])
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == 'model.rope_scaling: {rope_type = "yarn", factor = 4.0} -> not set'
    assert main(["train", "recipe.toml", *LONG]) == OK
    assert ROPE_LINE in capsys.readouterr().err
    run_ok("export", "runs/recipe", "--out", "learned")
    manifest, stored, exported = read_configs(
        "runs/recipe/12/prep-manifest.json",
        "runs/recipe/12/state/hf/config.json",
        "learned/config.json",
    )
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for config in (manifest["config"], stored, exported):
        assert (config["rope_scaling"], config["max_position_embeddings"]) == (scaling, 256)
    assert "rope_scaling" not in read_configs("tiny/config.json")[0]
    run_ok("verify", "runs/recipe")


def test_dry_run_accepts_contexts_within_the_scaled_positions(capsys: pytest.CaptureFixture[str]):
    words = ("--dry-run", "--set", "data.seq_length=200")
    warning = "`data.seq_length` is 200, and the model was made for 64 positions; `model.rope_scaling` extends them"
    for sets, warnings in (
        ((), [warning]),
        (YARN, []),
        (("--set", "model.max_position_embeddings=256"), []),
    ):
        capsys.readouterr()
        code, report = train_json(capsys, *words, *sets)
        lengths = [text for text in report["warnings"] if "seq_length" in text]
        assert (code, lengths) == (OK, warnings)
    assert main(["train", "recipe.toml", *words, *LONG[:4]]) == OK
    assert ROPE_LINE in capsys.readouterr().err


def test_model_with_learned_positions_is_rejected(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("neo"), GPT_NEO)
    write_tokenizer(Path("neo"))
    run_ok("save-init", "neo", "--pad-vocab", "8", "--mesh", "1,2,4")
    code, what, why, hint = train_error(capsys, *YARN, "--set", "model.path=neo-init")
    assert (code, what) == (USAGE, "`model.rope_scaling` cannot be applied to gpt_neo")
    assert (why, hint) == (
        "it has no rotary embedding",
        "remove `model.rope_scaling`",
    )
    assert not Path("runs").exists()


# `prep train` with partition rules of the recipe: losses, stored steps, resuming and padding.

RULES = ("--set", 'rules=["embed=mp", "heads=fsdp", "mlp=none"]')


OTHER_RULES = ("--set", "rules=embed=none")


# The rules of a run with RULES.
CHANGED = "vocab=mp, heads=fsdp, kv_heads=mp|none, mlp=none, embed=mp, layers=none, head_dim=none"


DEFAULTS = "vocab=mp, heads=mp, kv_heads=mp|none, mlp=mp, embed=fsdp, layers=none, head_dim=none"


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


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


# `prep train` with dropout: its line in the summary, resuming, and the rates of config.json.

DROPOUT = set_keys(
    "model.dropout={attention = 0.1, residual = 0.25}", "model.fcm_ratio=[0.0, 0.15]"
)


@pytest.mark.parametrize(
    ("dropout", "text"),
    [
        (NO_DROPOUT, ""),
        (DropoutConfig(embedding=0.1), "dropout embedding 0.1"),
        (DropoutConfig(fcm_ratio=(0.0, 0.15)), "forgetful causal masking of 0 to 0.15 of the keys"),
        (
            DropoutConfig(0.1, 0.25, fcm_ratio=(0.1, 0.1)),
            "dropout attention 0.1, residual 0.25; forgetful causal masking of 0.1 to 0.1 of the keys",
        ),
    ],
)
def test_dropout_text_lists_the_rates_that_are_set(dropout: DropoutConfig, text: str):
    assert dropout_text(dropout) == text


def test_run_with_dropout_prints_it_and_keeps_it(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--stop-after", "1", *DROPOUT]) == STOPPED
    assert (
        "dropout attention 0.1, residual 0.25; forgetful causal masking" in capsys.readouterr().err
    )
    code, what, why, _ = train_error(capsys, *DROPOUT[:2])
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "model.fcm_ratio: [0.0, 0.15] -> [0.0, 0.0]"


def test_invalid_rate_in_config_json_is_an_error(capsys: pytest.CaptureFixture[str]):
    path = Path("tiny/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 2}))
    code, what, why, _ = train_error(capsys, *set_keys("model.path=tiny", "model.dropout=config"))
    assert (code, what) == (FAILED, "config.json is invalid")
    assert why == "attention_dropout is 2, it must be a number from 0 to below 1"


# The recipe key `model.lock`: a run starts only from the approved bytes.

ONE_STEP = ("train.steps=1", "data.holdout=0", "model.lock=start.json")


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_locked_model_trains_and_a_changed_one_does_not():
    prep.lock("tiny", "start.json")
    from_folder = (*ONE_STEP, "model.path=tiny")
    run_ok("train", "recipe.toml", *set_keys(*from_folder))
    change_byte(max(Path("tiny").glob("*.safetensors")))
    with pytest.raises(DamagedError, match="is damaged"):
        prep.train("recipe.toml", "other", overrides=from_folder)


def test_other_init_is_refused_by_its_manifest():
    prep.lock("tiny-init", "start.json")
    Path("tiny-init").rename("first")
    prep.save_init("tiny", "tiny-init", scan=False)
    with pytest.raises(PrepError, match=r"tiny-init differs from start\.json") as caught:
        prep.train("recipe.toml", overrides=ONE_STEP)
    assert "`prep-manifest.json` has" in caught.value.why


def test_lock_is_refused_with_no_verify():
    prep.lock("tiny-init", "start.json")
    with pytest.raises(PrepError, match="has no effect without the check"):
        prep.train("recipe.toml", overrides=ONE_STEP, verify=False)


def test_batches_and_tokenize_check_the_lock():
    prep.lock("tiny", "start.json")
    tokenizer = Path("tiny/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text() + " ")
    for read_data in (prep.batches, prep.tokenize_shard):
        with pytest.raises(PrepError, match=r"tiny differs from start\.json"):
            read_data("recipe.toml", overrides=(*ONE_STEP, "model.path=tiny"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["slurm"],
        ["tpu", "--accelerator", "v4-16", "--zone", "us-central2-b"],
        ["gke", "--image", "I", "--nodes", "1", "--devices-per-node", "8", "--claim", "runs"],
    ],
)
def test_launch_passes_the_lock_on(words: list[str], capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    words = ["launch", words[0], "recipe.toml", *words[1:], "--", "--set", "model.lock=start.json"]
    assert main(words) == OK
    assert "model.lock=start.json" in capsys.readouterr().out
