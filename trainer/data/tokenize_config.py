"""Settings of the tokens of a dataset, the identity of its tokens, and why a resumed run has others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from prepcli.core.errors import Key, Option, PrepError, join_texts, text, usage_error
from trainer.data.dataset_layout import WHOLE, Selection
from trainer.data.encode import OverlongRule
from trainer.data.examples import ExampleSettings, IdentityChange
from trainer.data.files import DataFile, Note
from trainer.data.find_files import (
    DataFinder,
    find_data_files,
    resolve_type,
    with_companions,
)
from trainer.data.readers import READERS, TABLE_READERS
from trainer.data.records import RecordSettings
from trainer.data.shards import read_valid_meta
from trainer.data.tokenizer import TextTokenizer
from trainer.recipe.key_types import change_text
from trainer.recipe.text_fields import (
    CONCATENATED,
    DEFAULT_FIELDS,
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    WHOLE_TOKENS,
    DataType,
    FileType,
    Overlong,
    Packing,
)

# Settings that put tokens around a document.
ADDED_TOKENS = ("add_bos", "add_eos", "prepend_text")
# Part of a store's identity. Raise it when the same files give other tokens.
TOKENS_VERSION = 1
# Version of the objects in rows of tables, which chat templates see. Also a part of the identity.
ROW_VALUES_VERSION = 1


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """The inputs of the tokens of a dataset, and their folder."""

    type: DataType  # Type of the data files
    paths: tuple[str, ...]  # Files, folders, globs and URLs, as `find_data_files` takes them
    examples: ExampleSettings  # Settings of the examples of records
    seq_length: int  # Tokens of a block, or maximum tokens of a target
    tokenizer: Path  # A tokenizer.json, or a folder with one
    vocab: int  # Size of the model's vocabulary without padding
    cache: Path  # Folder of token stores
    scratch_dir: Path | None = None  # Folder for a new store, if `cache` must not be written to
    source_length: int = 0  # Maximum tokens of a source
    # Maximum number of records, or of documents of data without columns. 0 for all.
    max_examples: int = 0
    selection: Selection = WHOLE  # Part of a dataset
    bad_lines: int = 0  # Maximum number of invalid records to skip
    ids_dtype: str = DEFAULT_IDS_DTYPE  # Dtype of token ids in files without a recorded dtype
    # Maximum bytes of a line, a row or a value
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    remote: DataFinder | None = None  # Finds the files of URLs
    source: str = ""  # Name of the source in a mixture. Empty for the only source of a run.
    is_evaluation: bool = False  # Whether the data is for evaluation
    packing: Packing = CONCATENATED  # The recipe's `data.packing`. Ignored with an encoder.
    overlong: Overlong = WHOLE_TOKENS  # What becomes of records longer than a sequence
    # Read all data files and tokens for their digests. If False, files with the sizes and times of an earlier call,
    # and their tokens, are trusted.
    checks_digests: bool = True
    # The tokens with which a resumed run began. Others are an error, before they are made. None if there is no such
    # run.
    recorded: RecordedTokens | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether documents are concatenated and cut into blocks."""
        return self.packing == CONCATENATED

    @property
    def overlong_rule(self) -> OverlongRule:
        """The rule for documents that are longer than a sequence."""
        return OverlongRule(self.overlong, self.seq_length, self.examples.bos_id)

    @property
    def encoder_length(self) -> int:
        """Maximum tokens of a source. 0 without an encoder."""
        return self.source_length if self.examples.has_encoder else 0

    @property
    def has_rows(self) -> bool:
        """Whether documents are arranged in rows."""
        return not self.has_blocks and not self.examples.has_encoder


