"""`prep add-tokens` and `prep remove-tokens`: other tokens in the tokenizer, the config and the vocabulary.

The checkpoint is a Hugging Face folder, or an Orbax checkpoint with its training state.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast, get_args

from prepcli.commands.operations.checkpoint_options import common_options, make_match_options
from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    OpenedConversion,
    open_conversion,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import (
    AddTokensOptions,
    RemoveTokensOptions,
    SaveInitOptions,
)
from prepcli.commands.operations.pad_vocab import check_seed, make_fill, mesh_rows
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.save_init import resolve_layout
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text, join_names
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import REQUIRED, PathLike, with_defaults
from prepcli.engine.fills import Fill
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.added_tokens import (
    RECORD_FILE,
    AddedToken,
    Addition,
    RecordedToken,
    encode_record,
    overlapping_texts,
    parse_record,
    read_token_list,
)
from prepcli.planning.item_storage import StorageName
from prepcli.planning.manifest_fields import REPLACED_PADDING_RULE, AddedTokensRecord, Manifest
from prepcli.planning.plan import SmallFile
from prepcli.planning.tensors import is_leaf_path, split_name
from prepcli.sources.openers.tensor_files import ADAPTER_FAMILY
from prepcli.sources.source import AVERAGE_SLOT, Source
from prepcli.sources.tensor_match import Vocabulary, check_padded_size
from prepcli.sources.vocabulary_tensors import VocabularyTensors, find_vocabulary
from prepcli.targets.orbax_item import OrbaxLayout
from prepcli.targets.planner import (
    Draft,
    Placed,
    VocabResize,
    draft_of,
    resize_vocabulary,
    with_source_state,
)
from prepcli.targets.safetensors_folder import place_in_source_files
from prepcli.targets.token_files import (
    SourceTokenizer,
    VocabularyTokenizer,
    files_with_tokens,
    files_without_tokens,
    open_tokenizer,
    read_side_file,
    tokens_for,
)

ADD = "add-tokens"
REMOVE = "remove-tokens"
NORMALIZED_HINT = 'set "normalized" to false in a JSON list'


@public
def add_tokens(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[AddTokensOptions],
) -> Conversion:
    """Add tokens to a checkpoint and its tokenizer, and write another checkpoint.

    The source is a Hugging Face folder or an Orbax checkpoint of prep, with a tokenizer.json or a SentencePiece model
    alone. The output has the same format. New rows of moments are zeros.

    Embedding, head and the head's bias [V, ...] become [V + N, ...] for N tokens. Rows of padding are used first.

        prep.add_tokens("llama-7b", "llama-7b-tools", tokens="tokens.txt")

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `AddTokensOptions`. `tokens` is required.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: A token is empty, doubled, part of another one or in the vocabulary, or the source is not supported.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    check_seed(options["init"], options["seed"])
    if options["tokens"] is REQUIRED:
        hint = text("{}", Option("tokens", "FILE"))
        raise usage_error(text("{} is missing", Option("tokens")), "it lists the new tokens", hint)
    path = Path(options["tokens"])
    if process_options is not None and process_options.num_workers > 1 and path.is_fifo():
        raise usage_error(
            text("{} cannot be a pipe", Option("tokens", str(path))),
            text("{} start the same command, and a pipe is read once", Option("workers")),
            "write the tokens to a file",
        )
    tokens = read_token_list(path)
    # A quantised model keeps its codes and scales.
    stored = {**options, "quantized": "stored", "verbatim": None}
    common = common_options(
        checkpoint, out, stored, dry_run=dry_run, process_options=process_options
    )
    conversion = open_conversion(ADD, common, progress, allow_adapters=True)
    return _write_addition(conversion, options, tokens)


