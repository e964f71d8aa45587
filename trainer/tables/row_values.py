"""The values of a row, as the same row has them in JSON Lines.

Arrow stores objects as structs. All structs of a column have the same keys, so `{"city": "Ulm"}` becomes
`{"city": "Ulm", "days": null}` if another row has `days`. Null is therefore no key, at any depth. A list keeps its
nulls, and so does a JSON text (the type `Json` of `datasets`), which is stored as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from prepcli.core.json_values import load_json

if TYPE_CHECKING:
    from pyarrow import Field, Schema

# Canonical extension type of JSON texts. pyarrow before 19 reads it as text, with its name in the field's metadata.
JSON_EXTENSION = "arrow.json"
EXTENSION_KEY = b"ARROW:extension:name"
# Metadata of the schema that `datasets` writes: the types of its columns, as JSON.
DATASETS_KEY = b"huggingface"
JSON_FEATURE = "Json"

# Turns a value of pyarrow's `as_py` into the value of JSON Lines.
ValueDecoder: TypeAlias = Callable[[Any], Any]


def value_decoders(schema: Schema) -> dict[str, ValueDecoder]:
    """Return the decoder of each column that needs one: a column with objects, maps or JSON texts.

    Args:
        schema: Schema of the table, with its metadata.
    """
    features = _dataset_features(schema.metadata or {})
    decoders: dict[str, ValueDecoder] = {}
    for field in schema:
        decoder = _decoder_of(field, features.get(field.name))
        if decoder is not None:
            decoders[field.name] = decoder
    return decoders


def _dataset_features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return the types of columns that `datasets` has recorded. Empty if there are none, or they are malformed."""
    try:
        features = load_json(metadata.get(DATASETS_KEY, b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(features, dict):
        return features
    return {}


def _decoder_of(field: Field[Any], feature: Any) -> ValueDecoder | None:
    """Return the decoder of a field's values, or None if they need none.

    Args:
        field: The field, of any depth.
        feature: Its type in `datasets`. None if it is unknown.
    """
    from pyarrow import types

    kind = field.type
    if _is_json(field, feature):
        return _decode_json
    if types.is_struct(kind):
        return _struct_decoder(field, feature)
    if types.is_map(kind):
        item_decoder = _decoder_of(kind.item_field, None)
        return lambda pairs: _decode_map(pairs, item_decoder)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        decoder = _decoder_of(kind.value_field, _item_feature(feature))
        if decoder is not None:
            return lambda items: [_decode_or_none(decoder, item) for item in items]
    return None


def _is_json(field: Field[Any], feature: Any) -> bool:
    from pyarrow import types

    if getattr(field.type, "extension_name", None) == JSON_EXTENSION:
        return True
    if not (types.is_string(field.type) or types.is_large_string(field.type)):
        return False
    is_extension = (field.metadata or {}).get(EXTENSION_KEY) == JSON_EXTENSION.encode()
    is_feature = isinstance(feature, dict) and feature.get("_type") == JSON_FEATURE
    return is_extension or is_feature


def _item_feature(feature: Any) -> Any:
    """Return the type of a list's items: `[TYPE]`, or `{"_type": "List", "feature": TYPE}`."""
    if isinstance(feature, dict):
        return feature.get("feature")
    if isinstance(feature, list) and feature:
        return feature[0]
    return None


def _struct_decoder(field: Field[Any], feature: Any) -> ValueDecoder:
    """Return the decoder of structs: it leaves out the keys that are null."""
    kind = field.type
    decoders: dict[str, ValueDecoder | None] = {}
    for index in range(kind.num_fields):
        child = kind.field(index)
        child_feature = None
        if isinstance(feature, dict):
            child_feature = feature.get(child.name)
        decoders[child.name] = _decoder_of(child, child_feature)

    def decode(value: Mapping[str, Any]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, item in value.items():
            if item is not None:
                items[key] = _decode_or_none(decoders[key], item)
        return items

    return decode


def _decode_map(
    pairs: list[tuple[Any, Any]], decoder: ValueDecoder | None
) -> dict[str, Any] | list[tuple[Any, Any]]:
    """Return the object of a map with texts as keys. Other maps have no value in JSON, and stay lists of pairs."""
    if not all(isinstance(key, str) for key, _ in pairs):
        return pairs
    return {key: _decode_or_none(decoder, item) for key, item in pairs}


def _decode_json(value: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not JSON."""
    try:
        return load_json(value.encode())
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg}") from error


def _decode_or_none(decoder: ValueDecoder | None, value: Any) -> Any:
    if decoder is None or value is None:
        return value
    return decoder(value)
