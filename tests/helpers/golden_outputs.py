"""Golden outputs: the digest of every file that a command writes, and the difference from the recorded one."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict
from unittest import mock

import xxhash

import prepcli as prep
from prepcli import core
from tests.helpers.golden_cases import BUCKET, SAVE_PARAMS, Case
from tests.helpers.golden_inputs import provide
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.run_cli import run_code

FOLDER = Path(__file__).parents[1] / "golden"
# Digest of each case, to be read in a diff.
DIGESTS = FOLDER / "outputs.json"
# Digest of each file, and the text of each JSON document, to explain a difference.
DETAILS = FOLDER / "outputs_details.json.xz"
# Characters of a file's digest in DETAILS. A case's digest covers whole digests.
SHORT_DIGEST = 8
# Lines of a message.
MAX_LINES = 30
LOCK = "lock.json"
CERTIFICATE = "roundtrip.json"
# Version of prep in the outputs: bytes do not depend on the version that wrote them.
VERSION = "0.0.0"
DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}(?:[0-9a-f]{32})?\b")
# Larger documents are not kept as text.
MAX_DOCUMENT_NBYTES = 200_000


class Details(TypedDict):
    """Content of DETAILS: digests by case and path, and texts of documents by digest."""

    files: dict[str, dict[str, str]]
    documents: dict[str, str]


@dataclass(frozen=True)
class Output:
    """What a command wrote: its exit code, the digest of each file, and the fields of its JSON documents."""

    exit_code: int
    files: dict[str, str] = field(default_factory=dict[str, str])
    documents: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def digest(self) -> str:
        """Digest of the sorted table of files, or the exit code of a refusal."""
        if self.exit_code:
            return f"exit code {self.exit_code}"
        lines = [f"{path}\t{digest}\n" for path, digest in sorted(self.files.items())]
        return digest_of("".join(lines).encode())


def digest_of(data: bytes) -> str:
    """Return the XXH3-128 of bytes in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@contextmanager
def open_site(folder: Path) -> Iterator[FakeObjectStore]:
    """Make `folder` the working folder of commands, and serve a fake object store that the environment names.

    Commands have the version VERSION: in child processes by a module that Python imports when it starts.
    """
    site = folder / ".version"
    site.mkdir(parents=True)
    text = f"import prepcli.core\n\nprepcli.core.VERSION = {VERSION!r}\n"
    (site / "sitecustomize.py").write_text(text)
    prefixes = ("AWS_", "GOOGLE_", "PREP_", "SLURM_", "JAX_PROCESS")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    with (
        serve_objects() as store,
        chdir(folder),
        mock.patch.object(core, "VERSION", VERSION),
        mock.patch.dict(os.environ, variables | store.environment(), clear=True),
    ):
        yield store


def run_case(case: Case, store: FakeObjectStore, *more: str) -> Output:
    """Make the inputs of a case, run its command with further options, and read its output.

    The output is deleted afterwards.
    """
    for name in case.inputs:
        provide(name)
    _upload_sources(case, store)
    try:
        exit_code = _run(case, more)
        contents = _read_output(case.out, store)
    finally:
        _delete_outputs(store)
    files: dict[str, str] = {}
    documents: dict[str, str] = {}
    for path, data in contents.items():
        stable = stable_content(path, data, is_trained=case.is_trained)
        files[path] = digest_of(stable)
        if _is_document(path) and len(stable) < MAX_DOCUMENT_NBYTES:
            documents[path] = stable.decode()
    return Output(exit_code, files, documents)


def _run(case: Case, more: Sequence[str]) -> int:
    """Run the command of a case, or the public function that has no command, and return its exit code."""
    if case.words[0] != SAVE_PARAMS:
        return run_code(*case.command, *more)
    source = case.words[1]
    prep.save_params(prep.load_params(source), case.out, like=source)
    return 0


def _upload_sources(case: Case, store: FakeObjectStore) -> None:
    """Store the folders that the command reads from the bucket."""
    for word in case.words:
        name = word.removeprefix(f"{BUCKET}/")
        if name != word:
            for path, data in _read_folder(Path(name)).items():
                store.store(f"bucket/{name}/{path}", data)


