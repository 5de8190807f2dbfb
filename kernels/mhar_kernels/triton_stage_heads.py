"""The Triton kernels of the depth-blocked schedule that work across blocks; `stages_triton` launches them.

One program takes one head of a few tokens and makes depth the matrix: 16 sites by 16 sources a step, so that scores,
weighted sums and their gradients are products on the matrix unit and no lane adds up over a head. A block of 8 fills
the 16 rows of a product with two tokens, which share the queries. A head's K features are C1 * K1 + K2, as in
160 = 128 + 32.

16-bit numbers are exact on the matrix unit. float32 factors are split into two of them where a single rounding would
show in the result: queries that make logits, weights, and `dl r`.

Rows are 16-bit numbers. Buffers indexed by a token come token first, so that what one program wants of all sites lies
together. In-place buffers are outputs that alias an input, named `unused_*` here.
"""

# Triton compiles a subset of Python: no starred tuples, and a tuple grows by assignment.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,var-annotated,misc"

import triton
import triton.language as tl


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
    outside,  # float32 [S, T, D]
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
    h = tl.program_id(0) % H  # all heads of a token together: a row of memory is read once
    stride = tl.cast(tokens, tl.int64) * D
    s, j = tl.program_id(1) * SB + tl.arange(0, 16) % SB, tl.arange(0, 16)
    which = tl.arange(0, 16) // SB
    first = tl.program_id(0) // H * TOKENS
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
    at = (s.to(tl.int64) * tokens + t) * H + h
    out = ()
    for c in tl.static_range(C):
        out = out + (acc[c] / z[:, None],)
    place = s.to(tl.int64)[:, None] * stride + t[:, None] * D + h * K
    _store_chunks(outside + place, here[:, None], out, K, K1, K2, C1, C)
    tl.store(outside_lse + at, m + tl.log(z), mask=here)


@triton.jit
def pull_kernel(
    sources,  # [N, T, D]
    inverse_rms,  # float32 [T, NP]
    high,  # [N, D] storage dtype
    low,
    lse,  # float32 [T, H, NP]
    cotangents,  # [.., T, D]: from site `skipped` on
    deltas,  # float32 [T, H, NP]
    unused_keys,
    tokens,
    start,
    count,  # sources of the block
    sites,  # N, of the stack
    skipped,
    rows,  # of `keys`
    keys,  # float32 [T, H, rows, NP], in place
    outside,  # float32 [S, T, D]
    outside_shared,  # float32 [S, T, H]
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
    """Some tokens and a head a program: the gradients of all sources of a block from all sites behind it.

    The 16 rows of a product are SB sources of 16 / SB tokens, which share the queries.
    """
    TOKENS: tl.constexpr = 16 // SB
    h = tl.program_id(1)
    stride = tl.cast(tokens, tl.int64) * D
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
    for i0 in tl.range(start + count, sites, 16, num_stages=STAGES):
        i = i0 + j
        exists = i < sites
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
            row = cotangents + (i - skipped).to(tl.int64)[:, None] * stride + own * D + h * K
            d = _load_chunks(row, exists[:, None] & (own < tokens), K, K1, K2, C1, C)
            dot = _products(v, d, tl.zeros((16, 16), tl.float32), C)
            dots = tl.where((which == u)[:, None], dot, dots)
            ph, pl = _split(tl.where((which == u)[:, None], p, 0.0), qh[0])
            acc = _add_rows(acc, ph, d, C)
            acc = _add_rows(acc, pl, d, C)
        dl = p * (dots - tl.load(deltas + at, mask=both, other=0.0))
        shared += tl.sum(dl * logit, axis=1)
        key = dl * r
        tl.store(keys + ((t * H + h) * rows + n)[:, None] * NP + i[None, :], key, mask=both)
        kh, kl = _split(key, qh[0])
        acc = _add_rows(acc, kh, qh, C)
        acc = _add_rows(acc, kl, qh, C)
        acc = _add_rows(acc, kh, ql, C)
    place = s.to(tl.int64)[:, None] * stride + t[:, None] * D + h * K
    _store_chunks(outside + place, here[:, None], acc, K, K1, K2, C1, C)
    tl.store(outside_shared + (s.to(tl.int64) * tokens + t) * H + h, shared, mask=here)


@triton.jit
def query_kernel(
    sources,  # [N, T, D]
    keys,  # float32 [T, H, N, NP]
    tokens,
    number,  # N
    begin,  # first of the sites, and
    end,  # the one behind the last
    chunk,  # tokens a program
    partial,  # float32 [programs, end - begin, D]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    NP: tl.constexpr,
    MS: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    PARTS: tl.constexpr,
    TB: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Part of a head, tokens and sites a program: the sum over its tokens and all sources of (dl r) s.

    A step is TB tokens of one source, so that none of a product is lost on sources that there are not.
    dl adds up to 0 over sources, so that what they have in common cancels: were dl r rounded to 16 bits, it would not.
    """
    h = tl.program_id(0) // PARTS
    offset = (tl.program_id(0) % PARTS) * (K1 + K2)
    first = tl.program_id(2) * chunk
    count = tl.minimum(chunk, tokens - first)
    i = begin + tl.program_id(1) * MS + tl.arange(0, MS)
    stride = tl.cast(tokens, tl.int64) * D
    k1 = offset + tl.arange(0, K1)[None, :]
    k2 = offset + K1 + tl.arange(0, 16 if K2 == 0 else K2)[None, :]
    acc1 = tl.zeros((MS, K1), tl.float32)
    if K2 > 0:
        acc2 = tl.zeros((MS, K2), tl.float32)
    steps = (count + TB - 1) // TB
    behind = tl.minimum(number, begin + (tl.program_id(1) + 1) * MS)  # a site has no later sources
    for u in tl.range(0, behind * steps, num_stages=STAGES):
        n = u // steps
        j = u % steps * TB + tl.arange(0, TB)
        exists = (j < count)[:, None]
        read = exists & ((i >= n) & (i < end))[None, :]
        t = (first + j).to(tl.int64)[:, None]
        row = sources + n.to(tl.int64) * stride + t * D + h * K
        v1 = tl.load(row + k1, mask=exists & (k1 < K), other=0.0)
        key = tl.load(keys + ((t * H + h) * number + n) * NP + i[None, :], mask=read, other=0.0)
        high, low = _split(tl.trans(key), v1)
        acc1 = tl.dot(low, v1, tl.dot(high, v1, acc1))
        if K2 > 0:
            v2 = tl.load(row + k2, mask=exists & (k2 < K), other=0.0)
            acc2 = tl.dot(low, v2, tl.dot(high, v2, acc2))
    out = partial + (tl.program_id(2).to(tl.int64) * (end - begin) + i - begin)[:, None] * D + h * K
    tl.store(out + k1, acc1, mask=(i < end)[:, None] & (k1 < K))
    if K2 > 0:
        tl.store(out + k2, acc2, mask=(i < end)[:, None] & (k2 < K))
