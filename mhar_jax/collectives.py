"""What a compiled program sends between devices, read from its text.

The compiler's text (HLO) names every collective with the shape of what it leaves on each device. A collective that
overlaps with arithmetic is printed in several pieces that share a channel; it is one here. Those written out inside
`jax.shard_map` all have channel 1; their pieces share a chain. One in the body of a loop is one here too, however
often the loop runs. What an array is, a parameter or an activation, is read from what it is made of and leads to
(`dataflow.py`): a source of one sequence of 4096 tokens and a matrix of 4096 x 4096 have the same shape.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from mhar_jax.dataflow import Flow, Instruction

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
    "all-to-all",
    "collective-broadcast",
)
Role = Literal["activations", "indices", "parameters", "small"]

_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Array(NamedTuple):
    """What one device holds."""

    dtype: str
    shape: tuple[int, ...]
    of_model: bool = False  # made from the batch and multiplied later on: an activation, or its cotangent

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
    """What one device holds of a train step: activations [B, T, D] of a micro-batch."""

    batch: int
    length: int
    width: int
    keys: frozenset[int] = frozenset()  # numbers of values that keys (or values) of a token have, whole and split
    summed: int = 0  # sublayers whose output or input's gradient is summed over devices

    @property
    def source(self) -> int:
        """Number of values of one source of the depth history."""
        return self.batch * self.length * self.width


def read_collectives(text: str) -> tuple[Collective, ...]:
    """All collectives of a compiled train step's text, `compiled.as_text()`, in its order.

    The step's last argument is the batch.
    """
    found: dict[str, Collective] = {}
    flow = Flow(text)
    for number, one in enumerate(flow.instructions()):
        kind = one.operation.removesuffix("-start")
        if kind not in KINDS:
            continue
        arrays = _arrays(one, flow)
        if one.operation != kind:  # what is sent, what comes, and the compiler's own counters
            arrays = tuple(sorted(arrays, key=lambda a: a.bytes)[-1:])
        channel, name = _CHANNEL.search(one.rest), _OP_NAME.search(one.rest)
        if channel is not None and channel[1] == "1" and "is_spmd_generated" not in one.rest:
            channel = _CHAIN.search(one.rest)
        key = channel[0] if channel else f"line {number}"
        whole = Collective(kind, arrays, name[1] if name else "")
        if (piece := found.get(key)) is not None:
            if (piece.bytes, piece.op_name) > (whole.bytes, whole.op_name):
                piece, whole = whole, piece
            if any(a.of_model for a in piece.arrays):  # a piece whose own result nobody reads does not show it
                whole = whole._replace(arrays=tuple(a._replace(of_model=True) for a in whole.arrays))
        found[key] = whole
    return tuple(found.values())


def _arrays(one: Instruction, flow: Flow) -> tuple[Array, ...]:
    """What a device has after a collective."""
    arrays = [(t, tuple(int(n) for n in shape.split(",") if n)) for t, shape in _ARRAY.findall(one.result)]
    if len(arrays) != one.size:  # tuples in a tuple
        of_model = any(map(flow.is_activation, one.elements))
        return tuple(Array(*array, of_model) for array in arrays)
    return tuple(Array(*array, flow.is_activation(n)) for array, n in zip(arrays, one.elements, strict=True))


def role(array: Array, shapes: Shapes) -> Role:
    """What an array of a train step is; gradients count as parameters, tokens and masks as indices."""
    if array.size < min(shapes.source // 64, 1 << 16):
        return "small"
    if not array.of_model:
        return "parameters"
    return "activations" if re.match(r"bf|f", array.dtype) else "indices"


def activations(collectives: Iterable[Collective], shapes: Shapes) -> Iterator[tuple[Collective, Array]]:
    """The arrays of activations that collectives move."""
    for collective in collectives:
        for array in collective.arrays:
            if role(array, shapes) == "activations":
                yield collective, array


def history_moves(collectives: Sequence[Collective], shapes: Shapes) -> list[str]:
    """Why a train step's collectives cannot all be those of its sublayers, one sentence each; none if they can.

    The depth history is the outputs of all sublayers so far. Splitting batches moves no activation but the embedding's
    output and its cotangent. Splitting heads and hidden widths sums each sublayer's output, or the gradient of its
    input, once a pass: never more than one source at a time, and at most four such sums a sublayer (forward, forward
    again where it is recomputed, backward, and one for a gathered sequence). Where sequences are split, attention
    fetches keys and values beside that, twice and once back. A site that fetched its history would move several sources
    at once, or the same ones again at every later site.
    """
    every = list(activations(collectives, shapes))
    fetched = [(c, a) for c, a in every if _is_attention(a, shapes)]
    moved = [(c, a) for c, a in every if not _is_attention(a, shapes)]
    reasons = [
        f"{c.kind} of {a.dtype}{list(a.shape)} moves more than one source ({c.op_name or 'unnamed'})"
        for c, a in moved
        if a.size > shapes.source
    ]
    total = sum(a.size for _, a in moved) / shapes.source
    if total > (most := 4 * shapes.summed + 4):
        reasons.append(f"collectives move {total:.0f} sources, and {shapes.summed} split sublayers need at most {most}")
    if len(fetched) > (most := 3 * shapes.summed):
        reasons.append(f"collectives move {len(fetched)} arrays shaped like keys of attention, which needs {most}")
    reasons += [
        f"{c.kind} of {a.dtype}{list(a.shape)} is part of the routing ({c.op_name})"
        for c, a in every
        if re.search(r"depth_(route|stack)|_(mix|merge|pull|finish)\b", c.op_name)
    ]
    return reasons


def _is_attention(array: Array, shapes: Shapes) -> bool:
    """Keys or values gathered along a sequence: [B, S, heads, head_dim], with no axis of sources before the tokens."""
    of_tokens = len(array.shape) == 4 and array.shape[0] == shapes.batch and array.shape[1] % shapes.length == 0
    return of_tokens and array.shape[2] * array.shape[3] in shapes.keys
