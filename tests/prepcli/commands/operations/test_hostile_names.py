"""Hostile names of tensors: refused in planning with one error, or written inside of the output, by every writer."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers import towers
from tests.helpers.hostile_names import HOSTILE_NAMES, write_hostile_model
from tests.helpers.manifests import changed_manifest
from tests.helpers.object_server import use_objects
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import read_files
from tests.helpers.stored_tensors import safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import assert_same, read_tensors
from tests.helpers.tokenizer_folders import train_tokenizer, write_json

STORAGES = ("ocdbt", "zarr3", "files", "zarr3-files")
# Options of a conversion to an Orbax item: each storage, raw and compressed.
FORMS = tuple(
    ("--storage", storage, *compress)
    for storage, compress in product(STORAGES, ((), ("--compress", "zstd")))
)
FAST_NAMES = ("parent", "below another", "NUL", "one byte more", "longest name")
# Names of towers that no folder may have, as a file of `--storage files` or below another one.
TOWER_NAMES = ("../../escaped", "NUL\0", "m" * 300, "x/../../../escaped")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def writes_inside(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Run a conversion to `out`, and return whether it wrote the output. It writes nothing else."""
    before = read_files(Path())
    codes: list[int] = []
    for dry_run in (["--dry-run"], []):
        capsys.readouterr()
        codes.append(main([*words, "--out", "out", "-q", *dry_run]))
        errors = capsys.readouterr().err.splitlines()
        if codes[-1]:
            # A refusal leaves nothing behind, also no unfinished output.
            assert sorted(path.name for path in Path().iterdir()) == sorted(
                {path.split("/")[0] for path in before}
            )
            assert [line for line in errors if line.startswith("error: ")] == errors[:1]
            assert "bug in prep" not in "".join(errors)
    # The dry run shows what the run does.
    assert codes[0] == codes[1] in (0, 1, 2), (words, codes)
    after = read_files(Path())
    assert {path: after.pop(path) for path in before} == before
    assert all(path.startswith("out/") for path in after), words
    return codes[1] == 0


@pytest.mark.parametrize("kind", slow_except(HOSTILE_NAMES, FAST_NAMES))
def test_hostile_names_stay_inside(capsys: pytest.CaptureFixture[str], kind: str):
    tensors = write_hostile_model(Path("m"), HOSTILE_NAMES[kind])
    run_ok("save-init", "./m", "--out", "mine")
    written: dict[tuple[str, ...], bool] = {}
    for words in FORMS:
        written[words] = writes_inside(capsys, "save-init", "./m", *words)
        if written[words]:
            run_ok("export", "./out", "--out", "back")
            assert_same(read_tensors(Path("back")), tensors)
            shutil.rmtree("back")
            shutil.rmtree("out")
        # Another source of the same tensors is refused, too.
        assert writes_inside(capsys, "reshard", "./mine", *words) == written[words]
        shutil.rmtree("out", ignore_errors=True)
    # A database has no limit, and compression changes nothing about names.
    assert all(written[words] for words in FORMS if words[1] in ("ocdbt", "zarr3"))
    assert len({written[words] for words in FORMS if words[1].endswith("files")}) == 1


@pytest.mark.parametrize("kind", slow_except(HOSTILE_NAMES, ["parent"]))
def test_workers_and_buckets_refuse_the_same_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
):
    write_hostile_model(Path("m"), HOSTILE_NAMES[kind])
    for words in FORMS:
        is_written = writes_inside(capsys, "save-init", "./m", *words)
        shutil.rmtree("out", ignore_errors=True)
        if not is_written:
            assert not writes_inside(capsys, "save-init", "./m", *words, "--workers", "2")
        with use_objects(monkeypatch, {"bucket/other/config.json": b"{}"}) as store:
            before = dict(store.objects)
            code = main(["save-init", "./m", *words, "--out", "gs://bucket/out", "-q"])
            assert (code == 0) == is_written, (words, capsys.readouterr().err)
            after = dict(store.objects)
            assert {path: after.pop(path) for path in before} == before
            assert all(path.startswith("bucket/out/") for path in after)
            assert bool(after) == is_written


