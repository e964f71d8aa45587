"""Generated texts as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.chat_result import ChatResult
from prepcli.commands.operations.results import Generation
from prepcli.commands.operations.token_ids import format_token_ids


def generation_report(generation: Generation) -> Report:
    """Return one line per prompt, its text or its token ids, and the JSON object."""
    texts = [text for text in generation.texts if text is not None]
    lines = texts or [format_token_ids(ids) for ids in generation.tokens]
    fields = {
        "mesh": generation.mesh,
        "dtype": generation.dtype,
        "prompts": generation.prompts,
        "prompt_tokens": generation.prompt_tokens,
        "texts": texts or None,
        "tokens": generation.tokens,
        "ended": generation.ended,
        "tokens_per_s": generation.tokens_per_s,
        "compile_seconds": round(generation.compile_seconds, 3),
    }
    return Report("\n".join(lines), fields, process=generation.process)


def chat_report(result: ChatResult) -> Report:
    """Return the JSON object of a conversation. Its text was printed answer by answer."""
    fields = {
        "mesh": result.mesh,
        "dtype": result.dtype,
        "messages": result.messages,
        "tokens": result.num_tokens,
    }
    return Report("", fields)
