"""The command line: usage errors, options and their groups, completion, and exit codes."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypedDict

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    ProgressUi,
    command,
    complete_checkpoint,
    complete_devices,
    complete_family,
    complete_recipe,
    complete_recipe_or_checkpoint,
    complete_shipped_recipe,
)
from prepcli.commands.cli.root import all_commands
from prepcli.commands.console.ui import Report
from prepcli.commands.operations.options import DEFAULT_MEMORY
from prepcli.core.errors import PrepError
from prepcli.core.formatting import parse_bytes, suggest
from prepcli.core.option_spec import flag, option
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.sources.aliases import ALIAS_FAMILIES
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S
from tests.prepcli.sources.test_detect import fill

SLOW_IMPORTS = {
    "numpy",
    "ml_dtypes",
    "jax",
    "flax",
    "rich",
    "huggingface_hub",
    "orbax",
    "tensorstore",
    "torch",
}
COMMAND_WORDS = [f"{command.group} {command.name}".split() for command in all_commands()]
HELPS = [[], ["launch"], ["map"], *COMMAND_WORDS]

# Script of a process with additional commands, which prints `ready` when a command runs
WITH_COMMAND = """
import sys, time
from prepcli.commands.cli.root import app
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.core.signals import note_durable_work, raise_on_signal
from prepcli.commands.console.ui import Report, open_ui

@app.command()
def wait(json: bool = False) -> int:
    try:
        with raise_on_signal():
            print("ready", file=sys.stderr, flush=True)
            for _ in range(36_000):  # a signal just before one long sleep would be handled after it
                time.sleep(0.1)
    finally:
        print("cleaned up", file=sys.stderr, flush=True)
    return 0

@app.command()
def convert() -> int:
    with note_durable_work(lambda: "1 of 2 bytes are kept"):
        return wait()

@app.command()
def reports() -> int:
    return open_ui("reports", False, False, 0).finish(Report(error=PrepError("stopped by SIGINT", code=130)))

@app.command()
def broken() -> int:
    raise ZeroDivisionError("no chunks")

@app.command()
def severed() -> int:
    raise BrokenPipeError(32, "Broken pipe")

@app.command()
def chatty() -> int:
    for line in range(100_000):
        print(line)
    return 0

