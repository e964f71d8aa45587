"""Read untrusted settings of a tokenizer: tokenizer_config.json and special_tokens_map.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from trainer.data.files import io_error
from trainer.files.json_values import load_json
from trainer.files.reading import read_regular_file
from trainer.models.errors import PrepError

MAX_SETTINGS_NBYTES = 64_000_000  # the added tokens of some tokenizers take megabytes


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a settings file of a tokenizer. A missing file gives an empty one.

    Raises:
        PrepError: The file is not a regular file, is too large, or is not a JSON object.
    """
    text = read_text_file(path, MAX_SETTINGS_NBYTES)
    try:
        value = {} if text is None else load_json(text.encode())
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise PrepError(f"{path} is not a JSON object", f"it is {value!r:.60}")
    return cast(dict[str, Any], value)


def read_text_file(path: Path, max_nbytes: int) -> str | None:
    """Return the text of a small file, or None if it does not exist.

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
