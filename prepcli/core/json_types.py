"""Types of JSON values. Where a value is read, the reader narrows it: a file of a user may hold any value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]
# The content of a config.json.
HFConfig: TypeAlias = Mapping[str, JsonValue]
