"""The types and formats of data, and the default columns of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

FileType = Literal["text", "json", "csv", "parquet", "arrow", "ids", "megatron"]
# `auto` takes the type that the suffix of the files names.
DataType = Literal["auto", FileType]
DataFormat = Literal[
    "auto",
    "text",
    "prompt_completion",
    "prompt_response",
    "question_answer",
    "chat",
    "sharegpt",
    "alpaca",
]
# The columns of the first record decide.
AUTO: DataFormat = "auto"
# The format without a template: fields of any columns.
PLAIN: DataFormat = "text"
# The formats of conversations, which a chat template renders.
CHAT_FORMATS: frozenset[DataFormat] = frozenset({"chat", "sharegpt", "alpaca"})
# Dtypes of token ids in files without a header.
IdsDtype = Literal["uint16", "uint32", "int32", "int64"]
DEFAULT_IDS_DTYPE: IdsDtype = "uint16"
DEFAULT_MAX_DOCUMENT_NBYTES = 64 << 20
# Default of `data.fields` of each type that has columns, or may have some.
DEFAULT_FIELDS: Mapping[str, str] = dict.fromkeys(
    ("auto", "json", "csv", "parquet", "arrow"), "text"
)
Packing = Literal["concatenate", "documents", "none"]
# The packing that gives sequences segment ids and positions.
SEGMENTED: Packing = "documents"
CONCATENATED: Packing = "concatenate"
# Value of `data.chat_template` for the template of the tokenizer, with each turn as the last one.
TRAINING = "training"
Overlong = Literal["split", "truncate", "truncate_prompt", "drop"]
# The rule that keeps all tokens.
WHOLE_TOKENS: Overlong = "split"
Objective = Literal["next_token", "span_corruption"]
# Default of `data.fields` of each format with columns of its own.
FORMAT_FIELDS: Mapping[str, str] = {
    "prompt_completion": "[prompt], completion",
    "prompt_response": "[prompt], response",
    "question_answer": "[question], answer",
    "chat": "messages",
    "sharegpt": "conversations",
    "alpaca": "[instruction+input], output",
}
