"""Overrides of rotary embeddings, data sources and the description of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.registry import family_of
from prepcli.models.rope_config import Rope
from tests.helpers.tiny_configs import (
    GEMMA3,
    GOLDEN,
    GPT2,
    GPT_NEOX,
    GPTJ,
    LIVE,
    LLAMA,
    LONG_ROPE,
    PHI3,
    ROPES,
    T5,
)
from tests.helpers.training_plans import RECIPE, load_text, rope_table
from trainer.nn.attention_mask import inverse_frequencies
from trainer.recipe import LoadedRecipe, load_recipe, recipe_to_toml
from trainer.recipe.data_table import split_sources
from trainer.recipe.description import data_lines, recipe_lines
from trainer.recipe.model_table import Model, check_rope_scaling, override_rope

# Rotary embeddings of a recipe, as changes of a model's config.

YARN = {"rope_type": "yarn", "factor": 4.0}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}

VERSION_5 = LIVE["gpt_neox-version-5"]  # has rope_parameters with theta and partial_rotary_factor


def read_rope(config: Any) -> Rope:
    rope = family_of(config).arch_config(config).rope
    assert rope is not None
    return rope


def test_override_rope_without_overrides_keeps_the_config():
    assert override_rope(GPT2, rope_table()) is GPT2


def test_yarn_frequencies_follow_the_paper():
    """Section 3.2 of https://arxiv.org/abs/2309.00071: r(d) = L / wavelength, ramp from beta_slow 1 to beta_fast 32."""
    fields = {"max_position_embeddings": 4096, "head_dim": 128}
    config = override_rope(
        LLAMA | fields, rope_table(YARN | {"truncate": False}, max_positions=16384)
    )
    base = 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    turns = 4096 * base / (2 * np.pi)
    dims = np.arange(64)
    low, high = (128 * np.log(4096 / (n * 2 * np.pi)) / (2 * np.log(10_000)) for n in (32, 1))
    kept = 1 - np.clip((dims - low) / (high - low), 0, 1)
    expected = (1 - kept) * base / 4 + kept * base
    np.testing.assert_allclose(inverse_frequencies(read_rope(config), 16384), expected, rtol=2e-6)
    np.testing.assert_allclose(expected[turns > 32], base[turns > 32])
    np.testing.assert_allclose(expected[turns < 1], base[turns < 1] / 4)
    assert read_rope(config).attention_factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize("kind", ROPES)
def test_override_gives_the_rope_of_a_golden_file(kind: str):
    """`tests/trainer/nn/test_parity.py` compares these configs with the results of transformers."""
    assert read_rope(override_rope(LLAMA, rope_table(ROPES[kind]))) == read_rope(
        GOLDEN[f"llama-{kind}"]
    )


@pytest.mark.parametrize(
    "config", [LLAMA, GPT_NEOX, VERSION_5], ids=["llama", "gpt_neox", "version 5"]
)
@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_original_positions_default_to_the_checkpoint(
    config: dict[str, Any], scaling: dict[str, Any]
):
    changed = override_rope(config, rope_table(scaling, max_positions=512))
    assert (read_rope(changed).original_max_positions, changed["max_position_embeddings"]) == (
        64,
        512,
    )


def test_original_positions_of_the_recipe_replace_all_others():
    config = LLAMA | {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3}
    changed = override_rope(config, rope_table(YARN | {"original_max_position_embeddings": 48}))
    assert read_rope(changed).original_max_positions == 48


def test_more_positions_keep_the_original_ones_of_the_checkpoint():
    changed = override_rope(LLAMA | {"rope_scaling": YARN}, rope_table(max_positions=512))
    assert read_rope(changed).original_max_positions == 64


def test_second_override_keeps_the_original_positions():
    once = override_rope(LLAMA, rope_table(YARN, max_positions=256))
    twice = override_rope(once, rope_table(YARN | {"factor": 16.0}, max_positions=1024))
    assert (read_rope(twice).original_max_positions, read_rope(twice).factor) == (64, 16)


