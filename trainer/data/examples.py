"""Examples: the segments of a record with their loss, the settings that decide them, and what they ignore."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prepcli.core.json_values import JsonObject, JsonValue
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import DEFAULT_LOSS, LossRule
from trainer.data.tokenizer import TokenIds
from trainer.recipe.text_fields import DataFormat, Field, TextField, TokenField, parse_fields


class IdentityChange(Enum):
    """A change of the tokens that the same files, tokenizer and settings give, since an earlier version.

    The value says it in an error message. The identity of a store has an input for each change that affects the
    store, so a run of an earlier version is compared with the identity without this input.
    """

    TABLE_ROWS = "conversations in Parquet and Arrow files are read in another way since then"
    CHAT_RENDERING = "conversations are rendered in another way since then"
    CONTENT_PARTS = (
        "contents of messages that are lists of parts are rendered in another way since then"
    )
    JSON_LISTS = "JSON files that are one list are read since then, where their lines were invalid"
    SINGLE_BOS = "a document that has the begin token gets no second one since then"


# Start and end of a part of a text, in characters, and the loss weight of its tokens.
LossSpan: TypeAlias = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class Segment:
    """A separately tokenized part of a document."""

    content: str | TokenIds  # A text, or token ids to store unchanged
    weight: int = 1  # Loss weight of its tokens as targets, 0 or 1
    # The parts of a text with loss. Other tokens have weight 0. Where parts overlap, the later one counts. None if
    # `weight` is the weight of all tokens.
    loss_spans: tuple[LossSpan, ...] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A document of the token store, or a part of a long one. With an encoder, two documents."""

    target: tuple[Segment, ...]  # Decoder input, and the text to predict
    nbytes: int  # Bytes of the file that it accounts for. Progress reports add them up.
    # Encoder input. It is stored as a separate document, before the target's. None without an encoder.
    source: tuple[Segment, ...] | None = None
    # Whether the target's document ends with this example. False for all but the last part of a long document.
    ends_document: bool = True
    # Names of parts of the record that its tokens do not show, once per occurrence. See `describe_ignored`.
    ignored: tuple[str, ...] = ()
    # Tokens that end a text when a model generates. One of them should have loss. Empty if that is not checked.
    stop_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Characters and token ids of its segments."""
        return sum(len(segment.content) for segment in (*self.target, *(self.source or ())))


# Names of the parts. Stores record them.
TOOLS = "tools"
HIDDEN_REASONING = "hidden_reasoning"
NO_STOP_TOKEN = "no_stop_token"
NO_LOSS = "no_loss"
EMPTY_TURN = "empty_turn"
CUT_DOCUMENTS = "cut_documents"
DROPPED_DOCUMENTS = "dropped_documents"


CONVERSATIONS = ("conversation has", "conversations have")
TURNS = ("turn of the assistant has", "turns of the assistant have")
DOCUMENTS = ("document is", "documents are")
# Name -> what it counts, one and several, and the rest of its note.
IGNORED: Mapping[str, tuple[str, str, str]] = {
    TOOLS: (*CONVERSATIONS, "`tools` that the chat template does not show"),
    HIDDEN_REASONING: (
        *TURNS,
        'reasoning that the template leaves out: `data.chat_template = "training"` shows it',
    ),
    NO_LOSS: (*CONVERSATIONS, "no token with loss"),
    EMPTY_TURN: (*TURNS, "no text, only the token that ends the turn has loss"),
    CUT_DOCUMENTS: (*DOCUMENTS, "cut to the length of a sequence"),
    DROPPED_DOCUMENTS: (*DOCUMENTS, "dropped, because of more tokens than a sequence"),
    NO_STOP_TOKEN: (
        *CONVERSATIONS,
        "no loss on a token that ends a text: the model does not learn to stop",
    ),
}


def lacks_stop_token(
    ids: TokenIds, weights: npt.NDArray[np.float32], stop_ids: Sequence[int]
) -> bool:
    """Return whether tokens [T] have loss, but none of them ends a text when a model generates."""
    loss_ids = ids[weights > 0]
    return bool(len(stop_ids) and len(loss_ids) and not np.isin(loss_ids, stop_ids).any())


def describe_ignored(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line about each ignored part of a store."""
    for name, (singular, plural, line) in IGNORED.items():
        count = counts.get(name, 0)
        if count:
            noun = singular if count == 1 else plural
            yield f"{count:,} {noun} {line}"


