"""`prep train` with another rotary embedding: resuming, exporting, and models that do not support it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.train_runs import set_keys, train_error, train_json
from tests.helpers.training_folder import WORDS, write_tokenizer

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
    assert (code, what) == (FAILED, "the run began with another recipe")
    assert why == "model.rope_theta: not set -> 500000.0"
    code, what, why, _ = train_error(capsys, *LONG[2:])
    assert (code, what) == (FAILED, "the run began with another recipe")
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


# By default test_rope_parity_live and test_parity compare logits of scaled embeddings.
@pytest.mark.slow
def test_eval_loss_of_scaled_rope_equals_transformers(capsys: pytest.CaptureFixture[str]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    capsys.readouterr()
    report = train_json(capsys, *LONG)[1]
    run_ok("export", "runs/recipe", "--out", "learned")
    ids = torch.tensor([WORDS.index(word) for word in Path("text.txt").read_text().split()] + [0])
    blocks = ids[: len(ids) // 96 * 96].reshape(-1, 96)
    holdout = blocks[len(blocks) - round(len(blocks) * 0.1) :]
    losses = []
    scaled, unscaled = (transformers.AutoConfig.from_pretrained("learned") for _ in range(2))
    unscaled.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    for config in (scaled, unscaled):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            "learned", config=config, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            losses.append(float(model(holdout, labels=holdout).loss))
    assert report["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert report["eval_loss"] != pytest.approx(losses[1], rel=1e-4), "the scaling has an effect"


def test_next_run_scales_the_result_of_a_run(capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *LONG) == STOPPED
    words = set_keys(
        "model.path=runs/recipe/1", "model.rope_scaling={rope_type='yarn', factor=8.0}"
    )
    assert main(["train", "recipe.toml", "--out", "next", "--stop-after", "1", *words]) == STOPPED
    assert (
        "yarn (theta 10,000, factor 8, original positions 64); 256 positions"
        in capsys.readouterr().err
    )


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
        "it has learned positions instead of a rotary embedding",
        "remove `model.rope_scaling`",
    )
    assert not Path("runs").exists()


def test_rope_of_the_checkpoint_is_kept_without_overrides(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("scaled"), LLAMA | {"rope_theta": 5e5})
    write_tokenizer(Path("scaled"))
    run_ok("save-init", "scaled", "--pad-vocab", "8", "--mesh", "1,2,4")
    words = ("--set", "model.path=scaled-init", "--stop-after", "1")
    assert main(["train", "recipe.toml", *words]) == STOPPED
    assert "rotary embedding default (theta 500,000); 64 positions" in capsys.readouterr().err
    config = read_configs("runs/recipe/1/state/hf/config.json")[0]
    assert config == read_configs("scaled-init/hf/config.json")[0]