def find_config_files(
    config: TokenizeConfig, tokenizer: TextTokenizer, note: Note
) -> tuple[TokenizeConfig, tuple[Path | DataFile, ...]]:
    """Return a config with the type of its files and the tokenizer's prefix, and the files.

    Local files are not read yet.

    Raises:
        PrepError: There are no files, or the config does not fit them.
    """
    eos_id = config.examples.eos_id
    if eos_id is not None and not 0 <= eos_id < config.vocab:
        why = f"the vocabulary without padding has {config.vocab:,} tokens"
        hint = (
            "correct eos_token_id in the config.json of the source checkpoint, and convert it again"
        )
        raise PrepError(f"eos_token_id {eos_id:,} is out of range", why, hint)
    found = find_data_files(
        config.paths, config.type, config.selection, remote=config.remote, note=note
    )
    file_type = resolve_type(found, config.type)
    config = set_file_type(config, file_type)
    if READERS[file_type].has_ids:
        check_unused_settings(config, note)
        return config, with_companions(found, file_type)
    if not config.is_evaluation:
        for line in tokenizer.notes():
            note(line)
    if config.examples.chat_template is not None:
        # Templates may end a turn with the start of the next one.
        tokens = [tokenizer.codec.token(token) for token in config.examples.stop_ids]
        stop_texts = tuple(token for token in tokens if token)
        config = replace(config, examples=replace(config.examples, stop_texts=stop_texts))
    elif config.examples.add_bos is None:
        # Documents begin as the tokenizer begins a text. The training data reports it.
        examples = replace(config.examples, prefix_ids=tokenizer.prefix_ids())
        begin_ids = examples.used_begin_ids
        if begin_ids and not config.is_evaluation:
            tokens = " ".join(tokenizer.codec.token(token) or str(token) for token in begin_ids)
            note(
                f"each document begins with {tokens}, as the tokenizer begins a text: `data.add_bos = false` omits it"
            )
        config = replace(config, examples=examples)
    return config, with_companions(found, file_type)


def set_file_type(config: TokenizeConfig, file_type: FileType) -> TokenizeConfig:
    """Return a config for files of a type. Types without columns have no fields.

    Raises:
        UsageError: The recipe names columns, and the files have none.
    """
    if file_type in DEFAULT_FIELDS:
        return replace(config, type=file_type)
    if config.overlong != WHOLE_TOKENS:
        what = text("{}", Key("data.overlong", config.overlong))
        why = f"files of type {file_type} have no records, whose tokens can be cut"
        raise usage_error(what, why, "remove it")
    settings = config.examples
    if (
        settings.fields_from_example
        or settings.chat_template
        or settings.fields not in ("", *DEFAULT_FIELDS.values())
    ):
        fields = settings.fields or settings.fields_from_example
        raise usage_error(
            text('{} is "{:.60}"', Key("data.fields"), fields),
            f"files of type {file_type} have no columns",
            text("{} sets the type of the files", Key("data.type")),
        )
    return replace(config, type=file_type, examples=replace(settings, fields=""))


def check_unused_settings(config: TokenizeConfig, note: Note) -> None:
    """Raise UsageError for settings of added tokens with data of token ids.

    In a mixture the settings may be meant for another source, so they are only reported.
    """
    names = [name for name in ADDED_TOKENS if getattr(config.examples, name)]
    if not names:
        return
    keys = join_texts(", ", [text("{}", Key(f"data.{name}")) for name in names])
    if not config.source:
        why = "token ids in data files are stored unchanged"
        raise usage_error(
            text("{} cannot be used with token ids", keys),
            why,
            "remove it, and add the tokens to the files",
        )
    note(f"token ids are stored as they are, without {keys}")


def checked_identity(
    config: TokenizeConfig, files: Sequence[DataFile], tokenizer: TextTokenizer, note: Note
) -> str:
    """Return the identity of a store.

    A run that began with an earlier version keeps its tokens, if they are in the cache.

    Raises:
        PrepError: A resumed run began with other tokens.
    """
    identity = store_identity(config, files, tokenizer.digest)
    recorded = config.recorded
    if recorded is None or identity in recorded.identities:
        return identity

    def identify(add_bos: bool | None, without: Collection[IdentityChange]) -> str:
        prefix_ids: tuple[int, ...] = ()
        has_ids = READERS[resolve_type(files, config.type)].has_ids
        if config.examples.chat_template is None and not has_ids:
            prefix_ids = tokenizer.prefix_ids()
        examples = replace(config.examples, add_bos=add_bos, prefix_ids=prefix_ids)
        begun = replace(config, examples=examples)
        return store_identity(begun, files, tokenizer.digest, without=without)

    add_bos = config.examples.add_bos
    cause = recorded.find_cause(add_bos, identify)
    missing: Path | None = None
    if cause is not None:
        # A damaged store cannot be made again: this version makes other tokens.
        begun = config.cache / cause.identity
        missing = begun if read_valid_meta(begun) is None else None
        if missing is None and cause.add_bos == add_bos:
            note(f"the run keeps the tokens of the earlier version: {cause.description}")
            return cause.identity
    raise recorded.change_error(identity, add_bos, cause, missing=missing)


