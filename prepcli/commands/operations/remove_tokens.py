"""`prep remove-tokens`: undo the last `prep add-tokens` of a checkpoint."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from functools import partial
from typing import Unpack

from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    PlannedConversion,
    run_conversion,
)
from prepcli.commands.operations.opening import common_options, make_match_options, recorded_values
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.token_options import RemoveTokensOptions
from prepcli.commands.operations.vocabulary_change import (
    check_source,
    count_with_ids,
    draft_change,
    folder_options,
    padded_rows,
    plan_change,
    recorded_additions,
)
from prepcli.core.counts import count_text
from prepcli.core.errors import Command, PrepError, text, usage_error
from prepcli.core.observer import Observer, observer_of
from prepcli.core.option_spec import PathLike, format_command_line
from prepcli.core.progress import Progress
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.added_tokens import RECORD_FILE, Addition, encode_record
from prepcli.planning.plan import Fill
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import find_vocabulary
from prepcli.targets.streams import VocabResize
from prepcli.targets.token_files import files_without_tokens

REMOVE = "remove-tokens"


@public
def remove_tokens(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[RemoveTokensOptions],
) -> Conversion:
    """Remove the tokens of the last `add_tokens`, and write another checkpoint of the same format.

    Embedding, head and the head's bias [V + N, ...] become [V, ...]. The files of the tokenizer are byte for byte as
    before the addition.

        prep.remove_tokens("llama-7b-tools", "llama-7b-again")

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `RemoveTokensOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: The source records no added tokens, or is not supported.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The tokenizer was changed since, or the conversion failed. An interrupted one resumes when called
            again.
    """
    common = common_options(
        checkpoint, out, options, dry_run=dry_run, process_options=process_options
    )
    return run_conversion(
        folder_options(common),
        observer_of(progress),
        partial(plan_remove_tokens, options),
        allow_adapters=True,
    )


def plan_remove_tokens(
    options: RemoveTokensOptions, source: Source, located: LocatedCheckpoint
) -> PlannedConversion:
    """Plan a copy of a checkpoint without the tokens of the last addition."""
    check_source(source, REMOVE)
    additions = recorded_additions(source)
    if not additions:
        what = f"{source.display_name} records no added tokens"
        hint = text("pass an output of {}", Command("add-tokens"))
        raise usage_error(what, f"it has no {RECORD_FILE}", hint)
    addition = additions[-1]
    present = find_vocabulary(source, make_match_options(options))
    _check_vocabulary(source, present.vocabulary.true_size, addition)
    num_rows = padded_rows(source, present, addition.padded_vocab_size)
    old_vocabulary = Vocabulary(addition.true_vocab_size, num_rows)
    contents: dict[str, bytes | None] = {**files_without_tokens(source, addition)}
    contents[RECORD_FILE] = encode_record(additions[:-1]) if additions[:-1] else None
    name = f"{located.model_name.removesuffix('-added')}-removed"
    resize = VocabResize(
        old_vocabulary,
        present.names,
        Fill("zeros"),
        keeps_padding=False,
        dropped_rule="added tokens",
    )
    plan = plan_change(
        draft_change(source, present, old_vocabulary, resize, contents),
        command=REMOVE,
        request=format_command_line(
            REMOVE, source.display_name, RemoveTokensOptions, recorded_values(options)
        ),
        name=name,
    )
    removed = [{"id": token.id, "content": token.content} for token in addition.tokens]
    return PlannedConversion(
        plan,
        name,
        notes=_notes(addition),
        fields={"removed_tokens": {"count": len(removed), "tokens": removed}},
        next_command=f"prep verify {OUT_PLACEHOLDER}",
    )


def _check_vocabulary(source: Source, true_size: int, addition: Addition) -> None:
    """Raise PrepError unless the true vocabulary ends with the added tokens."""
    if true_size == addition.new_vocab_size:
        return
    what = f"the vocabulary of {source.display_name} has {true_size:,} tokens"
    why = f"{RECORD_FILE} records {addition.new_vocab_size:,}: it was changed since"
    hint = text("undo the change, or pass the output of {}", Command("add-tokens"))
    raise PrepError(what, why, hint)


def _notes(addition: Addition) -> tuple[str, ...]:
    first = addition.true_vocab_size
    tokens, ids = count_with_ids(first, len(addition.tokens))
    notes = [
        f"{tokens} removed: {ids}",
        "their rows are dropped, also where training changed them",
    ]
    padding = addition.padded_vocab_size - first
    if padding:
        notes.append(
            f"padding of {count_text(padding, 'row')} is zeros, as padding of prep is by default"
        )
    return tuple(notes)
