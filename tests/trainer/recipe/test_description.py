"""Sentences about the settings of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training_plans import RECIPE, load_text
from trainer.recipe.description import data_lines, recipe_lines

CHAT = ("data.type=json", "data.format=chat")
SCHEDULE = "learning rate 0.001, linear to 0 at step 20"


def described(folder: Path, *overrides: str, text: str = RECIPE) -> list[str]:
    return list(recipe_lines(load_text(folder, *overrides, text=text)))


def test_recipe_without_settings_has_its_schedule_alone(tmp_path: Path):
    assert described(tmp_path) == [SCHEDULE]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (CHAT, "loss on the turns of the assistant"),
        ((*CHAT, "data.loss=last"), "loss on the last turn of the assistant"),
        ((*CHAT, "data.loss=all"), "loss on all turns"),
        ((*CHAT, "data.loss=['user', 'tool']"), "loss on the turns of user, tool"),
        (
            (*CHAT, "data.loss_reasoning=false"),
            "loss on the turns of the assistant without their reasoning",
        ),
        (
            (*CHAT, "data.fields=[prompt], completion"),
            "loss on the turns of the assistant, none on [prompt]",
        ),
        (("data.type=json", "data.format=alpaca"), "loss on the turns of the assistant"),
        (
            ("data.type=json", "data.format=question_answer"),
            "loss on answer, none on [question]",
        ),
        (
            ("data.type=json", "data.fields=[a+b],c,[d],e"),
            "loss on c, e, none on [a+b], [d]",
        ),
        (
            ("data.type=json", "data.fields_from_example=fields"),
            "loss on the fields of each example outside of brackets",
        ),
        (
            ("data.type=json",),
            "loss on the turns of the assistant, on completions or on all of a text, as the columns of the data tell",
        ),
        (
            (*CHAT, "data.overlong=truncate_prompt"),
            "records of more than 16 tokens lose the start of their prompt",
        ),
        (("data.overlong=drop",), "records of more than 16 tokens are left out"),
        (("train.eval_every=500", "data.holdout=0.1"), "evaluation every 500 steps"),
        (
            ("train.eval_every=5", "eval.stride=8", "eval.patience=3", "data.holdout=0.1"),
            "evaluation every 5 steps on windows with stride 8; the run ends after 3 without a better eval_loss",
        ),
        (
            (
                *("train.eval_every_epochs=0.5", "eval.patience=2", "data.holdout=0.1"),
                "checkpoint.best=eval_accuracy",
            ),
            "evaluation every 0.5 epochs; the run ends after 2 without a better eval_accuracy",
        ),
    ],
)
def test_settings_of_a_recipe_are_described(tmp_path: Path, settings: tuple[str, ...], line: str):
    lines = described(tmp_path, *settings)
    assert lines[0] == SCHEDULE
    assert line in lines[1:]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("optimizer.warmup_steps=2", "optimizer.schedule=wsd", "optimizer.cooldown_steps=5"),
            "learning rate 0.001, linear warm-up from 0 in 2 steps,"
            " constant, linear to 0 in the last 5 steps before step 20",
        ),
        (
            ("optimizer.schedule=cosine_restarts", "optimizer.cycles=4"),
            "learning rate 0.001, 4 cosines to 0 until step 20",
        ),
        (("optimizer.schedule=constant",), "learning rate 0.001, constant"),
    ],
)
def test_schedule_is_described(tmp_path: Path, settings: tuple[str, ...], line: str):
    assert described(tmp_path, *settings) == [line]


@pytest.mark.parametrize(
    ("epochs", "settings", "line"),
    [
        ("3", (), "linear to 0 over 3 epochs"),
        ("1", ("optimizer.schedule=constant",), "constant over 1 epoch"),
        (
            "1",
            ("optimizer.type=palm", "optimizer.schedule=linear"),
            "linear warm-up from 0 in 10,000 steps, linear to 0 over 1 epoch",
        ),
        (
            "2",
            ("optimizer.schedule=cosine", "optimizer.end_lr=1e-4", "optimizer.warmup_ratio=0.03"),
            "linear warm-up from 0 in 3 % of the steps, cosine to 0.0001 over 2 epochs",
        ),
        (
            "2",
            ("optimizer.warmup_steps=1000", "optimizer.decay_steps=5000"),
            "linear warm-up from 0 in 1,000 steps, linear to 0 at step 5,000 over 2 epochs",
        ),
    ],
)
def test_schedule_of_epochs_is_described(
    tmp_path: Path, epochs: str, settings: tuple[str, ...], line: str
):
    text = RECIPE.replace("steps = 20", f"epochs = {epochs}")
    assert described(tmp_path, *settings, text=text) == [f"learning rate 0.001, {line}"]


def test_sources_with_other_tokens_with_loss_are_named(tmp_path: Path):
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{name}.jsonl"\ntype = "json"\n{keys}\n'
        for name, keys in (
            ("near", 'format = "chat"'),
            ("far", 'format = "sharegpt"'),
            ("plain", 'format = "text"'),
        )
    )
    text = RECIPE.replace('type = "text"\npath = "train.txt"\n', "")
    text = text.replace("[batch]", f"{sources}[batch]")
    assert described(tmp_path, text=text)[1:] == ["near, far: loss on the turns of the assistant"]
    same = text.replace('format = "text"', 'format = "alpaca"')
    assert described(tmp_path, text=same)[1:] == ["loss on the turns of the assistant"]


def test_read_data_has_no_line_about_unknown_columns(tmp_path: Path):
    recipe = load_text(tmp_path, "data.type=json")
    assert list(data_lines(recipe.data, is_read=True)) == []