def store_identity(
    config: TokenizeConfig,
    files: Sequence[DataFile],
    tokenizer_digest: str,
    *,
    without: Collection[IdentityChange] = (),
) -> str:
    """Return a digest of all inputs of the ids and weights, without some changes since an earlier version.

    File paths and `seq_length` are not among them.
    """
    settings = config.examples
    fields = settings.fields if config.type in DEFAULT_FIELDS else None
    inputs = {
        "version": TOKENS_VERSION,
        "type": config.type,
        "fields": fields,
        "eos_id": settings.end_id,
        "tokenizer": tokenizer_digest,
        "files": [[file.nbytes, file.digest] for file in files],
    }
    # A setting is an input only if it differs from its default. Stores of earlier versions, which
    # did not have the setting, therefore keep their identity. The order of keys is part of the
    # digest.
    inputs |= settings.identity_inputs(without)
    has_row_values = settings.chat_template is not None and config.type in TABLE_READERS
    if has_row_values and IdentityChange.TABLE_ROWS not in without:
        inputs["row_values"] = ROW_VALUES_VERSION
    if rule := config.overlong_rule.identity_inputs():
        inputs["overlong"] = rule
    inputs |= record_settings(config).identity_inputs(config.type, without)
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


def record_settings(config: TokenizeConfig) -> RecordSettings:
    """Return the settings of reading records."""
    return RecordSettings(
        vocab=config.vocab,
        eos_id=config.examples.eos_id,
        bad_lines=config.bad_lines,
        ids_dtype=config.ids_dtype,
        max_document_nbytes=config.max_document_nbytes,
        limit=config.max_examples,
    )


def record_key(config: TokenizeConfig, tokenizer: TextTokenizer) -> str:
    """Return the key of the record of a config's tokens."""
    settings = store_identity(config, (), tokenizer.digest)
    part = config.selection
    inputs = [config.paths, part.config, part.split, part.revision, settings]
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


BOS_KEY = "data.add_bos"
CHANGED_DATA = "the data has changed since the run began"
# Returns the identity of a store with another `data.add_bos` and without some changes.
Identify = Callable[[bool | None, Collection[IdentityChange]], str]


@dataclass(frozen=True, slots=True)
class TokenCause:
    """Why a run began with other tokens."""

    identity: str  # Identity of the store with which it began
    add_bos: bool | None  # Its `data.add_bos`
    changes: tuple[IdentityChange, ...]  # The changes since its version

    @property
    def description(self) -> str:
        """The changes since its version, for messages."""
        return ", and ".join(change.value for change in self.changes)


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens with which a run began."""

    identities: tuple[str, ...]  # Identity of each store
    add_bos: bool | None  # Its `data.add_bos`

    def encode(self) -> str:
        """Return these tokens as a text for the other processes of a job."""
        return json.dumps([self.identities, self.add_bos])

    @classmethod
    def decode(cls, encoded: str) -> RecordedTokens:
        """Return the tokens in a text of `encode`."""
        identities, add_bos = json.loads(encoded)
        return cls(tuple(identities), add_bos)

    def find_cause(self, add_bos: bool | None, identify: Identify) -> TokenCause | None:
        """Return why the run began with other tokens than those of a store. None if that is unknown.

        `identify` computes the identity as earlier versions and settings had it.
        """
        # Runs of version 0.1.0 put no begin token before documents, and their recipes do not say so.
        begun = dict.fromkeys((add_bos, self.add_bos, False))
        # The simplest causes come first.
        for n_changes in range(len(IdentityChange) + 1):
            for changes in itertools.combinations(IdentityChange, n_changes):
                for then in begun:
                    identity = identify(then, changes)
                    if identity in self.identities:
                        return TokenCause(identity, then, changes)
        return None

    def change_error(
        self, identity: str, add_bos: bool | None, cause: TokenCause | None, *, missing: Path | None
    ) -> PrepError:
        """Return the error for a store that is none of these. `missing` is the folder of the cause, if it is lost."""
        restart = restart_hint()
        if cause is None:
            why = f"{' '.join(self.identities)}, now {identity}"
            hint = text("use the files with which the run began, on all hosts; {}", restart)
            return PrepError(CHANGED_DATA, why, hint)
        causes: list[str] = []
        hint = restart
        if cause.add_bos != add_bos:
            causes.append(f"{BOS_KEY}: {change_text((cause.add_bos, add_bos))}")
            keeps = text("{} keeps it", Key(BOS_KEY, cause.add_bos, is_override=True))
            hint = text("{}; {}", keeps, restart)
        if cause.changes:
            causes.append(cause.description)
        if cause.changes and missing is not None:
            # This version makes these tokens with no setting.
            causes.append(f"{missing} is missing or damaged")
            hint = text("the earlier version finishes the run; {}", restart)
        return PrepError(CHANGED_DATA, ", and ".join(causes), hint)


def restart_hint() -> str:
    """Return the hint to start a run again that cannot resume."""
    return text(
        "{} starts again from step 0; another {} keeps both runs",
        Option("restart", True),
        Key("name"),
    )
