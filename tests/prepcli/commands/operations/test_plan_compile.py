"""`prep plan --compile`: the compiler's plan beside the estimate."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, INTERRUPTED, OK, USAGE
from prepcli.models.mesh import Mesh
from tests.helpers.tiny_checkpoints import LLAMA
from trainer.distributed.compilation import CompileWatch
from trainer.planning.training_plan import Collective, CompiledPlan
from trainer.recipe import Recipe
from trainer.training import compiled_plan as compiled

MIB = 1 << 20
WORDS = ("plan", "nowhere", "--config", "config.json")


@pytest.fixture(autouse=True)
def _in_folder_with_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))


def plan_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = OK) -> dict[str, Any]:
    """Run `prep plan --json` and return its object."""
    capsys.readouterr()
    assert main([*WORDS, *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def requests(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[Recipe, Mapping[str, Any], str, str | None]]:
    """Replace the compilation by a fixed plan, and record its arguments."""
    recorded: list[tuple[Recipe, Mapping[str, Any], str, str | None]] = []

    def fake_plan(
        recipe: Recipe,
        manifest: Mapping[str, Any],
        mesh: Mesh,
        topology: str | None,
        *,
        watch: CompileWatch,
    ) -> CompiledPlan:
        watch.on_phase("XLA compiles it", 65.0)
        recorded.append((recipe, manifest, str(mesh), topology))
        return CompiledPlan(
            target=topology or "4 CPU devices",
            kernel="blockwise",
            is_upper_bound=topology is None,
            temp_nbytes=900 * MIB,
            argument_nbytes=100 * MIB,
            output_nbytes=101 * MIB,
            alias_nbytes=100 * MIB,
            compile_s=61.04,
            host_nbytes=1100 * MIB,
            collectives=(Collective("all-gather", 1234, 5 * MIB),),
            jax_version="0.12.0.1",
            libtpu_version="0.0.50.1" if topology else "",
        )

    monkeypatch.setattr(compiled, "compiled_plan", fake_plan)
    return recorded


def test_step_is_compiled_for_cpu_devices(capsys: pytest.CaptureFixture[str]):
    report = plan_json(capsys, "--mesh", "1,2,2", "--set", "data.seq_length=32", "--compile")
    compiled = report["compiled"]
    assert (compiled["target"], compiled["is_upper_bound"], compiled["kernel"]) == (
        "4 CPU devices",
        True,
        "blockwise",
    )
    assert compiled["peak"] == compiled["temporary"] + compiled["arguments"] + compiled["outputs"]
    assert compiled["ratio"] == compiled["estimated"] / compiled["peak"]
    assert compiled["arguments"] >= report["memory"]["parameters"] + report["memory"]["moments"]
    assert "all-reduce" in {collective["kind"] for collective in compiled["collectives"]}
    assert min(compiled["compile_s"], compiled["host_memory"]) > 0
    assert compiled["jax"] == version("jax")
    assert compiled["libtpu"] == ""


def test_text_has_memory_collectives_and_cost(
    requests: list[Any], capsys: pytest.CaptureFixture[str]
):
    assert main([*WORDS, "--devices", "v5p:4", "--compile", "--set", "model.dtype=float32"]) == OK
    out, err = capsys.readouterr()
    estimate = plan_json(capsys, "--devices", "v5p:4", "--set", "model.dtype=float32")["memory"][
        "peak"
    ]
    lines = out.partition("memory of one device, compiled for v5p:2x2x1\n")[2].splitlines()
    assert [line.rsplit("  ", 1)[0].strip() for line in lines[:6]] == [
        "temporary arrays", "state and batch", "outputs not in place", "in all", "estimated", "estimated / in all",
    ]  # fmt: skip
    assert lines[3].endswith("1001 MiB")
    assert lines[5].endswith(f"{estimate / (1001 * MIB):.2f}")
    assert lines[8].split() == ["all-gather", "1,234", "5.0", "MiB"]
    cost = "in 61.0 s with 1.07 GiB of host memory"
    assert lines[10] == (
        f"Attention kernel blockwise; compiled by jax 0.12.0.1, libtpu 0.0.50.1 {cost}."
        " An operation in a loop counts once."
    )
    assert "compiling for v5p:2x2x1" in err
    assert "XLA compiles it, 65.0 s since the start" in err


def test_upper_bound_is_compared_with_the_estimate_for_cpus(
    requests: list[Any], capsys: pytest.CaptureFixture[str]
):
    report = plan_json(capsys, "--devices", "H100:4", "--compile")
    assert requests[0][3] is None
    assert report["compiled"]["estimated"] > report["memory"]["peak"], "bfloat16 is widened"
    assert main([*WORDS, "--mesh", "1,2,2", "--compile"]) == OK
    out = capsys.readouterr().out
    assert "compiled for 4 CPU devices, an upper bound" in out
    assert out.endswith("accelerators need less memory.\n")


def test_compile_uses_vocabulary_and_rules_of_the_plan(
    requests: list[Any], capsys: pytest.CaptureFixture[str]
):
    plan_json(capsys, "--mesh", "1,2,2", "--set", 'rules=["vocab=mp"]', "--compile")
    recipe, manifest, mesh, _ = requests[0]
    assert (recipe.mesh, mesh, manifest["rules"]) == ("1,2,2", "1,2,2", ["vocab=mp"])
    assert manifest["config"] == LLAMA | {"vocab_size": 132, "true_vocab_size": 131}
    assert {key: manifest[key] for key in ("tied", "scan", "scan_axis")} == {
        "tied": False,
        "scan": True,
        "scan_axis": 0,
    }


def test_page_shows_the_compiled_step(requests: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--devices", "v5e:4", "--compile", "--html", "plan.html"]) == OK
    page = Path("plan.html").read_text()
    for text in (
        "memory of one device, compiled for v5e:2x2",
        "temporary arrays",
        "all-gather",
        "Attention kernel blockwise; compiled by jax 0.12.0.1, libtpu 0.0.50.1 in",
    ):
        assert text in page


def test_plan_without_compile_has_no_compiled_step(
    requests: list[Any], capsys: pytest.CaptureFixture[str]
):
    assert plan_json(capsys, "--mesh", "1,2,2")["compiled"] is None
    assert requests == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--devices", "v5e:2"], "no slice of v5e has 2 chips"),
        (["--devices", "v5e:4", "--search"], "`--compile` has no effect with `--search`"),
    ],
)
def test_invalid_requests_are_errors(
    words: list[str], what: str, requests: list[Any], capsys: pytest.CaptureFixture[str]
):
    error = plan_json(capsys, *words, "--compile", code=USAGE)["error"]
    assert error["what"] == what
    assert requests == []


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["blockwise", "auto"])
def test_step_is_compiled_for_a_tpu_slice(
    kernel: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """XLA_FLAGS of the test suite are unknown to libtpu."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    words = (
        "--mesh",
        "1,2,2",
        "--devices",
        "v5e",
        "--set",
        f"model.attention_kernel={kernel}",
        "--compile",
    )
    compiled = plan_json(capsys, *words)["compiled"]
    assert (compiled["target"], compiled["is_upper_bound"]) == ("v5e:2x2", False)
    assert compiled["temporary"] > 0


def test_time_limit_ends_the_compilation(capsys: pytest.CaptureFixture[str]):
    error = plan_json(
        capsys, "--mesh", "1,2,2", "--compile", "--compile-timeout", "0.01", code=FAILED
    )["error"]
    assert error["what"] == "the step was not compiled within 0.01 s"
    assert "--compile-timeout" in error["hint"]


def test_time_limit_needs_a_compilation(capsys: pytest.CaptureFixture[str]):
    error = plan_json(capsys, "--mesh", "1,2,2", "--compile-timeout", "9", code=USAGE)["error"]
    assert "`--compile-timeout`" in error["what"]


# By default test_devices ends the process with its parent and at its limit.
@pytest.mark.slow
def test_interrupt_ends_the_compilation():
    words = [*WORDS, "--mesh", "1,2,2", "--compile"]
    with subprocess.Popen(
        [sys.executable, "-m", "prepcli", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "since the start" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == INTERRUPTED
