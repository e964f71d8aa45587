"""Conflicts between keys of `[model]`, its rope scaling, and partition rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.models.activation_memory import SAVES_SCORES
from tests.trainer.recipe.test_errors import GOOD, error_of
from trainer.recipe import load_recipe

BLOCKWISE = GOOD.replace("[data]", 'attention_kernel = "blockwise"\nremat_policy = "{}"\n[data]')


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("policy", SAVES_SCORES)
def test_policy_that_saves_scores_is_rejected_with_blockwise(policy: str):
    assert str(error_of(BLOCKWISE.format(policy))) == (
        f'x.toml:5: `model.remat_policy` is "{policy}", and `model.attention_kernel` "blockwise" - '
        'the policy saves the scores of all tiles - `model.remat_policy = "nothing_saveable"`'
    )


def test_policy_that_saves_scores_is_accepted_with_reference():
    Path("x.toml").write_text(
        BLOCKWISE.format("dots_saveable").replace('"blockwise"', '"reference"')
    )
    assert load_recipe(Path("x.toml"), ()).recipe.model.remat_policy == "dots_saveable"


REMAT_ERRORS = {
    "misspelled activation": (
        'remat_policy = ["q", "attention_ouput"]',
        '`model.remat_policy` is ["q", "attention_ouput"] - it takes "none", ',
        "did you mean `attention_output`?",
    ),
    "activation without a list": (
        'remat_policy = "attention_output"',
        "",
        '`remat_policy = ["attention_output"]`',
    ),
    "misspelled policy": (
        'remat_policy = "nothing_savable"',
        "",
        "did you mean `nothing_saveable`?",
    ),
    "empty list": (
        "remat_policy = []",
        "`model.remat_policy` is [] - ",
        '`remat_policy = "nothing_saveable"`',
    ),
    "hidden units in chunks": (
        'remat_policy = ["mlp_hidden"]\nffn_chunk_size = 8',
        '`model.remat_policy` is ["mlp_hidden"], and `model.ffn_chunk_size` 8 - ',
        "`model.ffn_chunk_size = -1`",
    ),
    "offload without a policy": (
        'offload = "residuals"',
        '`model.offload` is "residuals", and `model.remat_policy` "none" - ',
        '`model.remat_policy = "nothing_saveable"`',
    ),
}


@pytest.mark.parametrize("name", REMAT_ERRORS)
def test_invalid_remat_policy_is_rejected_with_its_line(name: str):
    lines, start, hint = REMAT_ERRORS[name]
    message = str(error_of(GOOD.replace("[data]", f"{lines}\n[data]")))
    assert message.startswith(f"x.toml:4: {start}")
    assert message.endswith(f" - {hint}")


def with_rope(*lines: str) -> str:
    """Return GOOD with more lines in `[model]`."""
    return GOOD.replace("[data]", "\n".join([*lines, "[data]"]))


YARN = 'rope_scaling = {rope_type = "yarn", factor = 4.0}'
ROPE_ERRORS = {
    "unknown key": (
        with_rope('rope_scaling = {rope_type = "linear", facter = 4.0}'),
        "x.toml:4: `model.rope_scaling` has the unknown key `facter` - the keys of type linear are rope_type, type, "
        "rope_theta, partial_rotary_factor, factor - did you mean `factor`?",
    ),
    "unsupported type": (
        with_rope('rope_scaling = {rope_type = "ntk", factor = 4.0}'),
        "x.toml:4: rope type `ntk` is not supported - supported: default, linear, dynamic, llama3, yarn, longrope - "
        "`model.rope_theta` = theta * factor ** (d / (d - 2)), for heads with d rotated elements",
    ),
    "two thetas": (
        with_rope(YARN.replace("}", ", rope_theta = 5e5}"), "rope_theta = 5e5"),
        "x.toml:5: `model.rope_theta` is 500000.0, and `model.rope_scaling` has a `rope_theta` - "
        "both set the base of the rotary frequencies - remove one of them",
    ),
    "no table": (
        with_rope("rope_scaling = 4"),
        "x.toml:4: `model.rope_scaling` is 4 - it takes a table: ",
    ),
    "too many positions": (
        with_rope("max_position_embeddings = 3000000000"),
        "x.toml:4: `model.max_position_embeddings` is 3000000000 - out of range: the maximum is 2,147,483,647 - ",
    ),
}


@pytest.mark.parametrize("name", ROPE_ERRORS)
def test_invalid_rope_scaling_is_rejected_with_its_line(name: str):
    text, message = ROPE_ERRORS[name]
    assert str(error_of(text)).startswith(message)


def test_rope_scaling_may_be_a_table_or_an_override():
    table = with_rope("[model.rope_scaling]", 'rope_type = "yarn"', "factor = 4.0")
    for text, overrides in (
        (with_rope(YARN), ()),
        (table, ()),
        (GOOD, ("model." + YARN.replace(" = {", "={"),)),
    ):
        Path("x.toml").write_text(text)
        scaling = load_recipe(Path("x.toml"), overrides).recipe.model.rope_scaling
        assert scaling == {"rope_type": "yarn", "factor": 4.0}


RULE_ERRORS = {
    "unknown dim": (
        '"embd=fsdp"',
        '`rules = ["embd=fsdp"]`: unknown dim `embd` - the dims are vocab, ',
    ),
    "unknown axis": ('["embed=fdsp"]', '`rules = ["embed=fdsp"]`: unknown mesh axis `fdsp` - '),
    "no axis": (
        '["embed"]',
        '`rules = ["embed"]` is invalid - a rule is DIM=AXIS[+AXIS][|…|none], `act:` before it, re:PATTERN=AXIS,AXIS, '
        "or a preset - "
        '`rules = ["kv_heads=mp|none"]`',
    ),
    "two rules": (
        '["embed=mp", "embed=fsdp"]',
        "two rules for embed - `embed=mp` and `embed=fsdp` - ",
    ),
    "number": ("[1]", "`rules` is [1] - it takes text or a list of texts: "),
}


@pytest.mark.parametrize("name", RULE_ERRORS)
def test_invalid_rules_are_rejected_with_their_line(name: str):
    value, message = RULE_ERRORS[name]
    assert str(
        error_of(GOOD.replace('mesh = "1,2,4"\n', f'mesh = "1,2,4"\nrules = {value}\n'))
    ).startswith(f"x.toml:2: {message}")


def test_one_rule_may_be_an_override():
    Path("x.toml").write_text(GOOD)
    assert load_recipe(Path("x.toml"), ["rules=embed=fsdp+sp"]).recipe.rules == ("embed=fsdp+sp",)
