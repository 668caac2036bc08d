"""Counts the matrix products of a traced program, loops by their length: what one device computes."""

import math
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr


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

    Compilers count a loop's body once; here a scan counts as often as it turns. A while loop counts one turn, of a
    conditional the dearest branch.
    """
    counted = [_equation_flops(equation) for equation in jaxpr.eqns]
    return Flops(sum(c.dense for c in counted), sum(c.grouped for c in counted))


def _equation_flops(equation: Any) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return Flops(2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted), 0)
    if name == "ragged_dot_general":
        return Flops(0, _grouped(equation))
    if name == "scan":
        once = traced_flops(params["jaxpr"].jaxpr)
        return Flops(*(params["length"] * count for count in once))
    if name == "cond":
        return max((traced_flops(branch.jaxpr) for branch in params["branches"]), key=sum)
    inner = [traced_flops(each) for value in params.values() for each in _jaxprs(value)]
    return Flops(sum(c.dense for c in inner), sum(c.grouped for c in inner))


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
