"""Conversations whose tokens and loss masks are compared with transformers and with marked texts.

A marked text is the rendered conversation with `⟦` and `⟧` around its parts with loss. `…` stands for any text without
loss, e.g. the instructions that a template writes about tools. The files of marked texts are written by hand, from the
rule that a turn of the assistant has loss after the text that a template writes for a model to continue, up to the
token that ends the turn.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject
from trainer.data.chat_template import ChatTemplate
from trainer.data.encode import encode_batch
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record
from trainer.data.tokenizer import TextTokenizer, load_tokenizer

# Tokens that end a text, as `generation_config.json` names them.
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<eos>"),
)
SPECIAL_TOKENS = ("<s>", *STOPS, "<|im_start|>", "<|assistant|>", "<|start|>", "<|channel|>")
BOS_AND_EOS = (("bos_token", "<s>"), ("eos_token", "</s>"))
MARKED_TEXTS = Path(__file__).parents[1] / "golden" / "chat_masks"
# A line before each marked text of a file, with the name of its conversation. The last line has none.
HEADER = re.compile("^===(?: (.+))?\n", re.M)
# Templates with markers of generated text have it.
MARKER = "endgeneration"
LOSS_PARTS = re.compile("⟦(.*?)⟧", re.S)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the schemas of their tools."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of a conversation, and whether each token has loss."""

    ids: list[int]
    mask: list[int]


def user(content: str) -> JsonObject:
    return {"role": "user", "content": content}


def assistant(content: str, **keys: Any) -> JsonObject:
    return {"role": "assistant", "content": content, **keys}


def call(number: int, **arguments: Any) -> JsonObject:
    function = {"name": "weather", "arguments": arguments}
    # The ids of Mistral have nine characters.
    return {"id": f"call0000{number}", "type": "function", "function": cast(Any, function)}


def answer(number: int, content: str) -> JsonObject:
    """Return the answer of a tool."""
    key = f"call0000{number}"
    return {"role": "tool", "name": "weather", "tool_call_id": key, "content": content}


TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CONVERSATIONS: Mapping[str, Conversation] = {
    "single turn": Conversation([user("Hi"), assistant("Hello!")]),
    "multi-turn": Conversation([user("Hi"), assistant("Hello!"), user("So?"), assistant("Bye.\n")]),
    "system": Conversation(
        [
            {"role": "system", "content": "Be kind"},
            *(user("Hi"), assistant("Hello!"), user("So?"), assistant("Bye.")),
        ]
    ),
    "two calls": Conversation(
        [
            user("Weather?"),
            {"role": "assistant", "tool_calls": [call(1, city="Ulm"), call(2, city="Bonn", days=3)]},
            *(answer(1, "sun"), answer(2, "rain"), assistant("Sun and rain."), user("Thanks")),
            assistant("Welcome."),
        ],
        [TOOL],
    ),
    "reasoning": Conversation(
        [
            *(user("1+1?"), assistant("2", reasoning_content="One and one")),
            *(user("2+2?"), assistant("4", reasoning_content="Two and two")),
        ]
    ),
    "ends with user": Conversation([user("Hi"), assistant("Hello!"), user("So?")]),
}  # fmt: skip


def with_contents(conversation: Conversation, *, has_text_arguments: bool) -> Conversation:
    """Return a conversation with empty texts for absent contents, and with arguments as JSON texts or objects."""
    messages: list[JsonObject] = []
    for message in conversation.messages:
        if "tool_calls" in message:
            calls = json.loads(json.dumps(message["tool_calls"]))
            for item in calls if has_text_arguments else ():
                item["function"]["arguments"] = json.dumps(item["function"]["arguments"])
            message = {**message, "content": "", "tool_calls": calls}
        messages.append(message)
    return Conversation(messages, conversation.tools)


def read_marked_texts(file: Path) -> dict[str, str]:
    """Return the marked texts of a file by the name of their conversation."""
    pieces = HEADER.split(file.read_text())
    # Pieces at odd positions are the names. The line before the next header ends a text.
    return {name: text[:-1] for name, text in zip(pieces[1::2], pieces[2::2]) if name}


def without_markers(template: str) -> str:
    """Return a template without the markers of generated text."""
    return re.sub(r"\{%(-?)\s*(end)?generation\s*(-?)%\}", r"{%\1 set _ = 0 \3%}", template)