@pytest.mark.parametrize("name", slow_except(TOWER_NAMES, ["../../escaped"]))
@pytest.mark.parametrize("compress", [(), ("--compress", "zstd")], ids=["raw", "zstd"])
def test_names_of_towers_stay_inside(
    capsys: pytest.CaptureFixture[str], name: str, compress: tuple[str, ...]
):
    tensors = towers.write_model("llava")
    tower = next(key for key in tensors if "vision_tower" in key)
    tensors[f"{tower}/{name}"] = tensors.pop(tower)
    write_safetensors(Path("m/model.safetensors"), tensors)
    for storage in STORAGES:
        words = ("save-init", "./m", "--storage", storage, *compress)
        assert writes_inside(capsys, *words) == (storage in ("ocdbt", "zarr3"))
        shutil.rmtree("out", ignore_errors=True)
    run_ok("save-init", "./m", "--out", "init")
    assert writes_inside(capsys, "export", "./init")
    assert safetensors_bytes(Path("out")) == tensors


@pytest.mark.parametrize("level", slow_except([None, "zstd"], ["zstd"]))
def test_added_tokens_keep_names_inside(capsys: pytest.CaptureFixture[str], level: str | None):
    tensors = towers.write_model("llava")
    tower = next(key for key in tensors if "vision_tower" in key)
    tensors[f"{tower}/../../../escaped"] = tensors.pop(tower)
    write_safetensors(Path("m/model.safetensors"), tensors)
    tokenizer = train_tokenizer("wordlevel", 0)
    tokenizer.save("m/tokenizer.json")
    write_json(Path("tokens.json"), ["<tool>"])
    size = str(tokenizer.get_vocab_size())
    run_ok("pad-vocab", "./m", "--true-vocab", size, "--size", "128", "--out", "padded")
    run_ok("save-init", "./padded", "--out", "init")
    words = ("add-tokens", "./init", "--tokens", "tokens.json")
    if level is not None:
        with changed_manifest(Path("init")) as manifest:
            manifest["compress"] = level
    assert writes_inside(capsys, *words)
    shutil.rmtree("out")
    # The output has the storage that the manifest of its source names.
    with changed_manifest(Path("init")) as manifest:
        manifest["storage"] = "files"
    assert not writes_inside(capsys, *words)


COMMANDS = (
    "verify FOLDER ./other",
    "verify FOLDER-init FOLDER",
    "inspect FOLDER --stats --html page.html",
    "lock FOLDER --html page.html",
    "roundtrip FOLDER --layout init",
    "map suggest FOLDER ./other",
    "export FOLDER-init --out out",
)


@pytest.mark.parametrize("command", slow_except(COMMANDS, [COMMANDS[0], COMMANDS[2]]))
def test_control_characters_reach_neither_terminal_nor_page(
    capsys: pytest.CaptureFixture[str], command: str
):
    folder = Path("m\x1b]0;title\x07\r\x9b2J\u202e")
    names = [name for kind in HOSTILE_NAMES for name in HOSTILE_NAMES[kind] if len(name) < 100]
    write_hostile_model(folder, names)
    write_hostile_model(Path("other"), [*names[::2], "y"])
    run_ok("save-init", f"./{folder}", "--out", f"{folder}-init")
    capsys.readouterr()
    words = [word.replace("FOLDER", f"./{folder}") for word in command.split()]
    main([*words, "--progress", "lines", "-v"])
    captured = capsys.readouterr()
    texts = [captured.out, captured.err]
    if "page.html" in words:
        texts.append(Path("page.html").read_text())
    for text in texts:
        assert {char for char in text if not char.isprintable()} <= {"\n"}, words
