"""Jobs: words, exit codes and comments of scripts, invalid values, and the nodes of a command."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.core.json_values import JsonObject
from prepcli.launch.hardware import (
    TPU_GENERATIONS,
    TpuGeneration,
    check_hardware,
    find_topology,
    num_chips,
    plain_hardware,
)
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
from tests.helpers.tpu_devices import FakeTpu, make_tpu_devices
from trainer.planning.step_time import ACCELERATORS


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


@pytest.mark.parametrize(
    ("name", "has_shares"), [("train", False), ("eval", False), ("reshard", True)]
)
def test_processes_divide_trainings_and_conversions(name: str, has_shares: bool):
    command = LaunchedCommand(name=name, has_shares=has_shares)
    check_hardware(command, None, plain_hardware(4, None))


def test_processes_of_other_commands_are_refused():
    command = LaunchedCommand(name="inspect", arguments=("model",))
    check_hardware(command, None, plain_hardware(1, None))
    with pytest.raises(UsageError, match="`prep inspect` runs in one process") as caught:
        check_hardware(command, None, plain_hardware(2, None, option="workers"))
    assert caught.value.hint == "`--workers 1`"


@pytest.mark.parametrize(
    ("kind", "num_chips", "topology"),
    [
        ("v5p", 256, "v5p:4x8x8"),
        ("v4", 4, "v4:2x2x1"),
        ("v5e", 1, "v5e:1x1"),
        ("v6e", 256, "v6e:16x16"),
    ],
)
def test_slices_are_found_by_number_of_chips(kind: str, num_chips: int, topology: str):
    assert find_topology(kind, num_chips) == topology


@pytest.mark.parametrize(
    "generation", TPU_GENERATIONS.values(), ids=lambda generation: generation.name
)
def test_slices_of_a_kind_differ_in_size_and_fit_a_pod(generation: TpuGeneration):
    sizes = [num_chips(shape) for shape in generation.slices]
    assert sizes == sorted(set(sizes))
    assert all(generation.has_slice(shape) for shape in generation.slices)
    if kind := ACCELERATORS.get(generation.name):
        assert sizes[-1] * generation.devices_per_chip <= kind.domain_size


@pytest.mark.parametrize(
    ("kind", "shape", "exists"),
    [
        ("v5p", "4x4x12", True),
        ("v5p", "4x4x4x4", False),
        ("v5p", "8x4x4", False),
        ("v5p", "2x4x8", False),
        ("v5p", "16x16x28", False),
        ("v4", "16x16x24", False),
        ("v6e", "4x4", True),
        ("v6e", "4x16", False),
        ("v6e", "four", False),
    ],
)
def test_boxes_of_whole_cubes_are_slices(kind: str, shape: str, exists: bool):
    assert TPU_GENERATIONS[kind].has_slice(shape) == exists


def test_a_chip_of_tpu7x_is_two_devices():
    assert find_topology("tpu7x", 256) == "tpu7x:4x4x8"
    with pytest.raises(PrepError, match="no slice of tpu7x has 24 devices, 2 per chip") as caught:
        find_topology("tpu7x", 24)
    assert caught.value.hint == "use a mesh of 16 or 32 devices"


@pytest.mark.parametrize(
    ("kind", "num_chips", "nearest"),
    [("v5p", 2, "4"), ("v5e", 24, "16 or 32"), ("v6e", 512, "256"), ("v5p", 7000, "6,144")],
)
def test_errors_name_the_nearest_slices(kind: str, num_chips: int, nearest: str):
    with pytest.raises(
        PrepError, match=rf"^no slice of {kind} has {num_chips:,} chips - slices have "
    ) as caught:
        find_topology(kind, num_chips)
    assert caught.value.hint == f"use a mesh of {nearest} devices"
    assert caught.value.code == USAGE


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.slow
@pytest.mark.parametrize(
    "generation", TPU_GENERATIONS.values(), ids=lambda generation: generation.name
)
def test_fake_devices_match_libtpu(generation: TpuGeneration):
    from trainer.distributed.devices import tpu_devices

    for shape in generation.slices:
        topology = f"{generation.name}:{shape}"
        described = [
            FakeTpu(
                device.id,
                device.process_index,
                tuple(device.coords),
                device.core_on_chip,
                device.device_kind,
            )
            for device in tpu_devices(topology)
        ]
        assert described == make_tpu_devices(topology)
