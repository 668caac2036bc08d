"""What a compiled program says of itself: bytes that travel between devices, and its largest arrays."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2}
_BYTES |= {"bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"constant\((\d+)\)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Instruction(NamedTuple):
    """One instruction: its result type as text, its operation, the whole line."""

    name: str
    result: str
    op: str
    line: str


def _computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """Name of the entry, and every computation's instructions."""
    entry, found, current = "", {}, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found.setdefault(header[2], [])
            if header[1]:
                entry = header[2]
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(match[1], match[2], match[3], line))
    return entry, found


def _called(line: str) -> Iterator[str]:
    for match in _CALLED.finditer(line):
        yield match[1]
    for match in _BRANCHES.finditer(line):
        yield from (name.strip().lstrip("%") for name in (match[1] or match[2]).split(","))


def _trips(loop: Instruction, computations: dict[str, list[Instruction]]) -> int:
    """Turns of a while loop: as annotated, or the constant that its condition counts up to; 1 if it depends on data."""
    if known := _TRIPS.search(loop.line):
        return int(known[1])
    condition = computations.get(_CONDITION.search(loop.line)[1], ())
    constants = {name: int(value[1]) for name, _, op, line in condition if (value := _CONSTANT.search(line))}
    for instruction in condition:
        # Only where it is the whole condition: a decode also ends when nobody is left.
        if instruction.op == "compare" and "direction=LT" in instruction.line and "ROOT" in instruction.line:
            named = [constants[x] for x in re.findall(r"%([\w.\-]+)", instruction.line) if x in constants]
            return named[0] if named else 1
    return 1


def _runs(entry: str, computations: dict[str, list[Instruction]]) -> dict[str, int]:
    """How often each computation runs. A conditional in a loop counts once a loop, every branch of it."""
    times: dict[str, int] = defaultdict(int)
    pending = [(entry, 1, 1)]  # with the count outside the innermost loop
    while pending:
        name, count, outside = pending.pop()
        times[name] += count
        for instruction in computations.get(name, ()):
            if instruction.op == "while":
                turns = count * _trips(instruction, computations)
                pending += [(called, turns, count) for called in _called(instruction.line)]
            elif instruction.op == "conditional":
                pending += [(called, outside, outside) for called in _called(instruction.line)]
            else:
                pending += [(called, count, outside) for called in _called(instruction.line)]
    return times


def shape_bytes(text: str) -> list[int]:
    """Bytes of every array type in an HLO type, in order; layouts' padding is not counted."""
    return [
        math.ceil(_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(text)
    ]


def _participants(line: str, devices: int) -> int:
    match = _GROUPS.search(line)
    if match is None:
        return devices
    return len(match[1].split(",")) if match[1] else int(match[3])


def received_bytes(op: str, result: int, participants: int) -> float:
    """Bytes that one device receives in a collective, from the bytes of its result on that device.

    All-gather and all-to-all: what is not its own. Reduce-scatter: the others' parts of its share. All-reduce: a
    reduce-scatter and an all-gather. Permute: everything.
    """
    others = (participants - 1) / participants
    factor = {"all-gather": others, "all-to-all": others, "reduce-scatter": participants - 1, "all-reduce": 2 * others}
    return result * factor.get(op, 1.0)


def collective_bytes(text: str, devices: int) -> dict[str, float]:
    """Bytes that one device receives in a run of the program, by kind of collective.

    A loop that depends on data (a decode's) counts one turn; a conditional in a loop (passes of the experts beyond the
    stated load) counts once a loop.
    """
    entry, computations = _computations(text)
    total: dict[str, float] = defaultdict(float)
    for name, times in _runs(entry, computations).items():
        for instruction in computations.get(name, ()):
            kind = instruction.op.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            arrays = shape_bytes(instruction.result)
            if instruction.op.endswith("-start") and kind != "all-reduce":
                arrays = [max(arrays)]  # the tuple of a started collective holds its operand too
            total[kind] += times * received_bytes(kind, sum(arrays), _participants(instruction.line, devices))
    return dict(total)


def largest_arrays(text: str, count: int = 8) -> list[tuple[int, str, str]]:
    """(bytes, type, operation) of the largest arrays that the program makes, arguments and their views left out."""
    _, computations = _computations(text)
    views = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "constant", "call"}
    found: dict[str, tuple[int, str]] = {}
    every = [instruction for instructions in computations.values() for instruction in instructions]
    fused = {called for instruction in every if instruction.op == "fusion" for called in _called(instruction.line)}
    for name, instructions in computations.items():
        if name in fused:  # what a fusion holds inside never lies in memory
            continue
        for instruction in instructions:
            if instruction.op in views:
                continue
            for dtype, dims in _SHAPE.findall(instruction.result):
                size = shape_bytes(f"{dtype}[{dims}]")[0]
                found.setdefault(f"{dtype}[{dims}]", (size, instruction.op))
    ranked = sorted(((size, shape, op) for shape, (size, op) in found.items()), reverse=True)
    return ranked[:count]
