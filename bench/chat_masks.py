"""Tokens and loss masks of conversations with published chat templates, against transformers and marked texts.

    python -m bench.chat_masks --templates FOLDER

The folder has templates as `NAME.jinja`, e.g. those of TRL (`trl/chat_templates`). Needs the `parity` extra. Prints a
table with a row per template and a column per conversation:

    equal      the ids are those of `apply_chat_template`, and the mask is that of the marked text, which is written by
               hand (`tests/golden/chat_masks/published/NAME.txt`), or of `return_assistant_tokens_mask` for a
               template with markers
    ids        the ids are equal. There is no marked text
    refused    the template refuses the conversation, in transformers too
    error      prep refuses the conversation, because the template leaves out a part of it

Exit code 1 if ids or masks differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.chat_masks import (
    CONVERSATIONS,
    MARKED_TEXTS,
    MARKER,
    TokenizerOfBytes,
    compare,
    read_marked_texts,
    with_contents,
)

PUBLISHED = MARKED_TEXTS / "published"
# Templates that need a content, and whether they take the arguments of tool calls as a text.
WITH_CONTENTS = {"deepseekv3": True, "deepseekv3_training": False}


def compare_template(tokenizer: TokenizerOfBytes, file: Path) -> list[str]:
    """Return the result of each conversation with a template."""
    template = file.read_text()
    texts: dict[str, str] = {}
    marked = PUBLISHED / f"{file.stem}.txt"
    if marked.exists():
        texts = read_marked_texts(marked)
    results: list[str] = []
    for name, conversation in CONVERSATIONS.items():
        reference = conversation
        if file.stem in WITH_CONTENTS:
            has_text_arguments = WITH_CONTENTS[file.stem]
            reference = with_contents(conversation, has_text_arguments=has_text_arguments)
        expected = texts.get(name)
        result = compare(tokenizer, template, conversation, expected=expected, reference=reference)
        if result == "equal" and expected is None and MARKER not in template:
            result = "ids"
        results.append(result)
    return results


def format_results(rows: dict[str, list[str]]) -> str:
    """Return a Markdown table, and the reasons of refusals and errors below it."""
    header = ["template", *CONVERSATIONS]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    reasons: dict[str, int] = {}
    for name, results in rows.items():
        cells = [name]
        for result in results:
            kind, _, reason = result.partition(": ")
            if reason:
                number = reasons.setdefault(reason, len(reasons) + 1)
                kind = f"{kind} ({number})"
            cells.append(kind)
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all templates of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, required=True, help="folder of NAME.jinja")
    folder: Path = parser.parse_args(arguments).templates
    files = sorted(folder.glob("*.jinja"))
    if not files:
        parser.error(f"no NAME.jinja in {folder}")
    with tempfile.TemporaryDirectory() as work:
        tokenizer = TokenizerOfBytes(Path(work))
        rows = {file.stem: compare_template(tokenizer, file) for file in files}
    print(format_results(rows))
    differs = any(
        result.startswith(("other", "only")) for results in rows.values() for result in results
    )
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