def _read_output(out: str, store: FakeObjectStore) -> dict[str, bytes]:
    """Return the files of an output by relative path."""
    if out.startswith(BUCKET):
        return dict(store.objects_below(f"{out.removeprefix('gs://')}/"))
    path = Path(out)
    if path.is_file():
        return {out: path.read_bytes()}
    return _read_folder(path)


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by relative path."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def _delete_outputs(store: FakeObjectStore) -> None:
    """Delete the outputs of a command, finished or not."""
    for path in [*Path().glob("out*"), Path(LOCK), Path(CERTIFICATE)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    store.objects.clear()
    store.versions.clear()


def _is_document(path: str) -> bool:
    """Return whether a file is JSON text."""
    return path.endswith((".json", "_METADATA"))


def stable_content(path: str, data: bytes, *, is_trained: bool = False) -> bytes:
    """Return the content of a file without what differs between equal outputs.

    This is the only place that leaves something out. Times and the version of prep are in no case's way: the inputs
    have a fixed time, and `open_site` sets the version.

    - `versions` of a certificate.
    - The locks of a run, and the list of the data files that a run has opened (paths and times of this machine).
    - Of a trained output also `environment` of manifests, `environment.json`, and the values: files of arrays count by
      their size, manifests without digests, and metrics by their keys.
    """
    name = Path(path).name
    if name in ("lock", ".lock") or name.startswith("opened-"):
        return b""
    if name == CERTIFICATE:
        return _edit(data, lambda fields: {**fields, "versions": "-"})
    if not is_trained:
        return data
    if name == "prep-manifest.json":
        return _edit(data, lambda fields: _without_values({**fields, "environment": "-"}))
    if name == "environment.json":
        return b""
    if name == "metrics.jsonl":
        keys = [sorted(json.loads(line)) for line in data.splitlines()]
        return json.dumps(keys).encode()
    if not _is_document(path) and not name.endswith((".toml", ".txt")):
        return f"{len(data)} bytes".encode()
    return data


def _edit(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a JSON document after a change of its fields."""
    return json.dumps(change(json.loads(data)), indent=1).encode()


def _without_values(value: Any) -> Any:
    """Return a JSON value without digests."""
    if isinstance(value, dict):
        return {key: _without_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_values(item) for item in value]
    return DIGEST.sub("-", value) if isinstance(value, str) else value


def read_digests() -> dict[str, str]:
    """Return the recorded digest of each case."""
    return json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}


def read_details() -> Details:
    """Return the recorded files of each case and the texts of documents."""
    if not DETAILS.exists():
        return {"files": {}, "documents": {}}
    return json.loads(lzma.decompress(DETAILS.read_bytes()))


def record(outputs: Mapping[str, Output], *, keep: Collection[str]) -> None:
    """Record outputs, beside the recorded ones of the cases in `keep`."""
    digests = read_digests()
    details = read_details()
    digests = {name: digest for name, digest in digests.items() if name in keep}
    files = {name: table for name, table in details["files"].items() if name in keep}
    texts = details["documents"]
    for name, output in outputs.items():
        digests[name] = output.digest
        files[name] = {path: digest[:SHORT_DIGEST] for path, digest in sorted(output.files.items())}
        for path, text in output.documents.items():
            texts[files[name][path]] = shorten(text)
    used = {digest for table in files.values() for digest in table.values()}
    texts = {digest: texts[digest] for digest in sorted(used) if digest in texts}
    DIGESTS.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
    content = json.dumps({"files": files, "documents": texts}, sort_keys=True)
    DETAILS.write_bytes(lzma.compress(content.encode(), preset=9))


def shorten(text: str) -> str:
    """Return a document with the first eight characters of each digest. DETAILS stays small with these."""
    return DIGEST.sub(r"\1", text)


def explain(name: str, output: Output) -> str:
    """Return which files of an output differ from the recorded ones, and which fields of documents."""
    details = read_details()
    recorded = details["files"].get(name)
    if recorded is None:
        return f"case {name!r} is not recorded: `python -m tests.golden.make_outputs` records it"
    lines: list[str] = []
    for path in sorted({*recorded, *output.files}):
        before, after = recorded.get(path, ""), output.files.get(path, "")[:SHORT_DIGEST]
        if before == after:
            continue
        if not before or not after:
            lines.append(f"  {path}: {'missing' if before else 'new'}")
            continue
        lines.append(f"  {path}: differs")
        text = details["documents"].get(before)
        if text is not None and path in output.documents:
            new_text = shorten(output.documents[path])
            lines += field_differences(_parse(text), _parse(new_text))
    shown = lines[:MAX_LINES]
    if len(lines) > len(shown):
        shown.append(f"  ... and {len(lines) - len(shown)} more lines")
    end = f"exit code {output.exit_code}" if output.exit_code else f"{len(output.files)} files"
    return "\n".join([f"`{name}` differs from tests/golden/outputs.json ({end}):", *shown])


def _parse(text: str) -> Any:
    """Return the value of a JSON document, or its lines if it is other text."""
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def field_differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Return one line per field that differs between two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        return _key_differences(before, after, path)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        lines: list[str] = []
        for number, (old, new) in enumerate(zip(before, after)):
            lines += field_differences(old, new, f"{path}[{number}]")
        return lines
    if json.dumps(before) == json.dumps(after):
        return []
    return [f"    {path}: {json.dumps(before)[:80]} -> {json.dumps(after)[:80]}"]


def _key_differences(before: dict[str, Any], after: dict[str, Any], path: str) -> list[str]:
    """Return one line per key that is new, missing or in another place, and those of values that differ."""
    lines: list[str] = []
    if list(before) != list(after) and set(before) == set(after):
        lines.append(f"    {path or 'document'}: other order of keys")
    for key in dict.fromkeys([*before, *after]):
        place = f"{path}.{key}" if path else key
        if key not in before:
            lines.append(f"    {place}: new")
        elif key not in after:
            lines.append(f"    {place}: missing")
        else:
            lines += field_differences(before[key], after[key], place)
    return lines
