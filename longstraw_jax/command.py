"""Command lines: bad input is one line on stderr and exit code 2."""

import logging
import sys
from typing import NoReturn

from absl import flags

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


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing with the exit code of bad input: an unknown field or a value of the wrong type."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it tells each backend that is not there
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # holds the one name that the configuration lacks
        name = str(error).strip("'\"")
        given = [a.partition("=")[0] for a in argv if f".{name}" in a.partition("=")[0]]
        fail(f"{', '.join(given) or '--config'}: no field {name!r}; accepted: those of the --config file")
    except (flags.Error, TypeError, ValueError, OSError) as error:
        told = str(error)
        for said, accepted in _ACCEPTED.items():
            flag, found, _ = told.partition(f": {said}")
            told = f"{flag}; accepted: {accepted}" if found else told
        fail(told)


def parse_flags_alone(argv: list[str]) -> list[str]:
    """`parse_flags`, of a program that takes nothing but flags."""
    left = parse_flags(argv)
    if len(left) > 1:
        fail(f"arguments {left[1:]}; accepted: flags alone, see --help")
    return left