sys.exit(main())
"""


def prep(*args: str, script: str = "") -> subprocess.Popen[str]:
    command = (
        [sys.executable, "-c", script, *args]
        if script
        else [sys.executable, "-m", "prepcli", *args]
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*args: str, script: str = "") -> tuple[int, str, str]:
    process = prep(*args, script=script)
    out, err = process.communicate(timeout=MAX_S)
    return process.returncode, out, err


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("args", HELPS, ids=lambda args: " ".join(["prep", *args]))
def test_help_fits_in_80_columns(
    args: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*args, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(" ".join(["Usage: prep", *args]))
    assert max(map(len, text.splitlines())) <= 80


def listed_commands(text: str) -> dict[str, dict[str, str]]:
    """Return the summaries of the commands in a help text, by section and name."""
    sections: dict[str, dict[str, str]] = {}
    for block in text.split("\n\n"):
        title, *lines = block.splitlines()
        if title.endswith(":") and title != "Options:":
            sections[title[:-1]] = dict(line.strip().split(maxsplit=1) for line in lines)
    return sections


@pytest.mark.parametrize(
    "args", [["--help"], ["launch", "--help"], ["map", "--help"]], ids=" ".join
)
def test_help_cuts_no_summary_of_a_command(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 0
    sections = listed_commands(capsys.readouterr().out)
    summaries = [summary for section in sections.values() for summary in section.values()]
    assert summaries
    assert [each for each in summaries if not each.endswith(".") or each.endswith("...")] == []


def test_help_lists_every_command_in_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    sections = listed_commands(capsys.readouterr().out)
    assert list(sections) == ["Convert", "Check", "Train and use", "Launch", "Look up"]
    names = [name for section in sections.values() for name in section]
    assert sorted(names) == sorted({words[0] for words in COMMAND_WORDS})
    assert "map" in sections["Convert"]
    assert list(sections["Launch"]) == ["launch"]


@pytest.mark.parametrize(
    "args", [["train"], ["launch", "slurm"], ["map", "suggest"], []], ids=" ".join
)
def test_help_of_a_command_equals_its_option(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, "--help"]) == 0
    expected = capsys.readouterr().out
    assert main(["help", *args]) == 0
    assert capsys.readouterr().out == expected


def test_help_of_a_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "help", "slurm"]) == 0
    assert capsys.readouterr().out.startswith("Usage: prep launch slurm")


@pytest.mark.parametrize("args", COMMAND_WORDS, ids=" ".join)
def test_help_has_one_example_per_line(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*args, "-h"])
    examples = (
        capsys.readouterr().out.partition("  Examples:\n")[2].partition("\n\n")[0].splitlines()
    )
    assert len(examples) >= 2
    assert all(line.startswith(f"    prep {' '.join(args)}") for line in examples)


@pytest.mark.parametrize(
    "args", slow_except([["--help"], ["--version"], ["models", "--help"]], [["--help"]])
)
def test_help_imports_no_slow_module(args: list[str]) -> None:
    script = (
        "import sys; from prepcli.commands.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    code, _, err = run(*args, script=script)
    loaded = err.split()
    assert (code, loaded[0]) == (0, "0")
    assert "typer" in loaded
    assert not SLOW_IMPORTS & set(loaded)


def test_version_is_printed() -> None:
    assert run("--version") == (0, f"prep {metadata.version('prepcli')}\n", "")


def test_no_command_is_a_usage_error_with_help() -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: prep [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("args", "err"),
    [
        (["modles"], "error: unknown command `modles`\n hint: did you mean `models`?\n"),
        (["zzz"], "error: unknown command `zzz`\n hint: `prep --help`\n"),
        (["help", "zzz"], "error: unknown command `zzz`\n hint: `prep --help`\n"),
        (["halp"], "error: unknown command `halp`\n hint: did you mean `help`?\n"),
        (["finetune"], "error: unknown command `finetune`\n hint: did you mean `train`?\n"),
        (["launch", "slrm"], "error: unknown command `slrm`\n hint: did you mean `slurm`?\n"),
        (["launch", "zzz"], "error: unknown command `zzz`\n hint: `prep launch --help`\n"),
        (["launch"], "error: missing command\n hint: `prep launch --help`\n"),
        (
            ["eval", "m", "recipe.toml"],
            "error: unexpected argument `recipe.toml`\n hint: `prep eval --help`\n",
        ),
        (
            ["eval", "m", "a", "b"],
            "error: unexpected arguments `a b`\n hint: `prep eval --help`\n",
        ),
        (
            ["models", "--jsn"],
            "error: `prep models` has no option `--jsn`\n hint: did you mean `--json`?\n",
        ),
        (
            ["models", "--zzz"],
            "error: `prep models` has no option `--zzz`\n hint: `prep models --help`\n",
        ),
        (
            ["train", "x.toml", "--dtype", "bf16"],
            "error: `prep train` has no option `--dtype`\n hint: `--set model.dtype=VALUE`\n",
        ),
        (
            ["train", "x.toml", "--resume"],
            "error: `prep train` has no option `--resume`\n hint: run the same command again to resume\n",
        ),
        (
            ["train", "x.toml", "--quite"],
            "error: `prep train` has no option `--quite`\n hint: did you mean `--quiet`?\n",
        ),
        (
            [
                "train",
                "x.toml",
                "--learning_rate",
                "4e-6",
                "--do_train",
                "--block_size=1024",
                "--out",
                "r",
                "--zzz",
            ],
            "error: `prep train` has no option `--learning_rate` and 3 others\n"
            "  why: `--learning_rate` - `--set optimizer.lr=VALUE`\n"
            "       `--do_train` - `prep train` trains, and evaluates if there is data for it: `data.eval_path` or "
            "`data.holdout`\n"
            "       `--block_size` - `--set data.seq_length=VALUE`\n"
            "       `--zzz`\n"
            " hint: `prep recipes` lists examples, and `--set KEY=VALUE` changes a key\n",
        ),
        (["--zzz"], "error: `prep` has no option `--zzz`\n hint: `prep --help`\n"),
        (
            ["models", "lama"],
            f"error: no aliases of family `lama`\n  why: known: {', '.join(ALIAS_FAMILIES)}\n"
            " hint: did you mean `llama`?\n",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_have_a_hint_and_exit_2(
    args: list[str], err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", err)


def test_argument_errors_point_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["models", "a", "b"], ["env", "--devices=x"]):
        assert main(args) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("error: ")
        assert lines[0][7].islower()
        assert lines[1] == f" hint: `prep {args[0]} --help`"


def test_invalid_value_error_has_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pad-vocab", "x", "--progress", "loud"]) == 2
    what, why, hint = capsys.readouterr().err.splitlines()
    assert what == "error: invalid value for '--progress'"
    assert why == "  why: 'loud' is not one of 'auto', 'bar', 'lines', 'json', 'none'"
    assert hint == " hint: `prep pad-vocab --help`"


def test_synonym_of_a_choice_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--dtype", "bf16"]) == 2
    assert capsys.readouterr().err.endswith(" hint: did you mean `bfloat16`?\n")


@pytest.mark.parametrize(
    ("args", "command", "what"),
    [
        (["models", "--json", "lama"], "models", "no aliases of family `lama`"),
        (["models", "--json", "--jsn"], "models", "`prep models` has no option `--jsn`"),
        (["modles", "--json"], "", "unknown command `modles`"),
        (["launch", "slurm", "none.toml", "--json"], "launch", "none.toml does not exist"),
    ],
)
def test_json_is_one_object_on_failure(
    args: list[str], command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document = json.loads(out)
    assert (document["ok"], document["command"], document["error"]["what"]) == (
        False,
        command,
        what,
    )
    assert document["error"]["code"] == 2


def test_json_after_double_dash_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", slow_except([signal.SIGTERM, signal.SIGUSR1], [signal.SIGTERM]))
def test_signal_stops_conversion_with_75(number: signal.Signals) -> None:
    process = prep("convert", script=WITH_COMMAND)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=MAX_S)
    assert (process.returncode, out) == (75, "")
    what, why, hint = (
        "cleaned up\nerror: stopped by",
        "1 of 2 bytes are kept",
        "to resume: `prep convert`",
    )
    assert err == f"{what} {number.name}\n  why: {why}\n hint: {hint}\n"


def test_stopped_conversion_prints_json() -> None:
    process = prep("wait", "--json", script=WITH_COMMAND)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=MAX_S)
    error = json.loads(out)["error"]
    assert (error["code"], error["what"]) == (75, "stopped by SIGTERM")


@pytest.mark.parametrize(
    ("command", "kept"),
    slow_except(
        [
            ("convert", "  why: 1 of 2 bytes are kept\n hint: to resume: `prep convert`\n"),
            ("wait", ""),
        ],
        [("convert", "  why: 1 of 2 bytes are kept\n hint: to resume: `prep convert`\n")],
    ),
)
def test_ctrl_c_exits_130_with_durable_notes(command: str, kept: str) -> None:
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + WITH_COMMAND
    )
    process = prep(command, script=script)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == 130
    assert err == f"cleaned up\nerror: interrupted\n{kept}"


def test_reported_ctrl_c_prints_one_error() -> None:
    assert run("reports", script=WITH_COMMAND) == (130, "", "error: stopped by SIGINT\n")


def test_bug_exits_1_and_saves_traceback() -> None:
    code, out, err = run("broken", script=WITH_COMMAND)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (1, "", 3)
    assert lines[:2] == ["error: this is a bug in prep", "  why: ZeroDivisionError: no chunks"]
    saved = Path(lines[2].removeprefix(" hint: please report it with "))
    assert "ZeroDivisionError: no chunks" in saved.read_text()
    saved.unlink()


@pytest.mark.parametrize(
    ("args", "code"),
    slow_except(
        [(["chatty"], 0), (["models"], 0), (["models", "lama", "--json"], 2), (["--help"], 0)],
        [(["models", "lama", "--json"], 2), (["--help"], 0)],
    ),
)
def test_closed_stdout_keeps_the_exit_code(args: list[str], code: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", WITH_COMMAND, *args]
    try:
        done = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=MAX_S, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (code, "" if code == 0 else done.stderr)
    assert "Traceback" not in done.stderr


def test_broken_pipe_other_than_stdout_is_an_error() -> None:
    code, out, err = run("severed", script=WITH_COMMAND)
    assert (code, out) == (1, "")
    assert "Broken pipe" in err


class HubOptions(TypedDict, total=False):
    """A group of options with a text and flags."""

    revision: Annotated[str | None, option("NAME", "Read this branch.")]
    offline: Annotated[bool, flag("Use only the cache.")]
    stream: Annotated[bool, flag("Read without a copy.", position=1)]


@command("example", guide="convert")
def example_command(
    checkpoint: CheckpointArgument,
    *,
    hub_options: HubOptions,
    size: Annotated[int, option("N", "Take N.", default=3)],
    ui: ProgressUi,
) -> Report:
    """Look."""
    assert (checkpoint, size) == ("model", 4)
    assert hub_options == {"revision": "main", "offline": False, "stream": True}
    assert (ui.command, ui.as_json, ui.level, ui.progress_mode) == ("example", True, 2, "none")
    return Report(error=PrepError("stopped", code=75))


PARAMETERS = inspect.signature(example_command.function).parameters
OUTPUT_NAMES = ["as_json", "quiet", "verbose"]


def test_options_replace_their_group() -> None:
    names = ["checkpoint", "stream", "revision", "offline", "size", *OUTPUT_NAMES, "progress"]
    assert [*PARAMETERS] == names
    assert example_command.help == "Look.\n\nGuide: prep docs convert"
    assert PARAMETERS["verbose"].default == 0
    assert PARAMETERS["checkpoint"].default is inspect.Parameter.empty


def test_command_receives_its_option_groups(capsys: pytest.CaptureFixture[str]) -> None:
    hub_values = {"revision": "main", "offline": False, "stream": True}
    output_values = {"as_json": True, "quiet": False, "verbose": 2, "progress": "none"}
    code = example_command.function(checkpoint="model", size=4, **hub_values, **output_values)
    assert code == 75
    assert '"command": "example", "ok": false' in capsys.readouterr().out


@pytest.mark.parametrize("command", [*all_commands()], ids=lambda command: command.name)
def test_every_command_has_output_options(command) -> None:
    assert {*OUTPUT_NAMES} <= {*inspect.signature(command.function).parameters}


def test_complete_checkpoint_lists_folders_and_aliases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "llama-mine-init", MANIFEST_FILE)
    fill(tmp_path / "llama-other", "model.safetensors")
    assert complete_checkpoint("llama-")[:3] == ["llama-mine-init", "llama-7b", "llama-13b"]
    assert complete_checkpoint("llama-o") == []


def test_complete_family_lists_families() -> None:
    assert complete_family("gpt") == ["gpt2", "gpt_neo", "gptj", "gpt_neox"]


def test_complete_recipe_lists_files_and_shipped_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-mine.toml").touch()
    assert complete_recipe("gpt-")[:2] == ["gpt-mine.toml", "gpt-j-6b"]
    assert complete_recipe_or_checkpoint("gpt2")[:3] == ["gpt2", "gpt2-medium", "gpt2-large"]
    assert complete_shipped_recipe("gpt2") == ["gpt2"]


def test_complete_devices_lists_kinds_in_any_case() -> None:
    assert complete_devices("a100") == ["A100-40", "A100-80"]


def test_suggest_returns_one_name_or_none() -> None:
    assert suggest("pad-vcab", ["pad-vocab", "pad-vocabs", "models"]) == "pad-vocab"
    assert suggest("zzz", ["pad-vocab"]) is None


def test_default_memory_is_a_size() -> None:
    assert parse_bytes(DEFAULT_MEMORY, "memory") == 512 << 20
