"""The Triton kernels of the depth-blocked schedule; `stages_triton` launches them.

Two shapes of program. `merge` and `finish` hold one token's row as in `triton_kernels` (C tiles [HB, 1, L]) and walk
the few rows inside a block. `mix`, `pull` and `query` take one token and one head and make depth the matrix: 16 sites
by 16 sources a step, so that scores, weighted sums and their gradients are products on the matrix unit and no lane adds
up over a head. A head's K features are C1 * K1 + K2 there (160 = 128 + 32).

Rows are 16-bit numbers, exact on the matrix unit; float32 factors (queries, weights of a mix) are split into two such
numbers where a single rounding would show in the result. Buffers indexed by a token come token first, so that what one
program wants of all sites lies together. In-place buffers are outputs that alias an input, named `unused_*` here.
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
def _column(x, chosen):
    """One column of [HB, 1, SB]: [HB, 1, 1]."""
    return tl.sum(tl.where(chosen, x, 0.0), axis=2, keep_dims=True)


@triton.jit
def _wide(row, C: tl.constexpr):
    tiles = ()
    for c in tl.static_range(C):
        tiles = tiles + (row[c].to(tl.float32),)
    return tiles


@triton.jit
def merge_kernel(
    source,  # [T, D]: the source of this site
    queries,  # float32 [N, D]: effective
    outside,  # [S, T, D]: `mix` of the block, or unused
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
    mix,  # [T, D]
    rest,  # int8 [T, D]: what rounding took from the mix, in 2**-8 of its spacing
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
    OUTSIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One token a program: the newest source enters the history, and the site's mix is finished.

    Everything that lies outside the loop is asked for before it and used after it, so that it arrives meanwhile.
    """
    t = tl.program_id(0).to(tl.int64)
    stride = tokens.to(tl.int64) * D
    heads = tl.arange(0, HB)[:, None, None]
    own = logits + ((t * N + site) * S) * H + heads
    q = _load_row(queries + site * D, H, K, HB, L, C)
    newest = _load_row(source + t * D, H, K, HB, L, C, source.dtype.element_ty)
    if OUTSIDE:
        before = tl.load(
            outside_lse + ((site - start) * tokens.to(tl.int64) + t) * H + heads, mask=heads < H, other=-1e30
        )
        part = _load_row(outside + (site - start) * stride + t * D, H, K, HB, L, C, outside.dtype.element_ty)
    m = tl.full((HB, 1, 1), -1e30, tl.float32)
    z = tl.zeros((HB, 1, 1), tl.float32)
    acc = ()
    for c in tl.static_range(C):
        acc = acc + (tl.zeros((HB, 1, L), tl.float32),)
    for n in tl.range(start, site, num_stages=STAGES):
        row = _load_row(sources + n * stride + t * D, H, K, HB, L, C)
        logit = _dot_rows(row, q, HB, L, C) * tl.load(inverse_rms + t * NP + n)
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
            more = more + (acc[c] + part[c].to(tl.float32) * p,)
        acc = more
    m = top
    out = ()
    lost = ()
    for c in tl.static_range(C):
        exact = acc[c] / z
        rounded = exact.to(mix.dtype.element_ty)
        near = rounded.to(tl.float32)
        units = (exact - near) / (_rest_unit(near, MANTISSA) * 2.0**8)
        out = out + (rounded,)
        lost = lost + (tl.minimum(tl.maximum(units, -127.0), 127.0).to(tl.int32),)
    _store_row(mix + t * D, out, H, K, HB, L, C)
    _store_row(rest + t * D, lost, H, K, HB, L, C)
    tl.store(lse + (t * H + heads) * NP + site, m + tl.log(z), mask=heads < H)


