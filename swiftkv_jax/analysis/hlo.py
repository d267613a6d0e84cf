"""What an optimised program runs, communicates and moves through a device's memory, from XLA's text of it.

XLA's own count of bytes, `compiled.cost_analysis()["bytes accessed"]`, counts the body of a loop once, and a
model whose layers are scanned has nearly everything there. `bytes_moved` multiplies by the iterations.
"""

import dataclasses
import functools
import math
import re

_BITS = {"pred": "8", "token": "0", "opaque": "0"}  # of other types the name says it: bf16, s32, f8e4m3fn
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"?known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"),
    *("replica-id", "iota", "opt-barrier", "add-dependency", "get-dimension-size", "domain"),
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        branches = _BRANCHES.search(self.rest)
        names = branches[1].replace("%", "").split(", ") if branches else []
        return (*_CALLED.findall(self.rest), *names)


def bytes_moved(text: str) -> float:
    """Bytes that one run of a program's entry moves on one device; on-chip memory, `S(1)`, is not counted.

    When a fusion slices an operand, only the slice counts; when it updates one in place, only the update. A
    loop whose trip count the compiler does not know counts once.
    """
    program, entry = _parse(text)

    @functools.cache
    def total(computation: str) -> float:
        return sum(map(functools.partial(cost, program[computation]), program[computation].values()))

    def cost(inside: dict[str, _Instruction], op: _Instruction) -> float:
        if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")):
            return 0.0
        if op.opcode == "while":
            iterations = _iterations(program, op)
            return iterations * sum(map(total, op.called))
        if op.opcode == "conditional":
            return max(map(total, op.called), default=0.0)
        if op.opcode in ("call", "async-start"):
            return sum(map(total, op.called))
        if op.opcode == "fusion":
            fused = program[op.called[0]]
            reads = sum(_read(program, fused, i, inside.get(name)) for i, name in enumerate(op.operands))
            return reads + min(_written(fused), _size(op.type))
        operands = [inside[name] for name in op.operands if name in inside]
        if op.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * _size(op.type)
        if op.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * _size(operands[1 if op.opcode == "dynamic-update-slice" else -1].type)
        reads = sum(_size(operand.type) for operand in operands)
        if op.opcode.endswith("-start"):  # its type holds its operands too, and for a copy a context
            return max(_size(op.type), reads)
        return reads + _size(op.type)

    return total(entry)


def launched(text: str) -> tuple[list[tuple[str, str, bool]], list[bool]]:
    """(opcode, text and whether in a loop) of what a program launches, fusions as one; of each loop, whether
    its length is known."""
    program, entry = _parse(text)
    launches: list[tuple[str, str, bool]] = []
    loops: list[bool] = []

    def walk(computation: str, repeated: bool) -> None:
        for op in program[computation].values():
            if op.opcode in ("while", "call", "conditional", "async-start"):
                loops.extend(["known_trip_count" in op.rest] if op.opcode == "while" else [])
                for part in op.called:
                    walk(part, repeated or op.opcode == "while")
            elif op.opcode not in _FREE and not op.opcode.endswith(("-done", "-update")):
                launches.append((op.opcode, f"%{op.name} = {op.type} {op.opcode}({op.rest}", repeated))

    walk(entry, False)
    return launches, loops


def collectives(text: str) -> dict[str, tuple[int, float]]:
    """Of each kind of collective in a program: how many there are, and the bytes of their results on one
    device; loops once, asynchronous ones once."""
    totals: dict[str, tuple[int, float]] = {}
    for inside in _parse(text)[0].values():
        for op in inside.values():
            kind = op.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                size = _size(op.type, everywhere=True)
                if op.opcode != kind != "all-reduce":  # its type holds its operands too
                    size -= sum(_size(inside[name].type, everywhere=True) for name in op.operands)
                count, total = totals.get(kind, (0, 0.0))
                totals[kind] = count + 1, total + size
    return totals


