"""The rules of generation_config.json: greedy tokens are those of transformers, and other fields are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, PrepError
from prepcli.sources.generation_config import generation_defaults
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

PROMPTS = [[5, 6, 7, 5, 6], [9]]
NEW_TOKENS = 12
EOS = 40
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "ngrams": {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2},
    "trigrams": {"repetition_penalty": 0.6, "no_repeat_ngram_size": 3},
    "min_length": {"min_length": 9},
    "min_new_tokens": {"min_length": 9, "min_new_tokens": 3},
    "suppressed": {"suppress_tokens": [3, 8, 11], "begin_suppress_tokens": [1, 2]},
    "bad_words": {"bad_words_ids": []},
    "bias": {"sequence_bias": []},
    "forced": {
        "forced_bos_token_id": 12,
        "begin_suppress_tokens": [1, 2],
        "forced_eos_token_id": [13],
    },
    "decay": {"exponential_decay_length_penalty": [3, 40.0]},
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("tiny"), LLAMA | {"eos_token_id": EOS})


def write_rules(**rules: Any) -> None:
    Path("tiny/generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **rules}))


def transformers_tokens(**options: Any) -> list[list[int]]:
    """Return the new tokens of transformers for each prompt, alone in its batch."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
    tokens: list[list[int]] = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, **options
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("name", slow_except(RULES, ["ngrams", "bad_words"]))
def test_greedy_tokens_are_those_of_transformers(name: str):
    write_rules()
    first = prep.generate("tiny", tokens=PROMPTS, max_new_tokens=NEW_TOKENS).tokens
    rules = RULES[name]
    if name in ("min_length", "min_new_tokens", "suppressed"):
        # The first tokens of both prompts are end tokens, so that the rules have an effect.
        ends = sorted({first[0][0], first[1][0]})
        rules = {**rules, "eos_token_id": ends}
        rules |= {"begin_suppress_tokens": ends} if name == "suppressed" else {}
    if name == "bad_words":
        rules = {"bad_words_ids": [[first[0][0]], [PROMPTS[1][0], first[1][0]], [EOS]]}
    if name == "bias":
        rules = {"sequence_bias": [[[*PROMPTS[0][-2:], first[0][0]], -9.0], [[first[1][1]], -2.5]]}
    write_rules(**rules)
    expected = transformers_tokens()
    generated = prep.generate("tiny", tokens=PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [[*ids] for ids in generated.tokens] == expected
    assert name == "none" or generated.tokens != first


def test_rules_of_config_json_hold_without_the_file():
    defaults = generation_defaults({**LLAMA, "repetition_penalty": 1.7}, None, 96)
    assert defaults.rules.repetition_penalty == 1.7


def test_unsupported_fields_are_named(capsys: pytest.CaptureFixture[str]):
    write_rules(num_beams=4, guidance_scale=1.5, num_return_sequences=1, repetition_penalty=1.2)
    assert main(["generate", "tiny", "--tokens", "5,6", "--max-new-tokens", "2"]) == OK
    log = " ".join(capsys.readouterr().err.split())
    assert "by generation_config.json, tokens are chosen with repetition_penalty 1.2" in log
    assert "not supported in generation_config.json" in log
    assert "other tokens: `guidance_scale`, `num_beams`" in log


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0),
        ("min_length", -1),
        ("suppress_tokens", 3),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[1, 9999]]),
        ("sequence_bias", [[[1], "high"]]),
        ("forced_eos_token_id", 9999),
        ("exponential_decay_length_penalty", [1]),
        ("stop_strings", [""]),
    ],
)
def test_invalid_field_is_an_error(field: str, value: Any):
    write_rules(**{field: value})
    with pytest.raises(PrepError, match=rf"generation_config.json is invalid - `{field}` is"):
        prep.generate("tiny", tokens=[[5]], max_new_tokens=1)
