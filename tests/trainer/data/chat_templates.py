"""Chat templates in the ways of published models, in `tests/golden/chat_templates`.

They are written for the tests. Each has one property that makes turns hard to find. The names say which models have the
property.
"""

from __future__ import annotations

from pathlib import Path


def read_template(name: str) -> str:
    """Return the text of a template."""
    folder = Path(__file__).parents[2] / "golden" / "chat_templates"
    return (folder / f"{name}.jinja").read_text("utf-8")


CHATML = read_template("chatml")
LLAMA3 = read_template("llama3")
GEMMA = read_template("gemma")
# The earlier turns of the assistant have no reasoning, and the last one always has a place for it (Qwen3).
LAST_REASONS = read_template("last_reasons")
# The system text is in the last message of the user (Mistral).
SYSTEM_IN_LAST = read_template("system_in_last")
# The next role ends a turn (GLM).
NEXT_ROLE_ENDS = read_template("next_role_ends")
# The last turn ends with another token than those before it (gpt-oss).
LAST_RETURNS = read_template("last_returns")
# Arguments are texts, and calls are shown only if the content is null. Reasoning is never shown (DeepSeek).
TEXT_ARGUMENTS = read_template("text_arguments")
# A text without a prompt for the assistant ends with the end token (Phi-3).
END_OF_TEXT = read_template("end_of_text")
# The prompt opens the reasoning, which earlier turns do not have. Calls are XML (Qwen3.5, Nemotron 3).
OPEN_THINKING = read_template("open_thinking")
# Markers of generated text, and calls in the syntax of Python (LFM2).
PYTHON_CALLS = read_template("python_calls")
