"""What is timed: shapes of one routing site, and of the routing of a whole model."""

from dataclasses import dataclass
from typing import Literal

from mhar_jax.bench.common import LARGEST
from mhar_jax.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class SiteShape:
    """One call of depth_route.

    delta: the additive form, residual + gate * mix.
    """

    sources: int  # N
    dim: int  # D
    heads: int  # H
    tokens: int  # T
    delta: bool = False
    dtype: str = "bfloat16"

    @property
    def row_bytes(self) -> int:
        """D numbers of every token, in storage."""
        return self.tokens * self.dim * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class ModelShape:
    """All routing sites of a model, sublayers left out.

    Replacement form: `reads` is 1, 2, ..., N. Delta form: sources are block deltas and a null source beside them.
    """

    reads: tuple[int, ...]  # stored sources that each site reads
    dim: int
    heads: int
    tokens: int
    delta: bool = False
    dtype: str = "bfloat16"

    @property
    def sites(self) -> int:
        """Routing sites."""
        return len(self.reads)

    @property
    def row_bytes(self) -> int:
        """D numbers of every token, in storage."""
        return self.tokens * self.dim * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class Preset:
    """A model of the paper: some of its sites alone, and all of them."""

    sources: tuple[int, ...]  # of the sites timed alone
    site_tokens: int  # of a site timed alone
    model: ModelShape  # tokens: the paper's micro-batch

    def sites(self, dtype: str) -> tuple[SiteShape, ...]:
        """The sites timed alone."""
        m = self.model
        return tuple(SiteShape(n, m.dim, m.heads, self.site_tokens, m.delta, dtype) for n in self.sources)


def _replacement(sites: int, dim: int, heads: int, tokens: int) -> ModelShape:
    return ModelShape(tuple(range(1, sites + 1)), dim, heads, tokens)


# 2L + 1 sites for L = 12, 24, 36 layers; micro-batches of 8 x 2048, 4 x 1024 and 2 x 1024 tokens (the paper's). At 8B,
# 8 blocks of 4 layers: 8 sites read 1 block delta, 8 read 2, ... 8 read 8, and each its null source (a parameter). The
# site timed alone reads 9 stored sources, so that the null source costs what a stored one would.
PRESETS = {
    "tiny": Preset((2, 4), 16, _replacement(3, 128, 4, 16)),
    "100m": Preset((9, 25), 8192, _replacement(25, 512, 4, 16_384)),
    "350m": Preset((9, 49), 8192, _replacement(49, 1024, 8, 4096)),
    "1b": Preset((9, 25, 49, 73), 8192, _replacement(73, 1280, 8, 2048)),
    "8b-delta": Preset((9,), 8192, ModelShape(tuple(b for b in range(1, 9) for _ in range(8)), 4096, 8, 8192, True)),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
      UserError: naming those there are.
    """
    if name not in PRESETS:
        raise UserError(f"a preset must be of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def parse_site(text: str, tokens: int, dtype: str, delta: bool) -> SiteShape:
    """A site from sources x D x heads, as 24x4096x1.

    Raises:
      UserError: it does not look like that, or heads do not divide D.
    """
    try:
        sources, dim, heads = (int(part) for part in text.split("x"))
    except ValueError:
        raise UserError(f"--shapes must look like 24x4096x1 (sources x D x heads), got {text!r}") from None
    if min(sources, dim, heads) < 1 or max(sources, dim) > LARGEST or dim % heads:
        raise UserError(f"--shapes must be positive, of 31 bits, with heads that divide D, got {text!r}")
    return SiteShape(sources, dim, heads, tokens, delta, dtype)
