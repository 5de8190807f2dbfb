"""The two Triton kernels of depth routing: bodies only; `triton_launch` gives them their argument lists.

One program walks the depth of one token after another and reads each source row once. A row of D features is H heads of
K features; it is held as C tiles [HB, 1, L]: HB heads (H padded to a power of two) by L neighbouring features, with
C * L the head width K, padded only where no power of two divides it usefully. So K = 160 is five tiles of 32: a head's
sum over K adds its tiles inside a lane first and then crosses L / 8 lanes. SB sources are read together as tiles
[HB, SB, L]: their sums share one reduction, and the online softmax rescales once for all of them. Sources are the
middle axis because Triton spreads lanes over the last axis, then the first, and one lane should hold all SB of them.
Every tensor keeps these three axes, so none changes its layout.

Arithmetic (WIDE) is float32 for 16-bit storage and float64 for float32 storage, where rounding a large logit to float32
would be the largest error of the op. Sums over tokens are float32.
"""

# Triton compiles a subset of Python: no starred tuples, and a tuple grows by assignment.
# ruff: noqa: RUF005, B007
# mypy: disable-error-code="assignment,var-annotated"

import triton
import triton.language as tl


@triton.jit
def _tile_offsets(c: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, L: tl.constexpr):
    """Feature index [HB, 1, L] of tile c of a row."""
    return tl.arange(0, HB)[:, None, None] * K + (c * L + tl.arange(0, L))[None, None, :]


@triton.jit
def _tile_mask(c: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, L: tl.constexpr):
    return (tl.arange(0, HB) < H)[:, None, None] & ((c * L + tl.arange(0, L)) < K)[None, None, :]


@triton.jit
def _load_row(
    pointer,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    DTYPE: tl.constexpr = tl.float32,
):
    """One row as C tiles [HB, 1, L] of that dtype; features that do not exist are zero."""
    tiles = ()
    for c in tl.static_range(C):
        at = pointer + _tile_offsets(c, K, HB, L)
        if H == HB and C * L == K:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=_tile_mask(c, H, K, HB, L), other=0.0)
        tiles = tiles + (tile.to(DTYPE),)
    return tiles


