"""Depth routing on GPUs through jax-triton: tile shapes, operands and batching around the kernels of `triton_kernels`.

Each direction is one kernel that reads every source row once. The backward kernel needs Δ = <dO, mix> before it meets
the first source. The mix in the storage dtype alone would make Δ the largest error of the gradients, so the forward
pass of a differentiated call also keeps what rounding took from it, in 16 bits a feature (`rest`).
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhar_kernels import batching, triton_launch, tuning
from mhar_kernels.contract import RouteArrays, RouteCall, RouteForward, RouteGrads, RouteSaved
from mhar_kernels.triton_launch import Signature

NAME = "triton"
MAX_DIM = 16_384  # a row is held in the registers of one program
_MULTIPROCESSORS = 132  # of an H100 or H200, where the device cannot be asked
_MOST_FEATURES_A_LANE = 256  # a lane has 255 registers
# Shared memory of a program in KiB, by compute capability (CUDA C++ programming guide, technical specifications).
_SHARED = {"8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
Launcher = Callable[..., list[jax.Array]]
_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}


class Statistics(NamedTuple):
    """What the backward pass needs of the softmax and of the mix beside its rounded value."""

    lse: jax.Array  # [T, H] float32
    lse_low: jax.Array | None  # [T, H] float32, with float32 storage
    rest: jax.Array | None  # [T, D] int16, if the call is differentiated


class Tile(NamedTuple):
    """Constants of a kernel that decide its speed, not its result (but for the order of sums)."""

    sources: int  # SB, source rows read together
    width: int  # L, neighbouring features of a head in one tile
    warps: int
    ahead: int  # 2: the next rows are read before the present ones are used; 1: not
    stages: int  # above 1: rows pass through shared memory, so many steps deep
    programs: int  # a multiprocessor


def unsupported(call: RouteCall) -> str | None:
    """Why this call cannot run, and what would work; None if it can."""
    if call.dtype == "float64":
        return "float64 storage has no Triton kernel; use float32, or implementation='xla'"
    if call.dim > MAX_DIM:
        return f"the width D is limited to {MAX_DIM}, got {call.dim}; implementation='xla' has no limit"
    if call.tokens * max(call.num_heads, 1) >= 2**40:
        return f"{call.tokens} tokens are too many for one call; split them"
    if not call.interpret:
        if call.platform != "gpu":
            return f"it needs a GPU and this runs on {call.platform}; interpret=True runs it anywhere, slowly"
        if importlib.util.find_spec("jax_triton") is None:
            return "the package jax-triton is not installed: pip install 'mhar-jax[gpu]'"
    for direction in ("forward", "backward"):
        tile(call, direction)  # refuses what makes no sense before anything is launched
    return None


def forward(call: RouteCall, arrays: RouteArrays) -> RouteForward:
    """One pass over the sources."""
    result = _batchable_forward(call, 1)(_with_groups(arrays))
    weights = None
    if call.return_weights:
        weights = result["logits"] - result["lse"]
        if "logits_low" in result:
            weights += result["logits_low"] - result["lse_low"]
        weights = jnp.exp(weights)
    statistics = Statistics(result["lse"], result.get("lse_low"), result.get("rest"))
    return RouteForward(result["out"], result.get("mix"), statistics, weights)


def backward(
    call: RouteCall, arrays: RouteArrays, saved: RouteSaved, d_out: jax.Array, d_weights: jax.Array | None
) -> RouteGrads:
    """One more pass over the sources."""
    statistics: Statistics = saved.lse
    weighted = None
    if d_weights is not None:
        assert saved.weights is not None
        weighted = jnp.sum(saved.weights * d_weights, axis=0)
    operands = dict(
        d_out=d_out,
        mix=saved.mix,
        rest=statistics.rest,
        lse=statistics.lse,
        lse_low=statistics.lse_low,
        d_weights=d_weights,
        weighted=weighted,
    )
    result = _batchable_backward(call, 1)(_with_groups(arrays), operands)
    d_query, d_null = result["d_query"][0], None
    if arrays.null_source is not None:
        d_query, d_null = _finish_null(call, arrays, d_query, result["d_null"][0], result["d_null_logit"][0])
    d_gate = result["d_gate"][0] if call.has_gate else None
    residual = d_out if call.has_residual else None
    return RouteGrads(result["d_sources"], d_query, d_null, residual, d_gate)


def _finish_null(call, arrays, d_query, d_null, d_logit):
    """What the null source's gradients need once per call, since its logits [H] are the same for every token."""
    heads = lambda x: x.reshape(call.num_heads, call.head_dim)
    null, query = heads(arrays.null_source), heads(arrays.query)
    r = jax.lax.rsqrt(jnp.mean(null * null) + call.eps)
    key = (d_logit * r)[:, None]
    logit = r * jnp.sum(null * query, axis=-1)
    radial = jnp.sum(d_logit * logit) * r * r / call.dim
    d_query = d_query + (key * null).reshape(-1)
    d_null = d_null + (key * query - radial * null).reshape(-1)
    return d_query, d_null


