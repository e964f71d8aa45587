"""`prep demo`: it runs all steps, reports failed ones, and keeps folders of the user. Its model is valid."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.demo import run as module
from prepcli.commands.demo.run import (
    KILLED_RUN,
    MARKER,
    REPORT,
    UNBROKEN_RUN,
    DemoStep,
    StepReport,
    demo_steps,
    logged_losses,
    run_demo,
)
from prepcli.commands.demo.tiny_model import CONFIG, STEPS, VOCABULARY, write_tiny_model
from prepcli.core.compilation_cache import FOLDER_VARIABLE
from prepcli.core.errors import FAILED, OK, USAGE, PrepError
from prepcli.core.observer import PacedNotes
from prepcli.formats.manifest import MANIFEST_FILE, STATE_ITEM
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests import FLAGS
from tests.helpers.tiny_checkpoints import read_tensors, same_bits
from trainer.training.metrics import METRICS_FILE

TUTORIAL = Path(__file__).parents[4] / "docs" / "tutorial.md"
COMMANDS = ["", "pad-vocab", "save-init", "save-init", "save-init", "reshard", "export", "verify"]
TRAINING = ["", "train", "train", "train", "export", "verify"]
MAKE, PAD, *_ = demo_steps()
ShouldKill = Callable[[int], bool]
BY_TITLE = {step.title: step for step in demo_steps()}
KILL = BY_TITLE["train, kill -9"]


def make_ui(as_json: bool = False) -> Ui:
    return Ui("demo", as_json=as_json, out=io.StringIO(), err=io.StringIO())


def demo(out: Path, ui: Ui, steps: Sequence[DemoStep] | None = None) -> Report:
    return run_demo(out, ui, steps)


def failing_step(error: Exception, args: tuple[str, ...] = ()) -> DemoStep:
    """Return a step that raises an error."""

    def fail(folder: Path, step: DemoStep) -> StepReport:
        raise error

    return DemoStep("train, kill -9", args, fail)


def text(stream: object) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def run_steps(
    out: Path, expected_commands: Sequence[str], steps_to_run: Sequence[DemoStep] | None = None
) -> list[dict[str, Any]]:
    """Run the demo with `--json`, check the reports of its steps, and return them."""
    ui = make_ui(as_json=True)
    assert ui.finish(demo(out, ui, steps_to_run)) == OK
    report = json.loads(text(ui.out))
    assert report["ok"]
    assert report["output"] == str(out)
    steps = report["steps"]
    commands = [
        re.sub(r"^(JAX_NUM_CPU_DEVICES=8 )?prep ", "", step["command"]).split(" ")[0]
        for step in steps
    ]
    assert commands == [*expected_commands]
    assert all(step["ok"] and step["seconds"] > 0 and step["bytes"] > 0 for step in steps)
    stderr = text(ui.err)
    assert all(
        f"[{number}/{len(steps)}] {step['step']}\n" in stderr
        for number, step in enumerate(steps, 1)
    )
    assert all(f"$ {step['command']}\n" in stderr for step in steps if step["command"])
    return steps


def check_conversions(out: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Check that a conversion was killed and resumed within its memory, and that the export equals the model."""
    assert steps[2]["result"].startswith("killed at ")
    assert steps[2]["bytes"] < steps[4]["bytes"] == steps[1]["bytes"]
    assert all(0 < steps[i]["peak"] <= 32 << 20 < steps[i]["bytes"] for i in (3, 4))
    before, after = read_tensors(out / "tiny"), read_tensors(out / "tiny-hf")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert (out / "tiny-padded" / "config.json").read_text() != (
        out / "tiny" / "config.json"
    ).read_text()


def test_demo_runs_all_conversions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run_steps(tmp_path / "out", COMMANDS, demo_steps()[: len(COMMANDS)])
    check_conversions(tmp_path / "out", steps)
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    assert (
        main(["inspect", "tiny-padded-init", "--shards", "embed.tokens", "--mesh", "1,2,4"]) == OK
    )
    assert capsys.readouterr().out in TUTORIAL.read_text(), (
        "the tutorial shows what the demo's model looks like"
    )


@pytest.mark.slow
def test_demo_runs_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo itself also checks the results of its steps."""
    for name in (
        FLAGS,
        FOLDER_VARIABLE,
    ):  # the demo computes more than it compiles, and has its own cache
        monkeypatch.delenv(name, raising=False)
    steps = run_steps(tmp_path / "out", [*COMMANDS, *TRAINING])
    check_conversions(tmp_path / "out", steps)
    check_training(tmp_path / "out", steps)


def check_training(out: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Check that training was killed, resumed, and ended like the undisturbed run, with changed weights."""
    assert re.match(r"loss 5\.\d+ -> [234]\.\d+ in 12 steps", steps[9]["result"])
    assert re.match(r"killed after step \d+, step (4|8) is durable", steps[10]["result"])
    assert steps[11]["result"].endswith("step 12 is byte for byte equal to the undisturbed run")
    losses = logged_losses(out / KILLED_RUN)
    assert len(losses) == 12
    assert losses == logged_losses(out / UNBROKEN_RUN)
    before, after = read_tensors(out / "tiny"), read_tensors(out / "tiny-learned")
    assert before.keys() == after.keys()
    assert not any(same_bits(before[name], after[name]) for name in before)
    page = (out / REPORT).read_text()
    assert page.count("<svg") == 2
    assert not re.search(r"https?://|<script", page)
    assert len(page) < 1 << 20


