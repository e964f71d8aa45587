"""The numbers of tokens of span corruption (T5, arXiv:1910.10683, section 3.1.4). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.errors import Key, text, usage_error
from trainer.recipe.data_table import Data

# Value of `data.objective`.
SPAN_CORRUPTION = "span_corruption"
# Setting that hints show.
SOURCE_LENGTH_EXAMPLE = Key("data.source_length", 512)


@dataclass(frozen=True, slots=True)
class SpanSizes:
    """The numbers of tokens of each block of text, equal for all blocks.

    Attributes:
        block_length: Tokens of a block of text.
        n_noise: Tokens that move to the target.
        n_spans: Spans that these tokens form. In the source a sentinel takes the place of each
            span.
    """

    block_length: int
    n_noise: int
    n_spans: int

    @property
    def source_length(self) -> int:
        """Tokens of the source: the other tokens, a sentinel per span, and the end-of-sequence token."""
        return self.block_length - self.n_noise + self.n_spans + 1

    @property
    def target_length(self) -> int:
        """Tokens of the target: the spans, a sentinel before each, and the end-of-sequence token."""
        return self.n_noise + self.n_spans + 1


def span_sizes(source_length: int, *, noise_density: float, mean_span_length: float) -> SpanSizes:
    """Return the numbers of tokens of the longest blocks whose sources have at most `source_length` tokens.

    The formula comes from `random_spans_helper` and `random_spans_noise_mask` in
    t5/data/preprocessors.py of google-research/text-to-text-transfer-transformer: 568 tokens for
    sources of 512 and targets of 114.

    Args:
        source_length: Maximum tokens of a source.
        noise_density: Fraction of the tokens of a block that move to the target.
        mean_span_length: Mean tokens of a span.
    """

    def sizes(block_length: int) -> SpanSizes:
        n_noise = min(max(round(block_length * noise_density), 1), block_length - 1)
        return SpanSizes(block_length, n_noise, max(round(n_noise / mean_span_length), 1))

    # The source of a block is shorter than the block, e.g. with density 0.15 and spans of 3:
    # 568 tokens have 85 of noise in 28 spans. The source has 568 - 85 + 28 + 1 = 512 tokens, the target
    # 85 + 28 + 1 = 114. A block of 569 tokens would have a source of 513.
    length = source_length
    while sizes(length + 1).source_length <= source_length:
        length += 1
    if noise_density == 0.5 and sizes(length).target_length > sizes(length).source_length:
        # As in the source: sources and targets then have equal lengths.
        length -= 1
    return sizes(length)


def recipe_span_sizes(data: Data) -> SpanSizes:
    """Return the numbers of tokens of a recipe's blocks.

    Raises:
        UsageError: There is no `source_length`, it is too short for a span, or targets are longer
            than `seq_length`.
    """
    if data.source_length is None:
        why = 'sources have at most that number of tokens, with `objective = "span_corruption"`'
        raise usage_error("`data.source_length` is missing", why, text("{}", SOURCE_LENGTH_EXAMPLE))
    sizes = span_sizes(
        data.source_length,
        noise_density=data.noise_density,
        mean_span_length=data.mean_noise_span_length,
    )
    n_other = sizes.block_length - sizes.n_noise
    # Each span has a token of noise at least, and another token that separates it from the next span.
    if sizes.source_length > data.source_length or sizes.n_spans > min(n_other, sizes.n_noise):
        why = f"`noise_density` {data.noise_density:g} and `mean_noise_span_length` {data.mean_noise_span_length:g}"
        raise usage_error(
            f"`data.source_length` {data.source_length} is too short for span corruption",
            f"{why} give {sizes.n_spans} spans with {sizes.n_noise} tokens in all, and {n_other} tokens between them",
            text("{}", SOURCE_LENGTH_EXAMPLE),
        )
    if sizes.target_length > data.seq_length:
        why = f"targets of sources of {data.source_length} tokens have {sizes.target_length}"
        hint = text("{}", Key("data.seq_length", sizes.target_length, is_override=True))
        raise usage_error(f"`data.seq_length` is {data.seq_length}", why, hint)
    return sizes
