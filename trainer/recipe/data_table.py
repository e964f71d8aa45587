"""The table `[data]` of a recipe, its tables `[[data.sources]]`, and the numbers of tokens of span corruption."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from prepcli.core.errors import Key, text, usage_error
from trainer.recipe.key_types import (
    STRICT,
    DataSources,
    KeySchema,
    LossTurns,
    MayChange,
    NonEmptyText,
    NonNegativeInt,
    Paths,
    PathText,
    PositiveFloat,
    Table,
    UnitInterval,
    if_absent,
    parse_table,
)
from trainer.recipe.text_fields import (
    AUTO,
    DEFAULT_FIELDS,
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    FORMAT_FIELDS,
    DataFormat,
    DataType,
    IdsDtype,
    Objective,
    Overlong,
    Packing,
)

MAX_DOCUMENT_LIMIT = 1 << 40
# More tokens than a block of span corruption has besides its source
MAX_NOISE = 1 << 60
SOURCES_KEY = "data.sources"
EVAL_KEYS = ("eval_path", "eval_split")
# Keys of `[data]` that name one dataset. With sources each source has its own.
DATASET_KEYS = ("path", "eval_path", "eval_split", "config", "split", "revision")
# Paths in which `~` and `${NAME}` are expanded.
SOURCE_PATHS = ("path", "eval_path")
# Value of `data.objective`.
SPAN_CORRUPTION = "span_corruption"
# Setting that hints show.
SOURCE_LENGTH_EXAMPLE = Key("data.source_length", 512)


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
    path: MayChange[Paths | None] = Field(
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
    max_document_bytes: MayChange[Annotated[int, Field(ge=1, le=MAX_DOCUMENT_LIMIT)]] = Field(
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
    template_args: Table | None = Field(
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
    add_bos: MayChange[bool | None] = Field(
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
    tokenizer: MayChange[PathText | None] = Field(
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
    eval_path: MayChange[Paths | None] = Field(
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
    cache: MayChange[PathText | None] = Field(
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


def _as_in_data(key: str, example: str = "") -> Any:
    """Return the pydantic field for a key of a source, with an example, or those of the same key in `[data]`."""
    field = Data.model_fields[key]
    # A source without a key has the value of `[data]`, except for the keys that name a
    # dataset: with sources, `[data]` cannot have them.
    return Field(
        default=None,
        description=f"as `data.{key}`",
        examples=[example] if example else field.examples,
        json_schema_extra=field.json_schema_extra if key in DATASET_KEYS else None,
    )


class DataSource(BaseModel):
    """A dataset of a mixture. Missing keys have the values of `[data]`."""

    model_config = STRICT

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="name in messages and metrics",
        examples=["wiki"],
    )
    path: Paths = Field(description="as `data.path`", examples=["wiki/*.jsonl"])
    weight: PositiveFloat | None = Field(
        default=None,
        description="share of the sequences, relative to the other sources. All sources have one, or none",
        examples=[3],
        json_schema_extra=if_absent("all sequences of all sources are shuffled together"),
    )
    eval_path: Paths | None = _as_in_data("eval_path", example="wiki-validation.jsonl")
    eval_split: NonEmptyText | None = _as_in_data("eval_split")
    type: DataType | None = _as_in_data("type", example="json")
    format: DataFormat | None = _as_in_data("format", example="chat")
    fields: NonEmptyText | None = _as_in_data("fields")
    config: NonEmptyText | None = _as_in_data("config", example="en")
    split: NonEmptyText | None = _as_in_data("split")
    revision: NonEmptyText | None = _as_in_data("revision")
    ids_dtype: IdsDtype | None = _as_in_data("ids_dtype")
    bad_lines: NonNegativeInt | None = _as_in_data("bad_lines")


SOURCE_SCHEMAS: Mapping[str, KeySchema] = DataSource.model_json_schema()["properties"]


def parse_sources(data: Data) -> tuple[DataSource, ...]:
    """Return the sources of a recipe's data, or () if it has a `path`.

    Raises:
        UsageError: A table is invalid, two have the same name, or only some have a weight.
    """
    tables = data.sources or ()
    sources: list[DataSource] = []
    for number, table in enumerate(tables, start=1):
        sources.append(parse_table(DataSource, table, f"table {number} of `{SOURCES_KEY}`"))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            what = f"two tables of `{SOURCES_KEY}` have the name {name!r}"
            raise usage_error(what, hint="give each its own name")
    unweighted = [source.name for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(names):
        what = f"only some tables of `{SOURCES_KEY}` have a weight"
        why = f"without one: {', '.join(unweighted)}"
        raise usage_error(what, why, "give all of them one, or none")
    return tuple(sources)


def source_data(data: Data, source: DataSource) -> Data:
    """Return the data of a recipe with one source of its mixture, as if it were the only dataset."""
    keys = source.model_dump(exclude={"name", "weight"}, exclude_none=True)
    data_type = source.type or data.type
    # A source of texts or token ids has no columns, whatever `[data]` says about them.
    from_example = None
    fields = None
    if data_type in DEFAULT_FIELDS:
        from_example = data.fields_from_example
        fields = data.fields
        # Without columns of its own the first record decides, or the format of the source.
        if from_example is None and source.format == AUTO:
            fields = None
        elif from_example is None and source.format is not None:
            default = fields or DEFAULT_FIELDS[data_type]
            fields = FORMAT_FIELDS.get(source.format, default)
    columns = {"fields": fields, "fields_from_example": from_example}
    # Keys of the source have priority over the columns of `[data]`. `model_copy` validates nothing,
    # and both models are valid.
    return data.model_copy(update={**columns, **keys, "sources": None})


def has_eval_data(data: Data) -> bool:
    """Return whether a run has data to evaluate on: held out, or a separate dataset."""
    has_own = bool(data.eval_paths) or any({*EVAL_KEYS} & {*table} for table in data.sources or ())
    return bool(data.holdout) or has_own


def split_sources(data: Data) -> Iterator[tuple[DataSource | None, Data]]:
    """Yield each source of a recipe with its data, or None with the data if it has no sources."""
    if data.sources is None:
        yield None, data
    for source in parse_sources(data):
        yield source, source_data(data, source)


@dataclass(frozen=True, slots=True)
class SpanSizes:
    """The numbers of tokens of each block of text, equal for all blocks."""

    block_length: int  # Tokens of a block of text
    n_noise: int  # Tokens that move to the target
    # Spans that these tokens form. In the source a sentinel takes the place of each span.
    n_spans: int

    @property
    def source_length(self) -> int:
        """Tokens of the source: the other tokens, a sentinel per span, and the end-of-sequence token."""
        return self.block_length - self.n_noise + self.n_spans + 1

    @property
    def target_length(self) -> int:
        """Tokens of the target: the spans, a sentinel before each, and the end-of-sequence token."""
        return self.n_noise + self.n_spans + 1


def span_sizes(source_length: int, *, noise_density: float, mean_span_length: float) -> SpanSizes:
    """Return the numbers of tokens of the longest blocks whose sources have at most `source_length` tokens.

    The formula comes from `random_spans_helper` and `random_spans_noise_mask` in
    t5/data/preprocessors.py of google-research/text-to-text-transfer-transformer: 568 tokens for
    sources of 512 and targets of 114.

    Args:
        source_length: Maximum tokens of a source.
        noise_density: Fraction of the tokens of a block that move to the target.
        mean_span_length: Mean tokens of a span.
    """

    def sizes(block_length: int) -> SpanSizes:
        n_noise = min(max(round(block_length * noise_density), 1), block_length - 1)
        return SpanSizes(block_length, n_noise, max(round(n_noise / mean_span_length), 1))

    # The source of a block is shorter than the block, e.g. with density 0.15 and spans of 3:
    # 568 tokens have 85 of noise in 28 spans. The source has 568 - 85 + 28 + 1 = 512 tokens, the target
    # 85 + 28 + 1 = 114. A block of 569 tokens would have a source of 513.
    # Sources do not shrink when blocks grow.
    lengths = range(source_length, source_length + MAX_NOISE)
    n_fitting = bisect_right(lengths, source_length, key=lambda n: sizes(n).source_length)
    length = lengths[max(n_fitting - 1, 0)]
    if noise_density == 0.5 and sizes(length).target_length > sizes(length).source_length:
        # As in the source: sources and targets then have equal lengths.
        length -= 1
    return sizes(length)


def recipe_span_sizes(data: Data) -> SpanSizes:
    """Return the numbers of tokens of a recipe's blocks.

    Raises:
        UsageError: There is no `source_length`, it is too short for a span, or targets are longer
            than `seq_length`.
    """
    if data.source_length is None:
        why = 'sources have at most that number of tokens, with `objective = "span_corruption"`'
        raise usage_error("`data.source_length` is missing", why, text("{}", SOURCE_LENGTH_EXAMPLE))
    sizes = span_sizes(
        data.source_length,
        noise_density=data.noise_density,
        mean_span_length=data.mean_noise_span_length,
    )
    n_other = sizes.block_length - sizes.n_noise
    # Each span has a token of noise at least, and another token that separates it from the next span.
    if sizes.source_length > data.source_length or sizes.n_spans > min(n_other, sizes.n_noise):
        why = f"`noise_density` {data.noise_density:g} and `mean_noise_span_length` {data.mean_noise_span_length:g}"
        raise usage_error(
            f"`data.source_length` {data.source_length} is too short for span corruption",
            f"{why} give {sizes.n_spans} spans with {sizes.n_noise} tokens in all, and {n_other} tokens between them",
            text("{}", SOURCE_LENGTH_EXAMPLE),
        )
    if sizes.target_length > data.seq_length:
        why = f"targets of sources of {data.source_length} tokens have {sizes.target_length}"
        hint = text("{}", Key("data.seq_length", sizes.target_length, is_override=True))
        raise usage_error(f"`data.seq_length` is {data.seq_length}", why, hint)
    return sizes