def _write_addition(
    conversion: OpenedConversion, options: AddTokensOptions, tokens: Sequence[AddedToken]
) -> Conversion:
    """Write a copy of a checkpoint with more tokens. The first one gets the id after the last one of the vocabulary."""
    source = conversion.source
    _check_source(source, ADD)
    opened = open_tokenizer(source)
    tokens = tokens_for(opened, tokens)
    present = find_vocabulary(source, make_match_options(options), options["true_vocab"])
    vocabulary = present.vocabulary
    _check_sizes(source, opened.tokenizer, vocabulary)
    _check_new(source, opened.tokenizer, tokens)
    if present.layer_names:
        what = f"{source.display_name} has embeddings per layer, which is not supported"
        why = f"new tokens would have no rows in {join_names(sorted(present.layer_names))}"
        raise usage_error(what, why, "use a model without `hidden_size_per_layer_input`")
    num_tokens = vocabulary.true_size + len(tokens)
    check_padded_size(num_tokens, Option("tokens", str(options["tokens"])))
    contents, addition = _change_files(options["init"], source, opened, vocabulary, tokens)
    added: AddedTokensRecord = {
        "init": addition.init,
        "count": len(addition.tokens),
        "tokens": [{"id": token.id, "content": token.content} for token in addition.tokens],
    }
    num_rows = _padded_rows(source, present, max(num_tokens, vocabulary.stored_size))
    name = f"{conversion.located.model_name}-added"
    resize = VocabResize(
        vocabulary,
        present.names,
        Fill("zeros"),
        keeps_padding=False,
        added_count=len(tokens),
        added_fill=_make_added_fill(options, source, opened.tokenizer, tokens),
        dropped_rule=REPLACED_PADDING_RULE,
    )
    draft = _resized_draft(source, present, Vocabulary(num_tokens, num_rows), resize)
    draft = replace(draft, settings=Manifest(added_tokens=added))
    count, ids = _count_with_ids(vocabulary.true_size, added["count"])
    values = "the mean of their pieces" if options["init"] == "mean" else options["init"]
    notes = [f"{count} added: {ids}, rows of {values}"]
    padding = vocabulary.stored_size - vocabulary.true_size
    if padding:
        rows = count_text(padding, "row")
        notes.append(f"padding of {rows} is replaced: by tokens, then by zeros")
    next_command = f"prep pad-vocab {OUT_PLACEHOLDER}"
    if source.tree_manifest:
        next_command = f"prep verify {OUT_PLACEHOLDER}"
    return conversion.convert(
        *_place_change(draft, contents),
        AddTokensOptions,
        options,
        name=name,
        notes=notes,
        fields={"added_tokens": added},
        next_command=next_command,
    )


def _change_files(
    init: str,
    source: Source,
    opened: SourceTokenizer,
    vocabulary: Vocabulary,
    tokens: Sequence[AddedToken],
) -> tuple[dict[str, bytes | None], Addition]:
    """Return the content of each changed file, with the record of all additions, and the new addition."""
    first_id = vocabulary.true_size
    new_files, edits = files_with_tokens(source, opened.file_name, tokens, first_id)
    changed = opened.changed(source.root / opened.file_name, new_files[opened.file_name])
    _check_tokenizer(source, changed, tokens, first_id)
    recorded = [
        RecordedToken(id=token_id, content=token["content"])
        for token_id, token in enumerate(tokens, first_id)
    ]
    addition = Addition(
        tokens=tuple(recorded),
        init=init,
        true_vocab_size=vocabulary.true_size,
        padded_vocab_size=vocabulary.stored_size,
        files=edits,
    )
    contents: dict[str, bytes | None] = {**new_files}
    contents[RECORD_FILE] = encode_record((*recorded_additions(source), addition))
    return contents, addition


def _check_sizes(source: Source, tokenizer: VocabularyTokenizer, vocabulary: Vocabulary) -> None:
    """Raise UsageError unless the tokenizer has as many ids as the true vocabulary.

    The libraries number added tokens from the last one on. Ids cannot skip rows.
    """
    size = tokenizer.size
    if size == vocabulary.true_size:
        return
    name = source.display_name
    what = f"the tokenizer of {name} has {size:,} ids, its vocabulary {vocabulary.true_size:,} rows"
    why = "a new token gets the next id of the tokenizer and the next row of the vocabulary"
    hint = "use the tokenizer of the model"
    if size <= vocabulary.stored_size:
        hint = text("{}, if the rows after it are padding", Option("true_vocab", size))
    raise usage_error(what, why, hint)


def _check_new(
    source: Source, tokenizer: VocabularyTokenizer, tokens: Sequence[AddedToken]
) -> None:
    """Raise UsageError for tokens in the vocabulary, and for overlaps with its added tokens."""
    contents = [token["content"] for token in tokens]
    # A lowercasing tokenizer searches `Tool` as `tool`, so that the new token would hide an old token `tool`.
    searched: list[str] = []
    for token in tokens:
        content = token["content"]
        searched.append(tokenizer.normalize(content) if token["normalized"] else content)
    texts = dict.fromkeys([*contents, *searched])
    known = [content for content in texts if tokenizer.token_id(content) is not None]
    if known:
        names = join_names([repr(content) for content in known])
        what = f"{source.display_name} has these tokens already: {names}"
        why = "a token has one id, also with its normalized text"
        hint = "remove them from the list"
        if not set(known) <= set(contents):
            hint += f", or {NORMALIZED_HINT}"
        raise usage_error(what, why, hint)
    old = tokenizer.added_contents
    overlaps = overlapping_texts(contents, old) or overlapping_texts(searched, [*searched, *old])
    if overlaps:
        what = f"tokens overlap with each other or with added tokens of {source.display_name}"
        hint = "choose texts that do not contain each other"
        raise usage_error(what, join_names(overlaps), hint)


