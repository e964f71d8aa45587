"""The recipe keys that an evaluation uses, and the options of `evaluate` that set them.

Only light modules are imported: the help of a command lists the keys.
"""

from __future__ import annotations

from prepcli.core.errors import NO_VALUE, Key, Option, override_text

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
