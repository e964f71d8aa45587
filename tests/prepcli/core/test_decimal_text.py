"""Decimal numbers of any length in environment variables."""

from __future__ import annotations

import pytest

from prepcli.core.coordinator_address import coordinator_address
from prepcli.core.decimal_text import parse_decimal
from prepcli.core.launchers import OPEN_MPI
from trainer.recipe.other_trainers import translate_value

MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("0017", 17), ("", None), ("-1", None), ("٣", None), (MANY_DIGITS, None)],
)
def test_parse_decimal_returns_short_numbers(text: str, number: int | None) -> None:
    assert parse_decimal(text) == number


def test_profile_of_many_digits_stays_text() -> None:
    assert translate_value("profile_steps", MANY_DIGITS) == MANY_DIGITS
    assert translate_value("profile_steps", "5") == {"start": 10, "steps": 5}


def test_variables_of_many_digits_are_ignored() -> None:
    uri = {
        "OMPI_MCA_orte_hnp_uri": f"{MANY_DIGITS}.0;tcp://10.96.0.1:34911",
        "JAX_COORDINATOR_PORT": MANY_DIGITS,
    }
    address, _ = coordinator_address(OPEN_MPI, uri, default_port=11111)
    assert address.startswith("10.96.0.1:")