def test_demo_reuses_the_folder_of_an_earlier_demo(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert demo(tmp_path / "out", make_ui(), [MAKE]).error is None
    assert demo(tmp_path / "out", make_ui(), [MAKE]).error is None
    assert (tmp_path / "out" / MARKER).exists()
    assert demo(tmp_path / "mine", make_ui(), [MAKE]).error is None, "an empty folder may be used"


@contextmanager
def tick_once(tick: Callable[[], None]) -> Iterator[None]:
    """Tick in place of a thread, at the start of the block."""
    tick()
    yield


def test_demo_shows_that_a_long_step_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with parts shows their number. Both lines would be ten seconds after the last one."""
    train = DemoStep("train", (), lambda folder, step: step.passed("trained", 1), UNBROKEN_RUN)
    monkeypatch.setattr(module, "ticking", tick_once)
    monkeypatch.setattr(module, "PacedNotes", partial(PacedNotes, every_s=0.0))
    ui = make_ui()
    assert demo(tmp_path / "out", ui, [MAKE, train]).error is None
    lines = text(ui.err).splitlines()
    first = lines[lines.index("[1/2] make a tiny GPT-Neo") + 1]
    second = lines[lines.index("[2/2] train") + 1]
    assert re.fullmatch(r"      0\.\d s", first)
    assert re.fullmatch(r"      0\.\d s, 0 of 12 steps", second)


@pytest.mark.slow
def test_demo_prints_one_line_per_step(tmp_path: Path) -> None:
    ui = make_ui()
    assert ui.finish(demo(tmp_path / "out", ui, [MAKE, PAD])) == OK
    head, first, second, last_line = text(ui.out).splitlines()
    assert head.split() == ["step", "seconds", "bytes", "memory", "result"]
    assert first.startswith("make a tiny GPT-Neo ")
    assert first.endswith("257 words, 3 files")
    assert second.endswith("257 -> 264 rows")
    assert last_line == f"all 2 steps passed; report with pictures: {tmp_path}/out/report.html"
    assert text(ui.out).isascii()


def test_demo_ends_with_the_error_of_a_failed_step(tmp_path: Path) -> None:
    def make_damaged(folder: Path, step: DemoStep) -> StepReport:
        outcome = MAKE.run(folder, step)
        shard = max(folder.glob("tiny/*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
        return outcome

    ui = make_ui()
    report = demo(tmp_path / "out", ui, [DemoStep("make", (), make_damaged), PAD, MAKE])
    assert ui.finish(report) == FAILED
    assert report.error is not None
    assert report.error.what == "the demo failed at step 2: pad its vocabulary"
    assert "is cut short" in report.error.why
    assert report.error.hint == f"`cd {tmp_path}/out && prep pad-vocab tiny --multiple 8`"
    assert (
        "FAILED: prep pad-vocab ended with 1 - model-00003-of-00003.safetensors is cut short"
        in text(ui.out)
    )


def test_demo_keeps_a_folder_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.txt").write_text("all of it")
    with pytest.raises(PrepError, match="is not a demo") as caught:
        demo(tmp_path, make_ui())
    assert caught.value.code == USAGE
    assert (tmp_path / "tiny" / "thesis.txt").read_text() == "all of it"


def test_demo_vocabulary_is_odd() -> None:
    assert len(VOCABULARY) % 2 == 1


def test_hint_of_a_failed_step_repeats_the_demo(tmp_path: Path) -> None:
    step = failing_step(PrepError("its losses differ"), ("train", "tiny.toml"))
    report = demo(tmp_path / "out", make_ui(), [step])
    assert report.error is not None
    assert report.error.hint == f"`prep demo --out {tmp_path}/out`"


def full_disks(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Report no free space for the file systems of these folders, and much for others."""

    def disk_usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if path in folders else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


@pytest.mark.parametrize("is_tmp", [False, True])
def test_demo_names_the_folder_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tmp: bool
) -> None:
    out = tmp_path / "out"
    folder = tmp_path / "tmp" if is_tmp else out
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    full_disks(monkeypatch, folder)
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        PrepError("prep train ended with 1", "RESOURCE_EXHAUSTED: writing failed"),
    ):
        report = demo(out, make_ui(), [failing_step(error)])
        assert report.error is not None
        assert f"the disk that holds {folder} is full" in report.error.why
        assert "free some space" in report.error.hint


def test_demo_names_the_folder_that_cannot_be_written(tmp_path: Path) -> None:
    step = failing_step(OSError(errno.EIO, "Input/output error"))
    report = demo(tmp_path / "out", make_ui(), [step])
    assert report.error is not None
    assert f"{tmp_path / 'out'} - Input/output error" in report.error.why


