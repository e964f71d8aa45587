"""The benchmark of attention kernels: its formula of FLOPs, its peaks, and a run with tiny sizes."""

from __future__ import annotations

import jax
import pytest

from bench.kernels import device_peak, gradient_function, layer_flops, main, random_weights


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
