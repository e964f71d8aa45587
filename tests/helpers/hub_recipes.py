"""The models and datasets of the hub that shipped recipes name: tiny, in the layouts in which they are published.

Cards have the files of each configuration and split, and rows have all columns of the published ones. Their texts are
made for the tests.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.hub_server import COMMIT, FakeRepo
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import DENSE_CONFIGS, FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.towers import model_values, read_golden, stored
from tests.trainer.data.chat_templates import LAST_REASONS

VOCAB = 512
NUM_ROWS = 40
CONVERTED = "refs/convert/parquet"
END = "<|end|>"
SPECIAL_TOKENS = (
    *(END, "<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"),
    *("</tool_call>", "<tool_response>", "</tool_response>", "<|header|>", "<|/header|>"),
    *("<|eot|>", "<start_of_turn>", "<end_of_turn>"),
)
# LAST_REASONS with the start of a turn without reasoning, which Qwen3 writes for a model to continue.
QWEN3 = LAST_REASONS.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}{% endif %}",
)
LLAMA_3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|header|>' + m.role + '<|/header|>\\n\\n' + m.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}
"""
# The roles must alternate, and the system text is in the first message of the user.
GEMMA_3 = """\
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if system else messages %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + (m.role if m.role == 'user' else 'model') + '\\n' }}
    {{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]


@dataclass(frozen=True, slots=True)
class HubRecipe:
    """A shipped recipe, and the repositories that it reads.

    Attributes:
        name: Its name.
        model: Hub id of its model.
        config: Tiny config.json of the model's family.
        template: Chat template of the model. Empty if it has none.
        turn_end: Token that ends a turn of the assistant.
        datasets: Its datasets, by hub id.
        values: Values of the recipe that depend on the size.
        learned: Texts with loss of the first sample.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    template: str
    turn_end: str
    datasets: Mapping[str, FakeRepo]
    values: tuple[str, ...]
    learned: tuple[str, ...]

    def repos(self, folder: Path) -> dict[str, FakeRepo]:
        """Make the model in a folder, and return all repositories by hub id."""
        if self.config["model_type"] == "gemma3":
            _write_gemma_3(folder, self.config)
        else:
            make_checkpoint(folder, dict(self.config), vocab_size=VOCAB)
        _write_tokenizer(folder, self)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return {self.model: FakeRepo(files), **self.datasets}


