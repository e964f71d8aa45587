"""The samples of training data as a model sees them: text, token ids and loss weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Counts of the samples of a token store.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens, of sources too.
        loss_tokens: Number of tokens with a loss weight above 0.
        cut: Number of samples that are longer than a sequence. With an encoder, the source or the target is.
        dropped: Number of tokens that no sequence has.
        longest: Tokens of the longest sample. With an encoder, of the longest source or target.
        without_loss: Number of samples without a token with loss.
        cut_sources: Number of sources that are longer than `source_length`.
        cut_targets: Number of targets that are longer than `seq_length`.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    dropped: int = 0
    longest: int = 0
    without_loss: int = 0
    cut_sources: int = 0
    cut_targets: int = 0


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Consecutive tokens of a sample with one loss weight.

    Attributes:
        text: The decoded text, or the spelling of special tokens.
        ids: The token ids.
        weight: Loss weight of each token, 0 to 1.
        is_special: Whether the tokens are special ones, or ids that the tokenizer does not have.
        omitted: Number of tokens left out here. The part has no text then.
    """

    text: str
    ids: tuple[int, ...]
    weight: float
    is_special: bool = False
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sample of a token store. The texts of its parts, joined, are what a model sees.

    Attributes:
        parts: The parts of the document, or with an encoder of the target.
        source: The parts of the source. Empty without an encoder.
        tokens: Number of tokens, of the source too.
        loss_tokens: Number of tokens with a loss weight above 0.
        is_cut: Whether it is longer than a sequence.
    """

    parts: tuple[SamplePart, ...]
    source: tuple[SamplePart, ...]
    tokens: int
    loss_tokens: int
    is_cut: bool
