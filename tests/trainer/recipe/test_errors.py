"""Invalid recipes: one message with the line, the reason and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
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
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


SIX_THOUSAND_DIGITS = "f" * 6000


def error_of(text: str | bytes, *overrides: str) -> PrepError:
    """Return the error of loading a recipe text with overrides."""
    Path("x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("x.toml"), overrides)
    return caught.value


def replaced(line: str, by: str) -> str:
    """Return GOOD with a line replaced, or removed if `by` is empty."""
    assert f"{line}\n" in GOOD
    return GOOD.replace(f"{line}\n", f"{by}\n" if by else "")


FILES = {
    "misspelled key": (
        replaced("lr = 1e-3", "lr = 1e-3\nweight_deacy = 0.1"),
        "x.toml:12: unknown key `optimizer.weight_deacy` - did you mean `weight_decay = 0.1`?",
    ),
    "misspelled table": (
        replaced("[optimizer]", "[optimiser]"),
        "x.toml:10: unknown key `optimiser` - did you mean `optimizer`?",
    ),
    "unknown table": (
        GOOD + "[peft]\nquality = 8\n",
        "x.toml:14: unknown key `peft` - "
        "known: name, seed, mesh, rules, model, data, batch, optimizer, lora, loss, train, eval, checkpoint, log, "
        "cluster",
    ),
    "key of another table": (
        replaced("steps = 20", "steps = 20\nseq_length = 8"),
        "x.toml:14: unknown key `train.seq_length` - `seq_length = 8` in [data]",
    ),
    "top-level key in a table": (
        replaced("steps = 20", "steps = 20\nseed = 1"),
        "x.toml:14: unknown key `train.seed` - `seed = 1`, above the first table",
    ),
    "unknown key similar to a known one": (
        replaced('path = "m-init"', 'path = "m-init"\nhead_chunks_size = 2048'),
        "x.toml:4: unknown key `model.head_chunks_size` - did you mean `head_chunk_size = 2048`?",
    ),
    "text for a number": (
        replaced("seq_length = 8", 'seq_length = "2k"'),
        'x.toml:7: `data.seq_length` is "2k" - it takes an integer >= 2: tokens per sequence. With an encoder, maximum '
        "tokens of a target: longer targets are truncated - `seq_length = 1024`",
    ),
    "number in quotes": (
        replaced("lr = 1e-3", 'lr = "1e-3"'),
        'x.toml:11: `optimizer.lr` is "1e-3" - it takes a number > 0: peak learning rate, reached after warm-up'
        " - `lr = 1e-3`",
    ),
    "infinity": (
        replaced("lr = 1e-3", "lr = inf"),
        "x.toml:11: `optimizer.lr` is inf - it takes a number > 0: peak learning rate, reached after warm-up"
        " - `lr = 2e-5`",
    ),
    "integer written as a float": (
        replaced("steps = 20", "steps = 20.0"),
        "x.toml:13: `train.steps` is 20.0 - it takes an integer >= 1: optimizer steps of the run - `steps = 20`",
    ),
    "true for a number": (
        replaced("size = 4", "size = true"),
        "x.toml:9: `batch.size` is true - it takes an integer >= 1: sequences per step - `size = 32`",
    ),
    "number out of range": (
        replaced("seq_length = 8", "seq_length = 8\nholdout = 1"),
        "x.toml:8: `data.holdout` is 1 - it takes a number >= 0 and < 1: fraction of the sequences, the last "
        "ones, used for evaluation instead of training - `holdout = 0.05`",
    ),
    "misspelled value": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "cosin"'),
        'x.toml:12: `optimizer.schedule` is "cosin" - it takes "linear", "cosine", "cosine_restarts", '
        '"constant", "wsd" or "rsqrt": shape of the learning rate decay. `wsd`: constant, then a decay in the last '
        "`cooldown_steps`. `cosine_restarts`: `cycles` cosines, each from `lr`. "
        "`rsqrt`: with the inverse square root of the step - did you mean `cosine`?",
    ),
    "neither of two types": (
        GOOD + '[checkpoint]\nkeep = "every"\n',
        'x.toml:15: `checkpoint.keep` is "every" - it takes an integer >= 1 or "all": checkpoints to keep, the '
        "newest ones"
        " - `keep = 2`",
    ),
    "list with an invalid item": (
        replaced('path = "train.txt"', 'path = [\n  "a",\n  3,\n]'),
        'x.toml:6: `data.path` is ["a", 3] - it takes a path or a list of paths: files, folders or globs, also in '
        "`gs://`, `s3://` and `hf://` URLs"
        ' - `path = "data/train.txt"`',
    ),
    "empty list": (
        replaced('path = "train.txt"', "path = []"),
        "x.toml:6: `data.path` is [] - it takes a path or a list of paths: files, folders or globs, also in "
        "`gs://`, `s3://` and `hf://` URLs"
        ' - `path = "data/train.txt"`',
    ),
    "name that is not a folder name": (
        'name = "../x"\n' + GOOD,
        'x.toml:1: `name` is "../x" - it takes text: name of the run, a plain folder name - `name = "first-run"`',
    ),
    "value instead of a table": (
        "optimizer = 3\n" + GOOD.replace("[optimizer]\nlr = 1e-3\n", ""),
        "x.toml:1: `optimizer` is 3 - it takes a table - `[optimizer]`, and its keys below",
    ),
    "table instead of a value": (
        replaced("lr = 1e-3", "lr.a = 1"),
        "x.toml:11: `optimizer.lr` is a table - it takes a number > 0: peak learning rate, reached after warm-up"
        " - `lr = 2e-5`",
    ),
    "missing key": (
        replaced("lr = 1e-3", ""),
        "x.toml:10: `optimizer.lr` is missing - it takes a number > 0: peak learning rate, reached after warm-up"
        " - `lr = 2e-5` in [optimizer]",
    ),
    "missing table": (
        GOOD.replace('[model]\npath = "m-init"\n', ""),
        "x.toml: `model.path` is missing - it takes a path: a checkpoint of any format: a path, a hub id, or a URL"
        ' - `path = "gpt-neo-1.3B-init"` in [model]',
    ),
    "malformed mesh": (
        replaced('mesh = "1,2,4"', 'mesh = "1,64"'),
        'x.toml:1: `mesh = "1,64"` has 2 axes - it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`'
        " - did you mean `1,64,1`?",
    ),
    "fields with text data": (
        replaced("seq_length = 8", 'seq_length = 8\nfields = "body"'),
        'x.toml:8: `data.fields` is "body" - it names a column of json objects, but `data.type` is text - '
        '`data.type = "json"`',
    ),
    "source length with text data": (
        replaced("seq_length = 8", "seq_length = 8\nsource_length = 16"),
        "x.toml:8: `data.source_length` is 16 - `data.fields` has no source in brackets - "
        '`data.fields = "[article], summary"`',
    ),
    "format with text data": (
        replaced("seq_length = 8", 'seq_length = 8\nformat = "chat"'),
        'x.toml:8: `data.format` is "chat" - it is for columns of json objects, but `data.type` is text - '
        '`data.type = "json"`',
    ),
    "fields twice": (
        replaced('type = "text"', 'type = "json"\nfields = "body"\nfields_from_example = "how"'),
        'x.toml:6: `data.fields` is "body" - `data.fields_from_example` is "how" - remove one of them',
    ),
    "format with fields from the example": (
        replaced('type = "text"', 'type = "json"\nformat = "chat"\nfields_from_example = "how"'),
        'x.toml:6: `data.format` is "chat" - `data.fields_from_example` is "how" - remove one of them',
    ),
    "text before a conversation": (
        replaced('type = "text"', 'type = "json"\nformat = "chat"\nprepend_text = "Hi"'),
        'x.toml:7: `data.prepend_text` is "Hi" - `data.format` is chat, and its template makes the text - remove it',
    ),
    "turns of other data": (
        replaced('type = "text"', 'type = "json"\nformat = "prompt_completion"\nloss = "last"'),
        'x.toml:7: `data.loss` is ["last"] - there are no conversations: `data.format` is prompt_completion - remove '
        "it",
    ),
    "all text of a training template": (
        replaced(
            'type = "text"',
            'type = "json"\nformat = "chat"\nchat_template = "training"\nloss = "all"',
        ),
        'x.toml:8: `data.loss` is ["all"] - `data.chat_template` is training, which finds the turns of the assistant '
        'only - "assistant" or "last"',
    ),
    "separator in a conversation": (
        replaced('type = "text"', 'type = "json"\nformat = "chat"\nsubfield_separator = "-"'),
        'x.toml:7: `data.subfield_separator` is "-" - `data.format` is chat, and its template makes the text - remove '
        "it",
    ),
    "cooldown of another schedule": (
        replaced("lr = 1e-3", "lr = 1e-3\ncooldown_steps = 2"),
        "x.toml:12: `optimizer.cooldown_steps` is 2 - `optimizer.schedule` is linear - "
        '`schedule = "wsd"` in [optimizer]',
    ),
    "shape of another schedule": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "cosine"\ncooldown_shape = "cosine"'),
        'x.toml:13: `optimizer.cooldown_shape` is "cosine" - `optimizer.schedule` is cosine - '
        '`schedule = "wsd"` in [optimizer]',
    ),
    "waves of a linear cooldown": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "wsd"\ncooldown_waves = 1.5'),
        "x.toml:13: `optimizer.cooldown_waves` is 1.5 - `optimizer.cooldown_shape` is linear - "
        '`cooldown_shape = "cosine"` in [optimizer]',
    ),
    "restarts without their number": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "cosine_restarts"'),
        'x.toml:12: `optimizer.schedule` is "cosine_restarts" - the number of cosines is missing - '
        "`cycles = 4` in [optimizer]",
    ),
    "cycles without restarts": (
        replaced("lr = 1e-3", 'lr = 1e-3\nschedule = "cosine"\ncycles = 4'),
        "x.toml:13: `optimizer.cycles` is 4 - `optimizer.schedule` is cosine - "
        '`schedule = "cosine_restarts"` in [optimizer]',
    ),
    "source without a target": (
        replaced('type = "text"', 'type = "json"\nfields = "[a], [b]"'),
        'x.toml:6: `data.fields` is "[a], [b]" - all fields are in brackets, so no token would '
        'count in the loss: put one field outside brackets - `data.fields = "[article], summary"`',
    ),
    "repository without an owner": (
        replaced("steps = 20", 'steps = 20\n[checkpoint]\npush = "me"'),
        'x.toml:15: `checkpoint.push` is "me" - it has the form OWNER/NAME or OWNER/NAME@BRANCH - '
        '`push = "me/llama-13b"` in [checkpoint]',
    ),
    "two kinds of evaluation data": (
        replaced("seq_length = 8", 'seq_length = 8\nholdout = 0.5\neval_path = "e.txt"'),
        'x.toml:9: `data.holdout` is 0.5 and `data.eval_path` is ["e.txt"] - both set the evaluation data'
        " - remove one of them",
    ),
    "evaluation without data": (
        replaced("steps = 20", "steps = 20\neval_every = 5"),
        "x.toml:14: `train.eval_every` is 5 - there is no evaluation data: neither `holdout` nor `eval_path` is "
        "set - `holdout = 0.05` in [data]",
    ),
    "patience without evaluations": (
        replaced("steps = 20", "steps = 20\n[eval]\npatience = 3"),
        "x.toml:15: `eval.patience` is 3 - there is no evaluation data: neither `holdout` nor `eval_path` is "
        "set - `holdout = 0.05` in [data]",
    ),
    "patience with one evaluation": (
        replaced("seq_length = 8", "seq_length = 8\nholdout = 0.1") + "[eval]\npatience = 3\n",
        "x.toml:16: `eval.patience` is 3 - the run evaluates only after its last step - "
        "`eval_every = 500` in [train]",
    ),
    "negative patience": (
        replaced("steps = 20", "steps = 20\n[eval]\npatience = -1"),
        "x.toml:15: `eval.patience` is -1 - it takes an integer >= 0: evaluations in a row without a better "
        "`checkpoint.best`, or `eval_loss`, after which the run ends early. `0`: it takes all steps - "
        "`patience = 3`",
    ),
    "best value of an unknown metric": (
        replaced("seq_length = 8", "seq_length = 8\nholdout = 0.1").replace(
            "steps = 20", 'steps = 20\neval_every = 5\n[checkpoint]\nbest = "eval_bleu"'
        ),
        'x.toml:17: `checkpoint.best` is "eval_bleu" - whether its lowest or its highest value is the best is '
        'missing - `best_is = "highest"` or `best_is = "lowest"` in [checkpoint]',
    ),
    "highest loss": (
        replaced("seq_length = 8", "seq_length = 8\nholdout = 0.1").replace(
            "steps = 20",
            'steps = 20\neval_every = 5\n[checkpoint]\nbest = "eval_loss"\nbest_is = "highest"',
        ),
        'x.toml:18: `checkpoint.best_is` is "highest" - the lowest eval_loss is the best - remove it',
    ),
    "direction without a metric": (
        replaced("steps = 20", 'steps = 20\n[checkpoint]\nbest_is = "highest"'),
        'x.toml:15: `checkpoint.best_is` is "highest" - `checkpoint.best` is not set - '
        '`best = "eval_loss"` in [checkpoint]',
    ),
    "no batch size": (
        replaced("size = 4", "accumulate = 2"),
        "x.toml:8: `batch` does not set the sequences per step - none of `size`, `per_device` and `per_replica` is "
        "set - `size = 32` in [batch]",
    ),
    "two micro-batches": (
        replaced("size = 4", "per_device = 1\nper_replica = 2"),
        "x.toml:10: `batch.per_device` is 1 and `batch.per_replica` is 2 - both set the size of a "
        "micro-batch - remove one of them",
    ),
    "all three batch keys": (
        replaced("size = 4", "size = 4\nper_device = 1\naccumulate = 4"),
        "x.toml:11: `batch.accumulate` is 4 - `size` and `per_device` already determine it - remove one of the three",
    ),
    "no run length": (
        replaced("steps = 20", "log_every = 1"),
        "x.toml:12: `train` does not set the length of the run - neither `steps` nor `epochs` is set - `steps = 1000` "
        "in [train]",
    ),
    "two run lengths": (
        replaced("steps = 20", "epochs = 2\nsteps = 20"),
        "x.toml:13: `train.steps` is 20 and `train.epochs` is 2.0 - both set the length of the run"
        " - remove one of them",
    ),
    "two warm-up lengths": (
        replaced("lr = 1e-3", "lr = 1e-3\nwarmup_ratio = 0.1\nwarmup_steps = 3"),
        "x.toml:12: `optimizer.warmup_steps` is 3 and `optimizer.warmup_ratio` is 0.1 - both set the length of "
        "warm-up - remove one of them",
    ),
    "warm-up as long as the run": (
        replaced("lr = 1e-3", "lr = 1e-3\nwarmup_steps = 20"),
        "x.toml:12: `optimizer.warmup_steps` leaves no steps for the decay - warm-up takes the first 20 steps, and the "
        "run has 20 steps, warm-up included - use fewer warm-up steps, or `--set optimizer.schedule=constant`",
    ),
    "decay before warm-up": (
        GOOD.replace("steps = 20", "epochs = 1").replace(
            "1e-3", "1e-3\nwarmup_steps = 9\ndecay_steps = 5"
        ),
        "x.toml:12: `optimizer.warmup_steps` leaves no steps for the decay - warm-up takes the first 9 steps, and "
        "`optimizer.decay_steps` is 5, warm-up included - use fewer warm-up steps, or "
        "`--set optimizer.schedule=constant`",
    ),
    "text without quotes": (
        replaced('path = "m-init"', "path = m-init"),
        'x.toml:3: invalid TOML - invalid value (column 8) - text needs quotes: `mesh = "1,1,8"`',
    ),
    "duplicate key": (
        replaced("size = 4", "size = 4\nsize = 5"),
        "x.toml:10: invalid TOML - cannot overwrite a value (column 9) - `prep recipes` lists recipes",
    ),
    "unterminated string": (
        GOOD + '[eval]\nlimit = """',
        "x.toml:15: invalid TOML - unterminated string - `prep recipes` lists recipes",
    ),
    "too many nested lists": (
        "a = " + "[" * 100_000,
        "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
        " - `prep recipes` lists recipes",
    ),
    "number with too many digits": (
        "seed = " + "1" * 5_000,
        "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
        " - `prep recipes` lists recipes",
    ),
    "invalid UTF-8": (
        GOOD.encode() + b"# \xe9t\xe9\n",
        f"x.toml:14: not UTF-8 - byte {len(GOOD) + 2} of the file is 0xe9 - save the file as UTF-8",
    ),
    "number of 6,000 hexadecimal digits": (
        f"seed = 0x{SIX_THOUSAND_DIGITS}\n",
        "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
        " - `prep recipes` lists recipes",
    ),
    "key of 3,000 parts": (
        f"{'.'.join('a' * 3000)} = 1\n",
        "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
        " - `prep recipes` lists recipes",
    ),
    "key of 3,000 parts in a table": (
        f"model.{'.'.join('a' * 3000)} = 1\n",
        "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
        " - `prep recipes` lists recipes",
    ),
    "YAML": (
        "# settings\nmodel:\n  path: gpt2  # the start\n",
        "x.toml:2: invalid TOML - expected '=' after a key in a key/value pair (column 6)"
        " - `prep recipes` lists recipes",
    ),
    "JSON": (
        '{"model": {"path": "gpt2"}}',
        "x.toml:1: invalid TOML - invalid statement (column 1) - `prep recipes` lists recipes",
    ),
    "unset environment variable": (
        replaced('path = "train.txt"', 'path = "${NOT_SET_ANYWHERE}/train.txt"'),
        "x.toml:6: `data.path` needs the environment variable NOT_SET_ANYWHERE - it is "
        '"${NOT_SET_ANYWHERE}/train.txt", and '
        "NOT_SET_ANYWHERE is not set - `export NOT_SET_ANYWHERE=...`",
    ),
    "date for a chat template": (
        replaced(
            "seq_length = 8",
            'seq_length = 8\nformat = "chat"\ntemplate_args = { days = [2026-01-31] }',
        ).replace('"text"', '"json"'),
        "x.toml:9: `data.template_args` has 2026-01-31 - a chat template gets values of JSON, which has no dates"
        ' - quote it: `"2026-01-31"`',
    ),
    "time in a conversation": (
        GOOD + '[log]\nsamples = [{ messages = [{ role = "user", at = 07:32:00 }] }]\n',
        "x.toml:15: `log.samples` has 07:32:00 - a chat template gets values of JSON, which has no dates"
        ' - quote it: `"07:32:00"`',
    ),
    "name with a control character": (
        'name = "\\u0000"\n' + GOOD,
        'x.toml:1: `name` is "\\u0000" - it takes text: name of the run, a plain folder name - `name = "first-run"`',
    ),
    "shell expression": (
        replaced('path = "train.txt"', 'path = "${HOME:-x}/train.txt"'),
        'x.toml:6: `data.path` is "${HOME:-x}/train.txt" - only `${NAME}` is expanded, and '
        "only once - remove the remaining `${`",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_invalid_recipe_has_one_message(case: str):
    text, message = FILES[case]
    error = error_of(text)
    assert error.message == message
    assert error.code == USAGE


SETS = {
    "misspelled key": (
        "optimizer.weight_deacy=0.1",
        "`--set`: unknown key `optimizer.weight_deacy` - did you mean `--set optimizer.weight_decay=0.1`?",
    ),
    "6,000 hexadecimal digits": (
        f"seed=0x{SIX_THOUSAND_DIGITS}",
        f'`--set`: `seed` is "0x{"f" * 54}... - it takes an integer >= 0 and <= 4294967295: seed of the order of'
        " sequences and of all other random numbers - `--set seed=42`",
    ),
    "key below a key": (
        "optimizer.lr.x=1",
        "`--set`: unknown key `optimizer.lr.x` - did you mean `--set optimizer.lr=1`?",
    ),
    "text for a number": (
        "optimizer.lr=abc",
        '`--set`: `optimizer.lr` is "abc" - it takes a number > 0: peak learning rate, reached after warm-up'
        " - `--set optimizer.lr=2e-5`",
    ),
    "Python's true": (
        "data.shuffle=True",
        '`--set`: `data.shuffle` is "True" - it takes true or false: shuffle the sequences in each epoch'
        " - `--set data.shuffle=true`",
    ),
    "no value": (
        "optimizer.lr",
        "`--set optimizer.lr`: no value - it takes KEY=VALUE - `--set optimizer.lr=1e-4`",
    ),
    "long text": (
        "a" * 99,
        f"`--set {'a' * 57}...`: no value - it takes KEY=VALUE - `--set optimizer.lr=1e-4`",
    ),
    "whole table": (
        "optimizer={lr=1}",
        "`--set optimizer='{lr=1}'`: a whole table - it sets one key - `--set optimizer.KEY=VALUE`",
    ),
    "two lines": (
        "seed=1\nname='x'",
        "`--set seed='1\\nname='\"'\"'x'\"'\"''`: invalid value - a value is one line of UTF-8 text without control "
        "characters - remove the character",
    ),
    "bytes of another encoding": (
        "name=\udce9",
        "`--set name='\\udce9'`: invalid value - a value is one line of UTF-8 text without control characters - "
        "remove the character",
    ),
    "malformed mesh": (
        "mesh=8",
        '`--set`: `mesh = "8"` has 1 axis - it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2` - did you mean `1,8,1`?',
    ),
    "second run length": (
        "train.epochs=1",
        "`--set`: `train.steps` is 20 and `train.epochs` is 1.0 - both set the length of the run - remove one of them",
    ),
}


@pytest.mark.parametrize("case", SETS)
def test_invalid_override_has_one_message(case: str):
    text, message = SETS[case]
    error = error_of(GOOD, text)
    assert error.message == message
    assert error.code == USAGE


def test_override_in_invalid_table_reports_the_table():
    assert error_of("optimizer = 3\n", "optimizer.lr=1").why.startswith(
        "x.toml:1: `optimizer` is 3 - "
    )


def test_override_fixes_invalid_recipe():
    Path("x.toml").write_text(replaced("lr = 1e-3", ""))
    assert load_recipe(Path("x.toml"), ["optimizer.lr=1"]).recipe.optimizer.lr == 1.0


VALUES = st.sampled_from(
    ["1", "-1", "0", "1.5", "nan", "''", '"x"', "true", "[]", '["a"]', "{}", "{ a = 1 }", "[[1]]",
     "1979-05-27", "x", ""]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        *KEY_SCHEMAS,
        *TABLE_NAMES,
        "x",
        "model.x",
        '"model.path"',
        "data.path.x",
        "[model]",
        "[[data]]",
        "[x",
    ]
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.lists(st.tuples(NAMES, VALUES), max_size=2),
    st.booleans(),
)
def test_any_input_is_a_recipe_or_one_error(
    lines: list[tuple[str, str]], overrides: list[tuple[str, str]], on_top: bool
):
    text = "".join(name if name.startswith("[") else f"{name} = {value}\n" for name, value in lines)
    Path("x.toml").write_text(f"{text}\n{GOOD}" if on_top else text)
    error = None
    try:
        load_recipe(Path("x.toml"), [f"{name}={value}" for name, value in overrides])
    except PrepError as raised:
        error = raised
    assert error is None or (error.code == USAGE and error.what and "None" not in str(error))