def _check_tokenizer(
    source: Source, changed: SourceTokenizer, tokens: Sequence[AddedToken], first_id: int
) -> None:
    """Raise PrepError unless the changed tokenizer encodes each new token as its id."""
    contents = [token["content"] for token in tokens]
    wrong: list[str] = []
    for token_id, ids in enumerate(changed.tokenizer.encode(contents), first_id):
        if ids != (token_id,):
            wrong.append(f"{contents[token_id - first_id]!r} has ids {list(ids)}, not [{token_id}]")
    if wrong:
        what = f"the tokenizer of {source.display_name} would not use the new tokens"
        hint = "use another text"
        if not changed.is_sentencepiece:
            hint = f"{NORMALIZED_HINT}, or {hint}"
        raise PrepError(what, join_names(wrong), hint)


def _make_added_fill(
    options: AddTokensOptions,
    source: Source,
    tokenizer: VocabularyTokenizer,
    tokens: Sequence[AddedToken],
) -> Fill:
    """Return the initialization of the embedding rows of the added tokens (`--init`)."""
    if options["init"] != "mean":
        return make_fill(options["init"], options["seed"], source)
    contents = [token["content"] for token in tokens]
    pieces = tokenizer.encode(contents)
    without = [repr(content) for content, ids in zip(contents, pieces, strict=True) if not ids]
    if without:
        what = text("{} does not fit {}", Option("init", "mean"), join_names(without))
        why = "the tokenizer has no pieces for them"
        raise usage_error(what, why, text("{}", Option("init", "normal")))
    return Fill("pieces", pieces=tuple(pieces))


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
    # A quantised model keeps its codes and scales.
    stored = {**options, "quantized": "stored", "verbatim": None}
    common = common_options(
        checkpoint, out, stored, dry_run=dry_run, process_options=process_options
    )
    conversion = open_conversion(REMOVE, common, progress, allow_adapters=True)
    return _write_removal(conversion, options)


def _write_removal(conversion: OpenedConversion, options: RemoveTokensOptions) -> Conversion:
    """Write a copy of a checkpoint without the tokens of the last addition."""
    source = conversion.source
    _check_source(source, REMOVE)
    additions = recorded_additions(source)
    if not additions:
        what = f"{source.display_name} records no added tokens"
        hint = text("pass an output of {}", Command("add-tokens"))
        raise usage_error(what, f"it has no {RECORD_FILE}", hint)
    addition = additions[-1]
    present = find_vocabulary(source, make_match_options(options))
    if present.vocabulary.true_size != addition.new_vocab_size:
        what = (
            f"the vocabulary of {source.display_name} has {present.vocabulary.true_size:,} tokens"
        )
        why = f"{RECORD_FILE} records {addition.new_vocab_size:,}: it was changed since"
        hint = text("undo the change, or pass the output of {}", Command("add-tokens"))
        raise PrepError(what, why, hint)
    num_rows = _padded_rows(source, present, addition.padded_vocab_size)
    old_vocabulary = Vocabulary(addition.true_vocab_size, num_rows)
    contents: dict[str, bytes | None] = {**files_without_tokens(source, addition)}
    contents[RECORD_FILE] = encode_record(additions[:-1]) if additions[:-1] else None
    name = f"{conversion.located.model_name.removesuffix('-added')}-removed"
    resize = VocabResize(
        old_vocabulary,
        present.names,
        Fill("zeros"),
        keeps_padding=False,
        dropped_rule="added tokens",
    )
    tokens, ids = _count_with_ids(addition.true_vocab_size, len(addition.tokens))
    notes = [
        f"{tokens} removed: {ids}",
        "their rows are dropped, also where training changed them",
    ]
    padding = addition.padded_vocab_size - addition.true_vocab_size
    if padding:
        rows = count_text(padding, "row")
        notes.append(f"padding of {rows} is zeros, as padding of prep is by default")
    removed = [{"id": token.id, "content": token.content} for token in addition.tokens]
    draft = _resized_draft(source, present, old_vocabulary, resize)
    return conversion.convert(
        *_place_change(draft, contents),
        RemoveTokensOptions,
        options,
        name=name,
        notes=notes,
        fields={"removed_tokens": {"count": len(removed), "tokens": removed}},
    )


