"""Texts generated during a run: they are those of `Generator`, and do not change the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import model_logits
from prepcli.core.errors import PrepError, UsageError
from tests.helpers import runs
from tests.helpers.training_folder import write_tokenizer
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import AttentionOptions
from trainer.recipe import load_recipe
from trainer.training.loop import Loop
from trainer.training.metrics import MetricsFileLog, SamplesFileLog, read_metrics, sample_line
from trainer.training.samples import Sampler, build_sampler
from trainer.training.step import StepSetup

PROMPTS = ("w3 w4 w6", "w90")
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": runs.VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def make_sampler(tokenizer: TextTokenizer, setup: StepSetup, **changes: Any) -> Sampler:
    options: dict[str, Any] = {
        "prompts": PROMPTS,
        "dtype": "float32",
        "max_new_tokens": 5,
        "eos_token_ids": (),
        "decoder_start_id": None,
        **changes,
    }
    return Sampler(
        options.pop("prompts"),
        tokenizer,
        setup.model,
        sharding=setup.forward_config.sharding,
        **options,
    )


def assert_tokens_are_most_likely(
    setup: StepSetup, params: Any, prompt: list[int], text: str, **encoder_inputs: np.ndarray
) -> None:
    """Compare each of five new tokens with the logits of a forward pass without a cache over all tokens."""
    new_ids = [int(word.removeprefix("w")) for word in text.split()]
    assert len(new_ids) == 5
    # Padding does not change logits, so all prompts have one shape.
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, : len(prompt) + 5] = [*prompt, *new_ids]
    logits = model_logits(setup.model, params, {"tokens": tokens, **encoder_inputs})
    before_new = slice(len(prompt) - 1, len(prompt) + 4)
    assert np.argmax(logits[0, before_new, : runs.VOCAB], axis=-1).tolist() == new_ids


def test_sampler_takes_the_most_likely_tokens(tokenizer: TextTokenizer):
    setup = runs.make_setup()
    sampler = make_sampler(tokenizer, setup)
    # The second turn uses the compiled functions with other parameters.
    for seed in range(2):
        params = runs.make_state(setup, seed)["params"]
        samples = sampler.generate(params)
        assert [sample.prompt for sample in samples] == [*PROMPTS]
        for sample in samples:
            assert sample.text.startswith(" "), "it continues the prompt"
            prompt = tokenizer.encode_prompt(sample.prompt)
            assert_tokens_are_most_likely(setup, params, prompt, sample.text)


def test_sampler_reads_prompts_with_the_encoder(tokenizer: TextTokenizer):
    setup = runs.make_setup(T5)
    params = init_params(setup.model, 0)
    sampler = make_sampler(tokenizer, setup, decoder_start_id=0)
    texts = [sample.text for sample in sampler.generate(params)]
    assert not any(text.startswith(" ") for text in texts), "a target continues no text"
    sources = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    for text, source in zip(texts, sources, strict=True):
        encoder_inputs = {"source": np.array([source]), "present": np.ones((1, len(source)), bool)}
        assert_tokens_are_most_likely(setup, params, [0], text, **encoder_inputs)


def test_sampler_generates_fewer_tokens_than_positions(tokenizer: TextTokenizer):
    # The model has 32 positions.
    setup = runs.make_setup()
    params = runs.make_state(setup)["params"]
    (sample,) = make_sampler(
        tokenizer, setup, prompts=(" ".join(["w1"] * 30),), max_new_tokens=64
    ).generate(params)
    assert len(sample.text.split()) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" ".join(["w1"] * 33), r"a prompt of `log\.samples` has 33 tokens"),
        (" ", r"`log\.samples`: empty prompt"),
    ],
    ids=["long", "no tokens"],
)
def test_impossible_prompts_are_refused(tokenizer: TextTokenizer, prompt: str, message: str):
    with pytest.raises(UsageError, match=message) as caught:
        make_sampler(tokenizer, runs.make_setup(), prompts=(prompt,))
    assert "--" not in caught.value.hint, "an option of `prep generate`"


def test_prompt_that_cannot_be_encoded_is_refused(tokenizer: TextTokenizer):
    with pytest.raises(PrepError, match=r"`log\.samples`: a prompt is not UTF-8 text") as caught:
        make_sampler(tokenizer, runs.make_setup(), prompts=("\ud800",))
    assert "--" not in caught.value.hint


def test_samples_on_a_mesh_that_splits_tokens_are_refused(tokenizer: TextTokenizer):
    setup = runs.make_setup(mesh="fsdp:4,sp:2", attention_options=AttentionOptions("blockwise"))
    with pytest.raises(UsageError, match=r"`log\.samples` is not supported with sp in `mesh`"):
        make_sampler(tokenizer, setup)


def run_loop(setup: StepSetup, log: Path, **changes: Any) -> Loop:
    loop = Loop(
        runs.make_job(setup, steps=5, **changes),
        runs.make_state(setup),
        checkpoints=runs.MemoryCheckpoints(),
        logs=[
            MetricsFileLog(log.with_name("metrics.jsonl"), 0),
            SamplesFileLog(log, 0),
            runs.RecordingLog(),
        ],
    )
    loop.run()
    return loop


def test_loop_samples_at_its_interval_and_at_the_end(tokenizer: TextTokenizer, tmp_path: Path):
    setup, log = runs.make_setup(), tmp_path / "samples.jsonl"
    sampler = make_sampler(tokenizer, setup)
    loop = run_loop(setup, log, sampler=sampler, sample_every=2)
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    assert [step for step, _ in recording.samples] == [0, 2, 4, 5]
    assert read_metrics(log) == [
        sample_line(step, sample) for step, samples in recording.samples for sample in samples
    ]
    assert recording.samples[-1][1] == sampler.generate(loop.state["params"])
    assert recording.samples[0][1] != recording.samples[-1][1]


def test_samples_do_not_change_the_run(tokenizer: TextTokenizer, tmp_path: Path):
    setup, log = runs.make_setup(), tmp_path / "samples.jsonl"
    sampled = run_loop(setup, log, sampler=make_sampler(tokenizer, setup), sample_every=1)
    plain = run_loop(setup, log)
    assert not read_metrics(log)
    assert runs.state_bytes(sampled.state) == runs.state_bytes(plain.state)


def test_sampler_renders_conversations(tokenizer: TextTokenizer):
    template = "{% for m in messages %}w2 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
    (tokenizer.path.parent / "chat_template.jinja").write_text(template)
    setup = runs.make_setup()
    params = init_params(setup.model, 0)
    chat = {"messages": [{"role": "user", "content": "w7"}]}
    samples = make_sampler(tokenizer, setup, prompts=(chat, "w2 w7 w5")).generate(params)
    assert [sample.prompt for sample in samples] == ["w2 w7 w5", "w2 w7 w5"]
    assert samples[0].text == samples[1].text
    first = samples[0].text.split()
    stopped = make_sampler(tokenizer, setup, prompts=(chat,), stop_texts=(first[1],))
    assert stopped.generate(params)[0].text.split() == first[:2]


CHAT_RECIPE = """\
model.path = "tiny"
batch.size = 1
optimizer.lr = 1e-3
train.steps = 1
[data]
path = "chats.jsonl"
format = "chat"
seq_length = 16
chat_template = "data.jinja"
template_args = { word = "w9" }
template_date = "2026-01-31"
[log]
samples = [{ messages = [{ role = "user", content = "w7" }] }]
"""


def sampler_of_recipe(tokenizer: TextTokenizer) -> Sampler | None:
    Path("recipe.toml").write_text(CHAT_RECIPE)
    setup = runs.make_setup()
    return build_sampler(
        load_recipe(Path("recipe.toml")).recipe,
        setup.model,
        runs.GPT_NEO,
        files=tokenizer.path.parent,
        sharding=setup.sharding,
    )


def test_sampler_renders_conversations_as_the_data(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the template of the recipe, its variables and its date."""
    monkeypatch.chdir(tmp_path)
    Path("data.jinja").write_text("{{ strftime_now('w%d') }} {{ word }} {{ messages[0].content }}")
    sampler = sampler_of_recipe(tokenizer)
    assert sampler is not None
    assert sampler.prompts == ("w31 w9 w7",)


def test_missing_template_of_samples_names_its_key(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrepError, match="there is no such file") as raised:
        sampler_of_recipe(tokenizer)
    assert raised.value.hint == 'a Jinja file, or "training"'


@pytest.mark.parametrize("chat", [{}, {"messages": []}, {"messages": [1]}, {"text": "w7"}], ids=str)
def test_sampler_rejects_invalid_conversations(tokenizer: TextTokenizer, chat: dict[str, Any]):
    with pytest.raises(PrepError, match=r"log\.samples"):
        make_sampler(tokenizer, runs.make_setup(), prompts=(chat,))
