"""Parts of shell scripts: exit codes and comments."""

from __future__ import annotations

import subprocess

from prepcli.launch.shell import RESTARTABLE, RESTARTABLE_CODES, comment


def test_pattern_and_list_of_exit_codes_are_equal():
    lines = f"for code in {{0..255}}; do case $code in {RESTARTABLE}) echo $code ;; esac; done"
    matched = subprocess.check_output(["bash", "-c", lines], text=True)
    assert tuple(map(int, matched.split())) == RESTARTABLE_CODES


def test_comment_is_one_valid_line():
    assert comment("a\n b\r\x85c \udcff") == "# a b c \\udcff"
