"""What a compiled program sends between devices, read from its text.

The compiler's text (HLO) names every collective with the shape of what it leaves on each device. A collective that
overlaps with arithmetic is printed in several pieces that share a channel; it is one here. Those written out inside
`jax.shard_map` all have channel 1; their pieces share a chain. One in the body of a loop is one here too, however
often the loop runs.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
    "all-to-all",
    "collective-broadcast",
)
Role = Literal["activations", "parameters", "small"]

_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Array(NamedTuple):
    """What one device holds."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Memory, without the padding of a layout."""
        bits = re.search(r"\d+", self.dtype)
        return -(-self.size * (int(bits[0]) if bits else 8) // 8)


class Collective(NamedTuple):
    """One exchange between devices, as one device sees it."""

    kind: str  # one of KINDS
    arrays: tuple[Array, ...]  # what the device has after it
    op_name: str  # where in the traced program it comes from, as far as the compiler says

    @property
    def bytes(self) -> int:
        """Of all its arrays."""
        return sum(array.bytes for array in self.arrays)


class Shapes(NamedTuple):
    """What one device holds of a train step: activations [B, T, D] of a micro-batch, and parameters."""

    batch: int
    length: int
    width: int
    parameters: frozenset[int]  # numbers of values of whole parameters, and of their parts where heads are split

    @property
    def source(self) -> int:
        """Number of values of one source of the depth history."""
        return self.batch * self.length * self.width


def read_collectives(text: str) -> tuple[Collective, ...]:
    """All collectives of a compiled program's text, `compiled.as_text()`, in its order."""
    found: dict[str, Collective] = {}
    for number, line in enumerate(text.splitlines()):
        match = _COLLECTIVE.match(line)
        if match is None:
            continue
        result, kind, started = match.groups()
        arrays = tuple(Array(t, tuple(int(n) for n in shape.split(",") if n)) for t, shape in _ARRAY.findall(result))
        if started:  # what is sent, what comes, and the compiler's own counters
            arrays = tuple(sorted(arrays, key=lambda a: a.bytes)[-1:])
        channel, name = _CHANNEL.search(line), _OP_NAME.search(line)
        if channel is not None and channel[1] == "1" and "is_spmd_generated" not in line:
            channel = _CHAIN.search(line)
        key = channel[0] if channel else f"line {number}"
        one = Collective(kind, arrays, name[1] if name else "")
        if key not in found or (one.bytes, one.op_name) > (found[key].bytes, found[key].op_name):
            found[key] = one
    return tuple(found.values())


def role(array: Array, shapes: Shapes) -> Role:
    """What an array of a train step is, by its shape: activations have token axes, parameters known sizes.

    A matrix may be either where a device's tokens are as many as a parameter is wide; it is taken for a parameter.
    """
    if array.size < min(shapes.source // 64, 1 << 16):
        return "small"
    tokens, wide = shapes.batch * shapes.length, [n for n in array.shape if n > 1]
    if (shapes.batch, shapes.length) in itertools.pairwise(array.shape):
        return "activations"
    if array.size in shapes.parameters:
        return "parameters"
    if len(wide) > 2:
        return "activations" if any(n % shapes.length == 0 for n in wide) else "parameters"
    return "activations" if tokens in wide and array.size >= shapes.source and tokens != shapes.width else "parameters"


def activations(collectives: Iterable[Collective], shapes: Shapes) -> Iterator[tuple[Collective, Array]]:
    """The arrays of activations that collectives move."""
    for collective in collectives:
        for array in collective.arrays:
            if role(array, shapes) == "activations":
                yield collective, array


def history_moves(collectives: Sequence[Collective], shapes: Shapes, sublayers: int) -> list[str]:
    """Why a train step's collectives cannot all be those of its sublayers, one sentence each; none if they can.

    The depth history is the outputs of all sublayers so far. Splitting heads and hidden widths sums each sublayer's
    output, or the gradient of its input, once a pass: never more than one source at a time, and at most four such sums
    a sublayer (forward, forward again where it is recomputed, backward, and one for a gathered sequence), beside the
    keys and values that attention fetches where sequences are split. A site that fetched its history would move several
    sources at once, or the same ones again at every later site.
    """
    moved = [(c, a) for c, a in activations(collectives, shapes) if not _is_attention(a, shapes)]
    reasons = [
        f"a {c.kind} of {a.dtype}{list(a.shape)} moves more than one source ({c.op_name or 'unnamed'})"
        for c, a in moved
        if a.size > shapes.source
    ]
    total = sum(a.size for _, a in moved) / shapes.source
    if total > (most := 4 * sublayers + 4):
        reasons.append(f"collectives move {total:.0f} sources, and {sublayers} sublayers need at most {most}")
    reasons += [
        f"a {c.kind} of {a.dtype}{list(a.shape)} is part of the routing ({c.op_name})"
        for c, a in moved
        if re.search(r"depth_(route|stack)|_(mix|merge|pull|finish)\b", c.op_name)
    ]
    return reasons


def _is_attention(array: Array, shapes: Shapes) -> bool:
    """Keys or values gathered along a sequence: [B, S, heads, head_dim], with no axis of sources before the tokens."""
    return len(array.shape) == 4 and array.shape[0] == shapes.batch and array.shape[1] % shapes.length == 0