# Part of the identity of stores of conversations. Raise it when they give other tokens or weights.
CHAT_VERSION = 2
# The version before `IdentityChange.CONTENT_PARTS`.
FIRST_CHAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExampleSettings:
    """The settings of the examples of a record."""

    # Columns and tokens, in the grammar of `parse_fields`. Empty for types of data without columns.
    fields: str = ""
    fields_from_example: str = ""  # Column with the fields of each record, instead of `fields`
    # Template of the messages in the column `fields`. None for other data.
    chat_template: ChatTemplate | None = None
    chat_format: DataFormat = "chat"  # Form of the conversations in the columns `fields`
    has_encoder: bool = False  # Whether an encoder reads the fields in brackets
    bos_id: int | None = None  # The model's beginning-of-sequence token, or None
    eos_id: int | None = None  # The model's end-of-sequence token, or None
    # Render each turn of the assistant as the template renders the last one
    joins_last_turns: bool = False
    loss: LossRule = DEFAULT_LOSS  # The turns of conversations with loss
    stop_ids: tuple[int, ...] = ()  # All tokens that end a text when the model generates
    stop_texts: tuple[str, ...] = ()  # Their texts
    prefix_ids: tuple[int, ...] = ()  # The tokens that the tokenizer puts before a text
    # Put `bos_id` before each document, without loss. None puts `prefix_ids` there if the document begins with a
    # text.
    add_bos: bool | None = None
    # Put `eos_id`, if the model has it, after each document. None is like True, except for data of token ids: these
    # documents stay unchanged.
    add_eos: bool | None = None
    source_prefix: str = ""  # Text put before each source
    # Text put before the first field of each document. The field must be a text.
    prepend_text: str = ""
    subfield_separator: str = " "  # Text between the texts of a field

    def begin_ids(self, first: Field | None = None) -> tuple[int, ...]:
        """Return the tokens put before each document with this first field. A document without fields is a text."""
        if self.add_bos is None:
            if first is None or isinstance(first, TextField):
                return self.prefix_ids
            return ()
        if not self.add_bos or self.bos_id is None:
            return ()
        if isinstance(first, TokenField) and first.token in ("bos", self.bos_id):
            # The fields put the token there themselves.
            return ()
        return (self.bos_id,)

    @property
    def end_id(self) -> int | None:
        """The token put after each document, or None."""
        return None if self.add_eos is False else self.eos_id

    def identity_inputs(self, without: Collection[IdentityChange] = ()) -> JsonObject:
        """Return the inputs of a store's identity except `fields` and `end_id`, without some changes.

        Default values are not included, so the settings of version 0.1 still give the same identity.
        """
        inputs: JsonObject = {
            "prefix": self.source_prefix,
            "fields_from_example": self.fields_from_example,
            "chat": self.chat_template and self.chat_template.identity,
            **self._chat_inputs(without),
            **self._begin_inputs(without),
            "prepend": self.prepend_text,
            "separator": [self.subfield_separator] if self.subfield_separator != " " else None,
            "grammar": self._grammar_inputs(),
        }
        return {key: value for key, value in inputs.items() if value not in (None, "")}

    @property
    def used_begin_ids(self) -> tuple[int, ...]:
        """The tokens put before the documents that these settings describe."""
        first_fields: list[Field | None] = [None]
        if self.fields and self.chat_template is None and not self.fields_from_example:
            fields = parse_fields(self.fields)
            first_fields = [*fields.source[:1], *fields.target[:1]]
            if not self.has_encoder:
                first_fields = [fields.items[0][0]]
        return max((self.begin_ids(field) for field in first_fields), key=len, default=())

    def _begin_inputs(self, without: Collection[IdentityChange]) -> JsonObject:
        """Return the input for the tokens put before documents: an id, or a list of several."""
        if IdentityChange.SINGLE_BOS in without and self.add_bos:
            return {"bos": self.bos_id}
        ids = self.used_begin_ids
        if not ids:
            return {}
        key = "bos"
        if self.chat_template is not None and self.chat_template.bos_text:
            key = "chat_bos"
        if len(ids) == 1:
            return {key: ids[0]}
        return {key: [*ids]}

    def _chat_inputs(self, without: Collection[IdentityChange]) -> JsonObject:
        """Return the settings of the text and the loss of conversations."""
        if self.chat_template is None or IdentityChange.CHAT_RENDERING in without:
            return {}
        version = CHAT_VERSION
        if IdentityChange.CONTENT_PARTS in without:
            version = FIRST_CHAT_VERSION
        return {
            "chat_version": version,
            "chat_format": self.chat_format if self.chat_format != "chat" else None,
            "loss": self.loss.identity_inputs(),
            "last_turns": self.joins_last_turns or None,
            "stops": [*self.stop_texts] or None,
        }

    def _grammar_inputs(self) -> list[JsonValue] | None:
        """Return the other settings of the tokens of `data.fields`, or None."""
        # There are none if the fields are one column, or if the model has an encoder and each field is a column.
        if self.chat_template is not None or not (self.fields or self.fields_from_example):
            return None
        items = () if self.fields_from_example else parse_fields(self.fields).items
        is_plain = all(
            isinstance(field, TextField) and len(field.columns) == 1 for field, _ in items
        )
        if is_plain and not self.fields_from_example and (self.has_encoder or len(items) == 1):
            return None
        return [self.has_encoder, self.bos_id, self.eos_id]


def token_segment(token_id: int | None, weight: int = 1) -> tuple[Segment, ...]:
    """Return the segment of a token. Return no segment for None."""
    return () if token_id is None else (Segment(np.array([token_id], np.uint32), weight),)


def begin_segments(settings: ExampleSettings) -> tuple[Segment, ...]:
    """Return the segments put before each document that is a text or a conversation."""
    ids = settings.begin_ids()
    if not ids:
        return ()
    return (Segment(np.array(ids, np.uint32), 0),)


def largest_added_id(settings: ExampleSettings) -> int:
    """Return the largest id put before or after documents, or -1."""
    ids = (*settings.begin_ids(), settings.end_id)
    return max((token_id for token_id in ids if token_id is not None), default=-1)