def test_scaling_keeps_theta_and_rotated_share():
    rope = read_rope(override_rope(VERSION_5, rope_table({"type": "linear", "factor": 2.0})))
    assert rope == Rope(read_rope(VERSION_5).rotary_dim, 700.0, 64, rope_type="linear", factor=2.0)


@pytest.mark.parametrize(
    "config", [LLAMA, LLAMA | {"rope_scaling": YARN}, GPT_NEOX | {"rotary_emb_base": 500}]
)
def test_theta_changes_nothing_else(config: dict[str, Any]):
    before, after = read_rope(config), read_rope(override_rope(config, rope_table(theta=7e5)))
    assert (after.theta, after.rope_type, after.factor) == (7e5, before.rope_type, before.factor)
    assert override_rope(config, rope_table(theta=7e5))["rope_theta"] == 7e5, (
        "transformers 4 reads it there"
    )


def test_scaling_may_name_theta():
    assert read_rope(override_rope(LLAMA, rope_table(YARN | {"rope_theta": 3e4}))).theta == 3e4


def test_default_removes_a_scaling():
    config = LLAMA | {"rope_scaling": DYNAMIC}
    assert read_rope(override_rope(config, rope_table({"rope_type": "default"}))) == read_rope(
        LLAMA
    )


def test_gptj_override_sets_n_positions():
    changed = override_rope(GPTJ, rope_table(max_positions=600))
    assert (changed["n_positions"], read_rope(changed).original_max_positions) == (600, 600)
    assert "max_position_embeddings" not in changed


def test_longrope_stretch_follows_the_positions():
    changed = override_rope(PHI3 | {"partial_rotary_factor": 1.0}, rope_table(
        LONG_ROPE | {"original_max_position_embeddings": 32}, max_positions=1024
    ))  # fmt: skip
    assert read_rope(changed).attention_factor == pytest.approx(
        (1 + np.log(32) / np.log(32)) ** 0.5
    )


