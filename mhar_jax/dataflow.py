"""What the values of a compiled program are made from and lead to, read from its text (HLO).

A train step has three kinds of large arrays. Its last argument is the batch of tokens. Parameters do not depend on it.
Activations and their cotangents do, and lead to a matrix product: at the least to that of some weight's gradient.
Gradients depend on it and lead to no product any more, only to the optimizer's elementwise arithmetic. This tells them
apart where their shapes do not.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')

# Custom calls that only pass values on. Every other one is taken for a kernel that multiplies matrices.
_PASSING = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "SliceConcat",
    "X64Combine",
    "X64SplitHigh",
    "X64SplitLow",
}


class Instruction(NamedTuple):
    """One line of a program. A tuple's elements have numbers `first` to `first + size`; any other value has `first`."""

    name: str
    result: str  # its type, as written
    operation: str
    operands: tuple[str, ...]
    rest: str  # of the line, from the operands on
    root: bool
    first: int
    size: int

    @property
    def elements(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.size)


class Flow:
    """Where the values of a program come from and what they lead to. Tuples are followed element by element."""

    def __init__(self, text: str):
        """`text` is `compiled.as_text()` of a program whose last argument is the batch."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._entry = self._read(text)
        self._next: list[list[int]] = [[] for _ in range(self._count)]
        products: list[int] = []
        for computation in self.computations.values():
            for one in computation.values():
                self._connect(one, computation)
                for name in _multiplied(one):
                    products += computation[name].elements if name in computation else ()
        before: list[list[int]] = [[] for _ in range(self._count)]
        for number, following in enumerate(self._next):
            for other in following:
                before[other].append(number)
        arguments = [one for one in self.computations[self._entry].values() if one.operation == "parameter"]
        batch = max(arguments, key=_parameter, default=None)
        self.from_batch = _reached(batch.elements if batch else (), self._next)
        self.to_product = _reached(products, before)

    def is_activation(self, number: int) -> bool:
        """Whether the element of that number is made from the batch and used by the model."""
        return number in self.from_batch and number in self.to_product

    def instructions(self) -> Iterator[Instruction]:
        """All of them, in the order of the text."""
        return itertools.chain.from_iterable(c.values() for c in self.computations.values())

    def _read(self, text: str) -> str:
        entry, current = "", self.computations.setdefault("", {})
        self._count = 0
        for line in text.splitlines():
            match = _INSTRUCTION.match(line)
            if match is not None:
                root, name, result, operation, rest = match.groups()
                size = _elements(result)
                inside = rest.partition(")")[0] if "(" not in rest.partition(")")[0] else rest
                operands = tuple(_NAME.findall(inside)) if operation not in ("parameter", "constant") else ()
                current[name] = Instruction(name, result, operation, operands, rest, bool(root), self._count, size)
                self._count += size
            elif (head := _HEAD.match(line)) is not None:
                current = self.computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        return entry

    def _connect(self, one: Instruction, within: dict[str, Instruction]) -> None:
        """What flows into an instruction and, where it calls computations, into and out of these."""
        operands = [within[name] for name in one.operands if name in within]
        called = [self.computations[name] for name in _called(one) if name in self.computations]
        if one.operation == "get-tuple-element" and (index := _INDEX.search(one.rest)) and operands:
            numbers = operands[0].elements
            self._flow(numbers[int(index[1]) : int(index[1]) + 1] or numbers, one.elements)
        elif one.operation == "while":
            self._elementwise(operands[0], one)
            for body in called:
                root, (argument, *_) = _root(body), _parameters(body)
                for source, target in ((operands[0], argument), (root, argument), (root, one)):
                    self._elementwise(source, target)
        elif called:
            branches = one.operation == "conditional"
            for number, computation in enumerate(called):
                given = operands[number + 1 : number + 2] if branches else operands
                for source, target in zip(given, _parameters(computation), strict=False):
                    self._elementwise(source, target)
                self._elementwise(_root(computation), one)
        elif one.size > 1 and one.size == len(operands):  # tuple, or a collective of several arrays
            for number, source in zip(one.elements, operands, strict=True):
                self._flow(source.elements, (number,))
        elif one.operation == "opt-barrier" and len(operands) == 1:
            self._elementwise(operands[0], one)
        else:
            for source in operands:
                self._flow(source.elements, one.elements)

    def _elementwise(self, source: Instruction, target: Instruction) -> None:
        if source.size != target.size:
            self._flow(source.elements, target.elements)
            return
        for a, b in zip(source.elements, target.elements, strict=True):
            self._next[a].append(b)

    def _flow(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        for a, b in itertools.product(sources, targets):
            self._next[a].append(b)


def _called(one: Instruction) -> list[str]:
    """The computations that an instruction runs on whole values; not those of a reduction, on single numbers."""
    if one.operation not in ("fusion", "call", "while", "conditional", "async-start"):
        return []
    branches = _BRANCHES.search(one.rest)
    return _NAME.findall(branches[1]) if branches else [name for _, name in _CALLED.findall(one.rest)]


def _multiplied(one: Instruction) -> tuple[str, ...]:
    """The operands of a matrix product, or of a scatter what is scattered (an embedding's gradient): else none."""
    if one.operation in ("dot", "convolution", "ragged-dot"):
        return one.operands
    if one.operation == "scatter":
        return one.operands[len(one.operands) // 2 + 1 :]  # n arrays, indices, n updates
    if one.operation == "custom-call" and (target := _TARGET.search(one.rest)) and target[1] not in _PASSING:
        return one.operands
    return ()


def _parameter(one: Instruction) -> int:
    return int(one.rest.partition(")")[0])


def _parameters(computation: dict[str, Instruction]) -> list[Instruction]:
    return sorted((one for one in computation.values() if one.operation == "parameter"), key=_parameter)


def _root(computation: dict[str, Instruction]) -> Instruction:
    return next(one for one in computation.values() if one.root)


def _elements(result: str) -> int:
    """How many elements a type has at its outermost level."""
    if not result.startswith("("):
        return 1
    plain = re.sub(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]", "", result)
    depth = commas = 0
    for mark in re.findall(r"[(),]", plain):
        depth += {"(": 1, ")": -1, ",": 0}[mark]
        commas += mark == "," and depth == 1
    return commas + (plain.strip() != "()")


def _reached(start: Iterable[int], edges: list[list[int]]) -> set[int]:
    found = set(start)
    waiting = list(found)
    while waiting:
        for other in edges[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
