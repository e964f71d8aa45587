"""The changes of `add-tokens` and `remove-tokens` between an output and its source, for `verify_chain`."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.token_folder import recorded_additions
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.formats.added_tokens import RECORD_FILE, Addition
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import stored_vocabulary
from prepcli.targets.source_tokenizer import open_tokenizer
from prepcli.targets.token_files import files_with_tokens, read_side_file, recorded_tokens

ADD = "add-tokens"
REMOVE = "remove-tokens"


@dataclass(frozen=True, slots=True)
class TokenChange:
    """Different rows and files of an output and its source after tokens were added or removed.

    Attributes:
        added_rows: Rows of the added tokens in the output. Empty after a removal. Later rows are padding.
        vocab_rows: Rows of the output's vocabulary.
        files: Names of the files with equal content without the tokens.
    """

    added_rows: Range
    vocab_rows: int
    files: frozenset[str]


def token_change(output: Source, source: Source) -> TokenChange | None:
    """Return the change of tokens between an output and its source, or None for an output of another command.

    Raises:
        PrepError: The record of the tokens is missing or damaged, or a file was changed since.
    """
    command = (output.manifest or NO_MANIFEST).command
    if command == ADD:
        larger = output
        smaller = source
    elif command == REMOVE:
        larger = source
        smaller = output
    else:
        return None
    additions = recorded_additions(larger)
    if not additions:
        why = f"it has no {RECORD_FILE}"
        raise DamagedError(f"{larger.display_name} records no added tokens", why, GET_AGAIN_HINT)
    addition = additions[-1]
    equal_files = _files_with_tokens_alone(larger, smaller, addition)
    if recorded_additions(smaller) == additions[:-1]:
        equal_files.add(RECORD_FILE)
    first_row = addition.true_vocab_size
    num_added = len(addition.tokens) if command == ADD else 0
    return TokenChange(
        added_rows=(first_row, first_row + num_added),
        vocab_rows=stored_vocabulary(output).stored_size,
        files=frozenset(equal_files),
    )


def _files_with_tokens_alone(larger: Source, smaller: Source, addition: Addition) -> set[str]:
    """Return the files with no other difference between two checkpoints than added tokens.

    The files are made again. A record of insertions alone would also describe any other insertion.

    Raises:
        DamagedError: The tokens have other ids than the tokenizer gives them.
    """
    opened = open_tokenizer(smaller)
    size = opened.tokenizer.size
    if size != addition.true_vocab_size:
        what = f"{larger.display_name} records tokens with other ids than the tokenizer"
        why = f"they begin at {addition.true_vocab_size:,}, {smaller.display_name} has {size:,} ids"
        raise DamagedError(what, why, GET_AGAIN_HINT)
    tokens = recorded_tokens(larger, opened.file_name, addition)
    contents, _ = files_with_tokens(smaller, opened.file_name, tokens, addition.true_vocab_size)
    equal_files: set[str] = set()
    for name, content in contents.items():
        if read_side_file(larger, name) == content:
            equal_files.add(name)
    return equal_files
