"""The datasets of a run from one or several sources, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from prepcli.core.errors import PrepError, text
from trainer.data.dataset_layout import Selection
from trainer.data.files import Note
from trainer.data.order import MixedOrder, RowOrder, SampleOrder, mix_by_weight
from trainer.data.packing import ConcatenatedDataset, Dataset, DocumentDataset, PackedDataset
from trainer.data.seq2seq import Seq2SeqDataset
from trainer.data.store import MappedTokens
from trainer.recipe.data_table import Data, split_sources


@dataclass(frozen=True, slots=True)
class Datasets:
    """Training and evaluation datasets of a run.

    Attributes:
        train: Rows to train on.
        evaluation: Rows to evaluate on. None without evaluation.
        identity: Digest of the tokens of both, compared on resume.
        weights: Weight of each source of a mixture. The rows of its sources are concatenated.
            Empty if the rows have one order.
    """

    train: Dataset
    evaluation: Dataset | None
    identity: str
    weights: tuple[float, ...] = ()


# Builds the datasets of one source from its data table, which has no sources itself. The second
# argument is the name of the source in a mixture, or empty.
BuildSource: TypeAlias = Callable[[Data, str, Note], Datasets]


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The token store of a dataset, and how its documents become rows.

    Attributes:
        tokens: The store.
        source_length: Maximum tokens of a source. 0 without an encoder.
        has_blocks: Whether documents are concatenated and cut into blocks.
    """

    tokens: MappedTokens
    source_length: int
    has_blocks: bool


def token_stores(train: Dataset) -> dict[str, TokenStore]:
    """Return the token store of each source by name, `train` without a mixture. Span corruption has none."""
    parts: Mapping[str, Dataset] = {"train": train}
    if isinstance(train, ConcatenatedDataset):
        parts = train.parts
    stores: dict[str, TokenStore] = {}
    for name, part in parts.items():
        if isinstance(part, Seq2SeqDataset):
            stores[name] = TokenStore(part.tokens, part.source_length, has_blocks=False)
        elif isinstance(part, PackedDataset | DocumentDataset):
            has_blocks = isinstance(part, PackedDataset)
            stores[name] = TokenStore(part.tokens, 0, has_blocks=has_blocks)
    return stores


def train_selection(data: Data) -> Selection:
    """Return the part of a dataset to train on."""
    return Selection(data.config, data.split, data.revision)


def eval_selection(data: Data) -> Selection:
    """Return the part of a dataset to evaluate on: another split of the training data, or of `eval_path`."""
    if data.eval_path is None:
        return replace(train_selection(data), split=data.eval_split, split_key="eval_split")
    return Selection(split=data.eval_split, split_key="eval_split")


def build_mixture(data: Data, build: BuildSource, *, note: Note) -> Datasets:
    """Return the datasets of a recipe: of its only source, or of all its sources together.

    Args:
        data: Data of the recipe.
        build: Builds the datasets of one source.
        note: Called with messages for the user.

    Raises:
        PrepError: The data is invalid.
    """
    if data.sources is None:
        return build(data, "", note)
    datasets: dict[str, Datasets] = {}
    weights: dict[str, float] = {}
    for source, part in split_sources(data):
        assert source is not None
        with _label_errors(source.name):
            datasets[source.name] = build(part, source.name, _label_notes(source.name, note))
        if source.weight is not None:
            weights[source.name] = source.weight
    train = {name: part.train for name, part in datasets.items()}
    evaluation = {
        name: part.evaluation for name, part in datasets.items() if part.evaluation is not None
    }
    for line in _describe_mixture(train, weights):
        note(line)
    return Datasets(
        train=ConcatenatedDataset(train),
        evaluation=ConcatenatedDataset(evaluation) if evaluation else None,
        identity=" ".join(part.identity for part in datasets.values()),
        weights=tuple(weights.values()),
    )


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
    """Return a line per source: its sequences, and how often one epoch of the mixture takes them.

    An epoch of the mixture has as many sequences as all sources together.
    """
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
        return SampleOrder(train.n_rows, batch_size, seed, shuffle)
    assert isinstance(train, ConcatenatedDataset)
    source_rows = tuple(part.n_rows for part in train.parts.values())
    return MixedOrder(
        source_rows, mix_by_weight(datasets.weights), batch_size, seed=seed, shuffle=shuffle
    )


def tokens_by_source(
    order: RowOrder, train: Dataset, step: int, *, tokens_per_row: int
) -> dict[str, int]:
    """Return the tokens of each source in the first steps, by metric name.

    Empty without a mixture.
    """
    if not isinstance(order, MixedOrder) or not isinstance(train, ConcatenatedDataset):
        return {}
    counts = order.source_counts(step)
    tokens: dict[str, int] = {}
    for name, count in zip(train.parts, counts):
        tokens[f"tokens.{name}"] = tokens_per_row * count
    return tokens