@triton.jit
def finish_kernel(
    cotangent,  # [T, D]: of this site's mix
    mix,  # [T, D]
    rest,  # int8 [T, D]
    queries,  # [N, D] in the storage dtype: effective
    sources,  # [N, T, D]
    inverse_rms,  # float32 [T, NP]
    lse,  # float32 [T, H, NP]
    logits,  # float32 [T, N, S, H]
    outside,  # [S, T, D]: `pull` of the block, or unused
    outside_shared,  # float32 [S, T, H]
    unused_cotangents,
    unused_deltas,
    unused_keys,
    tokens,
    site,
    start,
    stop,  # of the block
    cotangents,  # [N, T, D], in place
    deltas,  # float32 [T, H, NP], in place
    keys,  # [T, H, N, NP], in place: dl r of each source and site
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
    SB: tl.constexpr,
    MANTISSA: tl.constexpr,
    OUTSIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One token a program: site `site`'s cotangent is kept, and the gradient of source `site` finished."""
    t = tl.program_id(0).to(tl.int64)
    stride = tokens.to(tl.int64) * D
    heads = tl.arange(0, HB)[:, None, None]
    exists = heads < H
    j = tl.arange(0, SB)[None, None, :]  # the sites of the block; those before this one read nothing of this source
    reads = exists & (j >= site - start) & (j < stop - start)
    at = (t * H + heads) * NP + start + j
    v = _load_row(sources + site * stride + t * D, H, K, HB, L, C)
    d_out = _load_row(cotangent + t * D, H, K, HB, L, C, cotangent.dtype.element_ty)
    near = _load_row(mix + t * D, H, K, HB, L, C, mix.dtype.element_ty)
    lost = _load_row(rest + t * D, H, K, HB, L, C, tl.int8)
    r = tl.load(inverse_rms + t * NP + site)
    logit = tl.load(logits + ((t * N + start + j) * S + (site - start)) * H + heads, mask=reads, other=0.0)
    weight = tl.where(reads, tl.exp(logit - tl.load(lse + at, mask=reads, other=0.0)), 0.0)
    delta = tl.load(deltas + at, mask=reads & (j > site - start), other=0.0)
    d_logit = tl.zeros((HB, 1, SB), tl.float32)
    shared = tl.zeros((HB, 1, 1), tl.float32)
    acc = ()
    if OUTSIDE:
        acc = _load_row(outside + (site - start) * stride + t * D, H, K, HB, L, C)
        shared += tl.load(
            outside_shared + ((site - start) * tokens.to(tl.int64) + t) * H + heads, mask=exists, other=0.0
        )
    else:
        for c in tl.static_range(C):
            acc = acc + (tl.zeros((HB, 1, L), tl.float32),)
    for i in tl.range(site + 1, stop, num_stages=STAGES):
        row = _load_row(cotangents + i * stride + t * D, H, K, HB, L, C)
        q = _load_row(queries + i * D, H, K, HB, L, C)
        p = _column(weight, j == i - start)
        dl = p * (_dot_rows(row, v, HB, L, C) - _column(delta, j == i - start))
        d_logit = tl.where(j == i - start, dl, d_logit)
        more = ()
        for c in tl.static_range(C):
            more = more + (acc[c] + p * row[c] + (dl * r) * q[c],)
        acc = more
    _store_row(cotangents + site * stride + t * D, d_out, H, K, HB, L, C)
    d_out = _wide(d_out, C)
    exact = ()
    for c in tl.static_range(C):
        rounded = near[c].to(tl.float32)
        exact = exact + (rounded + lost[c].to(tl.float32) * (_rest_unit(rounded, MANTISSA) * 2.0**8),)
    own_delta = _dot_rows(d_out, exact, HB, L, C)
    tl.store(deltas + (t * H + heads) * NP + site, own_delta, mask=exists)
    p = _column(weight, j == site - start)
    dl = p * (_dot_rows(d_out, v, HB, L, C) - own_delta)
    d_logit = tl.where(reads & (j == site - start), dl, d_logit)
    tl.store(keys + ((t * H + heads) * N + site) * NP + start + j, (d_logit * r).to(keys.dtype.element_ty), mask=reads)
    shared += tl.sum(d_logit * logit, axis=2, keep_dims=True)
    q = _load_row(queries + site * D, H, K, HB, L, C)
    more = ()
    for c in tl.static_range(C):
        more = more + (acc[c] + p * d_out[c] + (dl * r) * q[c],)
    acc = more
    radial = tl.sum(shared, axis=0, keep_dims=True) * (r * r / D)
    out = ()
    for c in tl.static_range(C):
        out = out + (acc[c] - radial * v[c],)
    _store_row(d_source + t * D, out, H, K, HB, L, C)


@triton.jit
def _split(x, like):
    """A float32 array as two in the dtype of `like`, whose sum is nearly it."""
    high = x.to(like.dtype)
    return high, (x - high.to(tl.float32)).to(like.dtype)


@triton.jit
def _chunk(c: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, C1: tl.constexpr):
    """Features [1, width] of chunk c of a head: C1 chunks of K1, then one of K2."""
    if c < C1:
        return c * K1 + tl.arange(0, K1)[None, :]
    else:
        return C1 * K1 + tl.arange(0, K2)[None, :]


@triton.jit
def _load_chunks(rows, exists, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, C1: tl.constexpr, C: tl.constexpr):
    """A head's features of some rows (pointers [R, 1]) as C chunks; zero where there is none."""
    chunks = ()
    for c in tl.static_range(C):
        k = _chunk(c, K1, K2, C1)
        chunks = chunks + (tl.load(rows + k, mask=exists & (k < K), other=0.0),)
    return chunks


@triton.jit
def _store_chunks(
    rows, exists, chunks, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, C1: tl.constexpr, C: tl.constexpr
):
    for c in tl.static_range(C):
        k = _chunk(c, K1, K2, C1)
        tl.store(rows + k, chunks[c].to(rows.dtype.element_ty), mask=exists & (k < K))


@triton.jit
def _zero_chunks(R: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, C1: tl.constexpr, C: tl.constexpr):
    chunks = ()
    for c in tl.static_range(C):
        if c < C1:
            chunks = chunks + (tl.zeros((R, K1), tl.float32),)
        else:
            chunks = chunks + (tl.zeros((R, K2), tl.float32),)
    return chunks


@triton.jit
def _products(a, b, acc, C: tl.constexpr):
    """acc + a bᵀ, summed over the features of a head."""
    for c in tl.static_range(C):
        acc = tl.dot(a[c], tl.trans(b[c]), acc)
    return acc


@triton.jit
def _add_rows(acc, weights, rows, C: tl.constexpr):
    """acc + weights rows."""
    more = ()
    for c in tl.static_range(C):
        more = more + (tl.dot(weights, rows[c], acc[c]),)
    return more


@triton.jit
def mix_kernel(
    sources,  # [N, T, D]
    inverse_rms,  # float32 [T, NP]
    high,  # [N, D] storage dtype: effective queries, and
    low,  # what rounding took from them
    tokens,
    start,  # first site of the block: so many sources lie before it
    sites,  # of the block
    outside,  # [S, T, D]
    outside_lse,  # float32 [S, T, H]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    NP: tl.constexpr,
    SB: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    C1: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some tokens and a head a program: all sites of a block over all sources before it, normalised.

    The 16 rows of a product are SB sites of 16 / SB tokens.
    """
    TOKENS: tl.constexpr = 16 // SB
    h = tl.program_id(1)
    stride = tokens.to(tl.int64) * D
    s, j = tl.program_id(2) * SB + tl.arange(0, 16) % SB, tl.arange(0, 16)
    which = tl.arange(0, 16) // SB
    first = tl.program_id(0) * TOKENS
    t = (first + which).to(tl.int64)
    here = (s < sites) & (t < tokens)
    query = (start + s)[:, None] * D + h * K
    qh = _load_chunks(high + query, here[:, None], K, K1, K2, C1, C)
    ql = _load_chunks(low + query, here[:, None], K, K1, K2, C1, C)
    acc = _zero_chunks(16, K1, K2, C1, C)
    m = tl.full((16,), -1e30, tl.float32)
    z = tl.zeros((16,), tl.float32)
    for n0 in tl.range(0, start, 16, num_stages=STAGES):
        n = n0 + j
        exists = n < start
        row = sources + n.to(tl.int64)[:, None] * stride + h * K
        logit = tl.zeros((16, 16), tl.float32)
        v = ()
        for u in tl.static_range(TOKENS):
            own = (first + u).to(tl.int64)
            v = v + (_load_chunks(row + own * D, exists[:, None] & (own < tokens), K, K1, K2, C1, C),)
            dot = _products(ql, v[u], tl.zeros((16, 16), tl.float32), C)
            dot = _products(qh, v[u], dot, C)
            logit = tl.where((which == u)[:, None], dot, logit)
        read = here[:, None] & exists[None, :]
        r = tl.load(inverse_rms + t[:, None] * NP + n[None, :], mask=read, other=0.0)
        logit = tl.where(exists[None, :], logit * r, -1e30)
        top = tl.maximum(m, tl.max(logit, axis=1))
        keep = tl.exp(m - top)
        p = tl.exp(logit - top[:, None])
        z = z * keep + tl.sum(p, axis=1)
        m = top
        kept = ()
        for c in tl.static_range(C):
            kept = kept + (acc[c] * keep[:, None],)
        acc = kept
        for u in tl.static_range(TOKENS):
            ph, pl = _split(tl.where((which == u)[:, None], p, 0.0), v[0][0])
            acc = _add_rows(acc, ph, v[u], C)
            acc = _add_rows(acc, pl, v[u], C)
    out = ()
    for c in tl.static_range(C):
        out = out + (acc[c] / z[:, None],)
    rows = outside + s.to(tl.int64)[:, None] * stride + t[:, None] * D + h * K
    _store_chunks(rows, here[:, None], out, K, K1, K2, C1, C)
    tl.store(outside_lse + (s.to(tl.int64) * tokens + t) * H + h, m + tl.log(z), mask=here)


@triton.jit
def pull_kernel(
    sources,  # [N, T, D]
    inverse_rms,  # float32 [T, NP]
    high,  # [N, D] storage dtype
    low,
    lse,  # float32 [T, H, NP]
    cotangents,  # [N, T, D]
    deltas,  # float32 [T, H, NP]
    unused_keys,
    tokens,
    start,
    count,  # sources of the block
    keys,  # [T, H, N, NP], in place
    outside,  # [S, T, D]
    outside_shared,  # float32 [S, T, H]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    SB: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    C1: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some tokens and a head a program: the gradients of all sources of a block from all sites behind it.

    The 16 rows of a product are SB sources of 16 / SB tokens, which share the queries.
    """
    TOKENS: tl.constexpr = 16 // SB
    h = tl.program_id(1)
    stride = tokens.to(tl.int64) * D
    s, j = tl.program_id(2) * SB + tl.arange(0, 16) % SB, tl.arange(0, 16)
    which = tl.arange(0, 16) // SB
    first = tl.program_id(0) * TOKENS
    t = (first + which).to(tl.int64)
    here = (s < count) & (t < tokens)
    n = start + s
    source = sources + n.to(tl.int64)[:, None] * stride + t[:, None] * D + h * K
    if C <= 2:  # else they would not stay in registers
        v = _load_chunks(source, here[:, None], K, K1, K2, C1, C)
    acc = _zero_chunks(16, K1, K2, C1, C)
    r = tl.load(inverse_rms + t * NP + n, mask=here, other=0.0)[:, None]
    shared = tl.zeros((16,), tl.float32)
    for i0 in tl.range(start + count, N, 16, num_stages=STAGES):
        i = i0 + j
        exists = i < N
        if C > 2:
            v = _load_chunks(source, here[:, None], K, K1, K2, C1, C)
        qh = _load_chunks(high + i[:, None] * D + h * K, exists[:, None], K, K1, K2, C1, C)
        ql = _load_chunks(low + i[:, None] * D + h * K, exists[:, None], K, K1, K2, C1, C)
        logit = _products(v, ql, tl.zeros((16, 16), tl.float32), C)
        logit = _products(v, qh, logit, C) * r
        at = (t[:, None] * H + h) * NP + i[None, :]
        both = here[:, None] & exists[None, :]
        p = tl.where(both, tl.exp(logit - tl.load(lse + at, mask=both, other=0.0)), 0.0)
        dots = tl.zeros((16, 16), tl.float32)
        for u in tl.static_range(TOKENS):
            own = (first + u).to(tl.int64)
            row = cotangents + i.to(tl.int64)[:, None] * stride + own * D + h * K
            d = _load_chunks(row, exists[:, None] & (own < tokens), K, K1, K2, C1, C)
            dot = _products(v, d, tl.zeros((16, 16), tl.float32), C)
            dots = tl.where((which == u)[:, None], dot, dots)
            acc = _add_rows(acc, tl.where((which == u)[:, None], p, 0.0).to(qh[0].dtype), d, C)
        dl = p * (dots - tl.load(deltas + at, mask=both, other=0.0))
        shared += tl.sum(dl * logit, axis=1)
        key = (dl * r).to(qh[0].dtype)
        tl.store(keys + ((t * H + h) * N + n)[:, None] * NP + i[None, :], key, mask=both)
        acc = _add_rows(acc, key, qh, C)
    rows = outside + s.to(tl.int64)[:, None] * stride + t[:, None] * D + h * K
    _store_chunks(rows, here[:, None], acc, K, K1, K2, C1, C)
    tl.store(outside_shared + (s.to(tl.int64) * tokens + t) * H + h, shared, mask=here)


@triton.jit
def query_kernel(
    sources,  # [N, T, D]
    keys,  # [T, H, N, NP]
    tokens,
    chunk,  # tokens a program
    partial,  # float32 [programs, N, D]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    MS: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Part of a head, tokens and sites a program: the sum over its tokens and all sources of (dl r) s."""
    h = tl.program_id(0) // PARTS
    offset = (tl.program_id(0) % PARTS) * (K1 + K2)
    first = tl.program_id(1) * chunk
    count = tl.minimum(chunk, tokens - first)
    i = tl.program_id(2) * MS + tl.arange(0, MS)
    j = tl.arange(0, 16)
    stride = tokens.to(tl.int64) * D
    k1 = offset + tl.arange(0, K1)[None, :]
    k2 = offset + K1 + tl.arange(0, 16 if K2 == 0 else K2)[None, :]
    acc1 = tl.zeros((MS, K1), tl.float32)
    if K2 > 0:
        acc2 = tl.zeros((MS, K2), tl.float32)
    STEPS: tl.constexpr = (N + 15) // 16
    for u in tl.range(0, count * STEPS, num_stages=STAGES):
        t = (first + u // STEPS).to(tl.int64)
        n = (u % STEPS) * 16 + j
        exists = n < N
        read = exists[:, None] & (i[None, :] >= n[:, None]) & (i[None, :] < N)
        key = tl.trans(tl.load(keys + ((t * H + h) * N + n)[:, None] * NP + i[None, :], mask=read, other=0.0))
        row = sources + n.to(tl.int64)[:, None] * stride + t * D + h * K
        acc1 = tl.dot(key, tl.load(row + k1, mask=exists[:, None] & (k1 < K), other=0.0), acc1)
        if K2 > 0:
            acc2 = tl.dot(key, tl.load(row + k2, mask=exists[:, None] & (k2 < K), other=0.0), acc2)
    out = partial + (tl.program_id(1).to(tl.int64) * N + i)[:, None] * D + h * K
    tl.store(out + k1, acc1, mask=(i < N)[:, None] & (k1 < K))
    if K2 > 0:
        tl.store(out + k2, acc2, mask=(i < N)[:, None] & (k2 < K))
