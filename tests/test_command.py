"""Bad input on a command line: one line on stderr and exit code 2."""

import pytest
from absl import flags

from longstraw_jax import command


def test_an_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit:
        command.fail(ValueError("group=1;\n  accepted: at least 2"))
    assert exit.value.code == 2
    assert capsys.readouterr().err == "error: group=1; accepted: at least 2\n"


def test_a_flag_that_is_none_is_bad_input(capsys):
    assert command.parse_flags(["program", "rest"]) == ["program", "rest"]
    with pytest.raises(SystemExit) as exit:
        command.parse_flags(["program", "--no_such_flag_is_defined=1"])
    assert exit.value.code == 2 and "no_such_flag_is_defined" in capsys.readouterr().err
    flags.FLAGS.unparse_flags()
