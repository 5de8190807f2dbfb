"""How many rows of D numbers a token the depth-blocked schedule moves, and from that the block size.

A stack has N sites and as many sources. Blocks of S sites make the passes over what lies outside a block rare (N / S
of them) and the walks inside it long (S / 2 rows on average): the first kind falls as 1 / S, the second grows as S.
"""

from typing import NamedTuple

LARGEST_BLOCK = 16  # rows of a product on the matrix unit; larger blocks only lengthen the walks


class Rows(NamedTuple):
    """One number a stage, as `schedule.Stages` names them: rows a token, or the time of a row."""

    mix: float
    merge: float
    pull: float
    finish: float
    query: float

    def times(self, each: "Rows") -> float:
        """Rows of every stage times what each costs, added up."""
        return sum(a * b for a, b in zip(self, each, strict=True))


def rows(sites: int, block: int) -> Rows:
    """Rows read or written a token, forward and backward, where parts between kernels are as wide as sources.

    The kernels' parts are float32: beside 16-bit sources, each of those rows is two. What rounding took from a mix is a
    row at most.

    - mix, a block: the sources before it are read, S partial mixes written.
    - merge, a site: the new source is read and written to the history, the sources of the block before it read, the
      partial mix read, the mix and what rounding took from it written.
    - pull, a block: all later cotangents and the block's sources are read, S partial gradients written.
    - finish, a site: cotangent, source, mix and its rest, later cotangents of the block and the partial gradient are
      read; cotangent and gradient written.
    - query: every source is read.
    """
    mix = merge = pull = finish = 0.0
    for start in range(0, sites, block):
        size = min(block, sites - start)
        later = sites - start - size
        inside = size * (size - 1) / 2
        mix += start + size if start else 0
        merge += 4 * size + inside + (size if start else 0)
        pull += later + 2 * size if later else 0
        finish += 6 * size + inside + (size if later else 0)
    return Rows(mix, merge, pull, finish, sites)


def forward_rows(sites: int, block: int) -> float:
    """Of the forward pass alone."""
    of = rows(sites, block)
    return of.mix + of.merge


def site_by_site_rows(sites: int) -> float:
    """Forward, where every site reads all its sources anew."""
    return sites * (sites + 1) / 2 + sites


def best_block_size(sites: int, costs: Rows) -> int:
    """The S of least time; mix and pull are padded to products of 16 rows."""

    def time(block: int) -> float:
        padding = (1 << (block - 1).bit_length()) / block
        of = rows(sites, block)
        padded = Rows(costs.mix * padding, costs.merge, costs.pull * padding, costs.finish, costs.query)
        return of.times(padded)

    return min(range(1, min(LARGEST_BLOCK, sites) + 1), key=time)
