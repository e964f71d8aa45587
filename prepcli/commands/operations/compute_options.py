"""The options of the operations that compute with a model or prepare data: train, evaluate, generate, tokenize.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it. See `options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypedDict

from prepcli.commands.operations.options import SourceOptions
from prepcli.core.errors import NO_VALUE, Key, Option, override_text, text, usage_error
from prepcli.core.option_spec import (
    Minimum,
    NonNegativeInt,
    PathLike,
    PositiveInt,
    flag,
    option,
    option_specs,
)

MAX_ID_DIGITS = 9  # more than any token id has


def parse_token_ids(ids: str) -> list[int]:
    """Return comma-separated token ids. Raise UsageError for other text.

    >>> parse_token_ids("3, 1,4")
    [3, 1, 4]
    """
    numbers = split_token_ids(ids)
    if numbers is None:
        raise usage_error(
            text("invalid {}", Option("tokens", f"{ids:.60}")),
            "it takes comma-separated token ids",
            text("{}", Option("tokens", [[1, 2, 3]])),
        )
    return numbers


def split_token_ids(ids: str) -> list[int] | None:
    """Return comma-separated token ids. None for other text."""
    numbers: list[int] = []
    for word in ids.split(","):
        word = word.strip()
        # `int` also takes digits of other scripts, and underscores.
        if not (word.isascii() and word.isdecimal() and len(word) <= MAX_ID_DIGITS):
            return None
        numbers.append(int(word))
    return numbers


def format_token_ids(ids: Sequence[int]) -> str:
    """Return token ids with commas.

    >>> format_token_ids([3, 1, 4])
    '3,1,4'
    """
    return ",".join(map(str, ids))


# --- Recipe keys of an evaluation


KEYS_BY_TABLE = {
    "data": (
        "add_bos",
        "add_eos",
        "always_start_with_bos",
        "bad_lines",
        "cache",
        "chat_template",
        "config",
        "fields",
        "fields_from_example",
        "format",
        "ids_dtype",
        "loss",
        "loss_reasoning",
        "max_document_bytes",
        "max_examples",
        "mean_noise_span_length",
        "noise_density",
        "objective",
        "overlong",
        "packing",
        "prepend_text",
        "revision",
        "seq_length",
        "source_length",
        "source_prefix",
        "split",
        "subfield_separator",
        "template_args",
        "template_date",
        "tokenizer",
        "type",
    ),
    "eval": ("stride",),
    "model": ("attention_kernel", "dtype", "head_chunk_size", "k_chunk_size", "q_chunk_size"),
}
EFFECTIVE_KEYS = frozenset(
    f"{table}.{key}" for table, keys in KEYS_BY_TABLE.items() for key in keys
)
KEYS_TEXT = ". ".join(f"[{table}]: {', '.join(keys)}" for table, keys in KEYS_BY_TABLE.items())

# Options of `evaluate` that replace a key. All other keys are set by `overrides`.
OPTION_OF_KEY = {
    "data.fields": "fields",
    "data.seq_length": "seq_length",
    "data.tokenizer": "tokenizer",
    "data.type": "type",
}


def option_of_key(key: Key) -> Option | Key | None:
    """Return the option of `evaluate` that sets a recipe key, or None if an evaluation does not use the key.

    >>> from prepcli.core.errors import TERMINAL
    >>> option_of_key(Key("data.type", "json")).render(TERMINAL)
    '`--type json`'
    >>> option_of_key(Key("data.source_length", 512)).render(TERMINAL)
    '`--set data.source_length=512`'
    """
    option = OPTION_OF_KEY.get(key.name)
    if option is not None:
        return Option(option, key.value)
    if key.name not in EFFECTIVE_KEYS or key.value is NO_VALUE:
        return None
    return Option("overrides", f"{key.name}={override_text(key.value)}")


ComputeDtype = Literal["float32", "bfloat16"]
Reduction = Literal["fast", "exact"]

_SOURCE_SPECS = option_specs(SourceOptions)
_MESH = option(
    "DP,FSDP,MP",
    "Use this device mesh. Default: one device.",
)
_DTYPE = option(
    "NAME",
    "Compute in this dtype. Default: as stored.",
    more="Stored weights count as float32 unless all of them are bfloat16.",
)
_EMA = flag("Take the moving average of a run's parameters.", position=26)
_VERIFY = option(
    None,
    "Skip checking the checkpoint's checksums.",
    default=True,
    flag="--no-verify",
    position=27,
)


class EvaluateOptions(SourceOptions, total=False):
    """Options of `evaluate`."""

    type: Annotated[
        str | None,
        option("TYPE", "Read files as this type, as `data.type` of a recipe. Default: by suffix."),
    ]
    fields: Annotated[
        str | None, option("FIELDS", "Read these columns, as `data.fields` of a recipe.")
    ]
    seq_length: Annotated[
        Annotated[int, Minimum(2)] | None,
        option(
            "N",
            "Cut the data into sequences of N tokens. Default: the model's positions, at most 1024.",
        ),
    ]
    limit: Annotated[
        NonNegativeInt, option("N", "Evaluate on N sequences of each source. 0: all.", default=0)
    ]
    overrides: Annotated[
        str | Sequence[str],
        option(
            "KEY=VALUE",
            f"Set a recipe key. Repeatable. {KEYS_TEXT}.",
            default=(),
        ),
    ]
    tokenizer: Annotated[
        PathLike | None,
        option("PATH", "Use this tokenizer, a file or folder. Default: the model's."),
    ]
    cache: Annotated[PathLike | None, option("FOLDER", "Keep the tokens in FOLDER for later runs.")]
    batch_size: Annotated[
        PositiveInt,
        option(
            "N",
            "Compute N sequences at a time.",
            more="The number is rounded up to a multiple of the mesh's dp x fsdp.",
            default=8,
        ),
    ]
    mesh: Annotated[str | None, _MESH]
    dtype: Annotated[ComputeDtype | None, _DTYPE]
    reduction: Annotated[
        Reduction,
        option(
            "KIND",
            "Compute fast, or exact: the same bits on any mesh.",
            more="exact computes each sequence alone, so that the batch size changes no bit either.",
            default="fast",
        ),
    ]
    metrics: Annotated[
        str | Sequence[str],
        option(
            "NAME",
            "Generate targets from sources, and compute rouge, bleu or exact_match. Repeatable.",
            more="The model must be an encoder-decoder.",
            default=(),
        ),
    ]
    ema: Annotated[bool, _EMA]
    verify: Annotated[bool, _VERIFY]


class GenerateArguments(TypedDict, total=False):
    """Arguments of the function `generate` with an option on the command line, such as `--prompt`."""

    prompts: Annotated[
        str | Sequence[str],
        option("TEXT", "Add a prompt. Repeatable.", default=(), position=0),
    ]
    tokens: Annotated[
        Sequence[Sequence[int]],
        option(
            "1,2,3",
            "Add a prompt as token ids. Repeatable.",
            default=(),
            parse=parse_token_ids,
            position=2,
        ),
    ]


class GenerateOptions(SourceOptions, total=False):
    """Options of `generate`."""

    prompts_file: Annotated[
        PathLike | None,
        option(
            "FILE",
            "Read one prompt per line (.jsonl: key `prompt`, `text` or `messages`). - is stdin.",
            more="A conversation has `messages` and may have `tools`.",
            cli_type=str,
            position=1,
        ),
    ]
    tokenizer: Annotated[
        PathLike | None,
        option(
            "PATH",
            "Use this tokenizer file or folder. Default: the model's.",
            more="The file is a tokenizer.json or a SentencePiece model.",
        ),
    ]
    max_new_tokens: Annotated[
        PositiveInt | None,
        option("N", "Generate at most N tokens. Default: 64, or to the last position."),
    ]
    temperature: Annotated[
        float, option("T", "Scale randomness by T. 0: the most likely token.", default=0.0)
    ]
    top_k: Annotated[int, option("K", "Sample from the K most likely. 0: all.", default=0)]
    top_p: Annotated[float, option("P", "Sample from the top probability mass P.", default=1.0)]
    min_p: Annotated[
        float,
        option(
            "P", "Sample from tokens with at least P times the highest probability.", default=0.0
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        option(
            "X",
            "Divide the logits of earlier tokens by X. Default: the model's.",
            more="Negative logits are multiplied by it.",
        ),
    ]
    stop: Annotated[
        str | Sequence[str], option("TEXT", "End a continuation at TEXT. Repeatable.", default=())
    ]
    tools: Annotated[
        PathLike | None,
        option("FILE", "Give conversations the tools of FILE, a JSON list of schemas."),
    ]
    template_args: Annotated[
        str | Mapping[str, object] | None,
        option(
            "JSON",
            """Set variables of the chat template, e.g. '{"enable_thinking": false}'.""",
            cli_type=str,
        ),
    ]
    seed: Annotated[int, option("N", "Set the random seed.", default=0)]
    mesh: Annotated[str | None, _MESH]
    dtype: Annotated[ComputeDtype | None, _DTYPE]
    batch_size: Annotated[
        PositiveInt,
        option("N", "Run N prompts at a time.", default=16),
    ]
    ema: Annotated[bool, _EMA]
    verify: Annotated[bool, _VERIFY]


class TrainOptions(TypedDict, total=False):
    """Options of `train`."""

    overrides: Annotated[
        str | Sequence[str],
        option(
            "KEY=VALUE",
            "Override a key, for example train.steps=10. `KEY=` removes one.",
            default=(),
            position=1,
        ),
    ]
    stop_after: Annotated[
        NonNegativeInt, option("STEPS", "Stop and save after STEPS steps. 0: never.", default=0)
    ]
    restart: Annotated[bool, flag("Delete the run's steps and start again.")]
    force: Annotated[bool, flag("Start even if a step is estimated not to fit into memory.")]
    verify: Annotated[
        bool,
        option(
            None,
            "Skip checking the checkpoint's checksums.",
            default=True,
            flag="--no-verify",
            position=44,
        ),
    ]
    offline: Annotated[bool, _SOURCE_SPECS["offline"]]
    stream: Annotated[bool, _SOURCE_SPECS["stream"]]


# --- Options for preparing data


_TRAIN = option_specs(TrainOptions)


TokenFormat = Literal["prep", "megatron", "parquet"]


class TokenizeArguments(TypedDict, total=False):
    """Arguments of the function `tokenize_shard` with an option on the command line."""

    out: Annotated[
        PathLike | None,
        option(
            "FOLDER",
            "Write the tokens of a run to its folder, or the files of another format to FOLDER. Default: runs/NAME.",
            position=2,
        ),
    ]
    format: Annotated[
        TokenFormat,
        option(
            "NAME",
            "Also write the tokens for another trainer: megatron or parquet.",
            default="prep",
            position=3,
        ),
    ]
    show: Annotated[
        NonNegativeInt | None,
        option(
            "N",
            "Show the first N samples of each source, with their tokens with loss marked, and a table of all samples.",
            position=4,
        ),
    ]
    html: Annotated[
        PathLike | None,
        option("FILE", "Write a page with the samples and the table of --show.", position=5),
    ]
    dry_run: Annotated[bool, flag("Keep no tokens: only show samples.", position=6)]


class DataOptions(TypedDict, total=False):
    """Options of `batches` and `tokenize_shard`."""

    overrides: Annotated[str | Sequence[str], _TRAIN["overrides"]]
    offline: Annotated[bool, _TRAIN["offline"]]
