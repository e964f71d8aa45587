"""The types and formats of data, and the default columns of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

FileType = Literal["text", "json", "csv", "parquet", "arrow", "ids"]
DataType = Literal["auto", FileType]  # auto: by the suffix of the files
DataFormat = Literal["text", "prompt_completion", "chat"]
PLAIN: DataFormat = "text"  # fields of any columns
IdsDtype = Literal["uint16", "uint32", "int32", "int64"]  # of token ids in files without a header
DEFAULT_IDS_DTYPE: IdsDtype = "uint16"
DEFAULT_MAX_DOCUMENT_NBYTES = 64 << 20
# Default of `data.fields` of each type that has columns, or may have some.
DEFAULT_FIELDS: Mapping[str, str] = dict.fromkeys(("auto", "json", "csv", "parquet", "arrow"), "text")
Packing = Literal["concatenate", "documents", "none"]
SEGMENTED: Packing = "documents"  # sequences have segment ids and positions
CONCATENATED: Packing = "concatenate"
Objective = Literal["next_token", "span_corruption"]
FORMAT_FIELDS: Mapping[str, str] = {"prompt_completion": "[prompt], completion", "chat": "messages"}
