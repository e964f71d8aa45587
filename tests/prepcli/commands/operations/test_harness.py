"""Models of the LM Evaluation Harness, and exact results of Python programs."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import prepcli as prep
from prepcli.commands.operations import harness_model as harness
from prepcli.core.errors import PrepError, UsageError
from prepcli.formats.manifest import MANIFEST_FILE
from tests import FLAGS
from tests.helpers.fork_server import ForkedProcess, start_python
from tests.helpers.run_cli import MonkeyPatch
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer
from trainer.distributed import exact_reduction
from trainer.distributed.exact_reduction import WITHOUT_FUSED
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig

EOS = 2
MAX_LENGTH = 12


@dataclass(frozen=True)
class Request:
    """A request without the harness's package."""

    args: tuple[Any, ...]


class PlainBase:
    """Replacement of the harness's class, so that lm-eval need not be installed."""


def words(ids: list[int]) -> str:
    return " ".join(WORDS[number] for number in ids)


@pytest.fixture(autouse=True)
def exact_process(monkeypatch: MonkeyPatch) -> None:
    """Allow exact results in this process. `test_exact_processes` tests the refusal after another use of JAX."""
    monkeypatch.setattr(exact_reduction, "fuses_multiply_add", lambda: False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "tiny"
    make_checkpoint(folder, LLAMA)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    return folder


@pytest.fixture
def model(checkpoint: Path, monkeypatch: MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(harness, "_harness_base", lambda: PlainBase)
    with harness.harness_model(checkpoint, batch_size=3, max_length=MAX_LENGTH) as opened:
        yield opened


@pytest.fixture
def log_probabilities(checkpoint: Path) -> Any:
    """Return a function from token ids to the log probabilities [T, V] of each next token."""
    params = prep.load_params(checkpoint)
    from prepcli.commands.operations.checkpoint_options import common_options, open_checkpoint
    from prepcli.core.observer import SilentObserver
    from trainer.run.params import open_model

    located, source = open_checkpoint(common_options(checkpoint, None, {}), SilentObserver())
    with open_model(
        source, located.files.path, None, verify=False, on_unchecked=lambda: None
    ) as opened:
        spec = opened.model

    def compute(ids: list[int]) -> jax.Array:
        logits = transformer.compute_logits(params, jnp.array([ids]), spec, ForwardConfig())
        return jax.nn.log_softmax(logits[0, :, : spec.true_vocab_size])

    return compute


def test_loglikelihood_equals_direct_computation(model: Any, log_probabilities: Any):
    pairs = [
        ([5, 6, 7], [8]),
        ([9], [3, 4, 1]),
        ([], [6, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14]),
    ]
    requests = [
        Request((words(context), (" " if context else "") + words(continuation)))
        for context, continuation in pairs
    ]
    results = model.loglikelihood(requests)
    for (context, continuation), (log_likelihood, is_greedy) in zip(pairs, results, strict=True):
        ids = ((context or [EOS]) + continuation)[-(MAX_LENGTH + 1) :]
        rows = log_probabilities(ids[:-1])[-len(continuation) :]
        expected = sum(float(row[token]) for row, token in zip(rows, continuation))
        assert log_likelihood == pytest.approx(expected, rel=1e-5)
        assert is_greedy == all(
            int(row.argmax()) == token for row, token in zip(rows, continuation)
        )


def test_loglikelihood_recognizes_a_greedy_continuation(model: Any, log_probabilities: Any):
    best = int(log_probabilities([5, 6, 7])[-1].argmax())
    request = Request((words([5, 6, 7]), f" {WORDS[best]}"))
    [(_, is_greedy)] = model.loglikelihood([request])
    assert is_greedy


def test_rolling_loglikelihood_scores_each_token_once(model: Any, log_probabilities: Any):
    ids = [(3 * number) % 100 + 3 for number in range(2 * MAX_LENGTH + 5)]
    windows = [
        ([EOS, *ids[: MAX_LENGTH - 1]], ids[:MAX_LENGTH]),
        (ids[MAX_LENGTH - 1 : 2 * MAX_LENGTH - 1], ids[MAX_LENGTH : 2 * MAX_LENGTH]),
        (ids[-MAX_LENGTH - 1 : -1], ids[2 * MAX_LENGTH :]),
    ]
    expected = 0.0
    for inputs, targets in windows:
        rows = log_probabilities(inputs)[-len(targets) :]
        expected += sum(float(row[token]) for row, token in zip(rows, targets))
    assert model.loglikelihood_rolling([Request((words(ids),))]) == [
        pytest.approx(expected, rel=1e-5)
    ]


@pytest.mark.slow
def test_samples_of_equal_contexts_differ_between_batches(model: Any):
    options = {"temperature": 1.0, "max_gen_toks": 8}
    texts = model.generate_until([Request((words([5, 6, 7]), options))] * 6)  # batches of 3
    assert len({*texts}) == 6


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("max_length", -1), ("dtype", "float16"), ("bad", 1)]
)
def test_harness_model_checks_arguments(checkpoint: Path, name: str, value: object):
    arguments: Any = {name: value}
    with pytest.raises(UsageError) as raised:
        harness.harness_model(checkpoint, **arguments)
    assert f"`{name}" in raised.value.what


