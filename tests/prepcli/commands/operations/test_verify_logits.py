"""`verify --logits`: distances, layers and errors, against NumPy formulas on the logits of transformers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations import model_outputs
from prepcli.commands.operations.verify_logits import (
    BLOCK_ROWS,
    logit_distance,
)
from prepcli.core.errors import PrepError, UsageError
from tests.helpers.hybrid_configs import FALCON_MAMBA, MAMBA2
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.run_cli import Capture, MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.tiny_configs import DENSE, QWEN3_MOE

# The rotations of CodeGen in transformers are a table of 64 positions. The longer random prompt has 512 tokens.
CODEGEN = LATER_FAMILIES["codegen"] | {"n_positions": 64}
ENCODER_MODELS = {"t5": FAMILY_CONFIGS["t5"], "mt5": DENSE["mt5"], "umt5": DENSE["umt5"]}
PROMPT = "3,1,4,1,5,9,2,6,5,3,5,8"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a model `m`, and a model `changed` with another weight in layer 1."""
    make_checkpoint(tmp_path / "m", LLAMA)
    make_checkpoint(tmp_path / "changed", LLAMA)
    change_tensor(tmp_path / "changed", "model.layers.1.mlp.up_proj.weight", 1.5)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\n7, 8\n")
    return tmp_path


