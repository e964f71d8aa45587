"""The memory of the recurrent mixer of a layer.

The docstring of `trainer.planning.memory_estimate` has the symbols.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from prepcli.models.activation_memory import (
    SAVES_ALL,
    SAVES_DOTS,
    SAVES_WEIGHT_DOTS,
    SCAN_CHUNK_SIZE,
    SELECTIVE_SCAN_CHUNK_SIZE,
)
from prepcli.models.layer_config import Mixer
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs

# Arrays [B, T, C] that the backward pass of a short convolution reads: three projections, and the input and the
# output of the convolution.
CONV_ARRAYS = 5
# Arrays [B, L, C, N] of a chunk in the backward pass of a selective scan: decays, updates, states, and their gradients.
STATE_ARRAYS = 6
# Arrays [B, T, C] of the backward pass of Mamba in addition to those that its forward pass saves: inputs and outputs of
# the scan in chunks, and the gradients of both.
SELECTIVE_ARRAYS = 9
# Float32 products [B, T, V] of `trainer.nn.scans`, and those that the gated delta net has in addition.
SCAN_PRODUCTS = 4
DELTA_PRODUCTS = 2


class ArrayCounts(NamedTuple):
    """Numbers of arrays of one shape."""

    plain: int  # In the dtype of the computation
    float32: int  # In float32

    def nbytes(self, size: int, itemsize: int) -> int:
        """Return the bytes of all arrays, of `size` elements each."""
        return size * (itemsize * self.plain + FLOAT32 * self.float32)


# Arrays [B, T, C] and [B, T, V] of a mixer with a state, for the C channels of its convolutions and the V elements of
# its output. The numbers are fitted to XLA's memory plans (`python -m bench.memory_points`).
# Saved: the inputs and outputs of convolutions, the gate, and the inputs and the output of the recurrence.
SAVED_CHANNEL_ARRAYS = ArrayCounts(plain=2, float32=1)
SAVED_VALUE_ARRAYS = ArrayCounts(plain=2, float32=2)
# Computed again: the shifted inputs of convolutions, their activation, and the norm of the output with its gate.
RECOMPUTED_CHANNEL_ARRAYS = ArrayCounts(plain=5, float32=0)
RECOMPUTED_VALUE_ARRAYS = ArrayCounts(plain=0, float32=4)


@dataclass(frozen=True, slots=True)
class MixerMemory:
    """The memory of a recurrent mixer on one device."""

    inputs: MemoryInputs  # Inputs of the estimate
    mixer: Mixer
    seq_length: int  # Number of tokens of a row

    @property
    def saved_nbytes(self) -> int:
        """Bytes that the mixer saves without rematerialization."""
        inputs = self.inputs
        mixer = self.mixer
        if not mixer.has_state:
            size = self._num_tokens() * inputs.local_extent("mixer_channels")
            return CONV_ARRAYS * size * inputs.itemsize
        if mixer.kind == "mamba":
            return self._selective_scan_nbytes()
        arrays = self._arrays_nbytes(SAVED_CHANNEL_ARRAYS, SAVED_VALUE_ARRAYS)
        return arrays + self._states_nbytes()

    @property
    def recomputed_nbytes(self) -> int:
        """Bytes that every policy computes again."""
        if not self.mixer.has_state:
            return 0
        if self.mixer.kind == "mamba":
            return self.scan_gradient_nbytes
        return self._arrays_nbytes(RECOMPUTED_CHANNEL_ARRAYS, RECOMPUTED_VALUE_ARRAYS)

    @property
    def scan_gradient_nbytes(self) -> int:
        """Bytes of the arrays that only the backward pass of a selective scan has. 0 for other mixers."""
        if self.mixer.kind != "mamba":
            return 0
        size = self._num_tokens() * self.inputs.local_extent("mixer_channels")
        return SELECTIVE_ARRAYS * FLOAT32 * size

    def _arrays_nbytes(self, channels: ArrayCounts, values: ArrayCounts) -> int:
        """Return the bytes of arrays [B, T, C] and [B, T, V] of a mixer with a state."""
        itemsize = self.inputs.itemsize
        channel_size = self._num_tokens() * self._conv_channels()
        value_size = self._num_tokens() * self._num_values()
        return channels.nbytes(channel_size, itemsize) + values.nbytes(value_size, itemsize)

    def _states_nbytes(self) -> int:
        """Return the bytes of the float32 states of a mixer, one per chunk of tokens."""
        inputs = self.inputs
        num_states = inputs.local_batch_size * math.ceil(self.seq_length / SCAN_CHUNK_SIZE)
        return FLOAT32 * num_states * self._num_values() * inputs.extent("mixer_state")

    def _conv_channels(self) -> int:
        """Return the channels C of the convolutions of a mixer with a state: queries, keys and values."""
        inputs = self.inputs
        num_keys = inputs.local_extent("mixer_groups") * inputs.extent("mixer_state")
        return 2 * num_keys + self._num_values()

    def _num_values(self) -> int:
        """Return the elements V of the output of a mixer with a state, per token."""
        return self._num_heads() * self.inputs.extent("mixer_head_dim")

    def _num_heads(self) -> int:
        """Return the number of heads of a recurrent mixer on one device."""
        inputs = self.inputs
        num_heads = inputs.extent("mixer_groups") * inputs.extent("group_heads")
        # A tensor uses a mesh axis once. E.g. mp 4 splits 8 groups of 16 heads into 32 heads per device, and
        # one group of 128 heads too.
        num_shards = max(inputs.num_shards("mixer_groups"), inputs.num_shards("group_heads"))
        return num_heads // num_shards

    @property
    def products_nbytes(self) -> int:
        """Bytes of the matrix products that the rematerialization policy saves."""
        inputs = self.inputs
        projections = self._num_tokens() * self._projection_width() * inputs.itemsize
        if inputs.remat_policy in SAVES_DOTS:
            return projections + self._scan_products_nbytes()
        if inputs.remat_policy in SAVES_WEIGHT_DOTS:
            return projections
        return 0

    @property
    def saved_loop_inputs_nbytes(self) -> int:
        """Bytes of the arrays that the rematerialization policy saves for the loop of the backward pass."""
        policy = self.inputs.remat_policy
        if policy in SAVES_ALL:
            return self.saved_nbytes
        if policy in SAVES_DOTS:
            return self._scan_products_nbytes()
        return 0

    def _projection_width(self) -> int:
        """Return the elements that a mixer projects a token to."""
        inputs = self.inputs
        # Short convolutions and Mamba have three projections to all channels. Mamba has queries, keys and steps too.
        channels = inputs.local_extent("mixer_channels")
        if channels:
            return 3 * channels + 2 * inputs.extent("mixer_state") + inputs.extent("dt_rank")
        return self._conv_channels() + self._num_values() + self._num_heads()

    def _scan_products_nbytes(self) -> int:
        """Return the bytes of the float32 products of a mixer's scan: [B, T, V], scores of chunks, and states."""
        inputs = self.inputs
        mixer = self.mixer
        if not mixer.has_state:
            return 0
        if mixer.kind == "mamba":
            return FLOAT32 * self._num_tokens() * inputs.local_extent("mixer_channels")
        scores = inputs.local_extent("mixer_groups") * min(SCAN_CHUNK_SIZE, self.seq_length)
        width = SCAN_PRODUCTS * self._num_values() + scores
        if mixer.kind == "gated_delta":
            # It multiplies keys by the state and by each other as well.
            width += DELTA_PRODUCTS * self._num_values() + scores
        return FLOAT32 * self._num_tokens() * width + self._states_nbytes()

    def _selective_scan_nbytes(self) -> int:
        """Return the bytes that the backward pass of Mamba reads."""
        # They are arrays of all tokens, the states between chunks, and the states of the tokens of one chunk.
        inputs = self.inputs
        channels = inputs.local_batch_size * inputs.local_extent("mixer_channels")
        state_size = channels * inputs.extent("mixer_state")
        chunk_size = min(SELECTIVE_SCAN_CHUNK_SIZE, self.seq_length)
        num_states = math.ceil(self.seq_length / chunk_size) + STATE_ARRAYS * chunk_size
        arrays = self.seq_length * channels * (5 * inputs.itemsize + 3 * FLOAT32)
        return arrays + FLOAT32 * num_states * state_size

    def _num_tokens(self) -> int:
        """Return the tokens of a micro-batch on one device."""
        return self.inputs.local_batch_size * self.seq_length
