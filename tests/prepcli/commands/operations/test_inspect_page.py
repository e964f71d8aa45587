"""`prep inspect --html`: the page of a checkpoint."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.pages.inspection_page import MAX_DRAWINGS, MAX_ROWS
from prepcli.core.errors import FAILED, OK, USAGE
from tests.helpers.run_inspect import SMALL_LLAMA, make_model_and_init
from tests.helpers.tiny_checkpoints import make_checkpoint

VOID_TAGS = {"meta"}


class Page(HTMLParser):
    """Texts of a page. Reading it checks that every element is closed in the right order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(self.source)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspect_page(*arguments: str, code: int = OK) -> Page:
    """Run `prep inspect --html` and read the page."""
    assert main(["inspect", *arguments, "--html", "page.html", "-q"]) == code
    return Page(Path("page.html"))


def test_page_has_facts_and_tree(capsys: pytest.CaptureFixture[str]):
    tensors = make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    page = inspect_page("model")
    number_of_values = sum(tensor.size for tensor in tensors.values())
    assert f"parameters {number_of_values:,}" in page.text
    assert "{0..1}" in page.text
    assert "input_layernorm.weight" in page.text
    # Without a mesh there is nothing to split, and statistics would read the data.
    assert "device" not in page.text
    assert "Statistics" not in page.text


def test_page_needs_no_network_and_no_script():
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    page = inspect_page("model", "--mesh", "1,2,2", "--stats")
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert "http" not in page.source


def test_page_states_the_bytes_that_jax_places_on_a_device(capsys: pytest.CaptureFixture[str]):
    make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "2,2,2")
    page = inspect_page("init")
    params = prep.load_params("init", mesh="2,2,2")
    on_first_device = 0
    total = 0
    for leaf in jax.tree.leaves(params):
        total += leaf.nbytes
        for shard in leaf.addressable_shards:
            if shard.device == jax.devices()[0]:
                on_first_device += shard.data.nbytes
    assert (
        f"Each device holds {on_first_device / 1024:.1f} KiB of {total / 1024:.1f} KiB" in page.text
    )


def test_mesh_of_the_user_replaces_the_mesh_of_the_manifest(capsys: pytest.CaptureFixture[str]):
    make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "1,2,2")
    assert "Parameters on 4 devices" in inspect_page("init").text
    assert "Parameters on 2 devices" in inspect_page("init", "--mesh", "1,1,2").text


def test_shards_are_drawn_with_their_devices():
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    page = inspect_page("model", "--mesh", "1,2,2")
    # 12 rows over mp and 8 columns over fsdp: device 3 holds the last quarter of the embedding.
    assert "device 3: rows 6:12, columns 4:8" in page.text
    assert page.tags.count("section") <= MAX_DRAWINGS


def test_shards_of_large_meshes_are_drawn_as_text():
    config = SMALL_LLAMA | {"vocab_size": 128, "hidden_size": 128}
    make_checkpoint(Path("model"), config, files=1)
    page = inspect_page("model", "--mesh", "1,64,2")
    assert "vocab down; embed across" in page.text


def test_statistics_equal_numpy():
    tensors = make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    page = inspect_page("model", "--stats")
    name, values = next(iter(tensors.items()))
    row = page.texts.index(name)
    minimum, maximum = page.texts[row + 3 : row + 5]
    np.testing.assert_allclose(float(minimum), values.min(), rtol=1e-5)
    np.testing.assert_allclose(float(maximum), values.max(), rtol=1e-5)


def test_differences_are_listed_and_fail(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    make_checkpoint(Path("wide"), SMALL_LLAMA | {"intermediate_size": 24}, files=1)
    page = inspect_page("model", "--diff", "wide", code=FAILED)
    row = page.texts.index("model.layers.0.mlp.up_proj.weight")
    assert page.texts[row + 1 : row + 3] == ["[16, 8] float32", "[24, 8] float32"]
    assert "differ in 6 of 21 tensors" in capsys.readouterr().err


def test_json_names_the_page(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    assert main(["inspect", "model", "--html", "page.html", "--json"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == "page.html"
    assert document["source"]["family"] == "llama"


def test_hostile_names_are_escaped():
    Path("model").mkdir()
    name = '<script>alert("x")</script>&<b>'
    save_file({name: np.zeros((2, 2), np.float32)}, "model/model.safetensors")
    page = inspect_page("model", "--stats")
    assert "script" not in page.tags
    assert name in page.text


def test_long_trees_and_tables_are_cut():
    Path("model").mkdir()
    tensors = {f"t{number}x": np.zeros(1, np.float32) for number in range(MAX_ROWS + 5)}
    save_file(tensors, "model/model.safetensors")
    page = inspect_page("model", "--stats")
    # One table of statistics and one of the tree, each with the first rows.
    assert page.text.count("and 5 more") == 2
    assert sum(text in tensors for text in page.texts) == 2 * MAX_ROWS


@pytest.mark.parametrize("view", [("--tree",), ("--shards", "embed.tokens")])
def test_views_that_the_page_has_anyway_are_refused(
    view: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    assert main(["inspect", "model", "--html", "page.html", *view]) == USAGE
    assert f"`{view[0]}" in capsys.readouterr().err
    assert not Path("page.html").exists()


def test_other_files_are_not_replaced():
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    before = Path("model/config.json").read_bytes()
    assert main(["inspect", "model", "--html", "model/config.json"]) == FAILED
    assert Path("model/config.json").read_bytes() == before


def test_mesh_that_does_not_divide_writes_no_page(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    assert main(["inspect", "model", "--html", "page.html", "--mesh", "1,1,5"]) == USAGE
    assert "5" in capsys.readouterr().err
    assert not Path("page.html").exists()
