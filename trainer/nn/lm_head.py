"""LM head fused with the cross entropy loss over chunks of tokens, so that [tokens, vocabulary] logits never exist.

The loss is a sum. Divided once by the summed token weights it is a mean that does not depend on the number of chunks,
micro-batches or devices. Rows beyond the true vocabulary are padding: they do not contribute to the loss, and their
gradient is exactly 0.

Axes: B rows of the batch, T tokens, C tokens of a chunk, D model width, V vocabulary rows with padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import chunk_length
from prepcli.models.architecture import NO_SOFTCAP
from trainer.distributed.sharding import ShardingContext
from trainer.nn.token_chunks import join_chunks, pad_tokens, split_chunks

# (logits [B, C, V], targets [B, C]) -> losses [B, C], and values by name
TokenLoss = Callable[[Array, Array], Array]
TokenMetrics = Callable[[Array, Array], Mapping[str, Array]]


class LossSums(NamedTuple):
    """Sums over tokens, float32 [] each."""

    loss: Array  # Weighted loss of tokens
    weight: Array  # Token weights
    correct: Array  # Token weights where the most likely token is the target


class TrainingSums(NamedTuple):
    """Sums over tokens, float32 [] each. The loss excludes the z-loss, as in evaluations."""

    loss: Array  # Weighted loss of tokens without the z-loss
    weight: Array  # Token weights
    correct: Array  # Token weights where the most likely token is the target
    z_loss: Array | None  # Weighted z-loss of tokens. None if there is no such term.

    @property
    def total(self) -> Array:
        """The loss to differentiate."""
        if self.z_loss is None:
            return self.loss
        return self.loss + self.z_loss

    def by_name(self) -> dict[str, Array]:
        """Return the sums that exist, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class LossTerms(NamedTuple):
    """Terms of a token's loss in addition to the cross entropy: the keys of `[loss]`, and a user's function.

    The gradient of the cross entropy and its terms is in `_logit_gradients`, that of a function is derived by JAX.
    """

    # Coefficient of log(Z)^2, where Z is the sum of the exponentials of a token's logits (PaLM, arXiv:2204.02311,
    # section 5)
    z_loss: float = 0.0
    # Share of the target distribution that is uniform over the true vocabulary, in [0, 1) (arXiv:1512.00567,
    # section 7)
    label_smoothing: float = 0.0
    # Computes the loss of each token in place of the cross entropy, from logits without padding
    token_loss: TokenLoss | None = None

    @property
    def has_z_loss(self) -> bool:
        """Whether the loss has the z-loss. A user-defined `token_loss` replaces it."""
        return self.z_loss > 0 and self.token_loss is None

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums of a batch."""
        names = ("loss", "weight", "correct")
        if self.has_z_loss:
            return (*names, "z_loss")
        return names


NO_LOSS_TERMS = LossTerms()


# The logit of padding. Finite: exp of its difference to any logit is 0, and 0 * -1e30 is not nan.
MASKED_LOGIT = -1e30


class LMHead(NamedTuple):
    """The static options of the LM head."""

    true_vocab_size: int  # Vocabulary size without padding
    # Tokens of a device per row with logits in memory at the same time. -1 means all.
    chunk_size: int
    sharding: ShardingContext  # The device mesh and its rules
    logit_softcap: float = NO_SOFTCAP  # Bound of logits. `NO_SOFTCAP` means none.
    loss_terms: LossTerms = NO_LOSS_TERMS  # Terms of the loss in addition to the cross entropy

    @property
    def num_token_shards(self) -> int:
        """Number of shards of the tokens of a row."""
        return self.sharding.sequence_parallel_size


def project_logits(hidden: Array, weight: Array, head: LMHead, bias: Array | None = None) -> Array:
    """Compute float32 logits [B, T, V] from hidden states [B, T, D] and weight [V, D]. Padding is `MASKED_LOGIT`."""
    return _softcap_and_mask(_linear_logits(hidden, weight, head, bias), head)


def _linear_logits(hidden: Array, weight: Array, head: LMHead, bias: Array | None) -> Array:
    """Compute float32 logits [B, T, V] before the softcap and the padding mask."""
    # logit[v] = x . W[v] + b[v]. A bfloat16 sum over D would round away differences of logits.
    logits = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
    logits = head.sharding.constrain(logits, "batch", "seq", "vocab")
    if bias is not None:
        logits = logits + bias
    return logits


def _softcap_and_mask(logits: Array, head: LMHead) -> Array:
    """Bound logits by the softcap and mask the padded rows of the vocabulary."""
    if head.logit_softcap != NO_SOFTCAP:
        # c * tanh(x / c) stays in (-c, c) (Gemma 2, arXiv:2408.00118, section 2).
        logits = head.logit_softcap * jnp.tanh(logits / head.logit_softcap)
    vocab_rows = logits.shape[-1]
    if head.true_vocab_size == vocab_rows:
        return logits
    return jnp.where(_is_unpadded_token(logits, head), logits, MASKED_LOGIT)


def loss_sums(
    hidden: Array,
    weight: Array,
    targets: Array,
    token_weights: Array,
    head: LMHead,
    bias: Array | None = None,
) -> LossSums:
    """Compute the summed loss in chunks of tokens.

    Tokens of weight 0 are ignored: their targets and hidden states may be arbitrary, even infinite.

    Args:
        hidden: Hidden states [B, T, D].
        weight: Weight of the head [V, D].
        targets: int32 [B, T].
        token_weights: Weight of each token's loss [B, T], 0 to ignore the token.
        head: Static options.
        bias: Bias of the head [V].

    Returns:
        float32 sums over all tokens. The loss has all terms. Its gradients have the dtypes of `hidden`, `weight` and
        `bias`.
    """
    sums = training_sums(hidden, weight, targets, token_weights, head, bias)
    return LossSums(loss=sums.total, weight=sums.weight, correct=sums.correct)


def training_sums(
    hidden: Array,
    weight: Array,
    targets: Array,
    token_weights: Array,
    head: LMHead,
    bias: Array | None = None,
) -> TrainingSums:
    """Compute the summed loss and z-loss in chunks of tokens.

    It takes the arguments of `loss_sums`. Only `total` has gradients, `loss` and `z_loss` alone have none.
    """
    head, (hidden, targets, token_weights) = _pad_to_chunks(hidden, targets, token_weights, head)
    loss, correct, z_loss = _chunked_loss(head, hidden, weight, bias, targets, token_weights)
    return TrainingSums(loss=loss, weight=token_weights.sum(), correct=correct, z_loss=z_loss)


def row_loss_sums(
    hidden: Array,
    weight: Array,
    targets: Array,
    token_weights: Array,
    head: LMHead,
    bias: Array | None = None,
) -> LossSums:
    """Compute the summed cross entropy of each row [B] in chunks of tokens, without gradients.

    It takes the arguments of `loss_sums`.
    """
    head, arrays = _pad_to_chunks(hidden, targets, token_weights, head)

    def sum_chunk(chunk: _Chunk) -> tuple[Array, Array]:
        hidden, target, token_weight = chunk
        logits = project_logits(hidden, weight, head, bias)
        losses = _cross_entropy(logits, jax.nn.logsumexp(logits, axis=-1), target, head)
        is_correct = _argmax(logits) == target
        weighted_losses = jnp.where(token_weight > 0, token_weight * losses, 0.0)
        return weighted_losses.sum(1), (token_weight * is_correct).sum(1)

    loss, correct = lax.map(sum_chunk, _chunk_inputs(*arrays, head))  # [chunks, B]
    return LossSums(loss=loss.sum(0), weight=arrays[2].sum(1), correct=correct.sum(0))


def metric_sums(
    hidden: Array,
    weight: Array,
    targets: Array,
    token_weights: Array,
    head: LMHead,
    bias: Array | None = None,
    *,
    metric_fn: TokenMetrics,
) -> dict[str, Array]:
    """Compute weighted sums of the user's metrics over all tokens, chunk by chunk and without gradients.

    Args:
        hidden: Hidden states [B, T, D].
        weight: Weight of the head [V, D].
        targets: int32 [B, T].
        token_weights: Weight of each token [B, T], 0 to ignore it.
        head: Static options.
        bias: Bias of the head [V].
        metric_fn: Computes the values of each token by name, from logits without padding.

    Returns:
        float32 sums over all tokens, by name.
    """
    head, arrays = _pad_to_chunks(hidden, targets, token_weights, head)

    def sum_chunk(chunk: _Chunk) -> dict[str, Array]:
        logits = project_logits(chunk[0], weight, head, bias)[..., : head.true_vocab_size]
        values = metric_fn(logits, chunk[1])
        if not isinstance(values, Mapping):
            why = f"it returned a value of type {type(values).__name__}"
            raise PrepError("`metric_fn` did not return a dict", why, 'return `{"NAME": values}`')
        return {
            name: _weighted_sum(value, chunk, f"`metric_fn` {name!r:.60}")
            for name, value in values.items()
        }

    return {
        name: sums.sum() for name, sums in lax.map(sum_chunk, _chunk_inputs(*arrays, head)).items()
    }


def _pad_to_chunks(
    hidden: Array, targets: Array, token_weights: Array, head: LMHead
) -> tuple[LMHead, _Chunk]:
    """Pad the tokens to whole chunks, and clear tokens of weight 0. Return the chunked head and the arrays."""
    token_weights = token_weights.astype(jnp.float32)
    is_counted = token_weights > 0
    targets = jnp.where(is_counted, targets, 0)
    # A gradient of zero would not be enough: in the product with the hidden states 0 * nan is nan.
    hidden = jnp.where(is_counted[..., None], hidden, 0)
    num_shards = head.num_token_shards
    length = hidden.shape[1] // num_shards
    chunk_size = chunk_length(head.chunk_size, length)

    def pad(array: Array) -> Array:
        return pad_tokens(array, -length % chunk_size, num_shards=num_shards)

    return head._replace(chunk_size=chunk_size), (pad(hidden), pad(targets), pad(token_weights))


# loss, correct and z-loss
_Sums = tuple[Array, Array, Array | None]
# gradients of weight and bias, float32
_HeadGradients = tuple[Array, Array | None]
# hidden states [B, C, D], targets [B, C], token weights [B, C]
_Chunk = tuple[Array, Array, Array]


def _chunked_loss_primal(
    head: LMHead,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    targets: Array,
    token_weights: Array,
) -> _Sums:
    """Compute the sums of losses and of correct tokens."""

    def add_chunk(sums: _Sums, chunk: _Chunk) -> tuple[_Sums, None]:
        chunk_sums, _ = _chunk_sums(project_logits(chunk[0], weight, head, bias), chunk, head)
        return _add_sums(sums, chunk_sums), None

    return lax.scan(
        add_chunk, _zero_sums(head), _chunk_inputs(hidden, targets, token_weights, head)
    )[0]


def _chunked_loss_fwd(
    head: LMHead,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    targets: Array,
    token_weights: Array,
) -> tuple[_Sums, tuple[Array, _HeadGradients, _HeadGradients]]:
    """Compute the sums, and with the same logits the gradients of hidden states, weight and bias."""

    # The weight's gradient accumulates in float32: in bfloat16 it would lose 1 % or more. It accumulates as [D, V],
    # because XLA transposes the left operand of its product on CPUs, and `x` is smaller than `dlogits`.
    def add_chunk(
        carry: tuple[_Sums, _HeadGradients], chunk: _Chunk
    ) -> tuple[tuple[_Sums, _HeadGradients], Array]:
        totals, (dweight, dbias) = carry
        x = chunk[0]
        linear_logits = _linear_logits(x, weight, head, bias)
        logits = _softcap_and_mask(linear_logits, head)
        if head.loss_terms.token_loss is None:
            sums, log_z = _chunk_sums(logits, chunk, head)
            dlogits = _logit_gradients(logits, linear_logits, log_z, chunk, head)
        else:
            sums, dlogits = _token_loss_gradients(linear_logits, chunk, head)
        # logits = x W^T + b, so with g = dloss / dlogits [B, C, V] for each token t:
        # dx = g W [B, C, D], dW^T = sum_t x^T g [D, V], db = sum_t g [V]
        if dbias is not None:
            dbias = dbias + dlogits.sum((0, 1))
        dlogits = dlogits.astype(x.dtype)
        dhidden = jnp.einsum("btv,vd->btd", dlogits, weight, preferred_element_type=jnp.float32)
        dweight = dweight + jnp.einsum(
            "btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32
        )
        return (_add_sums(totals, sums), (dweight, dbias)), dhidden.astype(x.dtype)

    zeros = jax.tree.map(
        lambda parameter: jnp.zeros(parameter.shape, jnp.float32), (weight.T, bias)
    )
    chunks = _chunk_inputs(hidden, targets, token_weights, head)
    (sums, (dweight, dbias)), dhidden = lax.scan(add_chunk, (_zero_sums(head), zeros), chunks)
    return sums, (dhidden, (dweight.T, dbias), (weight, bias))


def _chunked_loss_bwd(
    head: LMHead, residuals: tuple[Array, _HeadGradients, _HeadGradients], cotangents: _Sums
) -> tuple[Array, Array, Array | None, None, None]:
    """Scale the gradients of the total, computed for a cotangent of 1, and round them to the inputs' dtypes."""
    # The cotangents of loss and z-loss are equal, because only their sum is differentiated.
    dhidden, gradients, parameters = residuals

    def scale(gradient: Array, like: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangents[0]).astype(like.dtype)

    dweight, dbias = jax.tree.map(scale, gradients, parameters)
    dhidden = join_chunks(scale(dhidden, dhidden), num_shards=head.num_token_shards)
    return dhidden, dweight, dbias, None, None


