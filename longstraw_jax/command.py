"""Command lines: bad input is one line on stderr and exit code 2."""

import sys
from typing import NoReturn

from absl import flags

from longstraw_jax import launch


def fail(error: Exception | str) -> NoReturn:
    """Ends the program on bad input: one line and exit code 2. In a run of many processes it waits for none."""
    launch.say("error: " + " ".join(str(error).split()))
    if launch.joined():
        launch.leave(2)
    sys.exit(2)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing with the exit code of bad input: an unknown field or a value of the wrong type."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # holds the one name that the configuration lacks
        name = str(error).strip("'\"")
        given = [a.partition("=")[0] for a in argv if f".{name}" in a.partition("=")[0]]
        fail(f"{', '.join(given) or '--config'}: no field {name!r}; accepted: those of the --config file")
    except (flags.Error, TypeError, ValueError, OSError) as error:
        fail(error)