def test_harness_model_without_the_package_names_the_extra(
    checkpoint: Path, monkeypatch: MonkeyPatch
):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.api.model", None)
    with pytest.raises(PrepError) as raised, harness.harness_model(checkpoint):
        pass
    assert raised.value.hint == "`pip install 'prepcli[lm-eval]'`"


def test_local_task_of_the_harness_runs(checkpoint: Path, tmp_path: Path):
    """A task of perplexity on a local file, computed by the harness from rolling log likelihoods."""
    lm_eval = pytest.importorskip("lm_eval")
    text = words([(7 * number) % 120 + 3 for number in range(40)])
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "tiny_ppl.yaml").write_text(
        "task: tiny_ppl\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'data.jsonl'}\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: word_perplexity\n'
    )
    manager = pytest.importorskip("lm_eval.tasks").TaskManager(
        include_path=str(tmp_path), include_defaults=False
    )
    with harness.harness_model(checkpoint) as model:
        results = lm_eval.simple_evaluate(
            model=model, tasks=["tiny_ppl"], task_manager=manager, bootstrap_iters=0
        )
        (total,) = model.loglikelihood_rolling([Request((text,))])
    assert results["results"]["tiny_ppl"]["word_perplexity,none"] == pytest.approx(
        math.exp(-total / 40)
    )


BOS = 1
SPECIAL_WORDS = ["<unk>", "<s>", "</s>", *WORDS[3:]]


def special_words(ids: list[int]) -> str:
    return " ".join(SPECIAL_WORDS[number] for number in ids)


