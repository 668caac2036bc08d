"""Command lines: bad input is one line on stderr and exit code 2."""

import contextlib
import logging
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from longstraw_jax import launch

_ACCEPTED = {  # by what the parsers say, which do not
    "invalid literal for int()": "an integer",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "true or false",
    "Failed to parse": "one of its fields, as --config.section.field=value",
}


def fail(error: Exception | str) -> NoReturn:
    """Ends the program on bad input: one line and exit code 2. In a run of many processes it waits for none."""
    launch.say("error: " + " ".join(str(error).split()))
    if launch.joined():
        launch.leave(2)
    sys.exit(2)


@contextlib.contextmanager
def _told_in_a_line(argv: Sequence[str]) -> Iterator[None]:
    """An unknown field or a value of the wrong type ends the program as bad input does."""
    try:
        yield
    except (AttributeError, KeyError) as error:  # holds the name that the configuration lacks, and one like it
        lacking = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
        name, _, like = str(lacking).partition("\n")
        name, like = name.strip("'\""), like and f" ({like})"
        given = [a.partition("=")[0] for a in argv if f".{name}" in a.partition("=")[0]]
        fail(f"{', '.join(given) or '--config'}: no field {name!r}; accepted: those of the --config file{like}")
    except (flags.Error, TypeError, ValueError, OSError) as error:
        told = str(error)
        for said, accepted in _ACCEPTED.items():
            flag, found, _ = told.partition(f": {said}")
            told = f"{flag}; accepted: {accepted}" if found else told
        fail(told)


def define_config(default: pathlib.Path, told: str) -> None:
    """`--config` with a default file. Its fields' flags are parsed here already, before all others."""
    with _told_in_a_line(sys.argv):
        config_flags.DEFINE_config_file("config", str(default), told, flag_values=flags.FLAGS)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing with the exit code of bad input: an unknown field or a value of the wrong type."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it tells each backend that is not there
    with _told_in_a_line(argv):
        return flags.FLAGS(argv)


def parse_flags_alone(argv: list[str]) -> list[str]:
    """`parse_flags`, of a program that takes nothing but flags."""
    left = parse_flags(argv)
    if len(left) > 1:
        fail(f"arguments {left[1:]}; accepted: flags alone, see --help")
    return left