# --- Both commands


def _count_with_ids(first: int, count: int) -> tuple[str, str]:
    """Return the number of tokens and their ids as texts, e.g. `2 tokens` and `ids 7 to 8`."""
    if count == 1:
        ids = f"id {first}"
    else:
        ids = f"ids {first} to {first + count - 1}"
    return count_text(count, "token"), ids


def recorded_additions(source: Source) -> tuple[Addition, ...]:
    """Return the recorded additions of a source."""
    data = read_side_file(source, RECORD_FILE)
    if data is None:
        return ()
    return parse_record(source.root / RECORD_FILE, data)


def _check_source(source: Source, command: str) -> None:
    """Raise UsageError unless tokens of a source can be added and removed."""
    manifest = source.tree_manifest
    if manifest.is_adapter or source.family is ADAPTER_FAMILY:
        what = f"{source.display_name} has only adapters"
        hint = text(
            "run {}: adapters that leave the embedding as it is fit the new base",
            Command(command, "BASE"),
        )
        raise usage_error(what, "tokenizer and embedding belong to the base model", hint)
    if source.tensor_file_names:
        return
    if not manifest:
        what = f"{source.display_name} is neither a Hugging Face folder nor an Orbax checkpoint of prep"
        hint = text("{} writes a Hugging Face folder", Command("export"))
        raise usage_error(what, f"{command} does not read its format", hint)
    if source.family.is_verbatim:
        what = f"{source.display_name} has the tensor names of its file"
        hint = text("run {} before {}", Command(command), Command("save-init"))
        raise usage_error(what, "its embedding is not known", hint)


def _padded_rows(source: Source, present: VocabularyTensors, num_rows: int) -> int:
    """Return the rows of a vocabulary in the output. For an Orbax checkpoint they are a multiple for its mesh."""
    layout = _item_layout(source)
    if layout is None or layout.partitioning.mesh is None:
        return num_rows
    return mesh_rows(present.rows, layout.partitioning, num_rows)


def _place_change(draft: Draft, files: Mapping[str, bytes | None]) -> tuple[Draft, Placed]:
    """Place a draft in the format and layout of its source, with other small files. Content None removes a file."""
    source = draft.source
    small_files = [file for file in draft.small_files if file.path not in files]
    for path, content in files.items():
        if content is not None:
            small_files.append(SmallFile(path, content))
    draft = replace(draft, small_files=tuple(small_files))
    layout = _item_layout(source)
    if layout is None:
        return draft, place_in_source_files(draft)
    moments: list[str] = []
    partial: list[str] = []
    for tensor in source.state_tensors:
        slot, tensor_name = split_name(tensor.name)
        if is_leaf_path(tensor_name):
            partial.append(tensor.name)
        elif tensor_name in draft.resize.tensors and slot != AVERAGE_SLOT:
            moments.append(tensor.name)
    if partial:
        what = f"the optimizer state of {source.display_name} is not supported"
        names = join_names(partial, max_names=3)
        why = f"it has factored moments, or moments of some parameters only: {names}"
        params_only = Command("reshard", source.display_name, Option("params_only", True))
        raise usage_error(what, why, text("{} leaves it out", params_only))
    # New rows of moments are zeros: no step has changed them.
    resize = replace(draft.resize, zero_tensors=frozenset(moments))
    draft = with_source_state(replace(draft, resize=resize))
    return draft, layout.place(draft)


def _resized_draft(
    source: Source, present: VocabularyTensors, vocabulary: Vocabulary, resize: VocabResize
) -> Draft:
    """Return a draft of a checkpoint with other rows of its vocabulary."""
    # Other tensors that the family ignores, such as buffers, are copied to a folder. Only `--drop` removes a tensor.
    kept = {tensor.name for tensor in source.tensors} if source.tensor_file_names else ()
    return resize_vocabulary(draft_of(source, present, kept=kept), vocabulary, resize)


def _item_layout(source: Source) -> OrbaxLayout | None:
    """Return the layout of an Orbax checkpoint. None for a Hugging Face folder."""
    manifest = source.tree_manifest
    if not manifest:
        return None
    options = with_defaults(SaveInitOptions, {"compress": manifest.compress})
    if manifest.storage in get_args(StorageName):
        options["storage"] = cast(StorageName, manifest.storage)
    return resolve_layout(options, source, params_only=False)