def log(run: Path, count: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": 5.0}) + "\n" for step in range(1, count + 1)]
    (run / METRICS_FILE).write_text("".join(lines))


def save(run: Path, step: int) -> None:
    (run / str(step) / STATE_ITEM).mkdir(parents=True)
    for name in (MANIFEST_FILE, f"{STATE_ITEM}/{METADATA_FILE}"):
        (run / str(step) / name).write_text("{}")


def use_runs(monkeypatch: pytest.MonkeyPatch, *runs: Callable[[Path, ShouldKill], bool]) -> None:
    """Replace the processes that the step starts by functions, one per start."""
    remaining = list(runs)

    def run_prep(folder: Path, step: DemoStep, should_kill: ShouldKill) -> dict[str, Any]:
        was_killed = remaining.pop(0)(folder / KILLED_RUN, should_kill)
        return {} if was_killed else {"ok": True}

    monkeypatch.setattr(module, "run_prep", run_prep)


def run_that_saves_late(run: Path, should_kill: ShouldKill) -> bool:
    """Log steps while the first save is still under way, as on a slow disk."""
    assert not should_kill(0)
    log(run, 8)
    assert not should_kill(0)
    save(run, 4)
    assert should_kill(0)
    return True


def run_that_saves_first(run: Path, should_kill: ShouldKill) -> bool:
    """Save a step before a later one is logged."""
    log(run, 4)
    save(run, 4)
    assert not should_kill(0), "no step would be lost"
    log(run, 5)
    assert should_kill(0)
    return True


def run_that_ends(run: Path, should_kill: ShouldKill) -> bool:
    """End before the kill."""
    log(run, STEPS)
    save(run, 4)
    save(run, STEPS)
    return False


def run_that_saves_its_end(run: Path, should_kill: ShouldKill) -> bool:
    """Save the last step between the decision and the signal."""
    run_that_ends(run, should_kill)
    return True


def test_kill_step_waits_for_a_durable_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_runs(monkeypatch, run_that_saves_late)
    assert KILL.run(tmp_path, KILL).result == "killed after step 8, step 4 is durable"


def test_kill_step_kills_after_an_unsaved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_runs(monkeypatch, run_that_saves_first)
    assert KILL.run(tmp_path, KILL).result == "killed after step 5, step 4 is durable"


@pytest.mark.parametrize("early_end", [run_that_ends, run_that_saves_its_end])
def test_kill_step_repeats_a_run_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early_end: Callable[[Path, ShouldKill], bool]
) -> None:
    use_runs(monkeypatch, early_end, run_that_saves_first)
    assert (
        KILL.run(tmp_path, KILL).result
        == "killed after step 5, step 4 is durable (try 2: it was too fast)"
    )


def test_kill_step_fails_if_each_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_runs(monkeypatch, *[run_that_ends] * 5)
    with pytest.raises(PrepError, match="the run ended 5 times before it could be killed"):
        KILL.run(tmp_path, KILL)


def test_compare_step_fails_for_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (module.INIT, module.UNBROKEN):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "data").write_text(name)
    monkeypatch.setattr(module, "run_prep", lambda folder, step: {})
    compare = BY_TITLE["convert without a kill"]
    with pytest.raises(PrepError, match="different files in tiny-padded-init: d/data"):
        compare.run(tmp_path, compare)


@pytest.mark.slow
def test_kill_step_fails_if_the_command_ends_first(tmp_path: Path) -> None:
    step = replace(BY_TITLE["save an init, kill -9"], args=("models",))
    with pytest.raises(PrepError, match="ended 5 times before it could be killed"):
        step.run(tmp_path, step)


SENTENCE = "ba zul mou fen"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "tiny"
    write_tiny_model(folder)
    return folder


def test_tiny_model_is_a_valid_source(model: Path) -> None:
    source = open_source(locate(str(model)))
    assert source.family.name == "gpt_neo"
    assert len(source.files) == 3
    assert source.vocabulary().true_size == len(set(VOCABULARY)) == 257
    assert [path.name for path in source.side_files] == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tiny_model_has_deterministic_bytes(model: Path, tmp_path: Path) -> None:
    nbytes = write_tiny_model(tmp_path / "again")
    assert nbytes == sum(tensor.nbytes for tensor in open_source(locate(str(model))).tensors)
    for path in model.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_tiny_model_tokenizes_every_word(model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.encode(" ".join(VOCABULARY)).ids == list(range(len(VOCABULARY)))
    assert tokenizer.encode("stranger").ids == [VOCABULARY.index("<unk>")]


@pytest.mark.slow
def test_tiny_model_loads_in_transformers(model: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        model, output_loading_info=True
    )
    assert {name: list(problems) for name, problems in info.items() if problems} == {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(SENTENCE, return_tensors="pt")
    assert tokenizer.decode(ids["input_ids"][0]) == SENTENCE
    assert loaded(**ids).logits.shape == (1, 4, 257)