_chunked_loss = jax.custom_vjp(_chunked_loss_primal, nondiff_argnums=(0,))
_chunked_loss.defvjp(_chunked_loss_fwd, _chunked_loss_bwd)


def _zero_sums(head: LMHead) -> _Sums:
    zero = jnp.zeros((), jnp.float32)
    return zero, zero, zero if head.loss_terms.has_z_loss else None


def _add_sums(sums: _Sums, others: _Sums) -> _Sums:
    return jax.tree.map(operator.add, sums, others)


def _chunk_sums(logits: Array, chunk: _Chunk, head: LMHead) -> tuple[_Sums, Array]:
    """Compute the sums of a chunk from its logits [B, C, V], and log_z [B, C], the logarithm of the softmax sum."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    if (token_loss := head.loss_terms.token_loss) is None:
        losses = _cross_entropy(logits, log_z, chunk[1], head)
    else:
        losses = token_loss(logits[..., : head.true_vocab_size], chunk[1])
    sums = (
        _weighted_sum(losses, chunk, "`loss_fn`"),
        _weighted_correct_count(logits, chunk),
        _z_loss_sum(log_z, chunk, head),
    )
    return sums, log_z


def _z_loss_sum(log_z: Array, chunk: _Chunk, head: LMHead) -> Array | None:
    """Compute the weighted z-loss of a chunk. None if there is no such term."""
    # z_loss * log_z^2 keeps log_z near 0 (PaLM, arXiv:2204.02311, section 5).
    if not head.loss_terms.has_z_loss:
        return None
    return _weighted_sum(head.loss_terms.z_loss * jnp.square(log_z), chunk, "z-loss")


def _cross_entropy(logits: Array, log_z: Array, target: Array, head: LMHead) -> Array:
    """Compute the cross entropy of each token with label smoothing, [B, C]."""
    # log_z - logit[target]. A masked sum takes the place of a gather, because the mesh may split the
    # vocabulary.
    token_loss = log_z - jnp.where(_is_target(logits, target), logits, 0.0).sum(-1)
    if (smoothing := head.loss_terms.label_smoothing) > 0:
        # The cross entropy with the uniform distribution: log_z - mean(logits of true tokens).
        true_logits = jnp.where(_is_unpadded_token(logits, head), logits, 0.0)
        uniform_loss = log_z - true_logits.sum(-1) / head.true_vocab_size
        token_loss = (1 - smoothing) * token_loss + smoothing * uniform_loss
    return token_loss


def _weighted_correct_count(logits: Array, chunk: _Chunk) -> Array:
    """Sum the weights of the tokens with the target as their most likely token."""
    _, target, token_weight = chunk
    return jnp.where((token_weight > 0) & (_argmax(logits) == target), token_weight, 0.0).sum()


def _weighted_sum(values: Array, chunk: _Chunk, function: str) -> Array:
    """Sum the values of tokens by their weights. Raise PrepError if the function returned another shape."""
    token_weight = chunk[2]
    if jnp.shape(values) != token_weight.shape:
        why = f"it has shape {list(jnp.shape(values))}, the targets have {list(token_weight.shape)}"
        what = f"{function} did not return a value for each token"
        raise PrepError(what, why, "return an array with the shape of the targets")
    # select with `where`: the value of a token of weight 0 may be inf
    return jnp.where(token_weight > 0, token_weight * values, 0.0).sum()


def _token_loss_gradients(linear_logits: Array, chunk: _Chunk, head: LMHead) -> tuple[_Sums, Array]:
    """Compute the sums of a chunk with a function of tokens as its loss, and the gradient by the linear logits."""

    def chunk_loss(linear_logits: Array) -> tuple[Array, _Sums]:
        sums, _ = _chunk_sums(_softcap_and_mask(linear_logits, head), chunk, head)
        return sums[0], sums

    _, pullback, sums = jax.vjp(chunk_loss, linear_logits, has_aux=True)
    return sums, jnp.where(chunk[2][..., None] > 0, pullback(jnp.ones(()))[0], 0.0)


def _argmax(logits: Array) -> Array:
    """Return the first index of the largest logit, int32 [B, C]. XLA vectorizes this on CPUs, but not `jnp.argmax`."""
    vocab_rows = logits.shape[-1]
    is_largest = logits == logits.max(-1, keepdims=True)
    return jnp.where(is_largest, jnp.arange(vocab_rows), vocab_rows).min(-1)


def _logit_gradients(
    logits: Array, linear_logits: Array, log_z: Array, chunk: _Chunk, head: LMHead
) -> Array:
    """Compute the gradient of a chunk's loss by its logits before the softcap, float32 [B, C, V]."""
    # With p = softmax(logits), smoothing s and n true tokens (p is 0 for padding):
    #   d cross_entropy / d logits = p - (1 - s) onehot(target) - s / n
    #   d (z log_z^2) / d logits = 2 z log_z p
    #   d (c tanh(x / c)) / d x = 1 - tanh(x / c)^2
    _, target, token_weight = chunk
    terms = head.loss_terms
    probabilities = jnp.exp(logits - log_z[..., None])
    if terms.has_z_loss:
        probabilities = probabilities * (1.0 + 2.0 * terms.z_loss * log_z[..., None])
    dlogits = probabilities - (1 - terms.label_smoothing) * _is_target(logits, target)
    if terms.label_smoothing > 0:
        dlogits = dlogits - terms.label_smoothing / head.true_vocab_size * _is_unpadded_token(
            logits, head
        )
    if head.logit_softcap != NO_SOFTCAP:
        dlogits = dlogits * (1.0 - jnp.square(jnp.tanh(linear_logits / head.logit_softcap)))
    return jnp.where(token_weight[..., None] > 0, dlogits * token_weight[..., None], 0.0)


def _is_unpadded_token(logits: Array, head: LMHead) -> Array:
    """Return bool [V], false for padding."""
    return jnp.arange(logits.shape[-1]) < head.true_vocab_size


def _is_target(logits: Array, target: Array) -> Array:
    """Return bool [B, C, V], true for the target of each token."""
    return jnp.arange(logits.shape[-1]) == target[..., None]


def _chunk_inputs(hidden: Array, targets: Array, token_weights: Array, head: LMHead) -> _Chunk:
    """Split hidden states, targets and weights into chunks of tokens."""
    split = partial(split_chunks, chunk_size=head.chunk_size, num_shards=head.num_token_shards)
    return split(hidden), split(targets), split(token_weights)
