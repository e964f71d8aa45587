"""The options of the operations that compute with a model: train, evaluate and generate. See `options.py`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypedDict

from prepcli.commands.operations.evaluation_keys import KEYS_TEXT
from prepcli.commands.operations.options import ConversionArguments, SourceOptions
from prepcli.commands.operations.token_ids import parse_token_ids
from prepcli.core.option_spec import (
    Minimum,
    NonNegativeInt,
    OptionSpec,
    PathLike,
    PositiveInt,
    option_specs,
)

ComputeDtype = Literal["float32", "bfloat16"]
Reduction = Literal["fast", "exact"]

_SOURCE_SPECS = option_specs(SourceOptions)
_MESH = OptionSpec(
    "DP,FSDP,MP",
    "Use this device mesh. Default: one device.",
    '"dp,fsdp,mp" sizes or named axes. Default: the first device.',
)
_DTYPE = OptionSpec(
    "NAME",
    "Compute in this dtype. Default: as stored.",
    "Dtype of the computation. Default: bfloat16 if all weights are bfloat16, otherwise float32.",
)
_EMA = OptionSpec(
    None,
    "Take the moving average of a run's parameters.",
    "Take the moving average of a run's parameters. Default: False.",
    default=False,
    position=26,
)
_VERIFY = OptionSpec(
    None,
    "Skip checking the checkpoint's checksums.",
    "Compare the weights with the checkpoint's checksums or digests. Default: True.",
    default=True,
    flag="--no-verify",
    position=27,
)


class EvaluateArguments(TypedDict, total=False):
    """Argument of the function `evaluate` with an option on the command line: `--data`."""

    data: Annotated[
        PathLike | Sequence[PathLike],
        OptionSpec(
            "[NAME=]PATH",
            "Evaluate on this file, folder, glob or URL. Repeatable: a result for each name.",
            "One or more files, folders, globs or URLs.",
            default=(),
            position=0,
        ),
    ]


class EvaluateOptions(SourceOptions, total=False):
    """Options of `evaluate`."""

    type: Annotated[
        str | None,
        OptionSpec(
            "TYPE",
            "Read files as this type, as `data.type` of a recipe. Default: by suffix.",
            "Type of the files, as `data.type` of a recipe. Default: by their suffix.",
        ),
    ]
    fields: Annotated[
        str | None,
        OptionSpec(
            "FIELDS",
            "Read these columns, as `data.fields` of a recipe.",
            "Columns of the text, as `data.fields` of a recipe.",
        ),
    ]
    seq_length: Annotated[
        Annotated[int, Minimum(2)] | None,
        OptionSpec(
            "N",
            "Cut the data into sequences of N tokens. Default: the model's positions, at most 1024.",
            "Tokens per sequence, at least 2. Default: the positions of the model, at most 1024.",
        ),
    ]
    limit: Annotated[
        NonNegativeInt,
        OptionSpec(
            "N",
            "Evaluate on N sequences of each source. 0: all.",
            "Sequences of each source. Default: 0, all.",
            default=0,
        ),
    ]
    overrides: Annotated[
        str | Sequence[str],
        OptionSpec(
            "KEY=VALUE",
            f"Set a recipe key. Repeatable. {KEYS_TEXT}.",
            f'One or more recipe keys, such as "data.source_length=512". {KEYS_TEXT}.',
            default=(),
            flag="--set",
        ),
    ]
    tokenizer: Annotated[
        PathLike | None,
        OptionSpec(
            "PATH",
            "Use this tokenizer, a file or folder. Default: the model's.",
            "A tokenizer, as a file or folder. Default: the checkpoint's.",
        ),
    ]
    cache: Annotated[
        PathLike | None,
        OptionSpec(
            "FOLDER",
            "Keep the tokens in FOLDER for later runs.",
            "Folder that keeps the tokens for later calls. Default: none.",
        ),
    ]
    batch_size: Annotated[
        PositiveInt,
        OptionSpec(
            "N",
            "Compute N sequences at a time.",
            "Sequences per batch, rounded up to a multiple of the mesh's dp x fsdp. Default: 8.",
            default=8,
        ),
    ]
    mesh: Annotated[str | None, _MESH]
    dtype: Annotated[ComputeDtype | None, _DTYPE]
    reduction: Annotated[
        Reduction,
        OptionSpec(
            "KIND",
            "Compute fast, or exact: the same bits on any mesh.",
            '"exact" computes each sequence alone: results have the same bits on any mesh and batch'
            ' size. Default: "fast".',
            default="fast",
        ),
    ]
    metrics: Annotated[
        str | Sequence[str],
        OptionSpec(
            "NAME",
            "Generate targets from sources, and compute rouge, bleu or exact_match. Repeatable.",
            "Metrics of the targets that an encoder-decoder model generates from the sources:"
            ' "rouge", "bleu", "exact_match". Default: none.',
            default=(),
            flag="--metric",
        ),
    ]
    ema: Annotated[bool, _EMA]
    verify: Annotated[bool, _VERIFY]


class GenerateArguments(TypedDict, total=False):
    """Arguments of the function `generate` with an option on the command line, such as `--prompt`."""

    prompts: Annotated[
        str | Sequence[str],
        OptionSpec(
            "TEXT",
            "Add a prompt. Repeatable.",
            "One prompt, or several, as text.",
            default=(),
            flag="--prompt",
            position=0,
        ),
    ]
    tokens: Annotated[
        Sequence[Sequence[int]],
        OptionSpec(
            "1,2,3",
            "Add a prompt as token ids. Repeatable.",
            "Prompts as token ids.",
            default=(),
            parse=parse_token_ids,
            position=2,
        ),
    ]


class GenerateOptions(SourceOptions, total=False):
    """Options of `generate`."""

    prompts_file: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Read one prompt per line (.jsonl: key `prompt`, `text` or `messages`). - is stdin.",
            "File with one more prompt per line (.jsonl: key `prompt` or `text`, or `messages` and"
            ' `tools` of a conversation). "-" is stdin.',
            flag="--prompts",
            cli_type=str,
            position=1,
        ),
    ]
    tokenizer: Annotated[
        PathLike | None,
        OptionSpec(
            "PATH",
            "Use this tokenizer file or folder. Default: the model's.",
            "A tokenizer.json, a SentencePiece model, or a folder with a tokenizer. Default: the"
            " checkpoint's.",
        ),
    ]
    max_new_tokens: Annotated[
        PositiveInt | None,
        OptionSpec(
            "N",
            "Generate at most N tokens. Default: 64, or to the last position.",
            "Limit per prompt. Default: 64, or fewer if the positions end.",
        ),
    ]
    temperature: Annotated[
        float,
        OptionSpec(
            "T",
            "Scale randomness by T. 0: the most likely token.",
            "Scale of the randomness. Default: 0, the most likely token.",
            default=0.0,
        ),
    ]
    top_k: Annotated[
        int,
        OptionSpec(
            "K",
            "Sample from the K most likely. 0: all.",
            "Sample from this many of the most likely tokens. Default: 0, all.",
            default=0,
        ),
    ]
    top_p: Annotated[
        float,
        OptionSpec(
            "P",
            "Sample from the top probability mass P.",
            "Sample from the smallest set of tokens with this probability. Default: 1.",
            default=1.0,
        ),
    ]
    min_p: Annotated[
        float,
        OptionSpec(
            "P",
            "Sample from tokens with at least P times the highest probability.",
            "Sample from the tokens with at least this part of the highest probability. Default: 0, all.",
            default=0.0,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        OptionSpec(
            "X",
            "Divide the logits of earlier tokens by X. Default: the model's.",
            "Divisor of the positive logits, and factor of the negative logits, of earlier tokens. Default: the"
            " model's.",
        ),
    ]
    stop: Annotated[
        str | Sequence[str],
        OptionSpec(
            "TEXT",
            "End a continuation at TEXT. Repeatable.",
            "One or more texts that end a continuation. They are part of it.",
            default=(),
        ),
    ]
    tools: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Give conversations the tools of FILE, a JSON list of schemas.",
            "JSON file with a list of schemas of tools, for conversations without tools of their own.",
        ),
    ]
    template_args: Annotated[
        str | Mapping[str, object] | None,
        OptionSpec(
            "JSON",
            """Set variables of the chat template, e.g. '{"enable_thinking": false}'.""",
            'Variables of the chat template, such as `{"enable_thinking": False}`, or their JSON text.',
            cli_type=str,
        ),
    ]
    seed: Annotated[
        int,
        OptionSpec("N", "Set the random seed.", "Seed of the random draws. Default: 0.", default=0),
    ]
    mesh: Annotated[str | None, _MESH]
    dtype: Annotated[ComputeDtype | None, _DTYPE]
    batch_size: Annotated[
        PositiveInt,
        OptionSpec("N", "Run N prompts at a time.", "Prompts per batch. Default: 16.", default=16),
    ]
    ema: Annotated[bool, _EMA]
    verify: Annotated[bool, _VERIFY]


class TrainArguments(TypedDict, total=False):
    """Arguments of the function `train` with an option on the command line, such as `--out`."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "RUN",
            "Save to RUN, a folder or bucket URL. Default: runs/NAME.",
            "Folder of the run.",
            position=2,
        ),
    ]
    dry_run: Annotated[bool, option_specs(ConversionArguments)["dry_run"]]


