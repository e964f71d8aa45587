"""Recipes that are wrong: one message with the line, the reason and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.models.errors import FAILED, USAGE, PrepError
from trainer.recipe import load_recipe
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES

GOOD = """\
mesh = "1,2,4"
[model]
path = "m-init"
[data]
type = "text"
path = "train.txt"
seq_length = 8
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 20
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def error_of(text: str | bytes, *sets: str) -> PrepError:
    Path("x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("x.toml"), sets)
    return caught.value


def replaced(line: str, by: str) -> str:
    assert f"{line}\n" in GOOD
    return GOOD.replace(f"{line}\n", f"{by}\n" if by else "")


FILES = {
    "a key with a typing error": (
        replaced("lr = 1e-3", "lr = 1e-3\nweight_deacy = 0.1"),
        "x.toml:12: unknown key `optimizer.weight_deacy` - did you mean `weight_decay = 0.1`?",
    ),
    "a table with a typing error": (
        replaced("[optimizer]", "[optimiser]"),
        "x.toml:10: unknown key `optimiser` - did you mean `optimizer`?",
    ),
    "a table that prep has not": (
        GOOD + "[lora]\nrank = 8\n",
        "x.toml:14: unknown key `lora` - "
        "known: name, seed, mesh, model, data, batch, optimizer, train, eval, checkpoint",
    ),
    "a key of another table": (
        replaced("steps = 20", "steps = 20\nseq_length = 8"),
        "x.toml:14: unknown key `train.seq_length` - `seq_length = 8` in [data]",
    ),
    "a key of no table below a table": (
        replaced("steps = 20", "steps = 20\nseed = 1"),
        "x.toml:14: unknown key `train.seed` - `seed = 1`, above the first table",
    ),
    "a key that is later perhaps": (
        replaced('path = "m-init"', 'path = "m-init"\nq_chunk_size = 2048'),
        "x.toml:4: unknown key `model.q_chunk_size` - did you mean `head_chunk_size = 2048`?",
    ),
    "text for a number": (
        replaced("seq_length = 8", 'seq_length = "2k"'),
        'x.toml:7: `data.seq_length` is "2k" - it takes an integer >= 2: tokens of a sequence; after an encoder, of a '
        "target: longer ones are cut - `seq_length = 1024`",
    ),
    "a number in quotes": (
        replaced("lr = 1e-3", 'lr = "1e-3"'),
        'x.toml:11: `optimizer.lr` is "1e-3" - it takes a number > 0: the learning rate after warm-up - `lr = 1e-3`',
    ),
    "infinity": (
        replaced("lr = 1e-3", "lr = inf"),
        "x.toml:11: `optimizer.lr` is inf - it takes a number > 0: the learning rate after warm-up - `lr = 2e-5`",
    ),
    "a whole number with a fraction": (
        replaced("steps = 20", "steps = 20.0"),
        "x.toml:13: `train.steps` is 20.0 - it takes an integer >= 1: optimizer steps of the run - `steps = 20`",
    ),
    "true for a number": (
        replaced("size = 4", "size = true"),
        "x.toml:9: `batch.size` is true - it takes an integer >= 1: sequences a step - `size = 32`",
    ),
    "a number out of bounds": (
        replaced("seq_length = 8", "seq_length = 8\nholdout = 1"),
        "x.toml:8: `data.holdout` is 1 - it takes a number >= 0 and < 1: the last part of the sequences validates "
        "instead - `holdout = 0.05`",
    ),
    "a value with a typing error": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "cosin"'),
        'x.toml:12: `optimizer.schedule` is "cosin" - it takes "linear", "cosine" or "constant": how the learning rate '
        "decays - did you mean `cosine`?",
    ),
    "neither of two kinds": (
        GOOD + '[checkpoint]\nkeep = "every"\n',
        'x.toml:15: `checkpoint.keep` is "every" - it takes an integer >= 1 or "all": how many stay, the newest'
        " - `keep = 2`",
    ),
    "no kind of a list": (
        replaced('path = "train.txt"', 'path = [\n  "a",\n  3,\n]'),
        'x.toml:6: `data.path` is ["a", 3] - it takes a path or a list of paths: files, folders or globs'
        ' - `path = "data/train.txt"`',
    ),
    "an empty list": (
        replaced('path = "train.txt"', "path = []"),
        "x.toml:6: `data.path` is [] - it takes a path or a list of paths: files, folders or globs"
        ' - `path = "data/train.txt"`',
    ),
    "a name that is no folder": (
        'name = "../x"\n' + GOOD,
        'x.toml:1: `name` is "../x" - it takes text: the run\'s name, a plain folder name - `name = "first-run"`',
    ),
    "a value for a table": (
        "optimizer = 3\n" + GOOD.replace("[optimizer]\nlr = 1e-3\n", ""),
        "x.toml:1: `optimizer` is 3 - it takes a table - `[optimizer]`, and its keys below",
    ),
    "a table for a value": (
        replaced("lr = 1e-3", "lr.a = 1"),
        "x.toml:11: `optimizer.lr` is a table - it takes a number > 0: the learning rate after warm-up - `lr = 2e-5`",
    ),
    "a required key that is missing": (
        replaced("lr = 1e-3", ""),
        "x.toml:10: `optimizer.lr` is missing - it takes a number > 0: the learning rate after warm-up"
        " - `lr = 2e-5` in [optimizer]",
    ),
    "a required table that is missing": (
        GOOD.replace('[model]\npath = "m-init"\n', ""),
        "x.toml: `model.path` is missing - it takes a path: an init checkpoint, a step of a run, or a Hugging Face"
        ' folder - `path = "gpt-neo-1.3B-init"` in [model]',
    ),
    "a mesh with bad grammar": (
        replaced('mesh = "1,2,4"', 'mesh = "1,64"'),
        "x.toml:1: `mesh 1,64` has 2 axes - it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`"
        " - did you mean `1,64,1`?",
    ),
    "a column of text": (
        replaced("seq_length = 8", 'seq_length = 8\nfields = "body"'),
        'x.toml:8: `data.fields` is "body" - it names the text in an object, and `data.type` is text - `type = "json"`',
    ),
    "a source of text": (
        replaced("seq_length = 8", "seq_length = 8\nsource_length = 16"),
        "x.toml:8: `data.source_length` is 16 - nothing in `data.fields` stands in brackets, which would be read by an "
        'encoder - `fields = "[article], summary"`',
    ),
    "a source without a length": (
        replaced('type = "text"', 'type = "json"\nfields = "[a], b"'),
        'x.toml:6: `data.source_length` is missing - `data.fields` has a source: "[a], b" - `source_length = 512` in '
        "[data]",
    ),
    "a source without a target": (
        replaced('type = "text"', 'type = "json"\nfields = "[a], [b]"'),
        'x.toml:6: `data.fields` is "[a], [b]" - brackets are around what an encoder reads; what it is to make of that '
        'stands without - `fields = "[article], summary"`',
    ),
    "two that validate": (
        replaced("seq_length = 8", 'seq_length = 8\nholdout = 0.5\neval_path = "e.txt"'),
        'x.toml:9: `data.holdout` is 0.5 and `data.eval_path` is ["e.txt"] - each says what validates, and only one can'
        " - take one of them out",
    ),
    "evaluation of nothing": (
        replaced("steps = 20", "steps = 20\neval_every = 5"),
        "x.toml:14: `train.eval_every` is 5 - nothing validates: no holdout and no eval_path"
        " - `holdout = 0.05` in [data]",
    ),
    "no size of a step": (
        replaced("size = 4", "accumulate = 2"),
        "x.toml:8: `batch` does not say how many sequences a step has - none of size, per_device and per_replica is "
        "given - `size = 32` in [batch]",
    ),
    "two micro-batches": (
        replaced("size = 4", "per_device = 1\nper_replica = 2"),
        "x.toml:10: `batch.per_device` is 1 and `batch.per_replica` is 2 - each says what a micro-batch is, and only "
        "one can - take one of them out",
    ),
    "all three of a batch": (
        replaced("size = 4", "size = 4\nper_device = 1\naccumulate = 4"),
        "x.toml:11: `batch.accumulate` is 4 - size and per_device say it already - two of the three",
    ),
    "no length": (
        replaced("steps = 20", "log_every = 1"),
        "x.toml:12: `train` does not say how long the run is - neither steps nor epochs is given - `steps = 1000` in "
        "[train]",
    ),
    "two lengths": (
        replaced("steps = 20", "epochs = 2\nsteps = 20"),
        "x.toml:13: `train.steps` is 20 and `train.epochs` is 2.0 - each says how long the run is, and only one can"
        " - take one of them out",
    ),
    "two warm-ups": (
        replaced("lr = 1e-3", "lr = 1e-3\nwarmup_ratio = 0.1\nwarmup_steps = 3"),
        "x.toml:12: `optimizer.warmup_steps` is 3 and `optimizer.warmup_ratio` is 0.1 - each says how long warm-up is, "
        "and only one can - take one of them out",
    ),
    "warm-up as long as the run": (
        replaced("lr = 1e-3", "lr = 1e-3\nwarmup_steps = 20"),
        "x.toml:12: `optimizer.warmup_steps` leaves no steps for the decay - warm-up takes 20 steps, and the run has 20"
        " steps, counted from 0, warm-up included - fewer steps of warm-up, or `--set optimizer.schedule=constant`",
    ),
    "decay before warm-up": (
        GOOD.replace("steps = 20", "epochs = 1").replace("1e-3", "1e-3\nwarmup_steps = 9\ndecay_steps = 5"),
        "x.toml:12: `optimizer.warmup_steps` leaves no steps for the decay - warm-up takes 9 steps, and "
        "`optimizer.decay_steps` is 5, counted from 0, warm-up included - fewer steps of warm-up, or "
        "`--set optimizer.schedule=constant`",
    ),
    "text without quotes": (
        replaced('path = "m-init"', "path = m-init"),
        'x.toml:3: not TOML - a value is not TOML (column 8) - text stands in quotes: `mesh = "1,1,8"`',
    ),
    "a key that is there twice": (
        replaced("size = 4", "size = 4\nsize = 5"),
        "x.toml:10: not TOML - the key is there twice (column 9)",
    ),
    "a string that does not end": (
        GOOD + '[eval]\nlimit = """',
        "x.toml:15: not TOML - a text has no closing quote",
    ),
    "lists without end": (
        "a = " + "[" * 100_000,
        "x.toml: not a recipe - lists are nested too deeply, or a number has too many digits",
    ),
    "a number without end": (
        "seed = " + "1" * 5_000,
        "x.toml: not a recipe - lists are nested too deeply, or a number has too many digits",
    ),
    "bytes that are no text": (
        GOOD.encode() + b"# \xe9t\xe9\n",
        f"x.toml:14: not UTF-8 - byte {len(GOOD) + 2} of the file is 0xe9 - save the file as UTF-8",
    ),
    "a variable that is not set": (
        replaced('path = "train.txt"', 'path = "${NOT_SET_ANYWHERE}/train.txt"'),
        'x.toml:6: `data.path` needs the variable NOT_SET_ANYWHERE - it is "${NOT_SET_ANYWHERE}/train.txt", and '
        "NOT_SET_ANYWHERE is not set - `export NOT_SET_ANYWHERE=...`",
    ),
    "an expression": (
        replaced('path = "train.txt"', 'path = "${HOME:-x}/train.txt"'),
        'x.toml:6: `data.path` is "${HOME:-x}/train.txt" - only `${NAME}` is replaced, and only once'
        " - no `${` in what is left",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_recipe_has_one_message(case: str):
    text, message = FILES[case]
    error = error_of(text)
    assert str(error) == message
    assert error.code == USAGE


SETS = {
    "a key with a typing error": (
        "optimizer.weight_deacy=0.1",
        "--set: unknown key `optimizer.weight_deacy` - did you mean `--set optimizer.weight_decay=0.1`?",
    ),
    "a key too deep": (
        "optimizer.lr.x=1",
        "--set: unknown key `optimizer.lr.x` - did you mean `--set optimizer.lr=1`?",
    ),
    "text for a number": (
        "optimizer.lr=abc",
        '--set: `optimizer.lr` is "abc" - it takes a number > 0: the learning rate after warm-up'
        " - `--set optimizer.lr=2e-5`",
    ),
    "Python's true": (
        "data.shuffle=True",
        '--set: `data.shuffle` is "True" - it takes true or false: a new order of the sequences in each epoch'
        " - `--set data.shuffle=true`",
    ),
    "nothing": ("optimizer.lr", "--set optimizer.lr: no value - it takes KEY=VALUE - `--set optimizer.lr=1e-4`"),
    "a table": (
        "optimizer={lr=1}",
        "--set optimizer={lr=1}: a whole table - it sets one key - `--set optimizer.KEY=VALUE`",
    ),
    "two lines": (
        "seed=1\nname='x'",
        "--set seed=1\\nname='x': not one line of text - a value is what a line of a recipe can hold",
    ),
    "bytes of another encoding": (
        "name=\udce9",
        "--set name=\\udce9: not one line of text - a value is what a line of a recipe can hold",
    ),
    "a mesh with bad grammar": (
        "mesh=8",
        "--set: `mesh 8` has 1 axis - it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2` - did you mean `1,8,1`?",
    ),
    "another length": (
        "train.epochs=1",
        "--set: `train.steps` is 20 and `train.epochs` is 1.0 - each says how long the run is, and only one can"
        " - take one of them out",
    ),
}


@pytest.mark.parametrize("case", SETS)
def test_a_wrong_set_has_one_message(case: str):
    text, message = SETS[case]
    error = error_of(GOOD, text)
    assert str(error) == message
    assert error.code == USAGE


def test_a_wrong_set_of_a_wrong_table_is_told_of_the_table():
    assert error_of("optimizer = 3\n", "optimizer.lr=1").why.startswith("x.toml:1: `optimizer` is 3 - ")


def test_set_mends_a_recipe():
    Path("x.toml").write_text(replaced("lr = 1e-3", ""))
    assert load_recipe(Path("x.toml"), ["optimizer.lr=1"]).recipe.optimizer.lr == 1.0


def test_a_recipe_that_is_not_there():
    Path("llama-7b.toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("lama-7b.toml"))
    assert str(caught.value) == "lama-7b.toml does not exist - a recipe is a TOML file - did you mean `llama-7b.toml`?"
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("no/where.toml"))
    assert str(caught.value) == "no/where.toml does not exist - a recipe is a TOML file"
    assert caught.value.code == USAGE


def test_a_folder_is_no_recipe():
    Path("llama-7b.toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("."))
    assert str(caught.value) == ". is a folder - a recipe is a TOML file - there: llama-7b.toml"


def test_what_the_machine_refuses_is_no_usage_error():
    name = "x" * 300
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(name))
    assert str(caught.value) == f"{name} cannot be read - File name too long"
    assert caught.value.code == FAILED


def test_a_mark_at_the_begin_and_other_line_ends_are_no_fault():
    Path("x.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(Path("x.toml")).recipe.mesh == "1,2,4"


def test_a_file_name_that_is_no_name_asks_for_one():
    Path(".toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(".toml"))
    assert caught.value.what == '.toml: `name` is ".toml"'
    assert load_recipe(Path(".toml"), ["name=x"]).recipe.name == "x"


VALUES = st.sampled_from(
    ["1", "-1", "0", "1.5", "nan", "''", '"x"', "true", "[]", '["a"]', "{}", "{ a = 1 }", "[[1]]",
     "1979-05-27", "x", ""]
)  # fmt: skip
NAMES = st.sampled_from(
    [*KEY_SCHEMAS, *TABLE_NAMES, "x", "model.x", '"model.path"', "data.path.x", "[model]", "[[data]]", "[x"]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, VALUES), max_size=4), st.lists(st.tuples(NAMES, VALUES), max_size=2), st.booleans())
def test_whatever_is_given_is_a_recipe_or_one_message(
    lines: list[tuple[str, str]], sets: list[tuple[str, str]], on_top: bool
):
    text = "".join(name if name.startswith("[") else f"{name} = {value}\n" for name, value in lines)
    Path("x.toml").write_text(f"{text}\n{GOOD}" if on_top else text)
    error = None
    try:
        load_recipe(Path("x.toml"), [f"{name}={value}" for name, value in sets])
    except PrepError as raised:
        error = raised
    assert error is None or (error.code == USAGE and error.what and "None" not in str(error))
