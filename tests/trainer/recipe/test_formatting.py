"""Values as TOML: rare characters and keys, which few random recipes have."""

from __future__ import annotations

import tomllib

import pytest

from trainer.recipe.formatting import to_toml


@pytest.mark.parametrize(
    "value",
    [
        "a\x7fb",
        "\x00\x1f\t\n\r",
        'quote " and \\ backslash',
        "\u2028 \U0001f600",
        {"a b": 1, "a.b": 2, "": 3, "plain-key_1": 4},
        [0.0025, 2e-05, 0.00025, -1e-300, 1e300],
        [True, False, 1],
    ],
    ids=ascii,
)
def test_to_toml_reads_back(value: object):
    assert tomllib.loads(f"value = {to_toml(value)}") == {"value": value}