def change_tensor(folder: Path, name: str, factor: float) -> None:
    from safetensors.numpy import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name] * np.float32(factor)
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError(name)


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def expected_distance(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Compute the distances of logits [T, V] by their definitions, with SciPy."""
    log_a = log_softmax(a, axis=1)
    log_b = log_softmax(b, axis=1)
    divergence = np.sum(np.exp(log_a) * (log_a - log_b), axis=1)
    top_a = np.argsort(-a, axis=1)[:, :5]
    top_b = np.argsort(-b, axis=1)[:, :5]
    overlaps = [len({*row_a} & {*row_b}) / 5 for row_a, row_b in zip(top_a, top_b)]
    return {
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "top1_agreement": float((top_a[:, 0] == top_b[:, 0]).mean()),
        "top5_overlap": float(np.mean(overlaps)),
        "max_difference": float(np.abs(a - b).max()),
    }


@pytest.mark.parametrize("rows", [1, BLOCK_ROWS, BLOCK_ROWS + 3])
def test_measure_logits_follows_the_definitions(rows: int):
    generator = np.random.default_rng(rows)
    a = generator.normal(size=(rows, 50)).astype(np.float32)
    b = (a + 0.3 * generator.normal(size=a.shape)).astype(np.float32)
    distance = logit_distance(a, b)
    for name, value in expected_distance(a.astype(float), b.astype(float)).items():
        assert distance[name] == pytest.approx(value, rel=1e-9, abs=1e-12)
    same = logit_distance(a, a)
    assert (same["kl_max"], same["top1_agreement"]) == (0, 1)
    assert (same["top5_overlap"], same["max_difference"]) == (1, 0)


def test_logits_of_two_models_match_transformers(home: Path):
    pytest.importorskip("transformers")
    comparison = prep.verify_logits("./m", "./changed", prompt_ids="prompts.txt")
    assert not comparison
    first, second = comparison.prompts
    assert (first.tokens, second.tokens) == (12, 2)
    ids = [int(word) for word in PROMPT.split(",")]
    expected = expected_distance(
        transformers_logits(home / "m", ids), transformers_logits(home / "changed", ids)
    )
    assert first.kl_mean == pytest.approx(expected["kl_mean"], rel=1e-3)
    assert first.kl_max == pytest.approx(expected["kl_max"], rel=1e-3)
    assert first.max_difference == pytest.approx(expected["max_difference"], rel=1e-3)
    assert first.top1_agreement == expected["top1_agreement"]
    assert first.top5_overlap == pytest.approx(expected["top5_overlap"])
    # The changed weight is in layer 1.
    assert first.parts_at == "layer 1"
    assert first.layer_differences[:2] == (0.0, 0.0)
    assert len(first.layer_differences) == LLAMA["num_hidden_layers"] + 1


# Rows of these experts are no multiple of 16 bytes. The hidden states of Mamba in transformers lack the embedding.
@pytest.mark.parametrize(
    "base",
    slow_except([LLAMA, GPT_NEO, QWEN3_MOE, MAMBA2, FALCON_MAMBA, CODEGEN], [MAMBA2]),
    ids=["llama", "gpt_neo", "qwen3_moe", "mamba2", "falcon_mamba", "codegen"],
)
def test_model_equals_itself_in_transformers(tmp_path: Path, base: dict[str, Any]):
    pytest.importorskip("transformers")
    make_checkpoint(tmp_path / "m", base)
    comparison = prep.verify_logits("./m", library="transformers", tolerance=1e-4)
    assert comparison
    assert [prompt.parts_at for prompt in comparison.prompts] == [None, None]
    assert all(prompt.layer_differences for prompt in comparison.prompts)


def test_random_prompts_fit_the_positions_of_doge(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LATER_FAMILIES["doge"], max_position_embeddings=20)
    comparison = prep.verify_logits("./m", "./m", tolerance=0)
    assert [prompt.tokens for prompt in comparison.prompts] == [16, 20]
    ids = ",".join(["3"] * 21)
    Path("long.txt").write_text(f"{ids}\n")
    with pytest.raises(UsageError, match="prompt 1 has 21 tokens"):
        prep.verify_logits("./m", "./m", prompt_ids="long.txt")


def test_transformers_does_not_ask_to_run_code(home: Path, monkeypatch: MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {}

    def refuse(folder: Path, **words: Any) -> None:
        options.update(words)
        raise ValueError("no model")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(PrepError, match="ValueError: no model"):
        prep.verify_logits("./m", library="transformers")
    assert options["trust_remote_code"] is False


def test_error_inside_transformers_names_the_model(home: Path, monkeypatch: MonkeyPatch):
    transformers = pytest.importorskip("transformers")

    def fail(*_: Any, **words: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
    with pytest.raises(PrepError, match=r"transformers cannot compute .*RuntimeError: no kernel"):
        prep.verify_logits("./m", library="transformers")


def test_prompts_with_too_large_outputs_are_refused(home: Path, monkeypatch: MonkeyPatch):
    usage = shutil.disk_usage(home)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UsageError, match=r"have 528 tokens .* has 9\.8 KiB - set the variable"):
        prep.verify_logits("./m", "./changed")


def test_full_disk_is_one_error(home: Path, monkeypatch: MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(PrepError, match="No space left on device"):
        prep.verify_logits("./m", "./changed")


@pytest.mark.parametrize(
    "limit", slow_except(["MAX_DENSE_TOKENS", "BLOCK_TOKENS"], ["BLOCK_TOKENS"])
)
def test_long_prompts_are_computed_in_parts(home: Path, monkeypatch: MonkeyPatch, limit: str):
    (first, second) = prep.verify_logits("./m", "./changed").prompts
    assert (first.tokens, second.tokens) == (16, 512)
    monkeypatch.setattr(model_outputs, limit, 100)
    (again, long) = prep.verify_logits("./m", "./changed").prompts
    assert (again.max_difference, again.parts_at) == (first.max_difference, "layer 1")
    assert long.max_difference == pytest.approx(second.max_difference, rel=1e-4)
    assert long.kl_mean == pytest.approx(second.kl_mean, rel=1e-4)
    assert long.layer_differences == pytest.approx(second.layer_differences, rel=1e-4)


def test_mesh_computes_the_same_logits(home: Path):
    alone = prep.verify_logits("./m", "./changed", prompt_ids="prompts.txt")
    split = prep.verify_logits("./m", "./changed", prompt_ids="prompts.txt", mesh="1,2,4")
    for a, b in zip(alone.prompts, split.prompts, strict=True):
        assert b.max_difference == pytest.approx(a.max_difference, rel=1e-3)
        assert (b.parts_at, b.tokens) == (a.parts_at, a.tokens)


@pytest.mark.parametrize("model_type", slow_except([*ENCODER_MODELS], ["t5"]))
def test_encoder_model_equals_itself_in_transformers(tmp_path: Path, model_type: str):
    pytest.importorskip("transformers")
    base = ENCODER_MODELS[model_type]
    make_checkpoint(tmp_path / "m", base, tied=base.get("tie_word_embeddings", True))
    # More tokens than the largest relative distance of each model.
    Path("prompts.txt").write_text(",".join(map(str, range(50))))
    comparison = prep.verify_logits(
        "./m", library="transformers", tolerance=1e-3, mesh="4,2,1", prompt_ids="prompts.txt"
    )
    assert comparison
    assert [prompt.parts_at for prompt in comparison.prompts] == [None]


PLACES = [
    ("encoder.block.1.layer.1.DenseReluDense.wo.weight", "encoder layer 1"),
    ("decoder.block.1.layer.1.EncDecAttention.v.weight", "layer 1"),
    ("decoder.final_layer_norm.weight", "final norm"),
    ("shared.weight", "encoder embedding"),
]


@pytest.mark.parametrize(("name", "place"), slow_except(PLACES, [PLACES[1]]))
def test_changed_weight_of_an_encoder_model_parts_at_its_layer(home: Path, name: str, place: str):
    base = FAMILY_CONFIGS["t5"] | {"num_layers": 3, "num_decoder_layers": 3}
    make_checkpoint(home / "t5", base)
    make_checkpoint(home / "other", base)
    change_tensor(home / "other", name, 1.5)
    Path("ids.txt").write_text(PROMPT)
    (prompt,) = prep.verify_logits("./t5", "./other", prompt_ids="ids.txt").prompts
    assert prompt.parts_at == place
    assert len(prompt.layer_differences) == 8


def test_encoder_and_decoder_only_model_are_not_compared(home: Path):
    make_checkpoint(home / "t5", FAMILY_CONFIGS["t5"])
    with pytest.raises(UsageError, match=r"\./t5 has an encoder, and \./m has none"):
        prep.verify_logits("./m", "./t5")


def test_infinite_tolerance_accepts_finite_logits_only(home: Path, capsys: Capture):
    make_checkpoint(home / "broken", LLAMA)
    change_tensor(home / "broken", "model.norm.weight", np.nan)
    words = ["--logits", "--prompt-ids", "prompts.txt", "--tolerance", "inf", "--json", "-q"]
    assert main(["verify", "./m", "./changed", *words]) == 0
    assert json.loads(capsys.readouterr().out)["tolerance"] is None
    assert main(["verify", "./m", "./broken", *words]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def test_layouts_and_padding_do_not_change_logits(home: Path):
    run_ok("save-init", "./m", "--no-scan", "--mesh", "1,1,2", "--pad-vocab", "8", "--out", "init")
    comparison = prep.verify_logits("init", "./m", tolerance=0, prompt_ids="prompts.txt")
    assert comparison
    assert [prompt.kl_max for prompt in comparison.prompts] == [0, 0]


def test_cast_is_accepted_within_the_tolerance(home: Path):
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--out", "cast")
    (prompt, _) = prep.verify_logits("cast", "./m", prompt_ids="prompts.txt").prompts
    assert prompt.max_difference > 0
    assert prompt.parts_at == "embedding"
    for factor in (3, 1 / 3):
        tolerance = prompt.max_difference * factor
        result = prep.verify_logits("cast", "./m", prompt_ids="prompts.txt", tolerance=tolerance)
        assert bool(result) is (factor > 1)


def test_command_prints_a_table_and_exits_with_1(home: Path, capsys: Capture):
    words = ["verify", "./m", "./changed", "--logits", "--prompt-ids", "prompts.txt"]
    assert main([*words, "--progress", "none"]) == 1
    output = capsys.readouterr()
    assert "./m does not compute the logits of ./changed" in output.err
    table = [line for line in output.out.splitlines() if line.startswith("prompt")]
    assert len(table) == 3
    assert all(len(line) <= 80 for line in table)
    assert table[1].endswith("layer 1")
    assert main([*words, "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert fields["equal"] is False
    assert fields["prompts"][0]["parts_at"] == "layer 1"


def test_invalid_logit_requests_are_errors(home: Path):
    with pytest.raises(UsageError, match="requires a second checkpoint"):
        prep.verify_logits("./m")
    (home / "bad.txt").write_text("1,2\nx\n")
    with pytest.raises(PrepError, match=r"bad\.txt has an invalid prompt"):
        prep.verify_logits("./m", "./changed", prompt_ids="bad.txt")
    (home / "large.txt").write_text("1,131\n")
    with pytest.raises(UsageError, match="token id 131 of prompt 1 is out of range"):
        prep.verify_logits("./m", "./changed", prompt_ids="large.txt")
    (home / "empty.txt").write_text("\n")
    with pytest.raises(PrepError, match=r"empty\.txt has no prompts"):
        prep.verify_logits("./m", "./changed", prompt_ids="empty.txt")
    make_checkpoint(home / "other", {**LLAMA, "vocab_size": 140})
    with pytest.raises(PrepError, match="different vocabularies"):
        prep.verify_logits("./m", "./other")


def test_transformers_cannot_compute_an_init(home: Path):
    pytest.importorskip("transformers")
    run_ok("save-init", "./m", "--out", "init")
    with pytest.raises(UsageError, match="cannot read init"):
        prep.verify_logits("init", library="transformers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-ids", "prompts.txt"], "`--prompt-ids` has no effect without `--logits`"),
        (["--library", "transformers"], "has no effect without `--logits`"),
        (["--mesh", "1,1,2"], "`--mesh` has no effect without `--logits`"),
        (["--logits", "--mesh", "mp:4,sp:2"], "`--mesh mp:4,sp:2` splits tokens over sp"),
        (["--logits", "--quick"], "`--logits` and `--quick` exclude each other"),
        (["--logits", "--chain"], "`--chain` takes one checkpoint"),
    ],
)
def test_conflicting_logit_options_are_refused(
    home: Path, capsys: Capture, options: list[str], message: str
):
    assert main(["verify", "./m", "./changed", *options]) == 2
    assert message in capsys.readouterr().err
