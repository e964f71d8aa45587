"""`prep verify` of one model in two stored forms: it compares elements of the tree, not names in files."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import checkpoint_tensors, read_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.training_folder import RECIPE, make_training_folder

Tensors = dict[str, np.ndarray]
# Family -> the names of an expert's gate, up and down matrices, and the part of the router's name to replace.
MIXTRAL_NAMES = (("w1", "w3", "w2"), ("block_sparse_moe.", "mlp."))
FAMILIES = {
    "qwen3_moe": (("gate_proj", "up_proj", "down_proj"), ("", "")),
    "deepseek_v3": (("gate_proj", "up_proj", "down_proj"), ("", "")),
    "mixtral": MIXTRAL_NAMES,
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fuse_experts(tensors: Mapping[str, np.ndarray], family: str) -> Tensors:
    """Return the tensors with one tensor per matrix for all experts, as transformers 5 stores them."""
    (gate, up, down), (old, new) = FAMILIES[family]
    experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    fused: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            fused[name.replace(old, new) if old else name] = tensor
        else:
            module = match[1].replace(old.rstrip("."), new.rstrip(".")) if old else match[1]
            experts.setdefault(module, {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for module, matrices in experts.items():
        ordered = [matrices[number] for number in range(len(matrices))]
        both = [np.concatenate([expert[gate], expert[up]]) for expert in ordered]
        fused[f"{module}.experts.gate_up_proj"] = np.stack(both)
        fused[f"{module}.experts.down_proj"] = np.stack([expert[down] for expert in ordered])
    return fused


def write_forms(family: str) -> Tensors:
    """Write a model with separate and with fused experts, and an item of each. Return the fused tensors."""
    config = GOLDEN[family]
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    fused = fuse_experts(tensors, family)
    assert len(fused) < len(tensors)
    write_checkpoint(Path("separate"), config, tensors)
    write_checkpoint(Path("fused"), config, fused)
    run_ok("save-init", "./separate", "--no-verbatim", "--mesh", "1,2,1")
    run_ok("save-init", "./fused", "--no-verbatim", "--no-scan")
    return fused


@pytest.mark.parametrize("family", slow_except(list(FAMILIES), ["qwen3_moe", "mixtral"]))
def test_fused_and_separate_experts_are_equal(family: str):
    write_forms(family)
    run_ok("save-init", "./fused", "--verbatim", "--out", "names")
    forms = ("./separate", "./fused", "separate-init", "fused-init", "names")
    for a, b in itertools.permutations(forms, 2):
        assert prep.verify(a, b), (a, b)
    assert prep.verify("./separate", "./fused", quick=True)
    result = prep.verify("./fused", "separate-init", tolerance=0.0)
    assert result
    assert {distance.max_abs for distance in result.distances} == {0.0}


@pytest.mark.parametrize("family", slow_except(list(FAMILIES), ["mixtral"]))
def test_changed_element_of_an_expert_is_named(family: str):
    fused = write_forms(family)
    name = next(name for name in fused if name.endswith("experts.gate_up_proj"))
    changed = fused[name].copy()
    # Row 1 of the second expert's gate.
    changed[1, 1, 2] += 1
    write_checkpoint(Path("changed"), GOLDEN[family], fused | {name: changed})
    for other in ("./separate", "separate-init", "fused-init"):
        (difference,) = prep.verify("./changed", other).differences
        assert difference.get("index") in ([1, 2], [1, 1, 2])
        assert difference.get("count") == 1


def test_equal_damage_in_two_forms_is_found():
    """The values of both sides are equal, but one side is an output whose manifest has another digest."""
    fused = write_forms("qwen3_moe")
    run_ok("export", "fused-init", "--out", "exported")
    name = next(name for name in fused if name.endswith("experts.gate_up_proj"))
    changed = fused[name].copy()
    changed[1, 1, 2] += 1
    path = next(Path("exported").glob("*.safetensors"))
    old, new = (values[1, :4].tobytes() for values in (fused[name], changed))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    write_checkpoint(Path("fused-changed"), GOLDEN["qwen3_moe"], fused | {name: changed})
    separate = read_tensors(Path("separate"))
    gate = name.replace("experts.gate_up_proj", "experts.1.gate_proj.weight")
    separate[gate] = changed[1, : len(separate[gate])]
    write_checkpoint(Path("separate-changed"), GOLDEN["qwen3_moe"], separate)
    for other in ("./fused-changed", "./separate-changed"):
        with pytest.raises(prep.DamagedError, match="is damaged"):
            prep.verify("exported", other)


@pytest.mark.parametrize("is_equal", [True, False])
def test_untied_output_equals_its_source(is_equal: bool):
    """The config ties the head, and the file has one: `--untie` keeps it as a parameter."""
    config = GOLDEN["llama"] | {"tie_word_embeddings": True}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    if is_equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--untie")
    run_ok("export", "m-init", "--out", "hf")
    run_ok("pad-vocab", "./m", "--untie", "--multiple", "64", "--out", "padded")
    for output in ("m-init", "hf", "padded"):
        assert prep.verify(output, "./m")
        assert prep.verify("./m", output)
    # Without its own head, the model has the embedding in place of it.
    del tensors["lm_head.weight"]
    write_checkpoint(Path("tied"), config, tensors)
    result = prep.verify("m-init", "./tied")
    assert bool(result) == is_equal
    assert {entry["tensor"] for entry in result.differences} <= {"lm_head.weight"}


def test_adapter_of_a_run_equals_its_export():
    make_training_folder()
    recipe = RECIPE.replace("[train]\nsteps = 12", "[train]\nsteps = 1")
    Path("recipe.toml").write_text(recipe + "[lora]\nrank = 2\n")
    run_ok("train", "recipe.toml")
    run_ok("export", "runs/recipe", "--out", "adapter")
    assert prep.verify("runs/recipe", "adapter")
    assert prep.verify("adapter", "runs/recipe")
    path = Path("adapter/adapter_model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-4] + np.float32(7).tobytes())
    manifest = json.loads(Path("adapter/prep-manifest.json").read_text())
    assert manifest["family"]
    assert len(prep.verify("runs/recipe", "adapter").differences) == 1