@pytest.fixture(scope="module")
def beginning_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same model with a tokenizer that begins each text with a token, as LLaMA's does."""
    folder = tmp_path_factory.mktemp("harness") / "begins"
    shutil.copytree(checkpoint, folder)
    # No word contains the special tokens: they are found inside of words.
    write_tokenizer(folder, SPECIAL_WORDS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = SPECIAL_WORDS[BOS]
    tokenizer.add_special_tokens([begin, SPECIAL_WORDS[EOS]])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=None, special_tokens=[(begin, BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIAL_WORDS[EOS],
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def open_without_harness(checkpoint: Path, monkeypatch: MonkeyPatch) -> Any:
    monkeypatch.setattr(harness, "_harness_base", lambda: PlainBase)
    return harness.harness_model(checkpoint, batch_size=3, max_length=MAX_LENGTH)


def test_harness_model_warns_of_generation_fields(
    checkpoint: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    folder = tmp_path / "beams"
    shutil.copytree(checkpoint, folder)
    settings = {"eos_token_id": EOS, "num_beams": 4, "penalty_alpha": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    fields = "not supported in .*`num_beams`, `penalty_alpha`"
    with pytest.warns(UserWarning, match=fields), open_without_harness(folder, monkeypatch):
        pass


def test_generate_until_cuts_at_stop_texts(
    model: Any, checkpoint: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    request = Request((words([5, 6, 7]), {"max_gen_toks": 4}))
    [text] = model.generate_until([request])
    assert text == prep.generate(checkpoint, words([5, 6, 7]), max_new_tokens=4).texts[0]
    second = text.split()[1]
    stopping = Request((words([5, 6, 7]), {"max_gen_toks": 4, "until": [second]}))
    assert model.generate_until([stopping]) == [text[: text.index(second)]]
    folder = tmp_path / "stops"
    shutil.copytree(checkpoint, folder)
    settings = {"eos_token_id": EOS, "stop_strings": [second]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with (
        pytest.warns(UserWarning, match="stop_strings"),
        open_without_harness(folder, monkeypatch) as stopped,
    ):
        assert stopped.generate_until([request]) == [text[: text.index(second)]]


def test_generation_begins_with_the_tokens_of_the_tokenizer(
    beginning_checkpoint: Path, log_probabilities: Any, monkeypatch: MonkeyPatch
):
    options = {"max_gen_toks": 1}
    with open_without_harness(beginning_checkpoint, monkeypatch) as model:
        [text] = model.generate_until([Request((special_words([5, 6]), options))])
    best = int(log_probabilities([BOS, 5, 6])[-1].argmax())
    assert text.strip() == WORDS[best]


def test_results_equal_the_hf_model_of_the_harness(beginning_checkpoint: Path):
    """The judge is the harness's own model of transformers, with its defaults."""
    hf = pytest.importorskip("lm_eval.models.huggingface")
    judge = hf.HFLM(pretrained=str(beginning_checkpoint), dtype="float32", device="cpu")
    pairs = [
        # The tokenizer adds BOS to a context that does not begin with it.
        Request((special_words([5, 6]), f" {special_words([7, 8])}")),
        Request(("", special_words([9, 10]))),
        Request((special_words([BOS, 3]), f" {special_words([4])}")),
    ]
    texts = [Request((special_words([20, 21, 22, 23]),))]
    with harness.harness_model(beginning_checkpoint) as model:
        ours = model.loglikelihood(pairs)
        rolling = model.loglikelihood_rolling(texts)
    for (value, is_greedy), (expected, expected_greedy) in zip(
        ours, judge.loglikelihood(pairs), strict=True
    ):
        assert value == pytest.approx(expected, rel=1e-4)
        assert is_greedy == expected_greedy
    assert rolling == pytest.approx(judge.loglikelihood_rolling(texts), rel=1e-4)


# Exact results of Python programs: equal whether JAX was used before or not, or an error


WAIT_S = 240.0
USE_JAX = "import jax; jax.numpy.ones(3).sum(); "
TRAIN = """
import os, prepcli as prep
flags = os.environ["XLA_FLAGS"]
try:
    prep.train("recipe.toml", out, overrides=overrides)
except prep.PrepError as error:
    print(error.what, error.why, sep="; ")
assert os.environ["XLA_FLAGS"] == flags
"""
EVALUATE = """
import prepcli as prep
for name in ("evaluate", "harness_model"):
    try:
        if name == "evaluate":
            prep.evaluate("tiny", data="text.txt", reduction="exact", seq_length=16)
        else:
            with prep.harness_model("tiny"):
                pass
    except prep.PrepError as error:
        print(error.what, error.hint, sep="; ")
"""
OVERRIDES = ["train.reduction=exact", "train.steps=3", "data.holdout=0", "mesh=1,8,1"]


def start(script: str, folder: Path, *, out: str = "", flags: str = "") -> ForkedProcess:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", FLAGS: f"{os.environ[FLAGS]} {flags}".strip()}
    return start_python(
        f"out, overrides = {out!r}, {OVERRIDES!r}\n{script}",
        cwd=folder,
        env=variables,
        has_jax=True,
    )


def output(process: ForkedProcess) -> str:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_training_folder()
    return tmp_path


def manifest(folder: Path, run: str) -> dict[str, Any]:
    return json.loads((folder / run / "3" / MANIFEST_FILE).read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="a flag of x86 processors"
)
def test_exact_training_is_equal_or_refused(folder: Path):
    new = start(TRAIN, folder, out="new")
    used = start(USE_JAX + TRAIN, folder, out="used", flags=WITHOUT_FUSED)
    fused = start(USE_JAX + TRAIN, folder, out="fused")
    assert [output(new), output(used)] == ["", ""]
    assert manifest(folder, "new")["tensors"] == manifest(folder, "used")["tensors"]
    assert WITHOUT_FUSED in manifest(folder, "new")["environment"]["xla_flags"]
    assert manifest(folder, "new")["environment"] == manifest(folder, "used")["environment"]
    assert "exact results are not possible in this process; JAX was used before" in output(fused)
    assert not (folder / "fused").exists()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="a flag of x86 processors"
)
def test_exact_evaluation_is_refused_after_other_use_of_jax(folder: Path):
    pytest.importorskip("lm_eval")
    lines = output(start(USE_JAX + EVALUATE, folder)).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("exact results are not possible in this process") for line in lines)
    assert all(WITHOUT_FUSED in line for line in lines)
