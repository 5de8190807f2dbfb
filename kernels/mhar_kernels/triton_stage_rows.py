"""The Triton kernels of the depth-blocked schedule that work inside a block; `stages_triton` launches them.

One program takes one token's rows, held as in `triton_kernels` (C tiles [HB, 1, L]), and walks the few rows of the
block: `merge` forward, `finish` backward. (Tiles change their shape in one place, where the lower bits of four features
of a rest, all a lane's own, become a byte, and back.) What lies outside the loop is asked for before it, so that it
arrives together; `finish` uses it before the loop, since registers are what limits how many tokens are in flight.

Rows are 16-bit numbers. Buffers indexed by a token come token first, so that what one program wants of all sites lies
together. In-place buffers are outputs that alias an input, named `unused_*` here.
"""

# Triton compiles a subset of Python: no starred tuples, and a tuple grows by assignment.
# ruff: noqa: RUF005, B007
# mypy: disable-error-code="assignment,var-annotated"

import triton
import triton.language as tl

from mhar_kernels.triton_kernels import _load_row, _rest_unit, _store_row


@triton.jit
def _dot_rows(a, b, HB: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """<a[h], b[h]> of two rows held as tiles: [HB, 1, 1] float32."""
    total = tl.zeros((HB, 1, L), tl.float32)
    for c in tl.static_range(C):
        total += a[c] * b[c]
    return tl.sum(total, axis=2, keep_dims=True)


@triton.jit
def _wide(row, C: tl.constexpr):
    tiles = ()
    for c in tl.static_range(C):
        tiles = tiles + (row[c].to(tl.float32),)
    return tiles


@triton.jit
def _near_and_rest(exact, dtype: tl.constexpr, MANTISSA: tl.constexpr):
    """float32 numbers in a 16-bit dtype, and what that takes from them as an int16, in 2**-16 of the spacing there."""
    near = exact.to(dtype)
    wide = near.to(tl.float32)
    if MANTISSA == 7:  # bfloat16 is the upper half of a float32: a difference of bits, at half the cost
        return near, tl.minimum(exact.to(tl.int32, bitcast=True) - wide.to(tl.int32, bitcast=True), 32767)
    else:
        units = (exact - wide) / _rest_unit(wide, MANTISSA)
        return near, tl.minimum(tl.maximum(units, -32767.0), 32767.0).to(tl.int32)


@triton.jit
def _whole(near, rest, MANTISSA: tl.constexpr):
    """What `_near_and_rest` was given, as far as the rest goes; near: as any numbers of 32 bits, rest: as int32."""
    wide = near.to(tl.float32)
    if MANTISSA == 7:
        return (wide.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
    else:
        return wide + rest.to(tl.float32) * _rest_unit(wide, MANTISSA)


@triton.jit
def _store_rest(
    pointer,
    tiles,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes the rest of a row. PACKED: in 10 bits; the upper 8 of all D features, then the lower 2, four a byte."""
    if PACKED:
        shifts = (2 * tl.arange(0, 4))[None, None, :]
        upper = ()
        lower = ()
        for c in tl.static_range(C):
            rounded = tl.minimum((tiles[c] + 32) >> 6, 511)
            fourths = tl.sum(tl.reshape(rounded & 3, (HB, L // 4, 4)) << shifts, axis=2)
            upper = upper + (rounded >> 2,)
            lower = lower + (tl.reshape(fourths, (HB, 1, L // 4)),)
        _store_row(pointer, upper, H, K, HB, L, C)
        _store_row(pointer + D, lower, H, K // 4, HB, L // 4, C)
    else:
        _store_row(pointer, tiles, H, K, HB, L, C)


@triton.jit
def _load_rest(
    pointer,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What `_store_rest` wrote, as it is there: tiles [HB, 1, L], and where PACKED tiles [HB, 1, L / 4]."""
    if PACKED:
        upper = _load_row(pointer, H, K, HB, L, C, tl.int8)
        return upper, _load_row(pointer + D, H, K // 4, HB, L // 4, C, tl.int8)
    else:
        return _load_row(pointer, H, K, HB, L, C, tl.int16), ()


@triton.jit
def _rest(tiles, lower, c: tl.constexpr, HB: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr):
    """Tile c of what was loaded, in the units that were given to `_store_rest`."""
    if PACKED:
        shifts = (2 * tl.arange(0, 4))[None, None, :]
        fourths = tl.reshape(lower[c], (HB, L // 4)).to(tl.int32)[:, :, None]
        return (tiles[c].to(tl.int32) << 8) | (tl.reshape((fourths >> shifts) & 3, (HB, 1, L)) << 6)
    else:
        return tiles[c].to(tl.int32)


@triton.jit
def merge_kernel(
    source,  # [T, D]: the source of this site
    queries,  # float32 [N, D]: effective
    scale,  # float32 [D]: of the norm that the mix goes through, or unused
    outside,  # float32 [S, T, D]: `mix` of the block, or unused
    outside_lse,  # float32 [S, T, H]
    unused_sources,
    unused_rms,
    unused_lse,
    unused_logits,
    tokens,
    site,
    start,  # first site of the block
    sources,  # [N, T, D], in place
    inverse_rms,  # float32 [T, NP], in place
    lse,  # float32 [T, H, NP], in place
    logits,  # float32 [T, N, S, H], in place: of each site, inside its block
    read,  # [T, D]: the mix, through its norm
    rest,  # what rounding took from that, in 2**-16 of its spacing: int16 [T, D], or PACKED int8 [T, D + D / 4]
    mix_rms,  # float32 [T]: inverse RMS of the mix
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    S: tl.constexpr,
    MANTISSA: tl.constexpr,
    EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    OUTSIDE: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One token a program: the newest source enters the history, and the site's mix is finished.

    Everything that lies outside the loop is asked for before it and used after it, so that it arrives meanwhile. KEEP:
    what only a backward pass needs is written too.
    """
    t = tl.program_id(0).to(tl.int64)
    stride = tl.cast(tokens, tl.int64) * D
    heads = tl.arange(0, HB)[:, None, None]
    own = logits + ((t * N + site) * S) * H + heads
    q = _load_row(queries + site * D, H, K, HB, L, C)
    newest = _load_row(source + t * D, H, K, HB, L, C, source.dtype.element_ty)
    if OUTSIDE:
        at = ((site - start) * tl.cast(tokens, tl.int64) + t) * H + heads
        before = tl.load(outside_lse + at, mask=heads < H, other=-1e30)
        part = _load_row(outside + ((site - start) * stride + t * D), H, K, HB, L, C)
    m = tl.full((HB, 1, 1), -1e30, tl.float32)
    z = tl.zeros((HB, 1, 1), tl.float32)
    acc = ()
    for c in tl.static_range(C):
        acc = acc + (tl.zeros((HB, 1, L), tl.float32),)
    for n in tl.range(start, site, num_stages=STAGES):
        row = _load_row(sources + n * stride + t * D, H, K, HB, L, C)
        logit = _dot_rows(row, q, HB, L, C) * tl.load(inverse_rms + t * NP + n)
        if KEEP:
            tl.store(own + (n - start) * H, logit, mask=heads < H)
        top = tl.maximum(m, logit)
        keep = tl.exp(m - top)
        p = tl.exp(logit - top)
        z = z * keep + p
        m = top
        more = ()
        for c in tl.static_range(C):
            more = more + (acc[c] * keep + row[c] * p,)
        acc = more
    _store_row(sources + site * stride + t * D, newest, H, K, HB, L, C)
    newest = _wide(newest, C)
    squares = _dot_rows(newest, newest, HB, L, C)
    r = tl.rsqrt(tl.sum(squares, axis=0, keep_dims=True) / D + EPS)
    tl.store(inverse_rms + t * NP + site + tl.zeros((1, 1, 1), tl.int32), r)
    logit = _dot_rows(newest, q, HB, L, C) * r
    if KEEP:
        tl.store(own + (site - start) * H, logit, mask=heads < H)
    top = tl.maximum(m, logit)
    if OUTSIDE:
        top = tl.maximum(top, before)
    keep = tl.exp(m - top)
    p = tl.exp(logit - top)
    z = z * keep + p
    more = ()
    for c in tl.static_range(C):
        more = more + (acc[c] * keep + newest[c] * p,)
    acc = more
    if OUTSIDE:
        p = tl.exp(before - top)
        z += p
        more = ()
        for c in tl.static_range(C):
            more = more + (acc[c] + part[c] * p,)
        acc = more
    m = top
    exact = ()
    for c in tl.static_range(C):
        exact = exact + (acc[c] / z,)
    if NORM:
        w = _load_row(scale, H, K, HB, L, C)
        squares = _dot_rows(exact, exact, HB, L, C)
        r = tl.rsqrt(tl.sum(squares, axis=0, keep_dims=True) / D + NORM_EPS)
        if KEEP:
            tl.store(mix_rms + t + tl.zeros((1, 1, 1), tl.int32), r)
        more = ()
        for c in tl.static_range(C):
            more = more + (exact[c] * r * w[c],)
        exact = more
    out = ()
    lost = ()
    for c in tl.static_range(C):
        pair = _near_and_rest(exact[c], read.dtype.element_ty, MANTISSA)
        out = out + (pair[0],)
        lost = lost + (pair[1],)
    _store_row(read + t * D, out, H, K, HB, L, C)
    if KEEP:
        _store_rest(rest + t * (D + D // 4 * PACKED), lost, D, H, K, HB, L, C, PACKED)
        tl.store(lse + (t * H + heads) * NP + site, m + tl.log(z), mask=heads < H)


@triton.jit
def finish_kernel(
    cotangent,  # [T, D]: of what is read at this site
    read,  # [T, D]: that
    rest,  # of that, as `merge` wrote it
    mix_rms,  # float32 [T], or unused
    scale,  # float32 [D]: of the norm, or unused
    queries,  # [N, D] in the storage dtype: effective
    sources,  # [N, T, D]
    inverse_rms,  # float32 [T, NP]
    lse,  # float32 [T, H, NP]
    logits,  # float32 [T, N, S, H]
    outside,  # float32 [S, T, D]: `pull` of the block, or unused
    outside_shared,  # float32 [S, T, H]
    unused_cotangents,
    unused_deltas,
    unused_keys,
    tokens,
    site,
    start,
    stop,  # of the block
    cotangents,  # [N, T, D], in place: of mixes
    deltas,  # float32 [T, H, NP], in place
    keys,  # float32 [T, H, N, NP], in place: dl r of each source and site
    d_source,  # [T, D]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    S: tl.constexpr,
    MANTISSA: tl.constexpr,
    NORM: tl.constexpr,
    OUTSIDE: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One token a program: site `site`'s cotangent is kept, and the gradient of source `site` finished."""
    t = tl.program_id(0).to(tl.int64)
    stride = tl.cast(tokens, tl.int64) * D
    heads = tl.arange(0, HB)[:, None, None]
    exists = heads < H
    own = logits + (t * N * S + (site - start)) * H + heads
    at = (t * H + heads) * NP
    key_row = keys + ((t * H + heads) * N + site) * NP
    v = _load_row(sources + site * stride + t * D, H, K, HB, L, C)
    d_out = _load_row(cotangent + t * D, H, K, HB, L, C)
    near = _load_row(read + t * D, H, K, HB, L, C)
    lost, fourths = _load_rest(rest + t * (D + D // 4 * PACKED), D, H, K, HB, L, C, PACKED)
    q = _load_row(queries + site * D, H, K, HB, L, C)
    r = tl.load(inverse_rms + t * NP + site)
    own_logit = tl.load(own + site * (S * H), mask=exists, other=0.0)
    own_lse = tl.load(lse + at + site, mask=exists, other=0.0)
    if OUTSIDE:
        pulled = _load_row(outside + ((site - start) * stride + t * D), H, K, HB, L, C)
        shared = tl.load(
            outside_shared + ((site - start) * tl.cast(tokens, tl.int64) + t) * H + heads, mask=exists, other=0.0
        )
    else:
        shared = tl.zeros((HB, 1, 1), tl.float32)
    exact = ()
    for c in tl.static_range(C):
        exact = exact + (_whole(near[c], _rest(lost, fourths, c, HB, L, PACKED), MANTISSA),)
    if NORM:  # back through it; what was read, over scale and inverse RMS, is the mix
        w = _load_row(scale, H, K, HB, L, C)
        inverse = tl.load(mix_rms + t)
        along = tl.sum(_dot_rows(d_out, exact, HB, L, C), axis=0, keep_dims=True) / D
        back = ()
        more = ()
        for c in tl.static_range(C):
            unit = exact[c] / tl.where(w[c] == 0, 1.0, w[c])  # no scale is 0 but of features that do not exist
            d_mix = inverse * (d_out[c] * w[c] - along * unit)
            back = back + (d_mix.to(cotangents.dtype.element_ty).to(tl.float32),)  # Δ is of what the other sites see
            more = more + (unit / inverse,)
        d_out = back
        exact = more
    _store_row(cotangents + site * stride + t * D, d_out, H, K, HB, L, C)
    delta = _dot_rows(d_out, exact, HB, L, C)
    tl.store(deltas + at + site, delta, mask=exists)
    p = tl.exp(own_logit - own_lse)
    dl = tl.where(exists, p * (_dot_rows(d_out, v, HB, L, C) - delta), 0.0)
    tl.store(key_row + site, dl * r, mask=exists)
    shared += dl * own_logit
    acc = ()
    for c in tl.static_range(C):
        acc = acc + (p * d_out[c] + (dl * r) * q[c],)
    if OUTSIDE:
        more = ()
        for c in tl.static_range(C):
            more = more + (acc[c] + pulled[c],)
        acc = more
    for i in tl.range(site + 1, stop, num_stages=STAGES):
        row = _load_row(cotangents + i * stride + t * D, H, K, HB, L, C)
        q = _load_row(queries + i * D, H, K, HB, L, C)
        logit = tl.load(own + i * (S * H), mask=exists, other=0.0)
        p = tl.exp(logit - tl.load(lse + at + i, mask=exists, other=0.0))
        delta = tl.load(deltas + at + i, mask=exists, other=0.0)
        dl = tl.where(exists, p * (_dot_rows(row, v, HB, L, C) - delta), 0.0)
        tl.store(key_row + i, dl * r, mask=exists)
        shared += dl * logit
        more = ()
        for c in tl.static_range(C):
            more = more + (acc[c] + p * row[c] + (dl * r) * q[c],)
        acc = more
    radial = tl.sum(shared, axis=0, keep_dims=True) * (r * r / D)
    out = ()
    for c in tl.static_range(C):
        out = out + (acc[c] - radial * v[c],)
    _store_row(d_source + t * D, out, H, K, HB, L, C)
