"""Jobs: words, exit codes and comments of scripts. Invalid names, variables and lines are usage errors."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.json_values import JsonObject
from prepcli.launch.job import (
    RESTARTABLE,
    RESTARTABLE_CODES,
    LaunchedCommand,
    LaunchJob,
    as_label,
    check_label,
    comment,
    parse_env,
    yaml_text,
)
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import texts


def test_line_of_a_training_has_another_path_of_the_recipe():
    command = train_command("run.toml", ["--out", "my run"])
    assert command.line("/etc/r.toml") == "prep train /etc/r.toml --out 'my run'"


def test_line_of_a_conversion_has_no_recipe():
    command = LaunchedCommand(name="save-init", arguments=("model",), has_shares=True)
    assert command.line("/etc/r.toml") == "prep save-init model"
    assert command.words == ("save-init", "model")


@pytest.mark.parametrize(
    "values", [{"recipe": "a\nb.toml"}, {"recipe": "a\0"}, {"arguments": ("a\0",)}]
)
def test_words_that_no_script_can_hold_are_refused(values: dict[str, object]):
    with pytest.raises(UsageError):
        LaunchedCommand(**{"name": "train", **values})  # pyright: ignore[reportArgumentType]


def test_pattern_and_list_of_exit_codes_are_equal():
    lines = f"for code in {{0..255}}; do case $code in {RESTARTABLE}) echo $code ;; esac; done"
    matched = subprocess.check_output(["bash", "-c", lines], text=True)
    assert tuple(map(int, matched.split())) == RESTARTABLE_CODES


def test_comment_is_one_valid_line():
    assert comment("a\n b\r\x85c \udcff") == "# a b c \\udcff"


def test_parse_env_splits_at_the_first_equals_sign():
    assert parse_env(["A=b=c", "B="]) == (("A", "b=c"), ("B", ""))


@pytest.mark.parametrize("text", ["A", ""])
def test_parse_env_rejects_a_text_without_value(text: str):
    with pytest.raises(UsageError, match="has no value"):
        parse_env([text])


@pytest.mark.parametrize(
    "values",
    [
        {"env": (("1A", "b"),)},
        {"env": (("A B", "b"),)},
        {"env": (("A", "b\0"),)},
        {"setup": ("a\nb",)},
        {"setup": ("a\n",)},
        {"name": "a\nb"},
    ],
)
def test_job_rejects_texts_that_no_script_can_hold(values: dict[str, object]):
    with pytest.raises(UsageError):
        LaunchJob(**{"command": train_command("r.toml"), "name": "r", **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["A", "1a", "a-", "a_b", "a" * 41, ""])
def test_check_label_hint_is_a_valid_label(name: str):
    with pytest.raises(UsageError, match="invalid name of a job") as caught:
        check_label(name)
    check_label(caught.value.hint.removeprefix("`--job-name ").rstrip("`"))


@pytest.mark.parametrize(
    ("text", "label"),
    [("LLaMA 13B", "llama-13b"), ("32k", "prep-32k"), ("a" * 39 + "-b", "a" * 39), ("日", "prep")],
)
def test_as_label_keeps_letters_and_digits(text: str, label: str):
    assert as_label(text) == label
    check_label(label)


any_text = st.one_of(
    texts,
    texts.map("{}\n".format),
    st.sampled_from(["yes", "y", "1", "1e3", "~", "a: b", "a\n\n b\n", "\ta\n", "a\x85b\n"]),
)
values = st.recursive(
    st.one_of(any_text, st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(any_text, values, min_size=1, max_size=3))
def test_yaml_text_reads_back_as_the_value(value: JsonObject):
    assert list(yaml.safe_load_all(yaml_text([value, value]))) == [value, value]


def test_yaml_text_is_in_block_style_with_quoted_values():
    shared: JsonObject = {"cpu": "8"}
    text = yaml_text(
        [
            {"a1": [{"b1": 1, "y": "x y"}, "1e3"], "script": "set -e\n\nexec prep\n", "e1": {}},
            {"requests": shared, "limits": shared, "null": "é" * 200},
        ]
    )
    long = "é" * 200
    assert text == (
        'a1:\n- b1: 1\n  "y": "x y"\n- "1e3"\nscript: |\n  set -e\n\n  exec prep\ne1: {}\n'
        f'---\nrequests:\n  cpu: "8"\nlimits:\n  cpu: "8"\n\'null\': "{long}"\n'
    )