class TrainOptions(TypedDict, total=False):
    """Options of `train`."""

    overrides: Annotated[
        str | Sequence[str],
        OptionSpec(
            "KEY=VALUE",
            "Override a key, for example train.steps=10. `KEY=` removes one.",
            'One or more changes of recipe keys, such as "train.steps=10".',
            default=(),
            flag="--set",
            position=1,
        ),
    ]
    stop_after: Annotated[
        NonNegativeInt,
        OptionSpec(
            "STEPS",
            "Stop and save after STEPS steps. 0: never.",
            "Stop after this many steps. Default: 0, at the end of the recipe.",
            default=0,
        ),
    ]
    restart: Annotated[
        bool,
        OptionSpec(
            None,
            "Delete the run's steps and start again.",
            "Delete the steps of an earlier run. Default: False.",
            default=False,
        ),
    ]
    force: Annotated[
        bool,
        OptionSpec(
            None,
            "Start even if a step is estimated not to fit into memory.",
            "Start even if a step is estimated not to fit into memory. Default: False.",
            default=False,
        ),
    ]
    verify: Annotated[
        bool,
        OptionSpec(
            None,
            "Skip checking the checkpoint's checksums.",
            "Compare the checkpoint with its checksums while it is read. Default: True.",
            default=True,
            flag="--no-verify",
            position=44,
        ),
    ]
    offline: Annotated[bool, _SOURCE_SPECS["offline"]]
    stream: Annotated[bool, _SOURCE_SPECS["stream"]]