def _write_gemma_3(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model with an image encoder, and with a vocabulary of VOCAB tokens."""
    shapes = read_golden("gemma3")["shapes"]
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight"):
            shapes[name] = [VOCAB, *shape[1:]]
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", stored(model_values(shapes)))
    text_config = config["text_config"] | {"vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text_config}))


def _write_tokenizer(folder: Path, recipe: HubRecipe) -> None:
    """Write a byte-level tokenizer, the chat template, and the tokens that end a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [_text(number) for number in range(NUM_ROWS)]
    tools = [json.dumps([*TOOLS, *_calls(number)]) for number in range(NUM_ROWS)]
    tokenizer.train_from_iterator([*texts, *tools], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if recipe.template:
        (folder / "chat_template.jinja").write_text(recipe.template)
    ends = [SPECIAL_TOKENS.index(token) for token in (recipe.turn_end, END)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _chat(number: int) -> list[dict[str, str]]:
    """Return a conversation with two answers."""
    return [
        {"role": "user", "content": f"What is {number} plus one?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "Thank you."},
        {"role": "assistant", "content": "You are welcome."},
    ]


def _reasoning(number: int) -> list[dict[str, str]]:
    """Return a conversation whose answer begins with its reasoning, in the text."""
    question, answer = _chat(number)[:2]
    thought = f"<think>\n{number} and one more.\n</think>\n\n"
    return [question, {"role": "assistant", "content": thought + answer["content"]}]


def _calls(number: int) -> list[dict[str, str]]:
    """Return a conversation with a call of a tool, in the layout of LLaMA-Factory."""
    call = {"name": "add", "arguments": {"a": number}}
    return [
        {"from": "human", "value": f"What is {number} plus one?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": json.dumps({"sum": number + 1})},
        {"from": "gpt", "value": f"It is {number + 1}."},
    ]


def _text(number: int) -> str:
    """Return a document."""
    return " ".join(message["content"] for message in _chat(number))


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file.getvalue()


def _dataset(
    files: Mapping[str, str], rows: Sequence[Mapping[str, Any]], config: str = "default"
) -> FakeRepo:
    """Return a dataset with a card.

    Args:
        files: Path of the first file of each split. The card has the pattern of all files.
        rows: Rows of each split.
        config: Name of the configuration.
    """
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, path in files.items():
        pattern = path[: path.index("00000")] + "*"
        lines += [f"  - split: {split}", f"    path: {pattern}"]
    card = "\n".join([*lines, "---", "# Dataset Card", ""])
    data = _parquet(rows)
    return FakeRepo({"README.md": card.encode(), **dict.fromkeys(files.values(), data)})


NUMBERS = range(NUM_ROWS)
SMOLTALK = _dataset(
    {
        "train": "data/all/train-00000-of-00009.parquet",
        "test": "data/all/test-00000-of-00001.parquet",
    },
    [{"messages": _chat(number), "source": "everyday-conversations"} for number in NUMBERS],
    config="all",
)
TULU_3 = _dataset(
    {"train": "data/train-00000-of-00006.parquet"},
    [
        {"id": f"sample_{number}", "messages": _chat(number), "source": "ai2-adapt-dev/coconot"}
        for number in NUMBERS
    ],
)
ULTRACHAT = _dataset(
    {
        split: f"data/{split}-00000-of-00003.parquet"
        for split in ("train_sft", "test_sft", "train_gen", "test_gen")
    },
    [
        {"prompt": _chat(number)[0]["content"], "prompt_id": f"{number:064x}", "messages": _chat(number)}
        for number in NUMBERS
    ],
)  # fmt: skip
NO_ROBOTS = _dataset(
    {split: f"data/{split}-00000-of-00001.parquet" for split in ("train", "test")},
    [
        {
            "prompt": _chat(number)[0]["content"],
            "prompt_id": f"{number:064x}",
            "messages": _chat(number),
            "category": "Open QA",
        }
        for number in NUMBERS
    ],
)
MIXTURE_OF_THOUGHTS = _dataset(
    {"train": "all/train-00000-of-00022.parquet"},
    [
        {"messages": _reasoning(number), "num_tokens": 40, "source": "open-r1/OpenR1-Math-220k"}
        for number in NUMBERS
    ],
    config="all",
)
# The conversion by the hub has no card. Conversations without tools have an empty list of them.
GLAIVE = FakeRepo(
    {
        "default/train/0000.parquet": _parquet(
            [
                {"conversations": _calls(number), "tools": json.dumps(TOOLS)}
                if number % 4 != 3
                else {
                    "conversations": [_calls(number)[0], _calls(number)[-1]],
                    "tools": "[]",
                }
                for number in NUMBERS
            ]
        )
    },
    revisions=(CONVERTED, COMMIT),
)
FINEMATH = _dataset(
    {"train": "finemath-4plus/train-00000-of-00064.parquet"},
    [
        {
            **{"url": "https://a.org", "fetch_time": 1700000000, "content_mime_type": "text/html"},
            **{"warc_filename": "a.warc.gz", "warc_record_offset": 1, "warc_record_length": 2},
            **{"text": _text(number), "token_count": 30, "char_count": 99, "metadata": "{}"},
            **{"score": 4.2, "int_score": 4, "crawl": "CC-MAIN-2024-10", "snapshot_type": "latest"},
            **{"language": "en", "language_score": 0.9},
        }
        for number in NUMBERS
    ],
    config="finemath-4plus",
)
FINEWEB_EDU = _dataset(
    {"train": "sample/10BT/000_00000.parquet"},
    [
        {
            **{"text": _text(number), "id": f"<urn:uuid:{number}>", "dump": "CC-MAIN-2024-10"},
            **{"url": "https://a.org", "file_path": "s3://a", "language": "en"},
            **{"language_score": 0.9, "token_count": 30, "score": 2.9, "int_score": 3},
        }
        for number in NUMBERS
    ],
    config="sample-10BT",
)
LONG = {"max_position_embeddings": 256}
CHAT_VALUES = (
    *("data.seq_length=96", "batch.per_device=1", "optimizer.lr=1e-2", "train.epochs=3"),
    *("train.eval_every=4", "train.log_every=1"),
)
ANSWERS = ("It is 1.", "You are welcome.")


def _ended(token: str, texts: Sequence[str] = ANSWERS) -> tuple[str, ...]:
    """Return answers with the text that ends a turn."""
    return tuple(text + token for text in texts)


HUB_RECIPES = (
    HubRecipe(
        "qwen3-8b-chat", "Qwen/Qwen3-8B", FAMILY_CONFIGS["qwen3"] | LONG, QWEN3, "<|im_end|>",
        {"HuggingFaceTB/smoltalk": SMOLTALK}, CHAT_VALUES, _ended("<|im_end|>\n"),
    ),
    HubRecipe(
        "llama-3.1-8b-chat", "meta-llama/Llama-3.1-8B-Instruct", LLAMA | LONG, LLAMA_3, "<|eot|>",
        {"allenai/tulu-3-sft-mixture": TULU_3}, (*CHAT_VALUES, "data.holdout=0.1"), _ended("<|eot|>"),
    ),
    HubRecipe(
        "gemma-3-4b-chat", "google/gemma-3-4b-it", read_golden("gemma3")["config"], GEMMA_3, "<end_of_turn>",
        {"HuggingFaceH4/ultrachat_200k": ULTRACHAT}, CHAT_VALUES, _ended("<end_of_turn>\n"),
    ),
    HubRecipe(
        "qwen3-8b-tools", "Qwen/Qwen3-8B", FAMILY_CONFIGS["qwen3"] | LONG, QWEN3, "<|im_end|>",
        {"hiyouga/glaive-function-calling-v2-sharegpt": GLAIVE},
        (*CHAT_VALUES, "data.seq_length=256", "data.holdout=0.1"),
        _ended(
            "<|im_end|>\n",
            ('\n<tool_call>\n{"name": "add", "arguments": {"a": 0}}\n</tool_call>', "It is 1."),
        ),
    ),
    HubRecipe(
        "qwen3-4b-reasoning", "Qwen/Qwen3-4B", FAMILY_CONFIGS["qwen3"] | LONG, QWEN3, "<|im_end|>",
        {"open-r1/Mixture-of-Thoughts": MIXTURE_OF_THOUGHTS},
        (*CHAT_VALUES, "data.holdout=0.1"),
        ("<think>\n0 and one more.\n</think>\n\nIt is 1.<|im_end|>\n",),
    ),
    HubRecipe(
        "llama-3.3-70b-lora", "meta-llama/Llama-3.3-70B-Instruct", LLAMA | LONG, LLAMA_3, "<|eot|>",
        {"HuggingFaceH4/no_robots": NO_ROBOTS}, (*CHAT_VALUES, "lora.rank=4", "optimizer.lr=3e-2"),
        _ended("<|eot|>"),
    ),
    HubRecipe(
        "olmo-2-7b-math", "allenai/OLMo-2-1124-7B", DENSE_CONFIGS["olmo2"] | LONG, "", END,
        {"HuggingFaceTB/finemath": FINEMATH, "HuggingFaceFW/fineweb-edu": FINEWEB_EDU},
        (
            *("data.seq_length=48", "data.holdout=0.1", "batch.size=16", "batch.per_device=1"),
            *("optimizer.lr=1e-2", "optimizer.warmup_steps=1", "optimizer.cooldown_steps=2"),
            *("train.steps=6", "train.eval_every=3", "train.log_every=1"),
        ),
        (_text(0) + END,),
    ),
)  # fmt: skip