REJECTED: dict[str, tuple[dict[str, Any], Model, str, str]] = {
    "learned positions": (
        GPT2,
        rope_table(YARN),
        "`model.rope_scaling` cannot be applied to gpt2",
        "it has no rotary embedding",
    ),
    "relative bias": (
        T5,
        rope_table(theta=5e5),
        "`model.rope_theta` cannot be applied to t5",
        "it has no rotary embedding",
    ),
    "recurrent mixer": (
        {"model_type": "mamba2", "num_hidden_layers": 2},
        rope_table(theta=5e5),
        "`model.rope_theta` cannot be applied to mamba2",
        "it has no rotary embedding",
    ),
    "two rotary embeddings": (
        GEMMA3,
        rope_table(YARN),
        "`model.rope_scaling` is not supported for gemma3_text",
        "it has one rotary embedding for layers with a sliding window and another for the other layers",
    ),
    "fixed rotary embedding": (
        GPTJ,
        rope_table(theta=5e5),
        "`model.rope_theta` cannot be applied to this gptj model",
        "`rope_scaling` is not supported for this family",
    ),
    "unsupported type": (
        PHI3,
        rope_table(LLAMA3, max_positions=128),
        "`model.rope_scaling`, `model.max_position_embeddings` cannot be applied to this phi3 model",
        "rope type `llama3` is not supported for this family",
    ),
    "number of factors": (
        LLAMA,
        rope_table(LONG_ROPE),
        "`model.rope_scaling` cannot be applied to this llama model",
        "short_factor of the rope scaling is [1.0, 1.5, 2.5, 4.0], it must be 8 numbers, one per rotated pair",
    ),
    "theta": (
        LLAMA,
        rope_table(theta=0.5),
        "`model.rope_theta` cannot be applied to this llama model",
        "rope_theta is 0.5, it must be above 1",
    ),
    "postponed scaling": (
        LLAMA,
        rope_table(DYNAMIC, max_positions=256),
        "`model.max_position_embeddings` is 256",
        "dynamic scaling begins after these positions: 64 in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_override_rope_rejects_unsupported_overrides(name: str):
    config, overrides, what, why = REJECTED[name]
    with pytest.raises(PrepError) as caught:
        override_rope(config, overrides)
    assert (caught.value.code, caught.value.what, caught.value.why) == (USAGE, what, why)


INVALID_SCALINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "`model.rope_scaling` has no `rope_type`", ""),
    (
        {"rope_type": "ntk", "factor": 2.0},
        "rope type `ntk` is not supported",
        "`model.rope_theta` = theta",
    ),
    ({"rope_type": "llama"}, "rope type `llama` is not supported", "did you mean `llama3`?"),
    ({"rope_type": 3}, "rope type `3` is not supported", ""),
    (
        YARN | {"beta_fats": 32},
        "`model.rope_scaling`: unknown key `beta_fats`",
        "did you mean `beta_fast`?",
    ),
    (
        {"rope_type": "linear", "factor": 2, "beta_fast": 32},
        "`model.rope_scaling`: unknown key `beta_fast`",
        "",
    ),
    ({"type": "yarn"}, "`model.rope_scaling`: `factor` is missing", ""),
    (
        {"rope_type": "longrope", "short_factor": [1.0]},
        "`model.rope_scaling`: `long_factor` is missing",
        "",
    ),
    (YARN | {"factor": 0}, "`model.rope_scaling`: `factor` is 0", ""),
    (YARN | {"factor": "4"}, '`model.rope_scaling`: `factor` is "4"', ""),
    (YARN | {"factor": True}, "`model.rope_scaling`: `factor` is true", ""),
    (YARN | {"factor": float("nan")}, "`model.rope_scaling`: `factor` is nan", ""),
    (YARN | {"truncate": 1}, "`model.rope_scaling`: `truncate` is 1", ""),
    (YARN | {"type": 1}, "`model.rope_scaling`: `type` is 1", ""),
    (
        YARN | {"original_max_position_embeddings": 4096.0},
        "`model.rope_scaling`: `original_max_position_embeddings` is 4096.0",
        "",
    ),
    (LONG_ROPE | {"short_factor": [1, -1]}, "`model.rope_scaling`: `short_factor` is [1, -1]", ""),
    (LONG_ROPE | {"short_factor": 1.0}, "`model.rope_scaling`: `short_factor` is 1.0", ""),
    (
        LLAMA3 | {"high_freq_factor": 1.0},
        "`model.rope_scaling` has low_freq_factor 1 and high_freq_factor 1",
        "",
    ),
    (
        YARN | {"beta_slow": 9, "beta_fast": 3},
        "`model.rope_scaling` has beta_slow 9 and beta_fast 3",
        "",
    ),
]


@pytest.mark.parametrize(("scaling", "what", "hint"), INVALID_SCALINGS)
def test_check_rope_scaling_rejects_invalid_tables(scaling: dict[str, Any], what: str, hint: str):
    with pytest.raises(PrepError) as caught:
        check_rope_scaling(scaling)
    assert (caught.value.code, caught.value.what) == (USAGE, what)
    assert caught.value.hint.startswith(hint)


# The tables of `data.sources`: each has the keys of its dataset, and errors name the table and the key.

SOURCES_RECIPE = """
[model]
path = "m"
[data]
seq_length = 8
bad_lines = 3
{data}
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 10
"""

TWO = """\
[[data.sources]]
name = "wiki"
path = "~/wiki.jsonl"
weight = 3
[[data.sources]]
name = "chat"
path = ["${FOLDER}/a.csv", "b.csv"]
weight = 0.5
type = "csv"
format = "chat"
bad_lines = 0
"""


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("FOLDER", "/data")


def load(folder: Path, data: str) -> LoadedRecipe:
    """Load a recipe with this `[data]`."""
    (folder / "x.toml").write_text(SOURCES_RECIPE.replace("{data}", data))
    return load_recipe(folder / "x.toml")


