"""The types and formats of data, and the default columns of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

DataType = Literal["text", "json"]
DataFormat = Literal["text", "prompt_completion", "chat"]
DEFAULT_FIELDS: Mapping[str, str] = {"json": "text"}  # default of `data.fields` of each type that has columns
Packing = Literal["concatenate", "documents", "none"]
SEGMENTED: Packing = "documents"  # sequences have segment ids and positions
CONCATENATED: Packing = "concatenate"
Objective = Literal["next_token", "span_corruption"]
FORMAT_FIELDS: Mapping[str, str] = {"prompt_completion": "[prompt], completion", "chat": "messages"}
