"""`--quantized dequantize`: the values are those of the codes and scales, and errors name the tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import DamagedError, PrepError, UsageError
from prepcli.sources.detect import may_be_quantized
from tests.helpers.quantized import to_torch
from tests.helpers.quantized_folders import FORMATS, Arrays, make_quantized
from tests.helpers.run_cli import Capture, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    LLAMA,
    assert_same,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    write_checkpoint,
)

Q_PROJ = "model.layers.0.self_attn.q_proj."
SCALES = ("scale", "scale_inv", "scales", "SCB")


def exported(folder: str) -> dict[str, np.ndarray]:
    prep.export(folder, "exported", quantized="dequantize")
    return read_tensors(Path("exported"))


def assert_values(
    tensors: dict[str, np.ndarray], values: dict[str, np.ndarray], dtype: Any
) -> None:
    assert {*tensors} == {*values}
    for name, value in values.items():
        assert tensors[name].dtype == dtype
        assert tensors[name].tobytes() == value.astype(dtype).tobytes(), name


# test_codes_and_scales_are_kept_by_default reads all formats.
@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "awq"]))
def test_save_init_decodes_to_bfloat16(name: str):
    values = make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize", mesh="1,2,2", pad_vocab="auto")
    assert_values(exported("init"), values, ml_dtypes.bfloat16)
    config = json.loads(Path("exported/config.json").read_text())
    assert "quantization_config" not in config
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert manifest["quantization"]["quant_method"] == FORMATS[name].settings["quant_method"]


def test_save_init_names_number_of_decoded_weights(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    assert main(["save-init", "./m", "--quantized", "dequantize", "--dry-run"]) == 0
    assert "bfloat16  21 decoded from fp8" in capsys.readouterr().err


def test_save_init_decodes_to_requested_dtype():
    values = make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize", dtype="float32")
    assert_values(exported("init"), values, np.float32)


def test_every_tensor_is_accounted_for():
    make_quantized(Path("m"), "compressed-fp8")
    conversion = prep.save_init("./m", "init", quantized="dequantize", dry_run=True)
    accounting = conversion.details["accounting"]
    assert not accounting["dropped"]
    # 7 projections in each of 3 layers have a scale of weights and one of activations.
    assert accounting["used"] == 3 * 21 + 2 * 3 + 3


def test_rounded_values_are_counted():
    values = make_quantized(Path("m"), "fp8")
    conversion = prep.save_init("./m", "init", quantized="dequantize")
    changed = 0
    for value in values.values():
        if value.dtype == np.float32:
            changed += int((value != value.astype(ml_dtypes.bfloat16).astype(np.float32)).sum())
    assert changed > 0
    assert conversion.details["accounting"]["changed_values"] == changed


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "awq"]))
def test_codes_and_scales_are_kept_by_default(name: str):
    make_quantized(Path("m"), name)
    run_ok("save-init", "./m", "--out", "init")
    prep.export("init", "exported")
    assert_same(read_tensors(Path("exported")), read_tensors(Path("m")))
    assert Path("exported/config.json").read_bytes() == Path("m/config.json").read_bytes()


def test_cast_of_kept_scales_is_refused():
    make_quantized(Path("m"), "fp8")
    with pytest.raises(UsageError, match="would cast scales"):
        prep.save_init("./m", "init", dtype="bfloat16")
    prep.save_init("./m", "init")
    with pytest.raises(UsageError, match="would cast scales"):
        prep.export("init", "exported", dtype="bfloat16")
    prep.save_init("./m", "decoded", quantized="dequantize")
    prep.export("decoded", "exported", dtype="float16", quantized="dequantize")
    assert read_tensors(Path("exported"))["model.layers.0.mlp.up_proj.weight"].dtype == np.float16


@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_quantized_source_needs_option_to_be_decoded(name: str):
    make_quantized(Path("m"), name)
    for convert in (
        lambda: prep.save_init("./m", "out", verbatim=False),
        lambda: prep.export("./m", "out"),
    ):
        with pytest.raises(PrepError) as caught:
            convert()
        assert caught.value.what == "./m is quantised"
        assert 'quantized="dequantize"' in str(caught.value.hint)
        assert not Path("out").exists()


def test_unknown_model_type_is_decoded_verbatim():
    values = make_quantized(Path("m"), "fp8")
    config_path = Path("m/config.json")
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "model_type": "unheard_of"}))
    prep.save_init("./m", "init", quantized="dequantize")
    assert_values(exported("init"), values, ml_dtypes.bfloat16)
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "compressed-nvfp4", "awq", "nf4"]))
def test_inspect_shows_format_and_decoded_dtype(name: str, capsys: Capture):
    values = make_quantized(Path("m"), name)
    run_ok("inspect", "./m", "--json")
    source = json.loads(capsys.readouterr().out)["source"]
    method = FORMATS[name].settings["quant_method"]
    projections = [value for key, value in values.items() if key.endswith("_proj.weight")]
    assert source["quantization"] == {
        "method": method,
        "weights": 21,
        "values": sum(value.size for value in projections),
        "dtype": "bfloat16",
    }
    assert source["parameters"] == sum(value.size for value in values.values())
    run_ok("inspect", "./m")
    assert f"21 quantised weights ({method}), bfloat16 when decoded" in capsys.readouterr().out


def test_inspect_shows_fault_of_quantised_tensors(capsys: Capture):
    make_quantized(Path("m"), "fp8", change=remove("weight_scale_inv"))
    run_ok("inspect", "./m")
    assert f"`{Q_PROJ}weight_scale_inv` is missing" in capsys.readouterr().out


def test_option_without_quantised_weights_is_refused():
    make_checkpoint(Path("m"), LLAMA)
    with pytest.raises(UsageError, match="has no effect"):
        prep.save_init("./m", "init", quantized="dequantize")


def test_settings_file_of_earlier_gptq_is_read(capsys: Capture):
    values = make_quantized(Path("m"), "gptq")
    config_path = Path("m/config.json")
    config = json.loads(config_path.read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    config_path.write_text(json.dumps(config))
    Path("m/quantize_config.json").write_text(json.dumps(settings))
    prep.save_init("./m", "init", quantized="dequantize")
    assert_values(exported("init"), values, ml_dtypes.bfloat16)
    assert not Path("exported/quantize_config.json").exists()
    assert prep.verify("init", against="./m")
    assert prep.verify("./m", against="init")
    prep.save_init("./m", "kept", quantized="keep")
    assert prep.verify("kept", against="init")
    run_ok("inspect", "./m")
    assert "21 quantised weights (gptq)" in capsys.readouterr().out


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "nf4"]))
def test_verify_decodes_the_kept_codes_of_an_init(name: str):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "kept", quantized="keep")
    prep.save_init("./m", "decoded", quantized="dequantize", mesh="1,2,2", pad_vocab="auto")
    for pair in (("kept", "decoded"), ("decoded", "kept")):
        assert prep.verify(*pair)

    def negate(stored: Arrays) -> None:
        stored["model.norm.weight"] = -stored["model.norm.weight"]
        name = next(name for name in stored if name.startswith(Q_PROJ) and name.endswith(SCALES))
        stored[name] = stored[name][::-1].copy()

    if name != "nf4":
        make_quantized(Path("other"), name, change=negate)
        prep.save_init("./other", "other-kept", quantized="keep")
        result = prep.verify("other-kept", "decoded")
        names = {difference["tensor"] for difference in result.differences}
        names = {name for name in names if not name.startswith("quantization/")}
        assert names == {"model.norm.weight", f"{Q_PROJ}weight"}


def test_inspect_decodes_files_of_pytorch(capsys: Capture):
    torch = pytest.importorskip("torch")
    make_quantized(Path("m"), "gptq")
    stored = {}
    for name, array in read_tensors(Path("m")).items():
        # A view in another order than C, which is read through a copy.
        is_view = name.endswith("qweight")
        tensor = to_torch(array)
        stored[name] = tensor.t().contiguous().t() if is_view else tensor
    Path("t").mkdir()
    torch.save(stored, "t/pytorch_model.bin")
    shutil.copy("m/config.json", "t")
    statistics: list[dict[str, Any]] = []
    for folder in ("m", "t"):
        run_ok("inspect", folder, "--quantized", "dequantize", "--stats", "--json")
        tensors = json.loads(capsys.readouterr().out)["tensors"]
        statistics.append({tensor["name"]: tensor["stats"] for tensor in tensors})
    assert statistics[0] == statistics[1]
    assert f"{Q_PROJ}weight" in statistics[1]


def test_inspect_of_kept_codes_names_the_export(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "kept", quantized="keep")
    lines = error_lines(capsys, "inspect", "kept", "--stats", "--quantized", "dequantize")
    assert lines[0] == "error: kept cannot be decoded"
    assert lines[2] == " hint: `prep export kept` writes them"


def test_settings_file_of_modelopt_is_read():
    values = make_quantized(Path("m"), "modelopt-nvfp4")
    config_path = Path("m/config.json")
    config = json.loads(config_path.read_text())
    settings = config.pop("quantization_config")
    config_path.write_text(json.dumps(config))
    document = {"producer": {"name": "modelopt"}, "quantization": settings}
    Path("m/hf_quant_config.json").write_text(json.dumps(document))
    prep.save_init("./m", "init", quantized="dequantize")
    assert_values(exported("init"), values, ml_dtypes.bfloat16)


def remove(name: str):
    return lambda stored: stored.pop(Q_PROJ + name)


def cut(name: str):
    def change(stored: Arrays) -> None:
        stored[Q_PROJ + name] = np.ascontiguousarray(stored[Q_PROJ + name][:-1])

    return change


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    [
        ("fp8", remove("weight_scale_inv"), "weight_scale_inv"),
        ("fp8", cut("weight_scale_inv"), "weight_scale_inv"),
        ("compressed-fp8", cut("weight_scale"), "weight_scale"),
        ("compressed-int4", remove("weight_shape"), "weight_shape"),
        ("compressed-int4", cut("weight_zero_point"), "weight_zero_point"),
        ("compressed-nvfp4", cut("weight_scale"), "weight_scale"),
        ("compressed-nvfp4", remove("weight_global_scale"), "weight_global_scale"),
        ("modelopt-nvfp4", remove("weight_scale"), "weight_scale"),
        ("gptq", cut("scales"), "scales"),
        ("gptq", remove("qzeros"), "qzeros"),
        ("awq", cut("qzeros"), "qzeros"),
        ("int8", cut("SCB"), "SCB"),
        ("int8", remove("weight"), "weight"),
        ("nf4", cut("weight.absmax"), "weight.absmax"),
        ("nf4", cut("weight.quant_state.bitsandbytes__nf4"), "weight.quant_state"),
    ],
)
def test_missing_or_cut_tensor_is_named(name: str, change: Any, tensor: str):
    make_quantized(Path("m"), name, change=change)
    with pytest.raises(DamagedError) as caught:
        prep.save_init("./m", "init", quantized="dequantize")
    assert Q_PROJ + tensor in caught.value.what
    assert not Path("init").exists()
    assert not Path("init.partial").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq", {"group_size": 8}, "in groups of 8"),
        ("gptq", {"bits": 8}, "q_proj.scales` has 2 groups"),
        ("gptq", {"bits": 5}, "bits=5 is not supported"),
        ("gptq", {"bits": [4]}, r"bits=\[4\] is not supported"),
        ("gptq", {"dynamic": {"a": {"format": "marlin"}}}, "the rule 'a' changes 'format'"),
        ("gptq", {"dynamic": {"a": True}}, "the rule 'a' has no settings"),
        ("gptq", {"dynamic": ["a"]}, "`dynamic` has no rules"),
        ("gptq", {"dynamic": {"+:a": {"bits": 5}}}, "bits=5 is not supported"),
        ("awq", {"group_size": 4}, "in groups of 4"),
        ("awq", {"version": "gemv"}, "version='gemv' is not supported"),
        ("awq", {"bits": 8}, "bits=8 is not supported"),
        ("fp8", {"weight_block_size": [16, 8]}, "weight_scale_inv` has shape"),
        ("fp8", {"quant_method": "hqq"}, "`hqq` is not supported"),
        ("fp8", {"quant_method": ["fp8"]}, "is not supported"),
        ("fp8", {"quant_method": "awq"}, "no tensor is quantised in this way"),
        ("fp8", {"quant_method": "compressed-tensors"}, "no config_groups"),
        ("compressed-int4", {"format": "mxfp4-pack-quantized"}, "mxfp4-pack-quantized"),
        ("modelopt-nvfp4", {"quant_algo": "FP8"}, "quant_algo='FP8' is not supported"),
        ("modelopt-nvfp4", {"group_size": 32}, "group_size=32 is not supported"),
        ("compressed-int4", {"quant_method": "gptq"}, "no tensor is quantised in this way"),
        ("int8", {"quant_method": "fp8"}, "no tensor is quantised in this way"),
        ("compressed-fp8", {"quant_method": "fp8"}, "weight_scale_inv` is missing"),
    ],
)
def test_config_that_contradicts_tensors_is_refused(
    name: str, settings: dict[str, Any], message: str
):
    make_quantized(Path("m"), name, **settings)
    with pytest.raises(PrepError, match=message):
        prep.save_init("./m", "init", quantized="dequantize")
    assert not Path("init").exists()


def test_gptq_rules_that_skip_modules_are_read():
    rules = {"-:lm_head": {}, r"-:.*\.0\.self_attn\.q_proj": {}}
    plain = np.full((LLAMA["hidden_size"], LLAMA["hidden_size"]), 0.5, ml_dtypes.bfloat16)

    def leave_as_floats(stored: Arrays) -> None:
        for name in [name for name in stored if name.startswith(Q_PROJ)]:
            del stored[name]
        stored[f"{Q_PROJ}weight"] = plain

    values = make_quantized(Path("m"), "gptq", change=leave_as_floats, dynamic=rules)
    prep.save_init("./m", "init", quantized="dequantize")
    expected = {**values, f"{Q_PROJ}weight": plain}
    assert_values(exported("init"), expected, ml_dtypes.bfloat16)


def test_gptq_modules_of_other_bits_are_read():
    rules = {r"+:.*\.0\.self_attn\.q_proj": {"bits": 8, "group_size": 32, "desc_act": False}}
    width = LLAMA["hidden_size"]
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (width, width)).astype(np.uint8)
    groups = np.arange(width, dtype=np.int32) // 32
    zeros = rng.integers(1, 256, (groups[-1] + 1, width)).astype(np.uint8)
    scales = np.exp(rng.normal(-6, 1, zeros.shape)).astype(np.float16)

    def store_bytes(stored: Arrays) -> None:
        # 4 codes of 8 bits are one little-endian word.
        stored[f"{Q_PROJ}qweight"] = np.ascontiguousarray(codes.view(np.int32).T)
        stored[f"{Q_PROJ}qzeros"] = (zeros - 1).view(np.int32)
        stored[f"{Q_PROJ}scales"] = scales
        stored[f"{Q_PROJ}g_idx"] = groups

    values = make_quantized(Path("m"), "gptq", change=store_bytes, dynamic=rules)
    prep.save_init("./m", "init", quantized="dequantize")
    differences = codes.astype(np.float32) - zeros[groups].T
    expected = differences.astype(np.float16) * scales[groups].T
    values = {**values, f"{Q_PROJ}weight": expected}
    assert_values(exported("init"), values, ml_dtypes.bfloat16)


def test_group_of_another_input_is_an_error_of_the_run():
    def change(stored: Arrays) -> None:
        stored[Q_PROJ + "g_idx"] = stored[Q_PROJ + "g_idx"] + np.int32(1)

    make_quantized(Path("m"), "gptq", change=change)
    with pytest.raises(DamagedError, match=r"q_proj\.g_idx` refers to group 2"):
        prep.save_init("./m", "init", quantized="dequantize")
    assert not Path("init").exists()


# Quantisation settings beside dense tensors: the tensors decide, and the outputs do not claim quantisation


REMARK = "the quantisation in config.json is ignored: no tensor is quantised"


def make_left_over(name: str, **further: np.ndarray) -> dict[str, Any]:
    """Write a dense model `m` with the settings of a format, and return its config without them."""
    config = {**LLAMA, "torch_dtype": "float32", "tie_word_embeddings": False}
    tensors = {**checkpoint_tensors(LLAMA, "float32", False, False), **further}
    settings = {"quantization_config": dict(FORMATS[name].settings)}
    write_checkpoint(Path("m"), {**config, **settings}, tensors)
    return config


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def test_left_over_config_is_ignored(capsys: Capture):
    config = make_left_over("compressed-int4")
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert capsys.readouterr().err.count(REMARK) == 1
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert manifest["family"] == "llama"
    assert "quantization" not in manifest
    prep.export("init", "exported")
    assert "quantization_config" not in read_config("exported")
    assert read_config("exported")["hidden_size"] == config["hidden_size"]
    assert_same(read_tensors(Path("exported")), read_tensors(Path("m")))
    assert prep.verify("init", against="./m")


def test_left_over_config_is_dropped_from_verbatim_output(capsys: Capture):
    make_left_over("fp8")
    Path("m/quantize_config.json").write_text('{"bits": 4}')
    assert main(["save-init", "./m", "--verbatim", "--out", "init"]) == 0
    both = "the quantisation in config.json and quantize_config.json is ignored: no tensor"
    assert both in capsys.readouterr().err
    prep.export("init", "exported")
    assert "quantization_config" not in read_config("exported")
    assert not Path("exported/quantize_config.json").exists()


def test_unused_quantization_config_has_nothing_to_decode(capsys: Capture):
    make_left_over("awq")
    with pytest.raises(UsageError, match=f"has no effect.*not quantised .{REMARK}"):
        prep.save_init("./m", "init", quantized="dequantize")
    run_ok("inspect", "./m")
    captured = capsys.readouterr()
    assert REMARK in captured.out
    assert REMARK not in captured.err


def test_left_over_config_does_not_refuse_model(capsys: Capture):
    make_left_over("gptq")
    assert main(["export", "./m", "--dtype", "bfloat16", "--out", "exported"]) == 0
    assert capsys.readouterr().err.count(REMARK) == 1
    assert "quantization_config" not in read_config("exported")


def test_left_over_config_beside_torch_files_is_ignored():
    torch = pytest.importorskip("torch")
    make_left_over("gptq")
    tensors = {key: torch.tensor(array) for key, array in read_tensors(Path("m")).items()}
    Path("torch").mkdir()
    Path("m/config.json").rename("torch/config.json")
    torch.save(tensors, "torch/pytorch_model.bin")
    prep.export("./torch", "exported")
    assert "quantization_config" not in read_config("exported")


def test_dense_weights_with_scales_are_not_decoded():
    """Whether a script multiplied the weights with the scales that it left is unknown."""
    scale = {"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    make_left_over("fp8", **scale)
    with pytest.raises(DamagedError, match=r"config\.json and the tensors disagree") as caught:
        prep.save_init("./m", "init", quantized="dequantize")
    assert "`model.layers.0.self_attn.q_proj.weight_scale_inv` is a scale" in caught.value.why
    assert not Path("init").exists()


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("layers.0.q_proj.weight", "float8_e4m3fn", True),
        ("layers.0.experts.gate_up_proj", "float8_e4m3fn", True),
        ("layers.0.q_proj.W_q", "uint8", True),
        ("layers.0.q_proj.weight_scale", "float32", True),
        ("layers.0.experts.gate_up_proj_scale_inv", "bfloat16", True),
        ("layers.0.q_proj.weight", "bfloat16", False),
        ("logit_scale", "float32", False),
        ("layer_scale.scale", "float32", False),
        ("h.0.attn.bias", "uint8", False),
        ("h.0.attn.mask", "bool", False),
        ("embeddings.position_ids", "int64", False),
    ],
)
def test_name_and_dtype_show_quantised_tensor(name: str, dtype: str, expected: bool):
    assert may_be_quantized(name, dtype) is expected
