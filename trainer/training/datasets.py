"""Datasets of a run: tokenized as its recipe and model need them, mixed from its sources, and the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family
from trainer.data.chat_template import ChatTemplate, recipe_template
from trainer.data.columns import find_data_shape
from trainer.data.conversations import LossRule
from trainer.data.dataset_layout import eval_selection, train_selection
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.files import Note
from trainer.data.find_files import DataFinder
from trainer.data.order import RowOrder, mix_by_weight
from trainer.data.packing import (
    ConcatenatedDataset,
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
from trainer.data.tokenize import tokenize_in_group
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe import Recipe
from trainer.recipe.data_table import SPAN_CORRUPTION, Data, recipe_span_sizes, split_sources
from trainer.recipe.text_fields import CHAT_FORMATS, TRAINING, parse_fields

CONFIG_HINT = "correct the config.json of the source checkpoint, and convert it again"
ONE_PROCESS = SingleProcess()


@dataclass(frozen=True, slots=True)
class Datasets:
    """Training and evaluation datasets of a run."""

    train: Dataset  # Rows to train on
    evaluation: Dataset | None  # Rows to evaluate on. None without evaluation.
    identity: str  # Digest of the tokens of both, compared on resume
    # Weight of each source of a mixture. The rows of its sources are concatenated. Empty if the rows have one
    # order.
    weights: tuple[float, ...] = ()


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


@dataclass(frozen=True, slots=True)
class DatasetBuilder:
    """Tokenizes the data of a recipe, or maps the tokens that an earlier run made.

    All processes of a job build the datasets together.
    """

    recipe: Recipe
    model: DataModel  # The model to train
    model_config: HFConfig  # config.json of the start checkpoint, with the recipe's changes
    tokenizer: Path  # Tokenizer of the model, for a recipe without `data.tokenizer`
    cache: Path  # Folder of token stores, for a recipe without `data.cache`
    progress: Callable[[int, int, int], None]  # Receives the bytes done, all bytes, and the tokens
    note: Note  # Called with messages for the user
    # Folder for tokens missing in the cache, if the cache must not be written to
    scratch_dir: Path | None = None
    # Tokens that end a text when the model generates. Conversations without loss on one of them are counted.
    # Empty if that is unknown.
    stop_ids: tuple[int, ...] = ()
    group: ProcessGroup = ONE_PROCESS  # Processes of the job
    remote: DataFinder | None = None  # Finds the data files of URLs. None for local files only.
    checks_digests: bool = True  # See `TokenizeConfig`
    recorded: RecordedTokens | None = None  # See `TokenizeConfig`

    def build(self) -> Datasets:
        """Return the training and evaluation datasets: of the only source, or of all sources together.

        Raises:
            PrepError: The data, the tokenizer or the holdout is invalid, or does not fit the model.
        """
        data = self.recipe.data
        if data.sources is None:
            return self._build_source(data, "", self.note)
        datasets: dict[str, Datasets] = {}
        weights: dict[str, float] = {}
        for source, part in split_sources(data):
            assert source is not None
            with _label_errors(source.name):
                note = _label_notes(source.name, self.note)
                datasets[source.name] = self._build_source(part, source.name, note)
            if source.weight is not None:
                weights[source.name] = source.weight
        train = {name: part.train for name, part in datasets.items()}
        evaluation = {
            name: part.evaluation for name, part in datasets.items() if part.evaluation is not None
        }
        for line in _describe_mixture(train, weights):
            self.note(line)
        return Datasets(
            train=ConcatenatedDataset(train),
            evaluation=ConcatenatedDataset(evaluation) if evaluation else None,
            identity=" ".join(part.identity for part in datasets.values()),
            weights=tuple(weights.values()),
        )

    def configs(self) -> Iterator[tuple[str, TokenizeConfig]]:
        """Yield the name and the config of each token store, in the order in which `build` makes them.

        The names are `train` and `validation`, after the name of the source in a mixture.

        Raises:
            PrepError: The data does not fit the model.
        """
        for source, data in split_sources(self.recipe.data):
            prefix = source_name = ""
            if source is not None:
                source_name = source.name
                prefix = f"{source_name}-"
            data = self._find_shape(data, self.note)
            config = self._tokenize_config(data, source_name)
            if data.eval_paths is not None:
                yield f"{prefix}validation", _eval_config(config, data)
            yield f"{prefix}train", config

    def _find_shape(self, data: Data, note: Note) -> Data:
        is_only = self.recipe.data.sources is None
        return find_data_shape(
            data, remote=self.remote, group=self.group, is_only=is_only, note=note
        )

    def _build_source(self, data: Data, source: str, note: Note) -> Datasets:
        """Return the datasets of one source. `source` is its name in a mixture, or empty."""
        data = self._find_shape(data, note)
        config = self._tokenize_config(data, source)
        special_ids = _span_special_ids(data, config, self.model_config)
        if config.examples.has_encoder:
            # Called for its error, before all files are tokenized.
            decoder_start_token_id(self.model_config, config.vocab)
            if config.examples.eos_id is None:
                note("config.json has no eos_token_id: targets get no end-of-sequence token")

        def tokenize(config: TokenizeConfig) -> MappedTokens:
            return tokenize_in_group(config, self.group, progress=self.progress, note=note)

        def make_dataset(tokens: MappedTokens) -> Dataset:
            if special_ids is not None:
                return _span_dataset(tokens, data, special_ids, seed=self.recipe.seed)
            if config.examples.has_encoder:
                return seq2seq_dataset(
                    tokens,
                    config.source_length,
                    decoder_start_id=decoder_start_token_id(self.model_config, config.vocab),
                    eos_id=config.examples.end_id,
                )
            return _decoder_dataset(tokens, data, config, note)

        stride = self.recipe.eval.stride
        if data.eval_paths is None:
            tokens = tokenize(config)
            train, evaluation = split_holdout(make_dataset(tokens), data.holdout)
            if evaluation is not None:
                evaluation = with_stride(evaluation, stride)
            return Datasets(train, evaluation, tokens.identity)
        # The evaluation files come first: they are usually small, so their errors show early.
        eval_tokens = tokenize(_eval_config(config, data))
        train_tokens = tokenize(config)
        return Datasets(
            train=make_dataset(train_tokens),
            evaluation=with_stride(make_dataset(eval_tokens), stride),
            identity=f"{train_tokens.identity} {eval_tokens.identity}",
        )

    def _tokenize_config(self, data: Data, source: str) -> TokenizeConfig:
        """Return how a source is tokenized."""
        tokenizer = Path(data.tokenizer or self.tokenizer)
        # A block of span corruption is longer than its target: only the noise goes there.
        seq_length = data.seq_length
        if data.objective == SPAN_CORRUPTION:
            seq_length = recipe_span_sizes(data).block_length
        return TokenizeConfig(
            type=data.type,
            paths=data.path or (),
            examples=self._example_settings(data, tokenizer),
            seq_length=seq_length,
            tokenizer=tokenizer,
            vocab=self.model.true_vocab_size,
            cache=Path(data.cache or self.cache),
            scratch_dir=self.scratch_dir,
            source_length=data.source_length or 0,
            max_examples=data.max_examples,
            selection=train_selection(data),
            bad_lines=data.bad_lines,
            ids_dtype=data.ids_dtype,
            max_document_nbytes=data.max_document_bytes,
            remote=self.remote,
            source=source,
            packing=data.packing,
            overlong=data.overlong,
            checks_digests=self.checks_digests,
            recorded=self.recorded,
        )

    def _example_settings(self, data: Data, tokenizer: Path) -> ExampleSettings:
        """Return the settings of examples."""
        chat_template: ChatTemplate | None = None
        add_eos = data.add_eos
        is_chat = data.format in CHAT_FORMATS
        if is_chat:
            chat_template = recipe_template(data, tokenizer)
            # A template ends each turn itself, usually with the end token.
            add_eos = bool(add_eos)
        has_encoder = self.model.arch_config.encoder is not None
        settings = ExampleSettings(
            fields=data.fields or "",
            fields_from_example=data.fields_from_example or "",
            chat_template=chat_template,
            chat_format=data.format if is_chat else "chat",
            joins_last_turns=data.chat_template == TRAINING,
            loss=LossRule(data.loss, data.loss_reasoning),
            has_encoder=has_encoder and data.objective != SPAN_CORRUPTION,
            bos_id=_special_id(self.model_config, "bos_token_id"),
            eos_id=_special_id(self.model_config, "eos_token_id"),
            stop_ids=self.stop_ids,
            add_bos=data.add_bos,
            add_eos=add_eos,
            source_prefix=data.source_prefix or "",
            prepend_text=data.prepend_text,
            subfield_separator=data.subfield_separator,
        )
        vocab = self.model.true_vocab_size
        _check_special_ids(data, settings, vocab)
        if data.objective != SPAN_CORRUPTION:
            _check_encoder(data, settings, self.model.family.name)
        if not is_chat:
            # Invalid fields fail here, before all files are read for their digests.
            compile_fields(settings, vocab=vocab)
        return settings


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


def _span_dataset(
    tokens: MappedTokens, data: Data, special_ids: SpanCorruptionTokenIds, *, seed: int
) -> Dataset:
    """Return the blocks of a store with spans moved to their targets."""
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


def _decoder_dataset(
    tokens: MappedTokens, data: Data, config: TokenizeConfig, note: Note
) -> Dataset:
    """Return the rows of a store for a model without an encoder."""
    first_input: int | None = None
    if data.always_start_with_bos:
        first_input = config.examples.bos_id
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
    """Return the token ids that span corruption adds. None if the objective is another one."""
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
    """Return a token id of a model's config, the first of several. None if the config has none."""
    value = config.get(key)
    # E.g. Llama 3 has a list of end tokens. The first one ends a document.
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, int):
        return value
    return None