def _read(program, fused: dict[str, _Instruction], index: int, operand: _Instruction | None) -> float:
    """Bytes that a fusion reads of its operand number `index`."""
    if operand is None:
        return 0.0
    whole = _size(operand.type)
    return min(whole, _used(program, fused, index, whole))


def _used(program, fused: dict[str, _Instruction], index: int, whole: float, name: str = "") -> float:
    """Bytes that a fusion uses of its parameter number `index`, or of `name`, which is made of that."""
    mine = (x.name for x in fused.values() if x.opcode == "parameter" and x.rest.startswith(f"{index})"))
    if not (name := name or next(mine, "")):
        return whole
    read = 0.0
    for user in (x for x in fused.values() if name in x.operands):
        if user.opcode == "bitcast":
            read += _used(program, fused, index, whole, user.name)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            read += _size(user.type, everywhere=True)
        elif user.opcode == "fusion":
            inner = program[user.called[0]]
            for place in (i for i, operand in enumerate(user.operands) if operand == name):
                read += _used(program, inner, place, whole)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return whole
    return read


def _written(fused: dict[str, _Instruction]) -> float:
    """Bytes that a fusion writes: of an operand that it updates in place, the update."""

    def of(op: _Instruction) -> float:
        if op.opcode == "bitcast" and op.operands[0] in fused:
            inner = of(fused[op.operands[0]])
            return min(inner, _size(op.type))
        if op.opcode == "tuple":
            return sum(of(fused[name]) for name in op.operands)
        if op.opcode == "dynamic-update-slice" and _size(op.type):
            return _size(fused[op.operands[1]].type, everywhere=True)
        return _size(op.type)

    return sum(of(op) for op in fused.values() if op.root)


def _iterations(program, loop: _Instruction) -> int:
    """Iterations of a loop that counts from 0: the compiler's annotation, or the bound in its condition."""
    if match := _TRIP_COUNT.search(loop.rest):
        return int(match[1])
    (condition,) = re.findall(r"condition=%?([\w.\-]+)", loop.rest)
    inside = program.get(condition, {}).values()
    limits = [
        int(x.rest.partition(")")[0]) for x in inside if x.opcode == "constant" and x.type.startswith("s32[]")
    ]
    return limits[0] if len(limits) == 1 else 1


def _size(type_: str, everywhere: bool = False) -> float:
    """Bytes of an array or a tuple of arrays; those in on-chip memory count only with `everywhere`."""
    total = 0.0
    for dtype, dims, layout in _ARRAY.findall(type_):
        if "S(" in layout and not everywhere:
            continue
        bits = int(_BITS.get(dtype) or re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        total += math.prod(map(int, filter(None, dims.split(",")))) * bits / 8
    return total


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """(computation -> instruction name -> instruction, the entry's name)."""
    program: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and not line.startswith("HloModule"):
            words = line.split()
            name = words[1 if words[0] == "ENTRY" else 0].removeprefix("%").partition("(")[0]
            entry = name if words[0] == "ENTRY" else entry
            current = program.setdefault(name, {})
        elif " = " in line and line.startswith(" "):
            op = _instruction(line.strip())
            for part in (name for name in op.operands if "#" in name):  # of a tuple, as jax 0.11 prints it
                whole, index = part.split("#")
                type_ = list(_ARRAY.finditer(current[whole].type))[int(index)][0]
                current[part] = _Instruction(part, type_, "get-tuple-element", (whole,), "", False)
            current[op.name] = op
    return program, entry


def _instruction(line: str) -> _Instruction:
    root = line.startswith("ROOT ")
    name, _, made = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(made) + 1 if made.startswith("(") else made.index(" ")
    opcode, _, rest = made[end:].strip().partition("(")
    inside = rest[: _closing("(" + rest) - 1]
    return _Instruction(name.removeprefix("%"), made[:end], opcode, tuple(_NAME.findall(inside)), rest, root)


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one that `text` begins with."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(text)
