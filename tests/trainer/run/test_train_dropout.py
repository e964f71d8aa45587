"""`prep train` with dropout: its line in the summary, resuming, and the rates of config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, STOPPED
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig
from tests.helpers.train_runs import set_keys, train_error
from trainer.run.summary import dropout_text

pytestmark = pytest.mark.usefixtures("work_dir")

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
    assert (code, what) == (FAILED, "the run began with another recipe")
    assert why == "model.fcm_ratio: [0.0, 0.15] -> [0.0, 0.0]"


def test_invalid_rate_in_config_json_is_an_error(capsys: pytest.CaptureFixture[str]):
    path = Path("tiny/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 2}))
    code, what, why, _ = train_error(capsys, *set_keys("model.path=tiny", "model.dropout=config"))
    assert (code, what) == (FAILED, "config.json is invalid")
    assert why == "attention_dropout is 2, it must be a number from 0 to below 1"
