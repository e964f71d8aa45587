"""The table of readers, and the types that recipes know."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import trainer
from trainer.data.readers import READERS
from trainer.recipe.text_fields import DEFAULT_FIELDS, DataType, FileType

TRAINER = Path(trainer.__path__[0])


def test_every_type_of_data_has_a_reader():
    assert set(READERS) == set(get_args(FileType)) == {*get_args(DataType)} - {"auto"}
    assert DEFAULT_FIELDS.keys() <= {*get_args(DataType)}


def test_suffixes_of_readers_differ():
    suffixes = [
        suffix for reader in READERS.values() for suffix in reader.suffixes + reader.other_suffixes
    ]
    assert len({*suffixes}) == len(suffixes)


def test_no_module_compares_with_a_type_of_data():
    for path in TRAINER.rglob("*.py"):
        compares = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)
        ]
        constants = [
            node.value
            for compare in compares
            for node in ast.walk(compare)
            if isinstance(node, ast.Constant)
        ]
        assert not {*READERS} & {*constants}, path
