"""The bytes that must move, and the arithmetic, for a pass over a site or over all sites of a model.

Of one site, in rows of D numbers a token: forward, each source in and the mix out (delta form: the residual in too);
backward, each source and dO in, each source's gradient out. Parameters and what has one number a head are left out.
Of a whole model, site by site: the sum over its sites; gradients that are added up between sites are not counted. On
the blocked schedule: the rows of `mhar_kernels.traffic`, which the schedule itself reads and writes.
"""

from typing import Literal

from mhar_jax.bench.shapes import ModelShape, SiteShape
from mhar_kernels import traffic

Pass = Literal["forward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "forward_backward")


def site_rows(sources: int, which: Pass, *, delta: bool = False) -> int:
    """Rows a token of one site."""
    forward = sources + 1 + delta
    return forward if which == "forward" else forward + 2 * sources + 1


def site_bytes(shape: SiteShape, which: Pass) -> int:
    """Bytes that one call must move."""
    return site_rows(shape.sources, which, delta=shape.delta) * shape.row_bytes


def model_rows(shape: ModelShape, which: Pass, block: int | None) -> float:
    """Rows a token of all sites; block: sites a block, or None for site by site."""
    if block is None:
        return sum(site_rows(n, which, delta=shape.delta) for n in shape.reads)
    if which == "forward":
        return traffic.forward_rows(shape.sites, block)
    return sum(traffic.rows(shape.sites, block))


def model_bytes(shape: ModelShape, which: Pass, block: int | None) -> float:
    """Bytes that all sites must move."""
    return model_rows(shape, which, block) * shape.row_bytes


def routing_flops(reads: tuple[int, ...], dim: int, tokens: int, which: Pass) -> float:
    """Additions and multiplications over sites that read so many sources.

    A source: forward its square, its dot product with the query, its weighted sum, 2 D each; backward <dO, s>, three
    terms of its gradient and one of the query's, 2 D each.
    """
    each = 6 if which == "forward" else 16
    return float(each * dim * tokens * sum(reads))