def test_only_the_first_unknown_keys_have_hints(monkeypatch: pytest.MonkeyPatch):
    """A hint takes a millisecond: 100,000 of them took 40 s."""
    monkeypatch.setattr("trainer.recipe.loading.MAX_HINTED", 30)
    monkeypatch.setattr("trainer.recipe.hints.MAX_HINTED", 30)
    keys = "".join(f"learning_rate{number} = 1\n" for number in range(5000))
    searched = list[str]()

    def hint(path: str, *_: object, **__: object) -> str:
        searched.append(path)
        return "a hint"

    monkeypatch.setattr("trainer.recipe.loading.unknown_key_hint", hint)
    error = error_of(f"{GOOD}{keys}[other]\n{keys}[modle]\n{keys}")
    lines = error.why.split("\n")
    assert error.what.startswith("x.toml has 5,0")
    assert len(lines) == 21
    assert lines[-1].endswith(" more")
    assert len(searched) == 30


def test_override_of_one_interval_is_named_and_not_the_file():
    text = replaced("steps = 20", "steps = 20\n[checkpoint]\nevery = 5")
    error = error_of(text, "checkpoint.every_epochs=1")
    expected = "`--set`: `checkpoint.every` is 5 and `checkpoint.every_epochs` is 1.0"
    assert str(error.what) == expected


def test_adapters_without_a_checkpoint_are_one_error():
    random_start = replaced('path = "m-init"', 'init = "random"\nconfig = "config.json"')
    error = error_of(random_start, "lora.rank=3", "lora.path=x", "lora.targets=q")
    assert str(error).count("`lora` needs a checkpoint") == 1


def test_recipe_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.recipe.loading.MAX_RECIPE_NBYTES", 100)
    assert (
        str(error_of(GOOD))
        == "x.toml is not a recipe - it has more than 100 bytes - `prep recipes` lists recipes"
    )