@triton.jit
def _store_row(pointer, tiles, H: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    for c in tl.static_range(C):
        at = pointer + _tile_offsets(c, K, HB, L)
        tile = tiles[c].to(pointer.dtype.element_ty)
        if H == HB and C * L == K:
            tl.store(at, tile)
        else:
            tl.store(at, tile, mask=_tile_mask(c, H, K, HB, L))


@triton.jit
def _row_pointers(first, table, n, valid, stride, offset, ITEMSIZE: tl.constexpr):
    """Where row n of a token starts: in one array [N, T, D], or in array n of many, by its distance from the first.

    The multiplication by a constant shows the compiler that distances keep the alignment of the pointer argument, so
    that it moves 16 bytes a lane. (A hint on the loaded value would be lost where the load is pipelined.)
    """
    if table is None:
        return first + (n * stride + offset)
    else:
        return first + (tl.load(table + n, mask=valid, other=0) * (16 // ITEMSIZE) + offset)


@triton.jit
def _write_table(table, arrays, NB: tl.constexpr):
    """Distances of the arrays from the first, in units of 16 bytes, in this program's own row of the table."""
    SIZE: tl.constexpr = triton.next_power_of_2(NB)
    index = tl.arange(0, SIZE)
    start = arrays[0].to(tl.int64)
    address = tl.zeros((SIZE,), tl.int64) + start
    for i in tl.static_range(1, NB):
        address = tl.where(index == i, arrays[i].to(tl.int64), address)
    tl.store(table + index, (address - start) // 16, mask=index < NB)


@triton.jit
def _rows_mask(
    valid, c: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, L: tl.constexpr, C: tl.constexpr
):
    if H == HB and C * L == K:
        return valid[None, :, None]
    else:
        return valid[None, :, None] & _tile_mask(c, H, K, HB, L)


@triton.jit
def _load_rows(
    first,
    table,
    n,
    num_sources,
    stride,
    offset,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    ITEMSIZE: tl.constexpr,
):
    """Rows n as C tiles [HB, SB, L] in the storage dtype; rows that do not exist are zero and cost no traffic."""
    pointers = _row_pointers(first, table, n, n < num_sources, stride, offset, ITEMSIZE)
    tiles = ()
    for c in tl.static_range(C):
        at = pointers[None, :, None] + _tile_offsets(c, K, HB, L)
        tiles = tiles + (tl.load(at, mask=_rows_mask(n < num_sources, c, H, K, HB, L, C), other=0.0),)
    return tiles


@triton.jit
def _inverse_rms(squares, exists, D: tl.constexpr, EPS: tl.constexpr):
    """[HB, SB, L] partial sums of squares -> 1 / RMS over the full width, [1, SB, 1]; finite for rows of padding."""
    total = tl.sum(tl.sum(squares, axis=2, keep_dims=True), axis=0, keep_dims=True)
    return tl.rsqrt(tl.where(exists, total / D + tl.full((), EPS, squares.dtype), 1.0))


@triton.jit
def _load_query(
    query,
    query_low,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    q = _load_row(query, H, K, HB, L, C, WIDE)
    if query_low is None:
        return q
    else:
        low = _load_row(query_low, H, K, HB, L, C, WIDE)
        both = ()
        for c in tl.static_range(C):
            both = both + (q[c] + low[c],)
        return both


@triton.jit
def _row_logit(
    row,
    q,
    D: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Logits [HB, 1, 1] of one row held in float32."""
    squares = tl.zeros((HB, 1, L), WIDE)
    scores = tl.zeros((HB, 1, L), WIDE)
    for c in tl.static_range(C):
        s = row[c].to(WIDE)
        squares += s * s
        scores += s * q[c]
    return tl.sum(scores, axis=2, keep_dims=True) * _inverse_rms(squares, D > 0, D, EPS)


@triton.jit
def _weight(log):
    """exp of a weight's logarithm, which is above 0 only where a huge logit was rounded otherwise than before."""
    return tl.exp(tl.where(log > 0, 0.0, log))


@triton.jit
def _rest_unit(rounded, MANTISSA: tl.constexpr):
    """2**-16 of the spacing of a 16-bit dtype with that many mantissa bits, at these rounded values."""
    power = (rounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    least: tl.constexpr = 2.0**-24 if MANTISSA == 10 else 2.0**-110  # float16 is evenly spaced below 2**-14
    return tl.maximum(power * (2.0**-MANTISSA), least) * 2.0**-16


@triton.jit
def forward_body(
    sources,  # tuple: one pointer [N, T, D], or NB pointers [T, D]
    table,  # int64 [G, P, NB] scratch for separate arrays, or None
    query,  # float32 [G, D]
    query_low,  # float32 [G, D], or None
    null_source,  # float32 [G, D], or None
    residual,  # [T, D], or None
    gate,  # float32 [G], or None
    out,
    mix,  # [T, D]: the mix itself, or None
    rest,  # int16 [T, D]: what rounding took from the mix, or None
    lse,  # float32 [T, H]
    lse_low,  # float32 [T, H], or None
    logits,  # float32 [N(+1), T, H], or None
    logits_low,  # float32 [N(+1), T, H], or None
    tokens,  # in one of the G groups: T = G * tokens
    num_sources,
    NB: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    SB: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    MANTISSA: tl.constexpr,
    EPS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Programs (g, p) take tokens p, p + P, ... of group g."""
    WIDE: tl.constexpr = tl.float64 if ITEMSIZE == 4 else tl.float32
    BEFORE: tl.constexpr = 0 if null_source is None else 1
    first = sources[0]
    group = tl.program_id(0) + tl.full((), 0, tl.int64)
    all_tokens = tl.num_programs(0) * tokens + tl.full((), 0, tl.int64)
    program = group * tl.num_programs(1) + tl.program_id(1)
    if table is not None:
        table += program * NB
        _write_table(table, sources, NB)
        tl.debug_barrier()
    heads = tl.arange(0, HB)[:, None, None]
    q = _load_query(query + group * D, query_low if query_low is None else query_low + group * D, H, K, HB, L, C, WIDE)

    for t in tl.range(tl.program_id(1), tokens, tl.num_programs(1)):
        token = group * tokens + t
        offset = token * D
        if null_source is None:
            m = tl.full((HB, 1, 1), float("-inf"), WIDE)
            z = tl.zeros((HB, 1, 1), WIDE)
            acc = ()
            for c in tl.static_range(C):
                acc = acc + (tl.zeros((HB, 1, L), WIDE),)
        else:
            acc = _load_row(null_source + group * D, H, K, HB, L, C, WIDE)
            m = _row_logit(acc, q, D, HB, L, C, EPS, WIDE)
            z = tl.full((HB, 1, 1), 1.0, WIDE)
            if logits is not None:
                null_high = m.to(tl.float32)
                tl.store(logits + (token * H + heads), null_high, mask=heads < H)
                if logits_low is not None:
                    tl.store(logits_low + (token * H + heads), (m - null_high.to(WIDE)).to(tl.float32), mask=heads < H)

        n = tl.arange(0, SB)
        if AHEAD:
            rows = _load_rows(first, table, n, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
        for n0 in tl.range(0, num_sources, SB, num_stages=STAGES):
            n = n0 + tl.arange(0, SB)
            exists = (n < num_sources)[None, :, None]
            if AHEAD:
                ahead = _load_rows(first, table, n + SB, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
            else:
                rows = _load_rows(first, table, n, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
            squares = tl.zeros((HB, SB, L), WIDE)
            scores = tl.zeros((HB, SB, L), WIDE)
            for c in tl.static_range(C):
                s = rows[c].to(WIDE)
                squares += s * s
                scores += s * q[c]
            logit = tl.sum(scores, axis=2, keep_dims=True) * _inverse_rms(squares, exists, D, EPS)
            if logits is not None:
                at = ((n + BEFORE)[None, :, None] * all_tokens + token) * H + heads
                logit_high = logit.to(tl.float32)
                tl.store(logits + at, logit_high, mask=exists & (heads < H))
                if logits_low is not None:
                    tl.store(logits_low + at, (logit - logit_high.to(WIDE)).to(tl.float32), mask=exists & (heads < H))
            logit = tl.where(exists, logit, float("-inf"))
            top = tl.maximum(m, tl.max(logit, axis=1, keep_dims=True))
            decay = tl.exp(m - top)
            p = tl.exp(logit - top)
            m = top
            z = z * decay + tl.sum(p, axis=1, keep_dims=True)
            new = ()
            for c in tl.static_range(C):
                weighted = tl.sum(p * rows[c].to(WIDE), axis=1, keep_dims=True)
                new = new + (acc[c] * decay + weighted,)
            acc = new
            if AHEAD:
                rows = ahead

        total = m + tl.log(z)
        high = total.to(tl.float32)
        tl.store(lse + (token * H + heads), high, mask=heads < H)
        if lse_low is not None:
            tl.store(lse_low + (token * H + heads), (total - high.to(WIDE)).to(tl.float32), mask=heads < H)
        mixed = ()
        for c in tl.static_range(C):
            mixed = mixed + (acc[c] * (1.0 / z),)
        if rest is not None:
            lost = ()
            for c in tl.static_range(C):
                rounded = mixed[c].to(out.dtype.element_ty).to(tl.float32)
                steps = tl.floor((mixed[c] - rounded) / _rest_unit(rounded, MANTISSA) + 0.5)
                lost = lost + (tl.minimum(tl.maximum(steps, -32768.0), 32767.0),)
            _store_row(rest + offset, lost, H, K, HB, L, C)
        if mix is not None:
            _store_row(mix + offset, mixed, H, K, HB, L, C)
        if gate is not None:
            opening = tl.load(gate + group)
            gated = ()
            for c in tl.static_range(C):
                gated = gated + (mixed[c] * opening,)
            mixed = gated
        if residual is not None:
            stream = _load_row(residual + offset, H, K, HB, L, C, WIDE)
            summed = ()
            for c in tl.static_range(C):
                summed = summed + (stream[c] + mixed[c],)
            mixed = summed
        _store_row(out + offset, mixed, H, K, HB, L, C)


@triton.jit
def backward_body(
    sources,
    d_sources,  # as `sources`
    table,  # int64 [G, P, 2 * NB] scratch: distances of sources, then of their gradients; or None
    query,  # float32 [G, D]
    query_low,  # float32 [G, D], or None
    null_source,  # float32 [G, D], or None
    gate,  # float32 [G], or None
    d_out,  # [T, D]
    mix,  # [T, D]
    rest,  # int16 [T, D]
    lse,  # float32 [T, H]
    lse_low,  # float32 [T, H], or None
    d_weights,  # float32 [N(+1), T, H], or None
    weighted,  # float32 [T, H]: sum over sources of weights * d_weights, or None
    d_query,  # float32 [G, P, D]
    d_null,  # float32 [G, P, D]: sum over tokens of weight * dO, or None
    d_null_logit,  # float32 [G, P, H], or None
    d_gate,  # float32 [G, P], or None
    tokens,
    num_sources,
    NB: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    SB: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    MANTISSA: tl.constexpr,
    EPS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Programs (g, p) take tokens p, p + P, ... of group g, and keep the sums over their tokens in registers."""
    WIDE: tl.constexpr = tl.float64 if ITEMSIZE == 4 else tl.float32
    BEFORE: tl.constexpr = 0 if null_source is None else 1
    first = sources[0]
    d_first = d_sources[0]
    group = tl.program_id(0) + tl.full((), 0, tl.int64)
    all_tokens = tl.num_programs(0) * tokens + tl.full((), 0, tl.int64)
    program = group * tl.num_programs(1) + tl.program_id(1)
    d_table = table
    if table is not None:
        table += program * (2 * NB)
        d_table = table + NB
        _write_table(table, sources, NB)
        _write_table(d_table, d_sources, NB)
        tl.debug_barrier()
    heads = tl.arange(0, HB)[:, None, None]
    q = _load_query(query + group * D, query_low if query_low is None else query_low + group * D, H, K, HB, L, C, WIDE)
    dq = ()
    for c in tl.static_range(C):
        dq = dq + (tl.zeros((HB, 1, L), tl.float32),)
    if null_source is not None:
        null_logit = _row_logit(_load_row(null_source + group * D, H, K, HB, L, C), q, D, HB, L, C, EPS, WIDE)
        dnull_logit = tl.zeros((HB, 1, 1), tl.float32)
        dnull = ()
        for c in tl.static_range(C):
            dnull = dnull + (tl.zeros((HB, 1, L), tl.float32),)
    if gate is not None:
        opening = tl.load(gate + group)
        dgate = tl.zeros((HB, 1, 1), tl.float32)

    for t in tl.range(tl.program_id(1), tokens, tl.num_programs(1)):
        token = group * tokens + t
        offset = token * D
        at_head = token * H + heads
        do = _load_row(d_out + offset, H, K, HB, L, C, WIDE)
        mixed = _load_row(mix + offset, H, K, HB, L, C)
        lost = _load_row(rest + offset, H, K, HB, L, C)
        sums = tl.zeros((HB, 1, L), WIDE)
        for c in tl.static_range(C):
            whole = mixed[c].to(WIDE) + lost[c].to(WIDE) * _rest_unit(mixed[c], MANTISSA)
            sums += do[c] * whole
        delta = tl.sum(sums, axis=2, keep_dims=True)
        if gate is not None:
            dgate += delta.to(tl.float32)
            delta *= opening
            gated = ()
            for c in tl.static_range(C):
                gated = gated + (do[c] * opening,)
            do = gated
        if weighted is not None:
            delta += tl.load(weighted + at_head, mask=heads < H, other=0.0)
        norm = tl.load(lse + at_head, mask=heads < H, other=0.0).to(WIDE)
        if lse_low is not None:
            norm += tl.load(lse_low + at_head, mask=heads < H, other=0.0).to(WIDE)

        if null_source is not None:
            null = _load_row(null_source + group * D, H, K, HB, L, C)  # from the cache: registers are scarcer
            sums = tl.zeros((HB, 1, L), WIDE)
            for c in tl.static_range(C):
                sums += null[c] * do[c]
            null_a = _weight(null_logit - norm)
            null_dw = tl.sum(sums, axis=2, keep_dims=True)
            if d_weights is not None:
                null_dw += tl.load(d_weights + at_head, mask=heads < H, other=0.0)
            dnull_logit += (null_a * (null_dw - delta)).to(tl.float32)
            new = ()
            for c in tl.static_range(C):
                new = new + (dnull[c] + (null_a * do[c]).to(tl.float32),)
            dnull = new

        n = tl.arange(0, SB)
        if AHEAD:
            rows = _load_rows(first, table, n, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
        for n0 in tl.range(0, num_sources, SB, num_stages=STAGES):
            n = n0 + tl.arange(0, SB)
            exists = (n < num_sources)[None, :, None]
            if AHEAD:
                ahead = _load_rows(first, table, n + SB, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
            else:
                rows = _load_rows(first, table, n, num_sources, all_tokens * D, offset, H, K, HB, L, C, ITEMSIZE)
            squares = tl.zeros((HB, SB, L), WIDE)
            scores = tl.zeros((HB, SB, L), WIDE)
            products = tl.zeros((HB, SB, L), WIDE)
            for c in tl.static_range(C):
                s = rows[c].to(WIDE)
                squares += s * s
                scores += s * q[c]
                products += s * do[c]
            r = _inverse_rms(squares, exists, D, EPS)
            logit = tl.sum(scores, axis=2, keep_dims=True) * r
            dw = tl.sum(products, axis=2, keep_dims=True)
            if d_weights is not None:
                at = ((n + BEFORE)[None, :, None] * all_tokens + token) * H + heads
                dw += tl.load(d_weights + at, mask=exists & (heads < H), other=0.0)
            # Rows and heads that do not exist get weight 0, so nothing of them reaches a sum.
            a = _weight(tl.where(exists & (heads < H), logit - norm, float("-inf")))
            dlogit = a * (dw - delta)
            key = dlogit * r
            radial = tl.sum(dlogit * logit, axis=0, keep_dims=True) * r * r / D
            targets = _row_pointers(d_first, d_table, n, n < num_sources, all_tokens * D, offset, ITEMSIZE)
            new = ()
            for c in tl.static_range(C):
                s = rows[c].to(WIDE)
                ds = a * do[c] + key * q[c] - radial * s
                at = targets[None, :, None] + _tile_offsets(c, K, HB, L)
                tl.store(at, ds.to(d_first.dtype.element_ty), mask=_rows_mask(n < num_sources, c, H, K, HB, L, C))
                new = new + (dq[c] + tl.sum(key * s, axis=1, keep_dims=True).to(tl.float32),)
            dq = new
            if AHEAD:
                rows = ahead

    _store_row(d_query + program * D, dq, H, K, HB, L, C)
    if null_source is not None:
        _store_row(d_null + program * D, dnull, H, K, HB, L, C)
        tl.store(d_null_logit + (program * H + heads), dnull_logit, mask=heads < H)
    if gate is not None:
        tl.store(d_gate + program, tl.sum(tl.reshape(dgate, [HB]), axis=0))
