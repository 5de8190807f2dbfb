"""Depth weights averaged over a text: the maps that the pictures show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.inspect.text import Windows
from mhar_jax.inspect.walk import SiteInput, Walk, column_labels


@dataclasses.dataclass(frozen=True)
class Routing:
    """Means over tokens, float64; NaN where a site has no such source or softmax. S sites, N sources, G softmaxes."""

    sites: list[str]  # [S]
    columns: list[str]  # [N]
    attention_sites: np.ndarray  # bool [S]
    mlp_sites: np.ndarray  # bool [S]; the final site is neither
    counts: np.ndarray  # int [S]: sources of each site
    weight: np.ndarray  # [S, N, G]: mean depth weight
    weight_sd: np.ndarray  # [S, N, G]: its standard deviation over tokens
    entropy: np.ndarray  # [S, G]: nats
    gate: np.ndarray | None  # [S]: the gate's value; None where the variant has none
    added: np.ndarray | None  # [S]: |gate · mix| / |stream|, root mean squares; None in the replacement forms
    loss: float  # nats a token
    tokens: int

    @property
    def head_mean(self) -> np.ndarray:
        """[S, N]: the weights averaged over softmaxes."""
        return finite_mean(self.weight, 2)

    @property
    def deviation(self) -> np.ndarray:
        """[S, N, G]: each softmax's weight minus the mean over softmaxes of its site."""
        return self.weight - self.head_mean[..., None]

    @property
    def normalized_entropy(self) -> np.ndarray:
        """[S, G]: entropy over the log of the number of sources, 1 is uniform; NaN at sites with one source."""
        most = np.where(self.counts > 1, np.log(np.maximum(self.counts, 2)), np.nan)
        return self.entropy / most[:, None]

    def mass(self, kind: str) -> np.ndarray:
        """[S, G]: weight on the "newest" source, the "embedding" or the "null" source; NaN where there is none."""
        if kind == "newest":
            return np.stack([self.weight[i, n - 1] for i, n in enumerate(self.counts)])
        column = {"embedding": "embed", "null": "null"}[kind]
        if column not in self.columns:
            return np.full(self.entropy.shape, np.nan)
        return self.weight[:, self.columns.index(column)]


def measure_routing(walk: Walk, windows: Windows) -> Routing:
    """Streams the windows through the model; one compilation, float32 sums a batch, float64 sums over batches."""
    shapes, n = walk.shapes, walk.max_sources
    heads = max(shape.softmaxes for shape in shapes)
    total = {
        "weight": np.full((len(shapes), n, heads), np.nan),
        "square": np.full((len(shapes), n, heads), np.nan),
        "entropy": np.full((len(shapes), heads), np.nan),
    }
    for i, shape in enumerate(shapes):
        total["weight"][i, : len(shape.sources), : shape.softmaxes] = 0
        total["square"][i, : len(shape.sources), : shape.softmaxes] = 0
        total["entropy"][i, : shape.softmaxes] = 0
    is_delta = walk.config.variant in ("delta", "delta_block")
    energy = np.zeros((len(shapes), 2))
    loss = 0.0
    for tokens, mask in zip(windows.tokens, windows.mask, strict=True):
        sums: dict[int, dict[str, jax.Array]] = {}
        mask_on_device = jnp.asarray(mask)

        def visit(site, given: SiteInput, weights, sums=sums, mask=mask_on_device):
            sums[site] = _site_sums(weights, mask)

        states: list = []
        inputs = jnp.asarray(tokens[:, :-1])
        x = walk.run(*walk.start(inputs), visit=visit, states=states)
        losses = walk.losses(x, jnp.asarray(tokens[:, 1:]), mask_on_device)
        loss += float(np.asarray(losses, np.float64).sum())
        for site, values in jax.device_get(sums).items():
            shape = shapes[site]
            real, own = len(shape.sources), shape.softmaxes
            total["weight"][site, :real, :own] += values["weight"][:real].astype(np.float64)
            total["square"][site, :real, :own] += values["square"][:real].astype(np.float64)
            total["entropy"][site, :own] += values["entropy"].astype(np.float64)
        if is_delta:
            energy += _added_energy(walk, states, mask_on_device)
    count = windows.count
    mean = total["weight"] / count
    variance = np.maximum(total["square"] / count - mean**2, 0)
    gates = [row.gate for row in walk.rows[: len(shapes)]]
    kinds = np.array([0 if s.name.endswith("attn") else 1 if s.name.endswith("mlp") else 2 for s in shapes])
    return Routing(
        sites=[s.name for s in shapes],
        columns=column_labels(walk.config),
        attention_sites=kinds == 0,
        mlp_sites=kinds == 1,
        counts=np.array([len(s.sources) for s in shapes]),
        weight=mean,
        weight_sd=np.sqrt(variance),
        entropy=total["entropy"] / count,
        gate=None if any(g is None for g in gates) else np.array([float(g) for g in gates]),
        added=np.sqrt(energy[:, 0] / np.maximum(energy[:, 1], 1e-300)) if is_delta else None,
        loss=loss / count,
        tokens=count,
    )


@jax.jit
def _site_sums(weights: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Sums over the tokens that count, of weights [N, B, T, G]."""
    counts = mask[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=0)
    total = lambda x: jnp.sum(jnp.where(counts, x, 0), axis=(-3, -2))
    return {"weight": total(weights), "square": total(weights * weights), "entropy": total(entropy)}


def _added_energy(walk: Walk, states: list, mask: jax.Array) -> np.ndarray:
    """[S, 2]: summed squares of what each site of a delta form adds to its stream, and of that stream."""
    found: list[jax.Array] = []
    off = {i: walk.no_edit(i)._replace(scale=np.zeros(s.softmaxes, np.float32)) for i, s in enumerate(walk.shapes)}
    for i, state in enumerate(states[:-1]):
        read = walk.read_site(state, i)
        stream = walk.read_site(state, i, off[i])
        found.append(_energies(read, stream, mask))
    return np.stack(jax.device_get(found)).astype(np.float64)


@jax.jit
def _energies(read: jax.Array, stream: jax.Array, mask: jax.Array) -> jax.Array:
    wide = [x.astype(jnp.float32) for x in (read - stream, stream)]
    return jnp.stack([jnp.sum(jnp.where(mask[..., None], x * x, 0)) for x in wide])


def finite_mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of what is not NaN; NaN where all is."""
    there = np.isfinite(x)
    count = there.sum(axis)
    return np.where(count > 0, np.where(there, x, 0).sum(axis) / np.maximum(count, 1), np.nan)
