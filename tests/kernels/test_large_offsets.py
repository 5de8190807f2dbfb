"""Arrays of more than 2**31 numbers: offsets must not wrap. Needs a GPU with 24 GB free.

MHAR_TEST_PLATFORMS=cuda python -m pytest tests/kernels/test_large_offsets.py -n 0
"""

import jax
import jax.numpy as jnp
import pytest

from mhar_kernels import depth_route

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs a GPU: an interpreter would take hours over 2**31 numbers"
)
N, TOKENS, DIM, HEADS, TAIL = 9, 65_536, 4_096, 8, 64


@pytest.mark.parametrize("stacked", [True, False])
def test_the_last_tokens_of_a_large_call_equal_a_small_call_on_them(stacked: bool) -> None:
    assert N * TOKENS * DIM > 2**31
    make = lambda seed: jax.random.normal(jax.random.key(seed), (TOKENS, DIM), jnp.bfloat16)
    rows = [make(i) for i in range(N)]
    sources = jnp.stack(rows) if stacked else tuple(rows)
    del rows
    query = jax.random.normal(jax.random.key(100), (DIM,)) * 0.05
    d_out = make(101)

    @jax.jit
    def route(sources, query, d_out):
        out, vjp = jax.vjp(lambda s, q: depth_route(s, q, num_heads=HEADS, implementation="triton"), sources, query)
        return out, vjp(d_out)[0]

    out, grads = route(sources, query, d_out)
    tail = (lambda x: x[:, -TAIL:]) if stacked else (lambda x: tuple(s[-TAIL:] for s in x))
    small_out, small_grads = route(tail(sources), query, d_out[-TAIL:])
    # The same kernel on the same rows: only the order of tokens among programs differs, and rows do not meet.
    assert bool(jnp.all(out[-TAIL:] == small_out))
    assert all(
        bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(tail(grads)), jax.tree.leaves(small_grads), strict=True)
    )
