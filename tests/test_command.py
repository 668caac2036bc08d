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


@pytest.fixture
def flags_of_a_program(monkeypatch):
    """The flags that programs define, in a set of their own."""
    mine = flags.FlagValues()
    flags.DEFINE_integer("steps", 1, "", flag_values=mine)
    flags.DEFINE_float("rate", 1.0, "", flag_values=mine)
    flags.DEFINE_boolean("resume", False, "", flag_values=mine)
    monkeypatch.setattr(flags, "FLAGS", mine)
    return mine


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--steps=two", "flag --steps=two; accepted: an integer"),
        ("--steps=1e9", "flag --steps=1e9; accepted: an integer"),
        ("--rate=low", "flag --rate=low; accepted: a number"),
        ("--resume=maybe", "flag --resume=maybe; accepted: true or false"),
        ("more", "arguments ['more']; accepted: flags alone, see --help"),
    ],
)
def test_a_value_of_another_type_says_what_is_accepted(flags_of_a_program, argument, said, capsys):
    with pytest.raises(SystemExit) as exit:
        command.parse_flags_alone(["program", argument])
    assert exit.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"


def test_flags_alone_are_parsed(flags_of_a_program):
    assert command.parse_flags_alone(["program", "--steps=2"]) == ["program"] and flags_of_a_program.steps == 2


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--config.no_section.steps=1", "--config.no_section.steps: no field 'no_section'"),
        ("--config.no_field=1", "--config.no_field: no field 'no_field'"),
        ("--config.stepz=1", "--config.stepz: no field 'stepz'"),  # near enough for a suggestion
        ("--config.steps=two", "flag --config.steps=two; accepted: an integer"),
    ],
)
def test_a_wrong_field_of_a_default_configuration_is_one_line(argument, said, tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.py"
    config.write_text("import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict({'steps': 1})\n")
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    argv = ["program", argument]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as exit:
        command.define_config(config, "")
        command.parse_flags_alone(argv)
    told = capsys.readouterr().err
    assert exit.value.code == 2 and told.startswith(f"error: {said}") and told.count("\n") == 1
