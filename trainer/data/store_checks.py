"""Checks that a token store has what a run needs: a token, a block or a pair, and loss."""

from __future__ import annotations

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.formatting import count_text
from trainer.data import store
from trainer.data.ignored_parts import CUT_DOCUMENTS, DROPPED_DOCUMENTS, describe_ignored


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
        what = "the data is shorter than one block"
        _check_overlong(meta, what)
        size = f"{count_text(meta.n_tokens, 'token')} in {count_text(meta.n_documents, 'document')}"
        hint = "add more text"
        if meta.n_tokens > 1:
            hint = text("{}, or {}", hint, Key("data.seq_length", meta.n_tokens, is_override=True))
        raise PrepError(what, f"{size}, a block has {seq_length:,}", hint)


def check_has_token(meta: store.StoreMeta) -> None:
    """Raise PrepError if the data has no token."""
    if not meta.n_tokens:
        what = "the data has no token"
        _check_overlong(meta, what)
        hint = text("set another {}", Key("data.path"))
        raise PrepError(what, "all its documents are empty", hint)


def check_has_loss(tokens: store.MappedTokens, meta: store.StoreMeta) -> None:
    """Raise PrepError if no token of the data counts in the loss."""
    if not tokens.count_loss() and tokens.n_tokens:
        what = "the data has no token to train on"
        _check_overlong(meta, what)
        why = "all its tokens are in fields in brackets, or none is in a turn of the assistant"
        hint = text("set another {}, or for conversations {}", Key("data.fields"), Key("data.loss"))
        raise PrepError(what, why, hint)


def _check_overlong(meta: store.StoreMeta, what: str) -> None:
    """Raise PrepError if long documents were cut or dropped, which explains that tokens are missing."""
    overlong = {name: meta.ignored.get(name, 0) for name in (CUT_DOCUMENTS, DROPPED_DOCUMENTS)}
    if any(overlong.values()):
        hint = text("a larger {}, or another {}", Key("data.seq_length"), Key("data.overlong"))
        raise PrepError(what, ", ".join(describe_ignored(overlong)), hint)
