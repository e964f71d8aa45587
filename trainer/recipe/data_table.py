"""The table of a recipe for its data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from trainer.recipe.key_types import (
    STRICT,
    DataSources,
    LossTurns,
    NonNegativeInt,
    Paths,
    PathText,
    TemplateArguments,
    UnitInterval,
    if_absent,
)
from trainer.recipe.text_fields import (
    AUTO,
    DEFAULT_FIELDS,
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    DataFormat,
    DataType,
    IdsDtype,
    Objective,
    Overlong,
    Packing,
)

MAX_DOCUMENT_LIMIT = 1 << 40


class Data(BaseModel):
    """The training and evaluation data, and how it becomes sequences."""

    model_config = STRICT

    type: DataType = Field(
        default="auto",
        description="`text`: each file is a document. `json`: each line is an object with a document, or the file is "
        "one list of such objects. `csv`: each row has one, also in .tsv files. `parquet` and `arrow`: tables with a "
        "document per row. `ids`: .npy and .bin files of token ids. `megatron`: .idx files of Megatron-LM, each with "
        "its .bin file. `auto`: as the suffixes of the files tell. Files of text, json and csv may be compressed "
        "(.gz, .zst)",
        examples=["text"],
    )
    # Required, and None is valid: the loader sets None if the recipe has `sources`. A default of None
    # would hide a recipe that has neither.
    path: Paths | None = Field(
        description="files, folders or globs, also in `gs://`, `s3://` and `hf://` URLs",
        examples=["data/train.txt"],
        json_schema_extra=if_absent("required, or `sources`"),
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="configuration of a dataset, on the hub or in a folder",
        examples=["wikitext-103-raw-v1"],
        json_schema_extra=if_absent("its default"),
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="split of a dataset, on the hub or in a folder",
        examples=["train"],
        json_schema_extra=if_absent('"train", or the only one'),
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="branch, tag or commit of a dataset on the hub",
        examples=["main"],
        json_schema_extra=if_absent('"main"'),
    )
    sources: DataSources | None = Field(
        default=None,
        description="tables `[[data.sources]]` instead of `path`: several datasets that are mixed",
        examples=[
            [
                {"name": "wiki", "path": "wiki.jsonl", "weight": 3},
                {"name": "code", "path": "code.jsonl", "weight": 1},
            ]
        ],
        json_schema_extra=if_absent("the dataset of `path`"),
    )
    ids_dtype: IdsDtype = Field(
        default=DEFAULT_IDS_DTYPE,
        description="dtype of the token ids in .bin files",
        examples=["uint32"],
    )
    bad_lines: NonNegativeInt = Field(
        default=0,
        description="invalid lines and rows that are skipped. The first ones are reported, and one more is an error",
        examples=[10],
    )
    max_document_bytes: Annotated[int, Field(ge=1, le=MAX_DOCUMENT_LIMIT)] = Field(
        default=DEFAULT_MAX_DOCUMENT_NBYTES,
        description="bytes that a line, an object of a list, a row or a value of a column may have. A larger one is an "
        "invalid line. It also limits the memory for a page or a batch of Parquet and Arrow files, to 1 GiB more than "
        "8 times this size",
        examples=[256 << 20],
    )
    format: DataFormat = Field(
        default="auto",
        description="`text`: columns of texts or token ids. `prompt_completion`, `prompt_response`, "
        '`question_answer`: text with `fields` such as "[prompt], completion". The chat template of the tokenizer '
        "renders the others, with loss on the turns of the assistant. `chat`: the column `fields` has a list of "
        'messages, and "[prompt], completion" takes the messages of both columns. `sharegpt`: turns with `from` and '
        "`value`. `alpaca`: an instruction, its input and the output. `auto`: as the columns of the first record "
        "tell, unless `fields` names columns",
        examples=["text"],
    )
    chat_template: Literal["training"] | PathText | None = Field(
        default=None,
        description='a Jinja file for `format` chat, instead of the tokenizer\'s template. `"training"`: the template '
        "of the tokenizer, with each turn of the assistant as the template writes the last one. E.g. all turns show "
        "their reasoning",
        examples=["training"],
        json_schema_extra=if_absent("the tokenizer's template"),
    )
    template_args: TemplateArguments | None = Field(
        default=None,
        description="variables of the chat template, such as `{ enable_thinking = false }`",
        examples=[{"enable_thinking": False}],
        json_schema_extra=if_absent("no variables"),
    )
    template_date: str | None = Field(
        default=None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="date that a chat template writes where it asks for the present one (`strftime_now`)",
        examples=["2026-01-31"],
        json_schema_extra=if_absent("no date"),
    )
    loss: LossTurns = Field(
        default=("assistant",),
        description="turns of conversations with loss: of the `assistant`, its `last` one, `all` text, or a list of "
        "roles. In a message, a `weight` or `loss_weight` from 0 to 1 scales its loss, and `train`, `loss` or "
        "`training` = false turns it off",
        examples=["last"],
    )
    loss_reasoning: bool = Field(
        default=True,
        description="whether the reasoning before an answer has loss. If not, loss begins at the answer",
        examples=[False],
    )
    fields: str | None = Field(
        default=None,
        min_length=1,
        description="column of the text, or a list of fields: `[question+context], answer`. An encoder reads the "
        "fields in brackets. Without an encoder they have no loss. `a+b` joins texts, `<|bos|>`, `<|eos|>` and "
        "`<|ID|>` are tokens, and `{column}` has token ids (a list, or base64 of little-endian int32)",
        examples=["text"],
        json_schema_extra=if_absent("the columns that `format` tells"),
    )
    fields_from_example: str | None = Field(
        default=None,
        min_length=1,
        description="column with the fields of each example, instead of `fields`",
        examples=["fields"],
        json_schema_extra=if_absent("`fields`"),
    )
    subfield_separator: str = Field(
        default=" ", description="text between the texts that `+` joins", examples=[" "]
    )
    prepend_text: str = Field(
        default="",
        description="text put before the first field of each document",
        examples=["Question: "],
    )
    add_bos: bool | None = Field(
        default=None,
        description="put the model's beginning-of-sequence token before each document, without loss. By default, a "
        "document that begins with a text gets the tokens that the tokenizer puts before a text",
        examples=[True],
        json_schema_extra=if_absent("the rule of the tokenizer"),
    )
    add_eos: bool | None = Field(
        default=None,
        description="put the model's end-of-sequence token, if it has one, after each document",
        examples=[True],
        json_schema_extra=if_absent("true, or false for chat and ids"),
    )
    always_start_with_bos: bool = Field(
        default=False,
        description="replace the first input token of each sequence, or of each of its documents with `packing` "
        "documents, by the beginning-of-sequence token. Targets stay",
        examples=[True],
    )
    max_examples: NonNegativeInt = Field(
        default=0,
        description="lines, or text files, of `path` to use, the first ones. `0`: all. `eval.limit` limits evaluation",
        examples=[10000],
    )
    source_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="maximum tokens of an encoder source. Longer sources are truncated",
        examples=[512],
        json_schema_extra=if_absent("no sources"),
    )
    source_prefix: str | None = Field(
        default=None,
        description="text put before each source",
        examples=["summarize: "],
        json_schema_extra=if_absent("no prefix"),
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="a tokenizer.json, or a folder that contains one",
        examples=["gpt-neo-1.3B"],
        json_schema_extra=if_absent("the model's tokenizer"),
    )
    seq_length: Annotated[int, Field(ge=2)] = Field(
        description="tokens per sequence. With an encoder, maximum tokens of a target: longer targets are truncated",
        examples=[1024],
    )
    packing: Packing = Field(
        default="concatenate",
        description="`concatenate`: all documents are concatenated and cut into sequences. The remainder is dropped. "
        "`documents`: whole documents share a sequence, and none attends to another. `none`: each document is a "
        "sequence of its own, padded. With the last two, longer documents are cut. With an encoder, each pair of "
        "source and target is a sequence of its own",
        examples=["documents"],
    )
    overlong: Overlong = Field(
        default="split",
        description="what becomes of records with more tokens than a sequence. `split`: they are cut into several. "
        "`truncate`: their end is cut off. `truncate_prompt`: the start of the text before the first token with loss "
        "is cut off, and of the rest the end if it is too long alone. `drop`: they are left out",
        examples=["truncate_prompt"],
    )
    objective: Objective = Field(
        default="next_token",
        description="`next_token`: predict each token from those before it, and from the source. `span_corruption`: "
        "an encoder reads a block of concatenated text without random spans, which the decoder predicts (T5)",
        examples=["span_corruption"],
    )
    # T5 was trained with 15 % of the tokens in spans of 3 (arXiv:1910.10683, section 3.7).
    noise_density: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.15,
        description="fraction of the tokens of a block that span corruption moves to the target",
        examples=[0.15],
    )
    mean_noise_span_length: Annotated[float, Field(ge=1)] = Field(
        default=3.0, description="mean tokens of a span of span corruption", examples=[3.0]
    )
    holdout: UnitInterval = Field(
        default=0.0,
        description="fraction of the sequences, the last ones, used for evaluation instead of training",
        examples=[0.05],
    )
    eval_path: Paths | None = Field(
        default=None,
        description="files, folders or globs to evaluate on",
        examples=["data/validation.txt"],
        json_schema_extra=if_absent("the sequences of `holdout`"),
    )
    eval_split: str | None = Field(
        default=None,
        min_length=1,
        description="split of `eval_path`, or of `path`, to evaluate on",
        examples=["validation"],
        json_schema_extra=if_absent("the sequences of `holdout`"),
    )
    cache: PathText | None = Field(
        default=None,
        description="folder of the tokenized data",
        examples=["~/tokens"],
        json_schema_extra=if_absent("`data` in the run's folder"),
    )
    shuffle: bool = Field(
        default=True, description="shuffle the sequences in each epoch", examples=[True]
    )

    @property
    def has_auto_shape(self) -> bool:
        """Whether the columns of the first record decide about `format` and `fields`."""
        is_named = self.fields is not None or self.fields_from_example is not None
        return self.format == AUTO and self.type in DEFAULT_FIELDS and not is_named

    @property
    def eval_paths(self) -> Paths | None:
        """Files to evaluate on: another split of `path`, if there is no `eval_path`, or None for held-out sequences."""
        if self.eval_path is None and self.eval_split is not None:
            return self.path
        return self.eval_path
