"""Options that are defined once: what the recorded command line and the commands derive from them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from prepcli.commands.cli import root
from prepcli.commands.cli.launch import ENGINE_COMMANDS
from prepcli.commands.cli.root import COMMANDS
from prepcli.commands.operations.options import (
    AddTokensOptions,
    ExportOptions,
    MergeOptions,
    PadVocabOptions,
    RemoveTokensOptions,
    ReshardOptions,
    SaveInitOptions,
)
from prepcli.core.option_spec import (
    REQUIRED,
    OptionSpec,
    flag,
    format_command_line,
    option,
    option_specs,
    with_defaults,
)

COMMAND_FUNCTIONS = {command.name: command.function for command in COMMANDS}
# The keyword options of the function of each command.
OPTIONS_BY_COMMAND: dict[str, type] = {
    "pad-vocab": PadVocabOptions,
    "add-tokens": AddTokensOptions,
    "remove-tokens": RemoveTokensOptions,
    "save-init": SaveInitOptions,
    "reshard": ReshardOptions,
    "export": ExportOptions,
    "merge": MergeOptions,
}
# Options of the Python functions that the commands do not have.
ONLY_IN_PYTHON = {
    "pad-vocab": {"step"},
    "add-tokens": {"step"},
    "remove-tokens": {"step"},
    "save-init": {"step"},
    "reshard": {"revision", "offline", "stream", "true_vocab"},
    "export": {"revision", "offline", "stream"},
    "merge": {"step"},
}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            SaveInitOptions,
            "--mesh 1,2,1 --rule a=mp --rule b=none --no-scan --scan-axis 1 --compress zstd"
            " --pad-vocab 8 --init mean --seed 3 --true-vocab 5 --drop x --config c.json --untie"
            " --dtype bfloat16",
        ),
        (
            PadVocabOptions,
            "--multiple 8 --size 9 --mesh 1,2,1 --init mean --seed 3 --true-vocab 5 --drop x"
            " --config c.json --untie",
        ),
        (
            ReshardOptions,
            "--mesh 1,2,1 --rule a=mp --rule b=none --no-scan --scan-axis 1 --params-only"
            " --compress zstd --true-vocab 5 --config c.json",
        ),
        (
            ExportOptions,
            "--dtype bfloat16 --layout easylm --keep-padding --shard-size 7 --true-vocab 5"
            " --config c.json --ema",
        ),
    ],
)
def test_recorded_options_keep_their_order(options: type, line: str):
    values = {
        "mesh": "1,2,1",
        "rules": ("a=mp", "b=none"),
        "scan": False,
        "scan_axis": 1,
        "params_only": True,
        "compress": "zstd",
        "pad_vocab": "8",
        "init": "mean",
        "seed": 3,
        "true_vocab": 5,
        "drop": ("x",),
        "config": "c.json",
        "untie": True,
        "dtype": "bfloat16",
        "multiple": 8,
        "size": 9,
        "layout": "easylm",
        "keep_padding": True,
        "shard_size": 7,
        "ema": True,
        "memory": "1GiB",
        "overwrite": True,
        "allow_overflow": True,
    }
    assert format_command_line("x", "m", options, values) == f"prep x m {line}"


@pytest.mark.parametrize("options", OPTIONS_BY_COMMAND.values(), ids=OPTIONS_BY_COMMAND)
def test_defaults_are_not_recorded(options: type):
    assert format_command_line("x", "m", options, with_defaults(options, {})) == "prep x m"


@pytest.mark.parametrize("command", OPTIONS_BY_COMMAND)
def test_commands_have_the_options_of_their_operation(command: str):
    specs = option_specs(OPTIONS_BY_COMMAND[command])
    parameters = inspect.signature(COMMAND_FUNCTIONS[command]).parameters
    assert specs.keys() - parameters.keys() == ONLY_IN_PYTHON[command]


def test_commands_define_no_options_of_their_own():
    folder = Path(inspect.getfile(root)).parent
    modules = [path.name for path in folder.glob("*.py") if "typer.Option(" in path.read_text()]
    # The options of all commands, those made from TypedDicts, and `prep --version`.
    assert sorted(modules) == ["option_groups.py", "root.py"]


def test_required_option_has_no_default():
    (tpu,) = [engine for engine in ENGINE_COMMANDS if engine.name == "tpu"]
    parameters = inspect.signature(tpu.function).parameters
    assert parameters["zone"].default is inspect.Parameter.empty
    assert parameters["project"].default is None


def test_new_option_needs_one_definition():
    spec = option("N", "Convert the first N layers.", more="For a try.", default=3)
    assert spec.flag_of("num_layers") == "--num-layers"
    text = "`num_layers` (N): Convert the first N layers. For a try. Default: 3."
    assert spec.reference("num_layers") == text


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            option(None, "Skip checking.", flag="--no-verify", default=True),
            "`verify`: If False, skip checking. Default: True.",
        ),
        (
            flag("With --chain: take --strict links."),
            "`verify`: Take `strict` links. Default: False.",
        ),
        (
            option("FILE", "Read FILE. Repeatable.", default=()),
            "`verify` (FILE): Read FILE. One or several.",
        ),
        (option("FILE", "Read FILE.", default=REQUIRED), "`verify` (FILE): Read FILE. Required."),
    ],
)
def test_reference_of_option_names_arguments(spec: OptionSpec, text: str):
    assert spec.reference("verify") == text