def _with_groups(arrays: RouteArrays) -> RouteArrays:
    """Parameters with a leading axis of one group; `_batched` makes more."""
    lead = lambda x: None if x is None else x[None]
    return arrays._replace(
        query=arrays.query[None],
        query_low=lead(arrays.query_low),
        null_source=lead(arrays.null_source),
        gate=lead(arrays.gate),
    )


# Batching. A batch of calls is one call over more tokens, in G groups with parameters of their own, [G, D]. jax-triton
# has no batching rule; these give one by growing G.

_DEPTH_FIRST = ("logits", "logits_low", "d_weights")  # [N, T, H]; stacked sources are [N, T, D]


@functools.cache
def _batchable_forward(call: RouteCall, groups: int):
    return _batchable(call, groups, launch_forward, _batchable_forward)


@functools.cache
def _batchable_backward(call: RouteCall, groups: int):
    return _batchable(call, groups, launch_backward, _batchable_backward)


def _batchable(call: RouteCall, groups: int, launch, again):
    @jax.custom_batching.custom_vmap
    def run(*operands):
        return launch(call, groups, *operands)

    @run.def_vmap
    def batched(size, in_batched, *operands):
        if size == 0:
            none = batching.of_none(run, in_batched, operands)
            return none, jax.tree.map(lambda _: True, none)
        joined = [_join(call, size, b, o) for b, o in zip(in_batched, operands, strict=True)]
        result = again(call, groups * size)(*joined)
        split = {name: _split(call, size, name, x) for name, x in result.items()}
        return split, jax.tree.map(lambda _: True, split)

    return run


def _join(call: RouteCall, size: int, batched, operands):
    """A batch of operands [B, ...] as those of one call with B times the groups."""
    fields = operands._asdict() if isinstance(operands, RouteArrays) else operands
    flags = batched._asdict() if isinstance(batched, RouteArrays) else batched

    def join(name: str, x, is_batched):
        if not is_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if name in _DEPTH_FIRST or (name == "sources" and call.stacked):
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    joined = {k: jax.tree.map(functools.partial(join, k), v, flags[k]) for k, v in fields.items()}
    return RouteArrays(**joined) if isinstance(operands, RouteArrays) else joined


