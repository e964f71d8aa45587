"""Checks that a token store has what a run needs: a token, a block or a pair, and loss."""

from __future__ import annotations

from trainer.data import store
from trainer.models.errors import Key, PrepError, text


def check_has_source_target_pair(meta: store.StoreMeta) -> None:
    """Raise PrepError if the data of an encoder-decoder model is empty."""
    if not meta.n_tokens:
        raise PrepError(
            "the data has no source-target pair",
            "all lines are blank, or all their texts are empty",
            text("set another {}", Key("data.path")),
        )


def check_has_block(meta: store.StoreMeta, seq_length: int) -> None:
    """Raise PrepError if the data is shorter than one block."""
    if meta.n_tokens < seq_length:
        size = f"{count_text(meta.n_tokens, 'token')} in {count_text(meta.n_documents, 'document')}"
        hint = "add more text"
        if meta.n_tokens > 1:
            hint = text("{}, or {}", hint, Key("data.seq_length", meta.n_tokens, is_override=True))
        raise PrepError(
            "the data is shorter than one block", f"{size}, a block has {seq_length:,}", hint
        )


def check_has_token(meta: store.StoreMeta) -> None:
    """Raise PrepError if the data has no token."""
    if not meta.n_tokens:
        hint = text("set another {}", Key("data.path"))
        raise PrepError("the data has no token", "all its documents are empty", hint)


def check_has_loss(tokens: store.MappedTokens) -> None:
    """Raise PrepError if no token of the data counts in the loss."""
    if tokens.weight_codes is not None and not tokens.weight_codes.any():
        why = "all its tokens are in fields in brackets, or none is in a turn of the assistant"
        hint = text("set another {}, or for conversations {}", Key("data.fields"), Key("data.loss"))
        raise PrepError("the data has no token to train on", why, hint)


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun, e.g. `1 token` or `2 tokens`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"
