"""Datasets of a run: tokenized as a recipe and a model need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family
from trainer.data.chat_template import ChatTemplate, recipe_template
from trainer.data.conversations import LossRule
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.files import Note
from trainer.data.find_files import NO_REMOTE_FILES, RemoteFiles
from trainer.data.packing import (
    Dataset,
    PackedDataset,
    document_dataset,
    split_holdout,
    with_stride,
)
from trainer.data.seq2seq import (
    SpanCorruptionDataset,
    SpanCorruptionTokenIds,
    sentinel_ids,
    seq2seq_dataset,
)
from trainer.data.store import MappedTokens
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe import Recipe
from trainer.recipe.data_table import SPAN_CORRUPTION, Data, recipe_span_sizes, split_sources
from trainer.recipe.text_fields import CHAT_FORMATS, TRAINING, parse_fields
from trainer.training.source_datasets import (
    Datasets,
    build_mixture,
    eval_selection,
    find_data_shape,
    tokenize_in_group,
    train_selection,
)

CONFIG_HINT = "correct the config.json of the source checkpoint, and convert it again"


class DataModel(Protocol):
    """The properties of a model for its data."""

    @property
    def family(self) -> Family:
        """The model family."""
        ...

    @property
    def arch_config(self) -> ArchConfig:
        """The choices of its layers."""
        ...

    @property
    def true_vocab_size(self) -> int:
        """Vocabulary size without padding."""
        ...


def build_datasets(
    recipe: Recipe,
    model: DataModel,
    *,
    model_config: HFConfig,
    folders: Mapping[str, Path],
    stop_ids: tuple[int, ...] = (),
    group: ProcessGroup | None = None,
    remote: RemoteFiles = NO_REMOTE_FILES,
    checks_digests: bool = True,
    recorded: RecordedTokens | None = None,
    progress: Callable[[int, int, int], None],
    note: Callable[[str], None],
) -> Datasets:
    """Tokenize the data of a recipe, or map the tokens that an earlier run made.

    All processes of a job call it together.

    Args:
        recipe: The recipe.
        model: The model to train.
        model_config: config.json of the start checkpoint.
        folders: `tokenizer` and `cache`: defaults for the recipe keys of these names. `spare`,
            optional: folder for tokens missing in the cache, if the cache must not be written to.
        stop_ids: Tokens that end a text when the model generates. Conversations without loss on one of them
            are counted. Empty if that is unknown.
        group: Processes of the job. None means one process.
        remote: Finds the data files of URLs.
        checks_digests: See `TokenizeConfig`.
        recorded: See `TokenizeConfig`.
        progress: Called with the bytes tokenized so far, the total bytes, and the tokens so far.
        note: Called with messages for the user.

    Returns:
        The training and evaluation datasets.

    Raises:
        PrepError: The data, the tokenizer or the holdout is invalid, or does not fit the model.
    """
    build = partial(
        _build_source,
        model=model,
        model_config=model_config,
        seed=recipe.seed,
        stride=recipe.eval.stride,
        make_config=partial(
            _tokenize_config,
            folders=folders,
            stop_ids=stop_ids,
            remote=remote,
            checks_digests=checks_digests,
            recorded=recorded,
        ),
        find_shape=partial(
            find_data_shape,
            remote=remote,
            group=group or SingleProcess(),
            is_only=recipe.data.sources is None,
        ),
        tokenize=partial(tokenize_in_group, group=group or SingleProcess(), progress=progress),
    )
    return build_mixture(recipe.data, build, note=note)


def _build_source(
    data: Data,
    source: str,
    note: Note,
    *,
    model: DataModel,
    model_config: HFConfig,
    seed: int,
    stride: int | None,
    make_config: Callable[[Data, str, DataModel, HFConfig], TokenizeConfig],
    find_shape: Callable[..., Data],
    tokenize: Callable[..., MappedTokens],
) -> Datasets:
    """Return the datasets of one source."""
    data = find_shape(data, note=note)
    config = make_config(data, source, model, model_config)
    make_dataset = partial(
        _build_dataset,
        config=config,
        data=data,
        seed=seed,
        model_config=model_config,
        special_ids=_span_special_ids(data, config, model_config),
        note=note,
    )
    if config.examples.has_encoder:
        # Called for its error, before all files are tokenized.
        decoder_start_token_id(model_config, config.vocab)
        if config.examples.eos_id is None:
            note("config.json has no eos_token_id: targets get no end-of-sequence token")
    if data.eval_paths is None:
        tokens = tokenize(config, note=note)
        train, evaluation = split_holdout(make_dataset(tokens), data.holdout)
        if evaluation is not None:
            evaluation = with_stride(evaluation, stride)
        return Datasets(train, evaluation, tokens.identity)
    # The evaluation files come first: they are usually small, so their errors show early.
    eval_tokens = tokenize(_eval_config(config, data), note=note)
    train_tokens = tokenize(config, note=note)
    return Datasets(
        train=make_dataset(train_tokens),
        evaluation=with_stride(make_dataset(eval_tokens), stride),
        identity=f"{train_tokens.identity} {eval_tokens.identity}",
    )


def tokenize_configs(
    recipe: Recipe,
    model: DataModel,
    *,
    model_config: HFConfig,
    folders: Mapping[str, Path],
    stop_ids: tuple[int, ...] = (),
    remote: RemoteFiles = NO_REMOTE_FILES,
    note: Note = lambda text: None,
) -> Iterator[tuple[str, TokenizeConfig]]:
    """Yield the name and the config of each token store of a recipe, in the order of `build_datasets`.

    The names are `train` and `validation`, after the name of the source in a mixture. The arguments are as for
    `build_datasets`.

    Raises:
        PrepError: The data does not fit the model.
    """
    for source, data in split_sources(recipe.data):
        prefix = source_name = ""
        if source is not None:
            source_name = source.name
            prefix = f"{source_name}-"
        data = find_data_shape(data, remote=remote, is_only=source is None, note=note)
        config = _tokenize_config(
            data,
            source_name,
            model,
            model_config,
            folders=folders,
            stop_ids=stop_ids,
            remote=remote,
        )
        if data.eval_paths is not None:
            yield f"{prefix}validation", _eval_config(config, data)
        yield f"{prefix}train", config


def _eval_config(config: TokenizeConfig, data: Data) -> TokenizeConfig:
    """Return the config of the evaluation files of a source."""
    assert data.eval_paths is not None
    return replace(
        config,
        paths=data.eval_paths,
        selection=eval_selection(data),
        max_examples=0,
        is_evaluation=True,
    )


def _tokenize_config(
    data: Data,
    source: str,
    model: DataModel,
    model_config: HFConfig,
    *,
    folders: Mapping[str, Path],
    stop_ids: tuple[int, ...],
    remote: RemoteFiles,
    checks_digests: bool = True,
    recorded: RecordedTokens | None = None,
) -> TokenizeConfig:
    """Return how a recipe tokenizes its data."""
    tokenizer = Path(data.tokenizer or folders["tokenizer"])
    # A block of span corruption is longer than its target: only the noise goes there.
    seq_length = data.seq_length
    if data.objective == SPAN_CORRUPTION:
        seq_length = recipe_span_sizes(data).block_length
    return TokenizeConfig(
        type=data.type,
        paths=data.path or (),
        examples=_example_settings(
            data, model, model_config, tokenizer=tokenizer, stop_ids=stop_ids
        ),
        seq_length=seq_length,
        tokenizer=tokenizer,
        vocab=model.true_vocab_size,
        cache=Path(data.cache or folders["cache"]),
        scratch_dir=folders.get("spare"),
        source_length=data.source_length or 0,
        max_examples=data.max_examples,
        selection=train_selection(data),
        bad_lines=data.bad_lines,
        ids_dtype=data.ids_dtype,
        max_document_nbytes=data.max_document_bytes,
        remote=remote,
        source=source,
        packing=data.packing,
        overlong=data.overlong,
        checks_digests=checks_digests,
        recorded=recorded,
    )


def _example_settings(
    data: Data,
    model: DataModel,
    model_config: HFConfig,
    *,
    tokenizer: Path,
    stop_ids: tuple[int, ...],
) -> ExampleSettings:
    """Return the settings of examples."""
    chat_template: ChatTemplate | None = None
    add_eos = data.add_eos
    is_chat = data.format in CHAT_FORMATS
    if is_chat:
        chat_template = recipe_template(data, tokenizer)
        # A template ends each turn itself, usually with the end token.
        add_eos = bool(add_eos)
    settings = ExampleSettings(
        fields=data.fields or "",
        fields_from_example=data.fields_from_example or "",
        chat_template=chat_template,
        chat_format=data.format if is_chat else "chat",
        joins_last_turns=data.chat_template == TRAINING,
        loss=LossRule(data.loss, data.loss_reasoning),
        has_encoder=model.arch_config.encoder is not None and data.objective != SPAN_CORRUPTION,
        bos_id=_special_id(model_config, "bos_token_id"),
        eos_id=_special_id(model_config, "eos_token_id"),
        stop_ids=stop_ids,
        add_bos=data.add_bos,
        add_eos=add_eos,
        source_prefix=data.source_prefix or "",
        prepend_text=data.prepend_text,
        subfield_separator=data.subfield_separator,
    )
    _check_special_ids(data, settings, model.true_vocab_size)
    if data.objective != SPAN_CORRUPTION:
        _check_encoder(data, settings, model.family.name)
    if not is_chat:
        # Invalid fields fail here, before all files are read for their digests.
        compile_fields(settings, vocab=model.true_vocab_size)
    return settings


def _build_dataset(
    tokens: MappedTokens,
    *,
    config: TokenizeConfig,
    data: Data,
    seed: int,
    model_config: HFConfig,
    special_ids: SpanCorruptionTokenIds | None,
    note: Callable[[str], None],
) -> Dataset:
    """Return the dataset of a store. `special_ids` are the token ids of span corruption."""
    settings = config.examples
    if special_ids is not None:
        sizes = recipe_span_sizes(data)
        return SpanCorruptionDataset(
            tokens,
            sizes,
            special_ids,
            source_length=data.source_length or sizes.source_length,
            seq_length=data.seq_length,
            seed=seed,
            first_row=0,
            n_rows=tokens.n_blocks,
        )
    if settings.has_encoder:
        start_id = decoder_start_token_id(model_config, config.vocab)
        return seq2seq_dataset(
            tokens, config.source_length, decoder_start_id=start_id, eos_id=settings.end_id
        )
    first_input: int | None = None
    if data.always_start_with_bos:
        first_input = settings.bos_id
    if config.has_blocks:
        return PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks, first_input=first_input)
    dataset = document_dataset(tokens, data.packing, first_input=first_input)
    if dataset.rows.max_length == 1:
        raise PrepError(
            "the data has no token to train on",
            "each document has one token, and the first token of a document is not predicted",
            text(
                "set another {}, or {}",
                Key("data.path"),
                Key("data.add_bos", "true", is_override=True),
            ),
        )
    places = f"{100 * dataset.rows.fraction_with_token:.2f} % of their places have a token"
    note(f"{dataset.n_rows:,} sequences of {dataset.seq_length:,}: {places}")
    return dataset


def _span_special_ids(
    data: Data, config: TokenizeConfig, model_config: HFConfig
) -> SpanCorruptionTokenIds | None:
    """Return the token ids that span corruption adds.

    None if the objective is another one.
    """
    if data.objective != SPAN_CORRUPTION:
        return None
    eos_id = config.examples.eos_id
    if eos_id is None:
        why = "span corruption ends each source and target with it"
        raise PrepError("config.json has no eos_token_id", why, CONFIG_HINT)
    return SpanCorruptionTokenIds(
        sentinel_ids(
            load_tokenizer(config.tokenizer), recipe_span_sizes(data).n_spans, config.vocab
        ),
        eos=eos_id,
        decoder_start=decoder_start_token_id(model_config, config.vocab),
    )


def _check_special_ids(data: Data, settings: ExampleSettings, vocab: int) -> None:
    """Raise UsageError if the recipe adds a special token that the model does not have."""
    for key, needs_it, token_id in (
        ("add_bos", bool(data.add_bos), settings.bos_id),
        ("always_start_with_bos", data.always_start_with_bos, settings.bos_id),
        ("add_eos", data.add_eos, settings.eos_id),
    ):
        if needs_it and (token_id is None or not 0 <= token_id < vocab):
            name = "bos_token_id"
            if key == "add_eos":
                name = "eos_token_id"
            what = f"no {name}"
            if token_id is not None:
                what = f"{name} {token_id:,}, but {vocab:,} tokens"
            raise usage_error(
                f"`data.{key}` is true",
                f"the model has {what}",
                text("{}", Key(f"data.{key}", "false", is_override=True)),
            )


def _check_encoder(data: Data, settings: ExampleSettings, name: str) -> None:
    """Raise UsageError if the data does not fit a model with an encoder, or one without."""
    if not settings.has_encoder:
        for key in ("source_length", "source_prefix"):
            if getattr(data, key) is not None:
                what = f"`data.{key}` is {getattr(data, key)!r:.60}"
                raise usage_error(
                    what,
                    f"{name} has no encoder to read the source columns in brackets",
                    "remove it",
                )
        return
    for key, is_set, hint in (
        ("always_start_with_bos", data.always_start_with_bos, "remove it"),
        ("prepend_text", bool(data.prepend_text), text("{}", Key("data.source_prefix"))),
        (
            "format",
            data.format in CHAT_FORMATS,
            text("{}", Key("data.fields", "[article], summary")),
        ),
    ):
        if is_set:
            what = f"`data.{key}` is {getattr(data, key)!r:.60}"
            raise usage_error(what, f"{name} has an encoder", hint)
    if not (
        settings.fields_from_example or (settings.fields and parse_fields(settings.fields).source)
    ):
        why = "it trains on pairs of a source and a target, or on text by span corruption"
        hint = text(
            "{} and {}, or {}",
            Key("data.type", "json"),
            Key("data.fields", "[article], summary"),
            Key("data.objective", SPAN_CORRUPTION),
        )
        raise usage_error(f"{name} has an encoder, but the data has no source column", why, hint)


def decoder_start_token_id(config: HFConfig, vocab: int) -> int:
    """Return the first token id of a decoder with an encoder: `decoder_start_token_id`, else `pad_token_id`.

    Args:
        config: The model's config.json.
        vocab: Vocabulary size.

    Raises:
        PrepError: The config has neither id, or the id is not in the vocabulary.
    """
    what = "config.json has no valid decoder_start_token_id"
    # T5 starts with its padding token, and older configs of T5 have no other key for it.
    key = "decoder_start_token_id"
    if config.get(key) is None:
        key = "pad_token_id"
    token_id = config.get(key)
    if token_id is None:
        why = "it has neither decoder_start_token_id nor pad_token_id"
        raise PrepError(what, why, CONFIG_HINT)
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab:
        why = f"{key} is {token_id!r:.60}; the vocabulary has {vocab:,} tokens"
        raise PrepError(what, why, CONFIG_HINT)
    return token_id


def _special_id(config: HFConfig, key: str) -> int | None:
    """Return a token id of a model's config, the first of several.

    None if the config has none.
    """
    value = config.get(key)
    # E.g. Llama 3 has a list of end tokens. The first one ends a document.
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, int):
        return value
    return None
