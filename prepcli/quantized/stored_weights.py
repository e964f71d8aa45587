"""The stored tensors of a quantised model, taken one by one for the weights that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.planning.arrays import Array
from prepcli.planning.tensors import FLOAT_DTYPES

USE_ORIGINAL_HINT = "use the model that it was quantised from"
# Reads the bytes of a small tensor.
PayloadReader = Callable[[Array], bytes]
MAX_PAYLOAD_NBYTES = 1 << 20
# Scales of activations and of the KV cache, which quantised kernels multiply with.
ACTIVATION_SUFFIXES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
# Endings of the scales of weights and activations. Whether float weights beside them are already multiplied with them
# is unknown.
SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "_proj_scale",
    "_scale_inv",
    "_scales",
    ".scales",
    ".SCB",
    ".absmax",
    ".nested_absmax",
    ".quant_map",
    *ACTIVATION_SUFFIXES,
)
# A tensor with one of these endings holds values of a weight.
WEIGHT_SUFFIXES = (".weight", ".weight_packed", ".qweight", "_blocks")


class StoredWeights:
    """The tensors of the files by name, and which of them belong to decoded weights."""

    def __init__(
        self, tensors: Iterable[Array], read_payload: PayloadReader, settings_file: str
    ) -> None:
        # Name in messages.
        self.settings_file = settings_file
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._used_names: set[str] = set()
        self._read_payload = read_payload

    def __getitem__(self, name: str) -> Array:
        return self._tensors[name]

    def names_ending(self, suffix: str) -> Iterator[tuple[str, str]]:
        """Yield each name with a suffix, and the name without it."""
        for name in self._tensors:
            if name.endswith(suffix):
                yield name, name.removesuffix(suffix)

    def tensors_of(self, dtypes: Iterable[str]) -> Iterator[Array]:
        """Yield the tensors that have one of the dtypes and are not taken yet."""
        selected = {*dtypes}
        for tensor in self._tensors.values():
            if tensor.dtype in selected and tensor.name not in self._used_names:
                yield tensor

    def take(self, name: str, owner: str) -> Array:
        """Return a tensor that belongs to the weight `owner`.

        Raises:
            DamagedError: The tensor is missing.
        """
        tensor = self.take_optional(name)
        if tensor is None:
            raise DamagedError(
                f"{quote_name(name)} is missing",
                f"{quote_name(owner)} is quantised",
                GET_AGAIN_HINT,
            )
        return tensor

    def take_optional(self, name: str) -> Array | None:
        """Return a tensor that belongs to a weight, or None if there is none."""
        if name not in self._tensors:
            return None
        self._used_names.add(name)
        return self._tensors[name]

    def payload(self, tensor: Array) -> bytes:
        """Return the bytes of a small tensor.

        Raises:
            DamagedError: It is too large.
        """
        if tensor.nbytes > MAX_PAYLOAD_NBYTES:
            raise DamagedError(
                f"{quote_name(tensor.name)} has {count_text(tensor.nbytes, 'byte')}",
                f"such a tensor has at most {MAX_PAYLOAD_NBYTES:,}",
                GET_AGAIN_HINT,
            )
        return self._read_payload(tensor)

    def activation_scales(self) -> frozenset[str]:
        """Return the names of the scales of activations."""
        suffixes = ACTIVATION_SUFFIXES
        return frozenset(
            name for name in self._tensors.keys() - self._used_names if name.endswith(suffixes)
        )

    def check_all_decoded(self, method: str) -> None:
        """Raise DamagedError if no weight is quantised, or a stored weight has a quantised dtype but no decoder.

        Args:
            method: The quantisation method in the settings.
        """
        codes = [t for t in self._tensors.values() if is_quantized_weight(t.name, t.dtype)]
        if not self._used_names:
            why = f"it names the quantisation {method}, and no tensor is quantised in this way"
            hint = GET_AGAIN_HINT
            scale = next((name for name in self._tensors if name.endswith(SCALE_SUFFIXES)), "")
            if scale and not codes:
                why = f"it names the quantisation {method}, {quote_name(scale)} is a scale, and no weight has codes"
                hint = "if the weights are decoded, remove the scales and the settings; else get the model again"
            raise DamagedError(f"{self.settings_file} and the tensors disagree", why, hint)
        for tensor in codes:
            if tensor.name not in self._used_names:
                raise DamagedError(
                    f"{quote_name(tensor.name)} is {tensor.dtype}",
                    f"{self.settings_file} names the quantisation {method}, and no tensor has its scales",
                    GET_AGAIN_HINT,
                )

    @property
    def used_tensor_names(self) -> frozenset[str]:
        """Names of the tensors that belong to decoded weights."""
        return frozenset(self._used_names)


def is_quantized_weight(name: str, dtype: str) -> bool:
    """Return whether a stored tensor has quantised values of a weight, by its name and dtype."""
    return name.endswith(WEIGHT_SUFFIXES) and dtype not in FLOAT_DTYPES


def setting(settings: Mapping[str, Any], key: str, choices: Iterable[Any], default: Any) -> Any:
    """Return a value of a quantisation config.

    Args:
        settings: The quantisation config.
        key: Key of the value.
        choices: Supported values.
        default: Value if the key is missing or null.

    Raises:
        PrepError: The value is not supported.
    """
    value = settings.get(key)
    if value is None:
        return default
    # `True == 1`, and lists have no hash: compare type and value one by one.
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    supported = ", ".join(str(choice) for choice in choices)
    raise PrepError(
        f"{key}={value!r:.60} is not supported",
        f"supported in a quantisation config: {supported}",
        USE_ORIGINAL_HINT,
    )


def check_group_size(
    scales: Array, *, size: int, groups: int, group_size: object, owner: str
) -> None:
    """Raise DamagedError if the number of groups contradicts the group size of the settings.

    Args:
        scales: Scales of the groups.
        size: Number of values that are split into groups.
        groups: Number of groups.
        group_size: Values per group in the settings. The check is skipped if it is not a positive integer.
        owner: Name of the weight.
    """
    if not isinstance(group_size, int) or group_size < 1 or groups == 0:
        return
    expected = -(-size // group_size)
    if groups != expected:
        raise DamagedError(
            f"{quote_name(scales.name)} has {count_text(groups, 'group')}",
            f"{quote_name(owner)} has {count_text(size, 'input')} in groups of {group_size:,} (group_size):"
            f" {count_text(expected, 'group')}",
            GET_AGAIN_HINT,
        )
