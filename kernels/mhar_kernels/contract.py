"""What the API hands a kernel backend, and what it expects back: one contract for every chip."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

Sources = jax.Array | tuple[jax.Array, ...]  # [N, T, D], or N arrays [T, D]


@dataclass(frozen=True)
class RouteCall:
    """One call of depth_route, without its arrays. Hashable: it keys compiled kernels.

    T tokens are all leading axes flattened. The null source is not counted in `num_sources`.
    """

    num_sources: int  # N; 0 only with a null source
    tokens: int  # T >= 1
    dim: int  # D
    num_heads: int  # H, divides D
    dtype: str  # storage dtype of sources, residual and output
    stacked: bool  # sources are one array [N, T, D], not N arrays [T, D]
    has_null: bool
    has_residual: bool
    has_gate: bool
    return_weights: bool
    eps: float
    interpret: bool
    tile: tuple[tuple[str, int], ...] | None  # explicit tile choice
    platform: str  # "cpu" | "gpu" | "tpu": where the call will run
    differentiated: bool = False  # a backward pass may follow: forward keeps what it will need

    @property
    def head_dim(self) -> int:
        """K = D / H, the width of one routing head."""
        return self.dim // self.num_heads

    @property
    def rows(self) -> int:
        """Rows of the depth softmax: the sources and, before them, the null source."""
        return self.num_sources + self.has_null

    @property
    def additive(self) -> bool:
        """Whether the output is not the mix itself (delta form)."""
        return self.has_residual or self.has_gate


class RouteArrays(NamedTuple):
    """The arrays of one call. `query` is the effective query, query * norm_scale.

    `query_low` is what rounding that product to float32 lost; kept for float32 storage, where it is larger than the
    other errors of a large logit. A constant: it has no gradient.
    """

    sources: Sources
    query: jax.Array  # [D] float32
    query_low: jax.Array | None  # [D] float32
    null_source: jax.Array | None  # [D] float32
    residual: jax.Array | None  # [T, D] storage dtype
    gate: jax.Array | None  # [] float32


class RouteForward(NamedTuple):
    """What a backend's forward returns."""

    out: jax.Array  # [T, D] storage dtype
    mix: jax.Array | None  # [T, D] storage dtype, before gate and residual; None where `out` is the mix
    lse: Any  # the softmax's statistics for the backward pass: [T, H] float32 log-denominators, or what it needs
    weights: jax.Array | None  # [N(+1), T, H] float32, null source first


class RouteSaved(NamedTuple):
    """What the forward pass keeps for the backward pass, beside the inputs."""

    mix: jax.Array  # [T, D]
    lse: Any  # as in RouteForward
    weights: jax.Array | None  # [N(+1), T, H]


class RouteGrads(NamedTuple):
    """Cotangents of RouteArrays, in its structure but for `query_low`."""

    sources: Sources
    query: jax.Array
    null_source: jax.Array | None
    residual: jax.Array | None
    gate: jax.Array | None


class Backend(Protocol):
    """A kernel module: pallas_tpu or triton_gpu."""

    NAME: str

    def unsupported(self, call: RouteCall) -> str | None:
        """Why the call cannot run here and what would work; None if it can."""
        ...

    def forward(self, call: RouteCall, arrays: RouteArrays) -> RouteForward:
        """One pass over the sources."""
        ...

    def backward(
        self,
        call: RouteCall,
        arrays: RouteArrays,
        saved: RouteSaved,
        d_out: jax.Array,
        d_weights: jax.Array | None,
    ) -> RouteGrads:
        """One more pass over the sources."""
        ...
