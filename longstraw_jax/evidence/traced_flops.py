"""Counts the matrix products of a traced program, loops by their length: what one device computes."""

import math
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr
from jaxtyping import Int


class Flops(NamedTuple):
    """Operations, 2 a multiply-add.

    Attributes:
      dense: of all products but grouped ones.
      grouped: of grouped products at most: all of their rows count, used or not.
    """

    dense: int
    grouped: int


def traced_flops(jaxpr: Jaxpr) -> Flops:
    """Of every matrix product; inside a mapped body, of one device.

    Compilers count a loop's body once; here a scan counts as often as it turns. A while loop counts one turn; a
    conditional counts its dearest branch, in a scan (passes of the experts beyond the stated load) once for all turns.
    """
    return Flops(*np.sum(_counted(jaxpr), axis=0).tolist())


def _counted(jaxpr: Jaxpr) -> Int[np.ndarray, "2 2"]:
    """Rows: what always runs, what is conditional. Columns: dense, grouped."""
    return sum((_equation(equation) for equation in jaxpr.eqns), np.zeros((2, 2), np.int64))


def _equation(equation: Any) -> Int[np.ndarray, "2 2"]:
    name, params = equation.primitive.name, equation.params
    none = np.zeros(2, np.int64)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        dense = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
        return np.asarray([[dense, 0], [0, 0]])
    if name == "ragged_dot_general":
        return np.asarray([[0, _grouped(equation)], [0, 0]])
    if name == "scan":
        always, conditional = _counted(params["jaxpr"].jaxpr)
        return np.stack([params["length"] * always + conditional, none])
    if name == "cond":
        return np.stack([none, max((_counted(b.jaxpr).sum(0) for b in params["branches"]), key=sum)])
    inner = [_counted(each) for value in params.values() for each in _jaxprs(value)]
    return sum(inner, np.zeros((2, 2), np.int64))


def _grouped(equation: Any) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = (x.aval.shape for x in equation.invars[:2])
    seen = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(left) * math.prod(size for d, size in enumerate(right) if d not in seen)


def _jaxprs(value: Any) -> list[Any]:
    """The programs among an equation's parameters."""
    found = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        inner = getattr(item, "jaxpr", item)
        if hasattr(inner, "eqns"):
            found.append(inner)
    return found