def write_tokenizer_of_bytes(file: Path) -> None:
    """Write a tokenizer.json with a token per byte and per special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS])
    tokenizer.save(str(file))


def marked_spans(text: str, marked: str) -> list[tuple[int, int]] | None:
    """Return the start and the end of each part of a text with loss. None if the marked text is not one of it."""
    pieces = [
        re.escape(piece).replace("…", "(?:.*)") if number % 2 == 0 else f"({re.escape(piece)})"
        for number, piece in enumerate(LOSS_PARTS.split(marked))
    ]
    match = re.fullmatch("".join(pieces), text, re.S)
    if match is None:
        return None
    return [match.span(number) for number in range(1, len(pieces) // 2 + 1)]


def mask_of_spans(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """Return whether each token overlaps a span of the text."""
    return [
        int(any(start < last and end > first for first, last in spans)) for start, end in offsets
    ]


class TokenizerOfBytes:
    """The tokenizer of bytes in prep and in transformers."""

    def __init__(self, folder: Path) -> None:
        """Write the tokenizer to a folder, and load it."""
        file = folder / "tokenizer.json"
        write_tokenizer_of_bytes(file)
        self.own: TextTokenizer = load_tokenizer(file)

        from transformers import PreTrainedTokenizerFast

        self.reference = PreTrainedTokenizerFast(
            tokenizer_file=str(file), bos_token="<s>", eos_token="</s>"
        )

    def prep_tokens(self, template: str, conversation: Conversation) -> Tokens:
        """Return the tokens of a conversation as prep trains them.

        Raises:
            PrepError: The template rejects or does not show the messages.
        """
        settings = ExampleSettings(
            fields="messages",
            chat_template=ChatTemplate(
                "chat.jinja", template, BOS_AND_EOS, date=datetime.date.today()
            ),
            add_eos=False,
            stop_texts=STOPS,
        )
        record = {"messages": conversation.messages, "tools": conversation.tools}
        example = compile_fields(settings, vocab=300).build(Record(record, "rows.jsonl:1", 1))
        batch = encode_batch([example], self.own)
        assert batch.weights is not None
        return Tokens(batch.ids[:].tolist(), [int(weight) for weight in batch.weights])

    def reference_tokens(self, template: str, conversation: Conversation) -> Tokens:
        """Return the tokens of transformers. The mask is that of the markers of a template, else without loss.

        Raises:
            Exception: The template rejects the messages.
        """
        encoded: Any = self.reference.apply_chat_template(
            cast(Any, conversation.messages),
            tools=cast(Any, conversation.tools),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=MARKER in template,
        )
        ids = encoded["input_ids"]
        return Tokens(ids, encoded.get("assistant_masks", [0] * len(ids)))

    def _decode(self, ids: list[int]) -> str:
        return cast(str, self.reference.decode(ids, clean_up_tokenization_spaces=False))

    def show(self, tokens: Tokens) -> str:
        """Return the marked text of tokens, as one line."""
        text = ""
        has_loss = 0
        for token_id, has_loss_now in zip(tokens.ids, tokens.mask, strict=True):
            if has_loss_now != has_loss:
                text += "⟦" if has_loss_now else "⟧"
            has_loss = has_loss_now
            text += self._decode([token_id])
        return repr(text + "⟧" * has_loss)

    def marked_mask(self, tokens: Tokens, marked: str) -> list[int] | None:
        """Return the mask of a marked text for the tokens of transformers. None if their text is another one."""
        text = self._decode(tokens.ids)
        spans = marked_spans(text, marked)
        if spans is None:
            return None
        encoded = self.reference(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == tokens.ids
        return mask_of_spans(encoded["offset_mapping"], spans)


def compare(
    tokenizer: TokenizerOfBytes,
    template: str,
    conversation: Conversation,
    *,
    expected: str | None = None,
    reference: Conversation | None = None,
) -> str:
    """Compare the tokens of a conversation, and return "equal" or the difference.

    The mask is compared with that of the marked text, and with that of the markers of a template.

    Args:
        tokenizer: The tokenizer.
        template: A chat template.
        conversation: The conversation.
        expected: Its marked text, or None.
        reference: The conversation in the form that transformers needs. None is the same form.

    Returns:
        "equal", "refused: MESSAGE" if both refuse it, "error: MESSAGE" if only prep refuses it, or what differs.
    """
    try:
        theirs = tokenizer.reference_tokens(template, reference or conversation)
    except Exception as error:  # a template is a program
        try:
            tokenizer.prep_tokens(template, conversation)
        except PrepError as own:
            return f"refused: {own.why}"
        return f"only transformers refuses it: {error}"
    try:
        tokens = tokenizer.prep_tokens(template, conversation)
    except PrepError as error:
        return f"error: {error.why}"
    if tokens.ids != theirs.ids:
        return "other ids"
    masks: list[list[int]] = []
    if MARKER in template:
        masks.append(theirs.mask)
    if expected is not None:
        mask = tokenizer.marked_mask(theirs, expected)
        if mask is None:
            return f"other text: {tokenizer.show(tokens)}"
        masks.append(mask)
    if any(tokens.mask != mask for mask in masks):
        return f"other mask: {tokenizer.show(tokens)}"
    return "equal"