@contextmanager
def _label_errors(name: str) -> Iterator[None]:
    """Prefix PrepErrors raised in the block with the name of the data source."""
    try:
        yield
    except PrepError as error:
        what = text("source `{}`: {}", name, error.what)
        raise error.with_texts(what=what) from error.__cause__


def _label_notes(name: str, note: Note) -> Note:
    return lambda text: note(f"{name}: {text}")


def _describe_mixture(train: dict[str, Dataset], weights: dict[str, float]) -> list[str]:
    """Return a line per source: its sequences, and how often one epoch of the mixture takes them."""
    # An epoch of the mixture has as many sequences as all sources together.
    n_rows = sum(part.n_rows for part in train.values())
    total = sum(weights.values())
    lines: list[str] = []
    for name, part in train.items():
        share = weights[name] / total if weights else part.n_rows / n_rows
        epochs = share * n_rows / part.n_rows
        lines.append(
            f"{name}: {100 * share:.4g} % of {part.n_rows:,} sequences, {epochs:.4g} times in an epoch"
        )
    return lines


def make_order(datasets: Datasets, batch_size: int, *, seed: int, shuffle: bool) -> RowOrder:
    """Return the order of the training rows.

    Args:
        datasets: The datasets.
        batch_size: Rows of a step.
        seed: Seed of the permutations.
        shuffle: Permute the rows of each epoch.
    """
    train = datasets.train
    if not datasets.weights:
        return RowOrder(train.n_rows, batch_size, seed, shuffle)
    assert isinstance(train, ConcatenatedDataset)
    source_rows = tuple(part.n_rows for part in train.parts.values())
    mixture = mix_by_weight(datasets.weights)
    return RowOrder(train.n_rows, batch_size, seed, shuffle, source_rows, mixture)


def tokens_by_source(
    order: RowOrder, train: Dataset, step: int, *, tokens_per_row: int
) -> dict[str, int]:
    """Return the tokens of each source in the first steps, by metric name. Empty without a mixture."""
    tokens: dict[str, int] = {}
    if not isinstance(train, ConcatenatedDataset):
        return tokens
    # Without weights, the sources have one order, and their tokens are not counted.
    for name, count in zip(train.parts, order.source_counts(step)):
        tokens[f"tokens.{name}"] = tokens_per_row * count
    return tokens