def _split(call: RouteCall, size: int, name: str, x):
    """The opposite of `_join`, for one named result."""
    if isinstance(x, tuple):
        return tuple(_split(call, size, name, part) for part in x)
    if name in _DEPTH_FIRST or (name == "d_sources" and call.stacked):
        x = x.reshape(x.shape[0], size, x.shape[1] // size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


# Launching.


def launch_forward(
    call: RouteCall, groups: int, arrays: RouteArrays, *, launch: Launcher = triton_launch.launch
) -> dict[str, Any]:
    """The forward kernel's named results over `groups` times the call's tokens."""
    total = groups * call.tokens
    pointers, separate, sources = _source_operands(call, arrays.sources)
    inputs: dict[str, Any] = dict(
        sources=sources,
        query=arrays.query,
        query_low=arrays.query_low if call.dtype == "float32" else None,
        null_source=arrays.null_source,
        residual=arrays.residual,
        gate=arrays.gate,
        tokens=call.tokens,
        num_sources=call.num_sources,
    )
    programs = _programs(call, groups, tile(call, "forward").programs)
    wide = call.dtype == "float32"
    saving = call.differentiated
    row, head = jax.ShapeDtypeStruct((total, call.dim), call.dtype), _float32(total, call.num_heads)
    rows = _float32(call.rows, total, call.num_heads)
    outputs: dict[str, Any] = dict(
        out=row,
        mix=row if saving and call.additive else None,
        rest=jax.ShapeDtypeStruct((total, call.dim), jnp.int16) if saving else None,
        lse=head,
        lse_low=head if wide else None,
        logits=rows if call.return_weights else None,
        logits_low=rows if call.return_weights and wide else None,
        table=_table(groups, programs, pointers) if separate else None,
    )
    return _launch("forward", call, groups, pointers, inputs, outputs, launch)


def launch_backward(
    call: RouteCall,
    groups: int,
    arrays: RouteArrays,
    operands: dict[str, Any],
    *,
    launch: Launcher = triton_launch.launch,
) -> dict[str, Any]:
    """The backward kernel's named results, its partial sums over tokens added up."""
    total = groups * call.tokens
    pointers, separate, sources = _source_operands(call, arrays.sources)
    inputs = dict(
        sources=sources,
        query=arrays.query,
        query_low=arrays.query_low if call.dtype == "float32" else None,
        null_source=arrays.null_source,
        gate=arrays.gate,
        **operands,
        tokens=call.tokens,
        num_sources=call.num_sources,
    )
    programs = _programs(call, groups, tile(call, "backward").programs)
    unused = jax.ShapeDtypeStruct((1,), call.dtype)
    if separate:
        row = jax.ShapeDtypeStruct((total, call.dim), call.dtype)
        grads = [row] * call.num_sources + [unused] * (pointers - call.num_sources)
    else:
        grads = [jax.ShapeDtypeStruct((call.num_sources, total, call.dim), call.dtype) if call.num_sources else unused]
    null, gate = call.has_null, call.has_gate
    outputs = dict(
        d_sources=grads,
        d_query=_float32(groups, programs, call.dim),
        d_null=_float32(groups, programs, call.dim) if null else None,
        d_null_logit=_float32(groups, programs, call.num_heads) if null else None,
        d_gate=_float32(groups, programs) if gate else None,
        table=_table(groups, programs, 2 * pointers) if separate else None,
    )
    result = _launch("backward", call, groups, pointers, inputs, outputs, launch)
    for name in ("d_query", "d_null", "d_null_logit", "d_gate"):  # second stage of the sums over tokens
        if name in result:
            result[name] = jnp.sum(result[name], axis=1)
    result["d_sources"] = _source_grads(call, total, separate, result["d_sources"])
    return result


def _launch(
    direction: str,
    call: RouteCall,
    groups: int,
    pointers: int,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    launch: Launcher,
) -> dict[str, Any]:
    inputs = {k: v for k, v in inputs.items() if v is not None}
    outputs = {k: v for k, v in outputs.items() if v is not None}
    chosen = tile(call, direction)
    results = launch(
        Signature(direction, pointers, tuple(inputs), tuple(outputs)),
        [a for v in inputs.values() for a in (v if isinstance(v, list) else [v])],
        [s for v in outputs.values() for s in (v if isinstance(v, list) else [v])],
        constants(call, chosen, pointers),
        (groups, _programs(call, groups, chosen.programs)),
        chosen.warps,
        call.interpret,
    )
    left = iter(results)
    named = {k: [next(left) for _ in v] if isinstance(v, list) else next(left) for k, v in outputs.items()}
    named.pop("table", None)
    return named


def _source_operands(call: RouteCall, sources) -> tuple[int, bool, list[jax.Array]]:
    """Number of source pointers, whether they are separate arrays, and the operands."""
    if call.num_sources == 0:
        return 1, False, [jnp.zeros((1,), call.dtype)]  # never read
    if call.stacked:
        return 1, False, [sources]
    if call.num_sources == 1:
        return 1, False, [sources[0]]
    count = triton_launch.pointer_count(call.num_sources)
    if count is None:  # more pointers than a kernel takes: the one case that copies
        return 1, False, [jnp.stack(sources)]
    return count, True, [*sources, *[sources[0]] * (count - call.num_sources)]


def _source_grads(call: RouteCall, total: int, separate: bool, grads: list[jax.Array]):
    if call.num_sources == 0:
        return jnp.zeros((0, total, call.dim), call.dtype) if call.stacked else ()
    if separate:
        return tuple(grads[: call.num_sources])
    return grads[0] if call.stacked else tuple(grads[0])


def _table(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*shape, 2), jnp.uint32)  # int64 without jax_enable_x64


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _programs(call: RouteCall, groups: int, per_multiprocessor: int) -> int:
    """Programs a group: enough to fill the chip, and no more, since each leaves a partial sum of the parameters."""
    if call.interpret:
        return min(call.tokens, 3)
    device = triton_launch.gpu()
    count = getattr(device, "core_count", None) or _MULTIPROCESSORS
    return min(call.tokens, 65_535, max(1, -(-count * per_multiprocessor // groups)))  # CUDA's limit for this axis


# Tiles.


def constants(call: RouteCall, chosen: Tile, pointers: int) -> dict[str, Any]:
    """The kernel's compile-time constants."""
    return dict(
        NB=pointers,
        D=call.dim,
        H=call.num_heads,
        K=call.head_dim,
        HB=_power_of_two(call.num_heads),
        L=chosen.width,
        C=-(-call.head_dim // chosen.width),
        SB=chosen.sources,
        ITEMSIZE=np.dtype(call.dtype).itemsize,
        MANTISSA=_MANTISSA[call.dtype],
        EPS=call.eps,
        STAGES=chosen.stages,
        AHEAD=chosen.ahead - 1,
    )


def tile(call: RouteCall, direction: str) -> Tile:
    """The tile of a call: explicit, else tuned, else by rule.

    Raises:
      ValueError: an explicit size is unknown, not a power of two where it must be, or more than any chip holds.
    """
    device = None if call.interpret else triton_launch.gpu()
    key = tuning.bucketed(
        direction,
        dim=call.dim,
        num_heads=call.num_heads,
        sources=max(1, call.num_sources),
        tokens=call.tokens,
        dtype=call.dtype,
    )
    sizes = tuning.choose(
        NAME, device and device.device_kind, key, heuristic(call, direction)._asdict(), dict(call.tile or ())
    )
    for name in ("sources", "width", "warps"):
        if sizes[name] & (sizes[name] - 1):
            raise ValueError(f"tile {name} must be a power of two, got {sizes[name]}")
    if sizes["warps"] > 32:
        raise ValueError(f"tile warps must be at most 32, got {sizes['warps']}")
    if sizes["ahead"] > 2:
        raise ValueError(f"tile ahead must be 1 or 2, got {sizes['ahead']}")
    chosen = Tile(**sizes)
    _refuse_too_large(call, chosen)
    return chosen


def _refuse_too_large(call: RouteCall, chosen: Tile) -> None:
    step = chosen.sources * _power_of_two(call.num_heads) * -(-call.head_dim // chosen.width) * chosen.width
    lane = step // (32 * chosen.warps)
    if lane > _MOST_FEATURES_A_LANE:
        raise ValueError(
            f"tile sources={chosen.sources}, width={chosen.width}, warps={chosen.warps} gives a lane {lane} features "
            f"at D={call.dim}, and it holds at most {_MOST_FEATURES_A_LANE}: fewer sources or more warps would fit"
        )
    buffered = (chosen.stages - 1) * step * np.dtype(call.dtype).itemsize
    device = triton_launch.gpu()
    capability = getattr(device, "compute_capability", None)  # without a GPU, those that have most
    most = 1024 * _SHARED.get(str(capability), max(_SHARED.values()))
    if buffered > most:
        raise ValueError(
            f"tile stages={chosen.stages} needs {buffered} bytes of shared memory, and a program has at most {most}: "
            "fewer stages or sources would fit"
        )


def heuristic(call: RouteCall, direction: str) -> Tile:
    """Registers decide: a lane holds up to 40 features of the row, and of every array that must stay with it.

    Half as many with float32 storage, whose arithmetic is float64; a fifth fewer with a null source, or in delta form
    of 16-bit rows, where else some bytes spill at D 1280.
    """
    heads, head_dim = _power_of_two(call.num_heads), call.head_dim
    vector = 16 // np.dtype(call.dtype).itemsize  # numbers a lane moves at once
    most_features = 128 if call.has_null or (call.additive and vector == 8) else 160
    warps = min(16, max(1, _power_of_two(-(-heads * head_dim // (most_features * vector)))))
    lanes = max(1, 32 * warps // heads)
    most = lanes * vector
    widths = [1 << i for i in range(most.bit_length()) if 1 << i <= _power_of_two(head_dim)]
    waste = lambda w: -(-head_dim // w) * w / head_dim - 1
    width = max(w for w in widths if waste(w) <= max(0.1, min(map(waste, widths))))
    sources = 2 if heads * head_dim <= 80 * vector * warps else 1
    # A step in flight is one more buffer of rows in shared memory, of which the smallest chips have 99 KiB a program.
    buffers = 98_304 // (sources * heads * -(-head_dim // width) * width * np.dtype(call.dtype).itemsize)
    if direction == "forward":
        return Tile(sources, width, warps, ahead=1, stages=min(4, 1 + buffers), programs=max(1, 64 // warps))
    return Tile(sources, width, warps, ahead=1, stages=min(3, 1 + buffers), programs=max(1, 16 // warps))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
