"""Checkpoints of MaxText, Tunix, Levanter and torchtitan, and `--format dcp`: their libraries read them, and back.

`test_trainer_scales.py` has the models that MaxText scales.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from tests.helpers.damage import flip_bit, flip_used_bit, largest_file
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.levanter_trees import TREES as LEVANTER_TREES
from tests.helpers.levanter_trees import read_levanter, write_levanter
from tests.helpers.llama_trees import read_init
from tests.helpers.run_cli import Capture, error_lines, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.torchtitan_states import torchtitan_state
from tests.helpers.trainer_trees import ITEMS, TREES, Leaves
from tests.helpers.zarr_items import write_item


def check_way_back(tensors: Mapping[str, np.ndarray]) -> None:
    """Verify the export `out` of `./model`, convert it again, and compare the tensors of its own export."""
    run_ok("verify", "out")
    run_ok("verify", "out", "./model")
    run_ok("save-init", "out", "--out", "init", "--mesh", "1,2,1")
    run_ok("verify", "init", "out")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


torch = lazy_module("torch")
dcp = lazy_module("torch.distributed.checkpoint")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = FAMILY_CONFIGS["deepseek_v3"]
# Heads of 16 elements, so that the scale 1 / sqrt(16) of MaxText is exact.
GROUPED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3.1": {"model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma": {},
    "gemma-equal-heads": {"model_type": "gemma", "num_key_value_heads": 4},
    "gemma2": {},
    "gemma3": {"model_type": "gemma3_text"},
    "olmo2": {},
    "olmo3": {},
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: GROUPED_QUERY | {"model_type": name} | config for name, config in GROUPED.items()},
    "gpt2": GPT2,
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"],
    "deepseek_v3": DEEPSEEK,
    # No dense layers. Moonlight is an example of a model without a latent of queries.
    "deepseek_v3-sparse": DEEPSEEK | {"first_k_dense_replace": 0, "q_lora_rank": None},
}
LLAMA = MODELS["llama"]


@dataclass(frozen=True)
class Layout:
    """How a trainer stores a model.

    Attributes:
        models: Models that the trainer has.
        leaves: Returns the leaves of a model by the rules of the trainer.
        read: Reads the leaves of a folder with the library of the trainer.
        write: Writes the leaves and a training state to a run, as the trainer does.
        matrix: Part of the name of a matrix in each layer, which ends in its module.
    """

    models: str
    leaves: Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], Leaves]
    read: Callable[[Path], Leaves]
    write: Callable[[Path, Leaves], None]
    matrix: str


def orbax_layout(name: str, models: str, matrix: str) -> Layout:
    def read(out: Path) -> Leaves:
        return read_init(out / ITEMS[name])

    def write(run: Path, leaves: Leaves) -> None:
        write_item(run / ITEMS[name], leaves)

    return Layout(models, TREES[name], read, write, matrix)


def write_levanter_run(run: Path, leaves: Leaves) -> None:
    """Write two steps. The last one has the leaves."""
    state = {"step": np.array(10, np.int32), "opt_state.0.count": np.array(10, np.int32)}
    write_levanter(run / "step-9", {name: -leaf for name, leaf in leaves.items()}, 9)
    write_levanter(run / "step-10", leaves | state, 10)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Save a state dict with torch, in one process."""
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        tensors[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    dcp.save(tensors, checkpoint_id=folder)


def load_state(folder: Path) -> Leaves:
    """Load all tensors of a folder with torch."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.full(entry.size, torch.nan) for name, entry in metadata.items()}
    dcp.load(state, checkpoint_id=folder)
    return {name: value.numpy() for name, value in state.items()}


def save_training_state(run: Path, leaves: Leaves) -> None:
    """Save a state of torchtitan. Training has changed the zeros of buffers that the model has no tensor for."""
    state: dict[str, Any] = dict(leaves)
    for name, leaf in leaves.items():
        if name.endswith("expert_bias_E") and not leaf.any():
            state[name] = leaf + 1
    state["optimizer"] = {"state": {"norm.weight": {"exp_avg": torch.zeros(64)}}}
    state["train_state"] = {"step": torch.tensor(3)}
    save_state(run, state)


MAXTEXT_MODELS = "llama llama3.1 mistral mixtral qwen2 qwen3 qwen3_moe"
LEVANTER_MODELS = "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3 olmo2 gpt2"
LAYOUTS = {
    "tunix": orbax_layout(
        "tunix",
        "llama qwen2 qwen3 qwen3_moe gemma gemma-equal-heads gemma2 gemma3",
        ".mlp.down_proj.kernel",
    ),
    "maxtext": orbax_layout("maxtext", MAXTEXT_MODELS, ".mlp.wo.kernel"),
    "maxtext-unscanned": orbax_layout("maxtext-unscanned", "llama3.1 mixtral", ".mlp.wo.kernel"),
    "levanter": Layout(
        LEVANTER_MODELS,
        LEVANTER_TREES["levanter"],
        read_levanter,
        write_levanter_run,
        "mlp.down_proj",
    ),
    "levanter-unscanned": Layout(
        "llama mixtral olmo3",
        LEVANTER_TREES["levanter-unscanned"],
        read_levanter,
        write_levanter_run,
        "mlp.down_proj",
    ),
    "torchtitan": Layout(
        "llama qwen3 qwen3_moe deepseek_v3 deepseek_v3-sparse gpt_oss",
        torchtitan_state,
        load_state,
        save_training_state,
        "feed_forward.w2",
    ),
}
CASES = [(name, model) for name, layout in LAYOUTS.items() for model in layout.models.split()]
# Each layout, and models with experts, norms around a layer, buffers, or fused leaves where it has them.
FAST_CASES = [
    ("tunix", "gemma3"),
    ("maxtext", "mixtral"),
    ("maxtext-unscanned", "llama3.1"),
    ("levanter", "qwen3_moe"),
    ("levanter-unscanned", "olmo3"),
    ("torchtitan", "deepseek_v3"),
]
ORBAX_LAYOUTS = ("tunix", "maxtext", "maxtext-unscanned")
MAIN_LAYOUTS = (*ORBAX_LAYOUTS, "levanter", "torchtitan")


@pytest.mark.parametrize(("layout", "model"), slow_except(CASES, FAST_CASES))
def test_export_has_the_leaves_of_the_trainer_and_returns(layout: str, model: str):
    # PyTorch has no arrays of NumPy in bfloat16.
    dtype = "float32" if layout == "torchtitan" else "bfloat16"
    tensors = make_checkpoint(Path("model"), MODELS[model], dtype)
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--layout", layout, "--out", "out")
    assert_same(LAYOUTS[layout].read(Path("out")), LAYOUTS[layout].leaves(tensors, MODELS[model]))
    shutil.rmtree("init")
    check_way_back(tensors)


@pytest.mark.parametrize(
    ("layout", "model"), slow_except(CASES, [case for case in FAST_CASES if "unsc" not in case[0]])
)
def test_run_of_the_trainer_converts(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model])
    LAYOUTS[layout].write(Path("run"), LAYOUTS[layout].leaves(tensors, MODELS[model]))
    run_ok("save-init", "./run", "--config", "./model", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("layout", slow_except(["maxtext", "torchtitan"], ["torchtitan"]))
def test_tied_head_is_stored_as_the_trainer_stores_it(layout: str):
    """The names of torchtitan are both, and the others have no leaf."""
    tensors = make_checkpoint(Path("model"), MODELS["qwen3"], tied=True)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    leaves = LAYOUTS[layout].leaves(tensors, MODELS["qwen3"])
    assert_same(LAYOUTS[layout].read(Path("out")), leaves)
    run_ok("verify", "out", "./model")
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_checkpoint_manager_restores_the_step():
    layout = "maxtext"
    tensors = make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    item = Path(ITEMS[layout]).name
    handlers = {item: ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(Path("out").absolute(), item_handlers=handlers) as manager:
        assert manager.latest_step() == 0
        args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore()})
        tree = manager.restore(0, args=args)[item]
    for path, leaf in TREES[layout](tensors, LLAMA).items():
        value: Any = tree
        for key in path.split("."):
            value = value[key]
        assert np.array_equal(value, leaf)


def test_dtype_of_the_export_is_cast():
    layout = "maxtext"
    tensors = make_checkpoint(Path("model"), LLAMA, "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--dtype", "float32", "--out", "out")
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(LAYOUTS[layout].read(Path("out")), TREES[layout](wide, LLAMA))


@pytest.mark.parametrize("layout", ["tunix", "levanter"])
def test_damaged_export_is_found(layout: str):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    flip_used_bit(largest_file(next(Path("out").rglob("d"))))
    assert not prep.verify("out").is_equal


@pytest.mark.parametrize("layout", slow_except(MAIN_LAYOUTS, ["maxtext"]))
@pytest.mark.parametrize("fault", ["missing", "renamed", "extra", "shape"])
def test_wrong_leaf_is_named(layout: str, fault: str, capsys: Capture):
    matrix = LAYOUTS[layout].matrix
    module = matrix.removesuffix(".kernel").rpartition(".")[2]
    leaves = LAYOUTS[layout].leaves(make_checkpoint(Path("model"), LLAMA), LLAMA)
    path = next(path for path in leaves if matrix in path)
    leaf = leaves[path]
    if fault != "extra":
        del leaves[path]
    if fault == "renamed":
        leaves[path.replace(module, "downward")] = leaf
    elif fault == "extra":
        leaves[path.replace(module, "gate_bias")] = leaf
    elif fault == "shape":
        leaves[path] = np.ascontiguousarray(leaf[:-1])
    LAYOUTS[layout].write(Path("run"), leaves)
    words = ("save-init", "./run", "--config", "model", "--out", "init")
    error = "".join(error_lines(capsys, *words))
    # A long name is broken over several lines.
    assert ("gate_bias" if fault == "extra" else matrix) in "".join(error.split())
    assert not Path("init").exists()


# Options of `prep export`, the config of a model, and a part of the error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "--layout tunix",
        LLAMA | {"attention_bias": True},
        "no place for model.layers.0.self_attn.k_proj.bias",
    ),
    ("--layout maxtext --shard-size 1MB", LLAMA, "`--shard-size` is not supported for Orbax items"),
    ("--layout levanter --shard-size 1MB", LLAMA, "not supported for Levanter checkpoints"),
    (
        "--layout torchtitan",
        MODELS["deepseek_v3"] | {"rope_interleave": False},
        "the layout has no place for model.layers.0.self_attn.kv_a_proj",
    ),
    ("--layout easylm --format dcp", LLAMA, "the layout easylm has the format stream"),
    ("--layout maxtex", LLAMA, "did you mean `maxtext`"),
]


@pytest.mark.parametrize(("options", "config", "error"), REFUSED)
def test_unfit_layout_is_refused(options: str, config: dict[str, Any], error: str, capsys: Capture):
    make_checkpoint(Path("model"), config)
    lines = error_lines(capsys, "export", "./model", *options.split(), "--out", "out")
    assert error in " ".join(" ".join(lines).split())
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("layout", "texts"),
    [
        ("maxtext", ["layout maxtext, layers stacked on axis 1"]),
        ("tunix", ["layout tunix, one leaf per layer"]),
        ("levanter", ["Levanter, 1 data file", "layout levanter, layers stacked on axis 0"]),
        ("torchtitan", []),
    ],
)
def test_inspect_states_layers_and_parameters(layout: str, texts: list[str], capsys: Capture):
    tensors = make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    run_ok("inspect", "out")
    shown = " ".join(capsys.readouterr().out.split())
    count = sum(tensor.size for tensor in tensors.values())
    assert all(text in shown for text in [*texts, f"{count:,} parameters"])
    assert prep.inspect("out").parameters == count


# Levanter


def test_flags_of_dropout_are_not_parameters():
    tensors = make_checkpoint(Path("model"), GPT2)
    flags = {
        "model.embeddings.dropout.inference": np.array(True),
        "model.transformer.blocks.stacked.attn.inference": np.array([True] * 3),
    }
    write_levanter(Path("run/step-3"), LEVANTER_TREES["levanter"](tensors, GPT2) | flags, 3)
    run_ok("save-init", "./run", "--config", "./model", "--out", "init")
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert {entry["name"]: entry["rule"] for entry in manifest["dropped"]} == dict.fromkeys(
        flags, "not a parameter"
    )
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_chunk_of_zeros_that_tensorstore_omits_is_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    tensors["model.norm.weight"] = np.zeros_like(tensors["model.norm.weight"])
    write_levanter(Path("step-3"), LEVANTER_TREES["levanter"](tensors, LLAMA), 3)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_model_saved_alone_is_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    leaves = LEVANTER_TREES["levanter"](tensors, LLAMA)
    alone = {name.removeprefix("model."): leaf for name, leaf in leaves.items()}
    write_levanter(Path("step-3"), alone, 3)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_base_model_has_the_leaves_of_levanter():
    tensors = make_checkpoint(Path("model"), GPT2)
    base = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    Path("base").mkdir()
    shutil.copy("model/config.json", "base")
    save_file(base, "base/model.safetensors")
    run_ok("export", "./base", "--layout", "levanter", "--out", "out")
    assert_same(read_levanter(Path("out")), LEVANTER_TREES["levanter"](tensors, GPT2))


def test_export_is_the_newest_checkpoint_of_its_folder():
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    metadata = json.loads(Path("out/metadata.json").read_text())
    assert (metadata["step"], metadata["is_temporary"]) == (0, False)
    # Levanter compares times without a time zone.
    assert "+" not in metadata["timestamp"]
    assert prep.export("./model", "out", layout="levanter").already_done


# torchtitan


def test_names_of_meta_are_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    state = torchtitan_state(tensors, LLAMA)
    earlier = {
        name.replace("qkv_linear.", "").replace("lm_head", "output"): value
        for name, value in state.items()
    }
    save_state(Path("step-3"), earlier)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_family_without_a_layout_is_refused(capsys: Capture):
    config = GROUPED_QUERY | {"model_type": "mistral"}
    tensors = make_checkpoint(Path("model"), config)
    save_state(Path("step-3"), torchtitan_state(tensors, config))
    lines = error_lines(capsys, "save-init", "./step-3", "--config", "model", "--out", "init")
    assert "prep has no layout of it for mistral" in " ".join(lines)


def test_files_of_torchtitan_are_split_by_size():
    tensors = make_checkpoint(Path("model"), LLAMA, "bfloat16")
    words = ("--layout", "torchtitan", "--shard-size", "30000B")
    run_ok("export", "./model", *words, "--out", "out")
    assert len([*Path("out").glob("*.distcp")]) > 1
    check_way_back(tensors)


# `--format dcp`


DCP_LLAMA = LLAMA | {"architectures": ["LlamaForCausalLM"]}


def test_dcp_returns_every_bit():
    tensors = make_checkpoint(Path("model"), MODELS["mixtral"], "bfloat16")
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--format", "dcp", "--shard-size", "20000B", "--out", "out")
    assert len(list(Path("out").glob("*.distcp"))) > 1
    run_ok("verify", "out")
    run_ok("verify", "out", "./model")
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.filterwarnings("ignore")
def test_torch_and_transformers_load_the_export():
    transformers = pytest.importorskip("transformers")
    from torch.distributed.checkpoint.state_dict_loader import load

    make_checkpoint(Path("model"), DCP_LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained("out")
    )
    state = model.state_dict()
    load(state, checkpoint_id="out")
    model.load_state_dict(state)
    expected = transformers.AutoModelForCausalLM.from_pretrained("model")
    for name, parameter in expected.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


# Byte 383 is padding before the first payload, and byte 5,000 is in the embedding.
@pytest.mark.parametrize(
    ("name", "position"), [("__0_0.distcp", 5_000), ("__0_0.distcp", 383), (".metadata", 20)]
)
def test_damaged_dcp_is_found(name: str, position: int, capsys: Capture):
    make_checkpoint(Path("model"), DCP_LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    flip_bit(Path("out", name), position)
    message = run_failing(capsys, 1, "verify", "out")
    if position != 5_000:
        assert f"{name} is" in message


def test_short_file_is_named(capsys: Capture):
    make_checkpoint(Path("model"), DCP_LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    path = Path("out/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    message = run_failing(capsys, 1, "verify", "out")
    assert "out/__0_0.distcp is broken" in message


def test_dcp_is_cast():
    tensors = make_checkpoint(Path("model"), DCP_LLAMA, "bfloat16")
    run_ok("export", "./model", "--format", "dcp", "--dtype", "float32", "--out", "out")
    run_ok("export", "out", "--out", "back")
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(read_tensors(Path("back")), wide)


@pytest.mark.parametrize("words", [("--format", "dcp"), ("--layout", "maxtext")])
def test_verify_chain_accepts_an_export(words: tuple[str, str]):
    make_checkpoint(Path("model"), DCP_LLAMA, "bfloat16")
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", *words, "--out", "out")
    run_ok("verify", "out", "--chain")


@pytest.mark.parametrize(("option", "name"), [("format", "dcp"), ("layout", "torchtitan")])
def test_default_name_has_the_format_or_the_layout(option: str, name: str):
    make_checkpoint(Path("model"), LLAMA)
    options: Any = {option: name}
    assert prep.export("model", **options).path.name == f"model-{name}"
    assert prep.export("model", **options).already_done
