"""Results of the public functions that read, convert and compare checkpoints, without `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prepcli.commands.operations.html_table import HtmlTable
from prepcli.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Conversion(HtmlTable):
    """A finished output, or with `dry_run=True` the plan of one.

    Attributes:
        path: Folder of the output, or the local folder of an upload.
        bytes_read: Bytes of tensors read from the source by this call.
        bytes_written: Bytes of tensors written by this call. 0 if the output already existed.
        seconds: Duration of the call in seconds.
        peak_bytes: Highest anonymous memory in bytes above the level at the start of the call.
        already_done: Whether an equal output existed. Then no file was written.
        plan_digest: Digest of the plan. Equal plans write equal bytes.
        plan: The files, tensors and checks of the conversion. `print(plan)` lists them.
        stage_seconds: Busy time of each stage in seconds, over all workers: `read`, `move` (order, dtype and digests)
            and `write`. The stages run at once, so the largest one limits the speed.
        next_command: The command that usually follows.
        warnings: Messages about problems that did not stop the conversion, such as an unreachable hub.
        details: All fields of the command's `--json` output.
    """

    path: Path
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_bytes: int
    already_done: bool
    plan_digest: str
    plan: Plan = field(repr=False)
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    next_command: str = field(default="", repr=False)
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class LockedModel(HtmlTable):
    """A written lock file.

    Attributes:
        path: The lock file.
        source: Hub id or URL of the checkpoint, or the name of its folder.
        revision: Commit on the hub. None for any other checkpoint.
        files: Number of files.
        tensors: Number of tensors.
        nbytes: Size of the files in bytes.
        seconds: Duration of the call in seconds.
        already_done: Whether an equal file existed. Then no file was written.
    """

    path: Path
    source: str
    revision: str | None
    files: int
    tensors: int
    nbytes: int
    seconds: float
    already_done: bool


LinkStatus = Literal["proven", "holds", "not proven", "failed"]


@dataclass(frozen=True, slots=True)
class ChainLink(HtmlTable):
    """An output and one of its sources.

    Attributes:
        output: The output.
        source: Its source. Empty if the output itself is damaged, or if no source is recorded.
        command: The command that made the output, such as "export".
        status: "proven": all parts have equal digests. "holds": the source is the recorded one, and `not_shown` is not
            compared. "not proven": the source is missing, or no digest shows that it is the recorded one. "failed".
        proof: The parts with equal digests.
        reason: Why a link failed or is not proven. Otherwise empty.
        changed: Parts that the command changed on purpose, as its manifest records.
        not_shown: Changes with new content, which no digest of the source shows.
        check: Command line that compares this content. Empty for training, which is not repeated.
    """

    output: str
    source: str
    command: str
    status: LinkStatus
    proof: str = ""
    reason: str = ""
    changed: str = ""
    not_shown: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class Chain(HtmlTable):
    """The way of a model from its first checkpoint to an output. True in a condition if every link holds.

    Attributes:
        links: The links, from the output back to the first checkpoints.
        origins: The first checkpoints, with the commit of a model of the hub.
        allows_unproven: Whether unproven links are accepted.
        seconds: Duration of the call in seconds.
    """

    links: tuple[ChainLink, ...]
    origins: tuple[str, ...]
    allows_unproven: bool
    seconds: float

    @property
    def broken_link(self) -> ChainLink | None:
        """Return the first failed link, else the first one that is not proven, unless such links are accepted."""
        for link in self.links:
            if link.status == "failed":
                return link
        for link in self.links:
            if link.status == "not proven" and not self.allows_unproven:
                return link
        return None

    def __bool__(self) -> bool:
        """Return whether no link is broken."""
        return self.broken_link is None


@dataclass(frozen=True, slots=True)
class MapSuggestion(HtmlTable):
    """The rows of a suggested map. True in a condition if every tensor of both checkpoints has one.

    Attributes:
        path: The written map.
        rows: The rows.
        targets: Number of tensors of the rows.
        ambiguous: Target without a row whose values occur several times -> some tensors with these values.
        unmatched: Tensors of the target without a row.
        unused: Tensors of the mapped checkpoint without a row.
        cast_to: Dtype of a cast that makes the values equal. Empty if they are equal without one.
    """

    path: Path
    rows: tuple[str, ...]
    targets: int
    ambiguous: Mapping[str, tuple[str, ...]]
    unmatched: tuple[str, ...]
    unused: tuple[str, ...]
    cast_to: str = ""

    def __bool__(self) -> bool:
        """Return whether the map is complete."""
        return not (self.unmatched or self.unused)


@dataclass(frozen=True, slots=True)
class RoundtripWay(HtmlTable):
    """A model after conversions and the way back.

    Attributes:
        name: Name of the way, such as "easylm".
        commands: The conversions, from the model to a Hugging Face folder.
        status: "equal", "different", or "not available" for this model.
        tensors: Number of tensors at the end of the way.
        nbytes: Bytes of the compared tensors.
        digest: XXH3-128 of the names, dtypes, shapes and digests of all tensors at the end of the way.
        reason: The differences, or why the way is not available.
    """

    name: str
    commands: tuple[str, ...]
    status: Literal["equal", "different", "not available"]
    tensors: int = 0
    nbytes: int = 0
    digest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roundtrip(HtmlTable):
    """A certificate of conversions and their ways back. True in a condition if no way changed a bit.

    Attributes:
        path: The written certificate.
        source: The model, as errors name it.
        revision: Commit of the model on the hub.
        ways: The ways.
        versions: Versions of prep, Python and NumPy.
        seconds: Duration of the call in seconds. It is not part of the certificate.
    """

    path: Path
    source: str
    revision: str | None
    ways: tuple[RoundtripWay, ...]
    versions: Mapping[str, str]
    seconds: float

    def __bool__(self) -> bool:
        """Return whether all available ways end in an equal model."""
        return all(way.status != "different" for way in self.ways)


@dataclass(frozen=True, slots=True)
class TensorSummary(HtmlTable):
    """A tensor or leaf as a checkpoint stores it.

    Attributes:
        name: Name in the checkpoint's files.
        shape: Shape, padding included.
        dtype: Dtype, such as "bfloat16".
        nbytes: Size in bytes, uncompressed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection(HtmlTable):
    """The tensors of a checkpoint.

    Attributes:
        name: The checkpoint, as errors name it.
        format: Storage format, such as `safetensors` or `orbax`.
        tensors: One entry per tensor or leaf, in file order.
        parameters: Number of elements of the parameters, without buffers, copies of tied tensors and optimizer state.
            None for an unknown family.
    """

    name: str
    format: str
    tensors: tuple[TensorSummary, ...]
    parameters: int | None