@pytest.mark.usefixtures("_environment")
def test_sources_inherit_keys_of_the_data_table(tmp_path: Path):
    (wiki, first), (chat, second) = split_sources(load(tmp_path, TWO).recipe.data)
    assert wiki is not None
    assert chat is not None
    assert [(source.name, source.weight) for source in (wiki, chat)] == [("wiki", 3), ("chat", 0.5)]
    assert (first.path, first.type, first.fields, first.bad_lines) == (
        ("/home/me/wiki.jsonl",),
        "auto",
        None,
        3,
    )
    assert (second.path, second.type, second.bad_lines) == (("/data/a.csv", "b.csv"), "csv", 0)
    assert (second.format, second.fields) == ("chat", "messages")
    assert first.sources is second.sources is None


@pytest.mark.usefixtures("_environment")
def test_sources_without_columns_have_no_fields(tmp_path: Path):
    data = load(
        tmp_path, 'fields = "body"\n' + TWO.replace("weight = 3", 'weight = 3\ntype = "text"')
    ).recipe.data
    assert [part.fields for _, part in split_sources(data)] == [None, "messages"]
    pairs = TWO.replace('format = "chat"', 'fields = "[a], b"')
    data = load(tmp_path, pairs).recipe.data
    assert [part.fields for _, part in split_sources(data)] == [None, "[a], b"]


@pytest.mark.usefixtures("_environment")
def test_data_with_a_path_is_one_source(tmp_path: Path):
    data = load(tmp_path, 'path = "a.txt"').recipe.data
    assert list(split_sources(data)) == [(None, data)]


@pytest.mark.usefixtures("_environment")
def test_written_recipe_reads_back_equal_sources(tmp_path: Path):
    loaded = load(tmp_path, TWO)
    (tmp_path / "y.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(tmp_path / "y.toml").recipe == loaded.recipe


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "x.toml:4: `data.path` is missing"),
        (
            TWO.replace("weight = 3", "wieght = 3"),
            "table 1 of `data.sources`: unknown key `wieght` - did you mean",
        ),
        (
            TWO.replace('name = "chat"\n', ""),
            "table 2 of `data.sources`: `name` is missing - it takes text: name in",
        ),
        (
            TWO.replace("weight = 3", "weight = 0"),
            "table 1 of `data.sources`: `weight` is 0 - it takes a number > 0",
        ),
        (
            TWO.replace('name = "chat"', 'name = "wiki"'),
            "two tables of `data.sources` have the name 'wiki'",
        ),
        (
            TWO.replace("weight = 3\n", ""),
            "only some tables of `data.sources` have a weight - without one: wiki",
        ),
        (
            TWO.replace("weight = 3", 'weight = 3\nfields = "a,"'),
            'source `wiki`: `data.fields` is "a," - a field is empty',
        ),
        (
            TWO.replace("weight = 3", 'weight = 3\ntype = "text"\nfields = "a"'),
            'source `wiki`: `data.fields` is "a" - it is for columns of json objects, but `data.type` is text',
        ),
        ('path = "a.txt"\n' + TWO, '`data.path` is ["a.txt"] - `data.sources` names the datasets'),
        ("sources = []", "`data.sources` is []"),
        ('sources = ["a"]', '`data.sources` is ["a"]'),
        (
            "holdout = 0.1\n" + TWO.replace("weight = 3", 'weight = 3\neval_path = "v.txt"'),
            "`data.holdout` is 0.1, and tables of `data.sources` have evaluation data of their own",
        ),
        (
            TWO.replace("${FOLDER}", "${NOT_SET_ANYWHERE}"),
            "`data.sources` needs the environment variable",
        ),
    ],
)
def test_error_names_the_invalid_source_table(tmp_path: Path, data: str, message: str):
    with pytest.raises(PrepError) as caught:
        load(tmp_path, data)
    assert message in str(caught.value)


# Sentences about the settings of a recipe.

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
            "loss on the turns of the assistant, on completions or on all of a text: the columns of the data decide",
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
