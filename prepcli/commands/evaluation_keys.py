"""The recipe keys that an evaluation uses. Only the standard library is imported: the help of a command lists them."""

from __future__ import annotations

KEYS_BY_TABLE = {
    "data": (
        *("add_bos", "add_eos", "always_start_with_bos", "bad_lines", "cache", "config", "fields"),
        *("fields_from_example", "format", "ids_dtype", "max_document_bytes", "max_examples"),
        *(
            "mean_noise_span_length",
            "noise_density",
            "objective",
            "packing",
            "prepend_text",
            "revision",
        ),
        *(
            "seq_length",
            "source_length",
            "source_prefix",
            "split",
            "subfield_separator",
            "tokenizer",
            "type",
        ),
    ),
    "model": ("attention_kernel", "dtype", "head_chunk_size", "k_chunk_size", "q_chunk_size"),
}
EFFECTIVE_KEYS = frozenset(
    f"{table}.{key}" for table, keys in KEYS_BY_TABLE.items() for key in keys
)
KEYS_TEXT = "; ".join(f"[{table}]: {', '.join(keys)}" for table, keys in KEYS_BY_TABLE.items())
