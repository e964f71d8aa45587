"""Benchmarks of training steps: memory, seconds, tables and charts, with fake measurements or tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from bench import compiled_memory, compiled_step, context, cpu_step, longest_context, memory_points
from bench.compiled_memory import CompiledMemory
from bench.context import (
    ALL_CHUNKS,
    DENSE,
    METHODS,
    TILES,
    ContextRow,
    context_svg,
    context_text,
    method_config,
)
from bench.cpu_step import (
    WARMUP_STEPS,
    Measurement,
    StepCost,
    make_parser,
    print_profile,
    print_report,
    step_operations,
)
from bench.cpu_step_systems import CONFIG, make_recipe
from bench.kernels import device_peak, gradient_function, layer_flops, main, random_weights
from bench.memory_points import MIB, POINTS, MemoryPoint, has_changed
from bench.model_configs import MODEL_CONFIGS, MODEL_SIZES
from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import RematPolicy
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import LLAMA
from tools.import_graph import ROOT


@pytest.mark.slow  # compiles a training step
def test_main_prints_memory_and_collectives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIGS["small"] | {"hidden_size": 64})
    compiled_step.main(["--tokens", "64", "--mesh", "1,2,2", "--ffn-chunk", "32"])
    header, *lines, footer = capsys.readouterr().out.splitlines()
    assert header == "small, bfloat16, 2 x 64 tokens, mesh 1,2,2; of one device:"
    sizes = {
        match[1]: int(match[2].replace(",", ""))
        for line in lines
        if (match := re.match(r"(.*?)  +([\d,]+) MiB", line))
    }
    assert (
        abs(
            sizes["in all"]
            - sizes["temporary"]
            - sizes["state and batch"]
            - sizes["outputs not in place"]
        )
        <= 2
    )
    assert {"all-gather", "estimated"} <= {*sizes}
    assert re.fullmatch(
        r"compiled for 4 CPU devices in \d+ s with [\d,]+ MiB of host memory", footer
    )


@pytest.mark.slow  # compiles training steps
def test_main_prints_a_line_per_length_and_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Use as many devices as all tests have, since JAX counts them once per process."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setitem(MODEL_SIZES, "small", MODEL_SIZES["small"] | {"hidden_size": 64})
    compiled_memory.main(["--tokens", "64,512", "--mesh", "1,2,4", "--remat", "nothing_saveable"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "small, float32, mesh 1,2,4, 2 sequences a step; of one device:"
    matches = [
        re.fullmatch(r" +(\d+) +nothing_saveable +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+", line)
        for line in lines
    ]
    assert [match and match[1] for match in matches] == ["64", "512"]
    assert [match and match[4] for match in matches] == ["2", "2"]
    temps = [int(match[2].replace(",", "")) for match in matches if match]
    assert temps[0] < temps[1]


@pytest.mark.parametrize(
    ("text", "policy"),
    [("none", "none"), ("q", ("q",)), ("q+attention_output", ("q", "attention_output"))],
)
def test_parse_policy_reads_names_of_activations(text: str, policy: RematPolicy):
    assert compiled_memory.parse_policy(text) == policy


def test_main_rejects_an_invalid_mesh():
    with pytest.raises(PrepError):
        compiled_memory.main(["--mesh", "1,2"])


TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


RATES = {"prep": {"square": 8e9, "products": 5e9}, "torch": {"square": 7e9, "products": 6e9}}


def make_costs(loss: float, *seconds: float) -> list[StepCost]:
    """Return slow warm-up steps, and a step for each of the seconds."""
    return [StepCost(loss, 60.0, 60.0)] * WARMUP_STEPS + [
        StepCost(loss, second, 2 * second) for second in seconds
    ]


def test_print_report_states_speed_without_warmup(capsys: pytest.CaptureFixture[str]):
    steps = {"prep": make_costs(5.0, 0.5, 2.0, 1.0), "torch": make_costs(5.0, 3.0, 1.0, 4.0)}
    # The highest rate is 8 G operations per CPU second. The best steps take 1 and 2 CPU seconds.
    print_report(1, Measurement(steps, RATES), operations=6 * 10**9)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    prep, torch, speed, losses, operations, *rates = lines
    assert prep == ["1", "prep", "0.500", "1.000", "1.000", "2.000", "75%"]
    assert torch == ["1", "torch", "1.000", "3.000", "2.000", "6.000", "38%"]
    assert operations[0] == "6.0"
    assert [words[-4:] for words in rates] == [
        ["square", "8,", "products", "5"],
        ["square", "7,", "products", "6"],
    ]
    assert speed == ["1", "speed", "2.00x", "3.00x", "2.00x", "3.00x"]
    assert losses[2] == str(WARMUP_STEPS + 3)


@pytest.mark.parametrize("loss", [5.001, float("nan")])
def test_print_report_fails_if_losses_differ(loss: float):
    steps = {"prep": make_costs(loss, 1.0), "torch": make_costs(5.0, 1.0)}
    with pytest.raises(SystemExit, match="losses differ"):
        print_report(1, Measurement(steps, RATES), operations=1)


def test_print_profile_shows_shares_of_all_functions(capsys: pytest.CaptureFixture[str]):
    print_profile([("mlp:up", 3.0, 1.0), ("step:update", 0.0, 4.0)])
    first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first == ["mlp:up", "37.5%", "products", "12.5%", "other"]
    assert second == ["step:update", "0.0%", "products", "50.0%", "other"]


def test_step_operations_count_weights_and_visible_pairs(tmp_path: Path):
    options = make_parser().parse_args(["--rows", "2", "--tokens", "8", "--kernel", "reference"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG, **TINY}))
    # Of 2 layers: q and o 2 * 16 * 16, k and v 2 * 16 * 8, three matrices of the MLP 16 * 24. The head: 16 * 64.
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 64
    # 36 visible pairs of 8 tokens, with 2 heads of 8 elements in two products
    pairs = 2 * 2 * 36 * 2 * 2 * 2 * 8
    assert step_operations(tmp_path, options) == 3 * (2 * 16 * weights + pairs)


def test_recipe_leaves_the_sizes_to_the_devices():
    options = make_parser().parse_args([])
    options.model = Path("model")
    model = make_recipe(options).model
    assert model.attention_kernel == "auto"
    assert (model.q_chunk_size, model.k_chunk_size, model.head_chunk_size) == (None, None, None)


@pytest.mark.slow
def test_main_measures_both_systems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(cpu_step, "CONFIG", cpu_step.CONFIG | TINY)
    words = "--rows=2 --tokens=8 --threads=1 --repeats=1 --head-chunk=3 --profile"
    cpu_step.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    rows, (losses, _, *rates), profile = lines[2:5], lines[5:9], lines[9:]
    assert [row.split()[:2] for row in rows] == [["1", "prep"], ["1", "torch"], ["1", "speed"]]
    assert re.fullmatch(r" +losses of 3 steps differ by at most [\d.]+e-\d+ of their value", losses)
    assert [line.split(",")[0].strip() for line in rates] == ["prep", "torch"]
    products = [line.split()[0] for line in profile if " 0.0% products" not in line]
    assert {"projections:_multiply", "lm_head:_linear_logits"} <= set(products)


def rows_of(
    *mib_by_tokens: tuple[int, int, int], seconds: tuple[float, ...] = ()
) -> list[ContextRow]:
    """Return rows of 1,024 and more tokens with the MiB of each method."""
    return [
        ContextRow(method, 1024 << number, CompiledMemory(nbytes * MIB, 0, 1.0), seconds)
        for number, sizes in enumerate(mib_by_tokens)
        for method, nbytes in zip(METHODS, sizes)
    ]


def test_context_text_has_a_line_per_length():
    small, large = context_text(rows_of((3000, 200, 100), (12000, 400, 200))).splitlines()[-2:]
    assert small.split() == ["1,024", "3,000", "200", "100"]
    assert large.split() == ["2,048", "12,000", "400", "200"]


def test_context_text_shows_the_fastest_run():
    rows = rows_of((3000, 200, 100), seconds=(2.0, 1.5))
    rows[0] = replace(rows[0], seconds=())
    assert context_text(rows).splitlines()[-1].split() == [
        "1,024",
        "3,000",
        "200",
        "100",
        "1.50",
        "1.50",
    ]


def test_context_svg_draws_powers_as_straight_lines():
    picture = ElementTree.fromstring(context_svg(rows_of((16, 4, 4), (64, 8, 4), (256, 16, 4))))
    lines = [line.attrib["points"].split() for line in picture.findall(".//{*}polyline")]
    steps = [[float(point.split(",")[1]) for point in line] for line in lines]
    rises = [(high - middle, middle - low) for low, middle, high in steps]
    assert [first == pytest.approx(second, abs=0.2) for first, second in rises] == [True] * 3
    assert rises[0][0] == pytest.approx(2 * rises[1][0], abs=0.3), (
        "dense attention grows with the square"
    )
    assert rises[2] == (0, 0)


def test_methods_have_different_kernels_and_chunk_sizes():
    configs = [method_config(method) for method in (DENSE, TILES, ALL_CHUNKS)]
    assert [config.attention_options.kernel for config in configs] == [
        "reference",
        "blockwise",
        "blockwise",
    ]
    assert [config.ffn_chunk_size for config in configs] == [-1, -1, 1024]
    assert [config.head_chunk_size for config in configs] == [-1, -1, 512]


@pytest.mark.slow  # compiles three training steps
def test_main_measures_memory_and_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(context, "METHODS", (ALL_CHUNKS,))
    monkeypatch.setitem(MODEL_SIZES, "small", LLAMA)
    context.main(["--tokens", "16", "--seconds", "1"])
    tokens, mib, seconds = capsys.readouterr().out.splitlines()[-1].split()
    assert (tokens, mib.isdigit()) == ("16", True)
    assert float(seconds) >= 0


@pytest.mark.parametrize(
    ("longest", "expected"), [(0, 0), (1023, 0), (1024, 1024), (5000, 4096), (24575, 23552)]
)
def test_longest_context_is_the_largest_multiple_that_fits(longest: int, expected: int):
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    assert longest_context.longest_context(fits) == expected
    assert len({*tried}) == len(tried) <= 10


def test_longest_text_has_ratios():
    text = longest_context.longest_text({DENSE: 4096, TILES: 16384, ALL_CHUNKS: 40960})
    assert text.splitlines()[-1].split()[-3:] == ["40,960", "10.0", "2.5"]


def test_flops_follow_the_formula():
    flops = layer_flops("7b", 2048)
    assert flops.matrices == 6 * (4 * 4096**2 + 3 * 4096 * 11008) * 2048
    assert flops.full - flops.causal == 6 * 32 * 128 * 2048**2


@pytest.mark.slow
def test_full_flops_equal_the_compiled_reference():
    """The compiler also counts elementwise operations, and the convention omits the second pass over the scores."""
    shape, num_tokens = "tiny", 256
    x = jax.ShapeDtypeStruct((1, num_tokens, 64), "float32")
    weights = jax.eval_shape(lambda: random_weights(shape, "float32"))
    compiled = (
        jax.jit(gradient_function(shape, "reference", num_tokens)).lower(x, weights).compile()
    )
    analysis = compiled.cost_analysis()
    assert analysis is not None
    assert analysis["flops"] == pytest.approx(layer_flops(shape, num_tokens).full, rel=0.15)


def test_peaks_are_found_by_device_kind():
    assert device_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert device_peak("TPU v5p") == 459e12
    assert device_peak("TPU v5 lite") == 197e12
    assert device_peak("cpu") is None


@pytest.mark.slow
def test_table_has_times_and_reasons(capsys: pytest.CaptureFixture[str]):
    main(["--shapes", "tiny", "--tokens", "16", "--dtype", "float32", "--repeats", "1"])
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2] for row in rows] == ["reference", "blockwise", "cudnn", "pallas-splash"]
    assert all(row[3].split()[1:] == ["unknown", "unknown"] for row in rows[:2])
    assert [row[3] for row in rows[2:]] == ["runs on cuda, not on cpu", "runs on tpu, not on cpu"]


TINY_POINT = "--dtype float32 --kernel reference --ffn-chunk -1 --tokens 16 --head-chunk 16"


def test_points_are_distinct():
    assert len({(point.flags, point.is_whole) for point in POINTS}) == len(POINTS)


@pytest.mark.parametrize(("mib", "expected"), [(100, False), (102, False), (103, True), (97, True)])
def test_has_changed_allows_2_percent(mib: int, expected: bool):
    assert has_changed(MemoryPoint(TINY_POINT, 100), mib * MIB) == expected


def test_main_compares_a_compiled_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIGS["small"] | {"hidden_size": 64})
    points = [MemoryPoint(TINY_POINT, 1, is_whole=False), MemoryPoint("--tokens 17", 1)]
    monkeypatch.setattr(memory_points, "POINTS", points)
    assert memory_points.main(["--only", "--tokens 16 "]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{TINY_POINT} (gradients)")
    recorded, compiled, estimated, _ = map(
        float, line.split("(gradients)")[1].replace(",", "").split()
    )
    assert recorded == 1
    assert compiled > 1
    assert estimated > 1


@pytest.mark.parametrize("count", slow_except([2, len(POINTS)], [2]))
def test_main_returns_0_if_plans_are_as_recorded(count: int, monkeypatch: pytest.MonkeyPatch):
    def recorded_nbytes(point: MemoryPoint) -> int:
        return point.recorded_mib * MIB

    monkeypatch.setattr(memory_points, "POINTS", POINTS[:count])
    monkeypatch.setattr(memory_points, "compiled_nbytes", recorded_nbytes)
    assert memory_points.main([]) == 0


@pytest.mark.slow
def test_plans_are_as_recorded():
    """XLA_FLAGS of the test suite change the plans."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "bench.memory_points"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
