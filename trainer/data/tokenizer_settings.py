"""Read the settings beside a tokenizer, which are not trusted: tokenizer_config.json and special_tokens_map.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from trainer.data.files import io_error
from trainer.files.reading import read_regular_file
from trainer.models.errors import PrepError

MAX_SETTINGS_NBYTES = 64_000_000  # the added tokens of some tokenizers take megabytes


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file beside a tokenizer; empty if there is none.

    Raises:
        PrepError: The file is not a regular file, is too large, or is not a JSON object.
    """
    text = read_text_file(path, MAX_SETTINGS_NBYTES)
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error)) from None
    except RecursionError:
        raise PrepError(f"{path} is not JSON", "it is nested too deeply") from None
    if not isinstance(value, dict):
        raise PrepError(f"{path} is not a JSON object", f"it is {value!r:.60}")
    return cast(dict[str, Any], value)


def read_text_file(path: Path, max_nbytes: int) -> str | None:
    """Return the text of a small file; None if there is none.

    Raises:
        PrepError: The file is not a regular file, is too large, cannot be read, or is not UTF-8.
    """
    try:
        return read_regular_file(path, max_nbytes).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(path, error) from error
    except UnicodeDecodeError as error:
        raise PrepError(f"{path} is not UTF-8", str(error)) from None
