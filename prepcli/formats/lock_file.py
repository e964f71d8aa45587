"""The lock file of a model: the approved digests of its files and of its tensors.

{
"format": 1,
"source": "EleutherAI/gpt-neo-1.3B",
"revision": "dbe59a7f4a88d01d1ba9798d78dbe3fe038792c8",
"algorithms": {"files": "sha256", "tensors": "xxh3-128"},
"files": {"config.json": {"bytes": 1347, "digest": "5f..."}},
"tensors": {"transformer.wte.weight": {"dtype": "float32", "shape": [50257, 2048],
"digests": [[0, 50257, "9a..."]]}}
}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from prepcli.core.errors import Command, DamagedError, text
from prepcli.engine.digest import ALGORITHMS, digest_pattern
from prepcli.planning.tensors import DEFAULT_DIGEST
from prepcli.stores.files import read_small_file
from prepcli.stores.paths import AnyPath

# Kimi-K2 has 139,583 tensors: about 30 MB.
MAX_LOCK_NBYTES = 256 << 20

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=digest_pattern())]
TensorAlgorithm = Annotated[str, Field(pattern="|".join(f"^{name}$" for name in ALGORITHMS))]

STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")


class LockedFile(BaseModel):
    """Size of a file and its SHA-256.

    The digest is None for weights in a bucket: object stores publish none. The digests of the tensors cover them.
    """

    model_config = STRICT

    bytes: NonNegativeInt
    digest: Sha256 | None = None


class LockedTensor(BaseModel):
    """Dtype and shape of a tensor, and the digests of its rows.

    `digests` has one entry (first row, one past the last, digest) per range, as in a manifest. The ranges follow
    each other. A tensor without dims is one row.
    """

    model_config = STRICT

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    digests: tuple[tuple[NonNegativeInt, NonNegativeInt, Digest], ...]

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        num_rows = self.shape[0] if self.shape else 1
        next_row = 0
        for first, stop, _ in self.digests:
            if first != next_row or stop < first:
                raise ValueError("the ranges of rows do not follow each other")
            next_row = stop
        if next_row != num_rows:
            raise ValueError(f"the digests cover {next_row} of {num_rows} rows")
        return self


class Algorithms(BaseModel):
    """Names of the digests."""

    model_config = STRICT

    files: Literal["sha256"] = "sha256"
    tensors: TensorAlgorithm = DEFAULT_DIGEST


class Lock(BaseModel):
    """Content of a lock file.

    Attributes:
        format: Version of the file format.
        source: Hub id or URL of the checkpoint, or the name of its folder.
        revision: Commit on the hub. None for any other checkpoint.
        algorithms: Names of the digests.
        files: Files of the model, by path within it.
        tensors: Tensors, by name in the files.
    """

    model_config = STRICT

    format: Literal[1] = 1
    source: str
    revision: str | None
    algorithms: Algorithms = Algorithms()
    files: Mapping[str, LockedFile]
    tensors: Mapping[str, LockedTensor]


def encode_lock(lock: Lock) -> bytes:
    """Return the bytes of a lock file. It has one line per file and tensor, for a diff of two locks."""
    head = lock.model_dump_json(exclude={"files", "tensors"})
    # `head` is an object, whose closing brace is replaced by the two long lists.
    parts = [
        head[:-1],
        f'"files":{_entry_lines(lock.files)}',
        f'"tensors":{_entry_lines(lock.tensors)}',
    ]
    return ",\n".join(parts).encode() + b"}\n"


def _entry_lines(entries: Mapping[str, LockedFile] | Mapping[str, LockedTensor]) -> str:
    lines: list[str] = []
    for name, entry in entries.items():
        lines.append(f"{json.dumps(name)}:{entry.model_dump_json(exclude_none=True)}")
    return "{\n" + ",\n".join(lines) + "}"


def read_lock(path: AnyPath) -> Lock:
    """Read a lock file.

    Raises:
        PrepError: It cannot be read.
        DamagedError: It is no lock file, or has another format or unknown algorithms.
    """
    data = read_small_file(path, MAX_LOCK_NBYTES)
    try:
        return Lock.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        why = f"`{place}`: {first['msg']}" if place else first["msg"]
        hint = text("write it with {}", Command("lock", "MODEL"))
        raise DamagedError(f"{path} is not a lock file of this prep", why, hint) from error
