"""The given cases, and a float64 oracle in NumPy written from the definition, forward and backward by hand.

The backward pass is derived by hand (arXiv 2607.27230 gives the forward pass only), so
it shares no code and no autodiff with what it tests; `test_oracle.py` holds it against finite differences.
"""

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np

CASES = pathlib.Path(__file__).parent.parent / "fixtures" / "cases"
INPUTS = ("sources", "query", "norm_scale", "residual", "gate", "null_source")


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs as given to depth_route, and what must come back, in float64."""

    name: str
    inputs: dict[str, np.ndarray]
    cotangent: np.ndarray
    num_heads: int
    eps: float
    dtype: str
    out: np.ndarray
    weights: np.ndarray
    grads: dict[str, np.ndarray]


def route_case_names() -> list[str]:
    """Names of the given cases of kind `route`."""
    return sorted(p.stem for p in CASES.glob("*.npz") if not p.stem.startswith("stack"))


def load_case(name: str) -> Case:
    """One given case of kind `route`."""
    with np.load(CASES / f"{name}.npz") as z:
        meta = json.loads(str(z["meta"]))
        inputs = {k: z[k] for k in INPUTS if k in z}
        for k in ("sources", "residual"):
            if k in inputs:
                inputs[k] = inputs[k].astype(numpy_dtype(meta["dtype"]))
        return Case(
            name,
            inputs,
            z["cotangent"],
            meta["num_heads"],
            meta["eps"],
            meta["dtype"],
            z["out"],
            z["weights"],
            {k: z[f"d_{k}"] for k in inputs},
        )


def random_case(
    n,
    lead,
    dim,
    heads,
    *,
    dtype="float32",
    seed=0,
    residual=False,
    gate=None,
    null_source=False,
    eps=1e-6,
    query_scale=1.0,
) -> Case:
    """A case of any shape, its answer from `solve`."""
    rng = np.random.default_rng(seed)
    stored = numpy_dtype(dtype)
    inputs = {
        "sources": rng.standard_normal((n, *lead, dim)).astype(stored),
        "query": (query_scale * rng.standard_normal(dim) / np.sqrt(dim / heads)).astype(np.float32),
        "norm_scale": rng.uniform(0.6, 1.4, dim).astype(np.float32),
    }
    if residual:
        inputs["residual"] = rng.standard_normal((*lead, dim)).astype(stored)
    if gate is not None:
        inputs["gate"] = np.float32(gate)
    if null_source:
        inputs["null_source"] = (0.3 * rng.standard_normal(dim)).astype(np.float32)
    cotangent = rng.standard_normal((*lead, dim)).astype(stored)
    out, weights, grads = solve(inputs, cotangent, heads, eps)
    return Case("random", inputs, cotangent, heads, eps, dtype, out, weights, grads)


def solve(inputs, cotangent, num_heads, eps, d_weights=None):
    """out [..., D], weights [N(+1), ..., H] and gradients of sum(out * cotangent) + sum(weights * d_weights)."""
    x = {k: np.asarray(v).astype(np.float64) for k, v in inputs.items()}
    d_out = np.asarray(cotangent).astype(np.float64)
    s = x["sources"]
    if "null_source" in x:
        s = np.concatenate([np.broadcast_to(x["null_source"], (1, *s.shape[1:])), s])
    dim = s.shape[-1]
    heads = lambda a: a.reshape(*a.shape[:-1], num_heads, dim // num_heads)
    norm_scale = x.get("norm_scale", np.ones(dim))
    q = heads(x["query"] * norm_scale)
    r = 1 / np.sqrt(np.mean(s * s, -1) + eps)
    logits = np.sum(heads(s) * q, -1) * r[..., None]
    weights = np.exp(logits - logits.max(0))
    weights /= weights.sum(0)
    mix = np.sum(weights[..., None] * heads(s), 0).reshape(s.shape[1:])
    gate = x.get("gate", 1.0)
    out = gate * mix + x.get("residual", 0.0)

    d_mix = heads(gate * d_out)
    d_w = np.sum(d_mix * heads(s), -1) + (0 if d_weights is None else np.asarray(d_weights, np.float64))
    d_logit = weights * (d_w - np.sum(weights * d_w, 0))
    d_key = d_logit * r[..., None]
    d_s = (weights[..., None] * d_mix + d_key[..., None] * q).reshape(s.shape)
    d_s -= (r * r / dim * np.sum(d_logit * logits, -1))[..., None] * s
    d_q = np.sum((d_key[..., None] * heads(s)).reshape(-1, dim), 0)
    grads = {"sources": d_s, "query": d_q * norm_scale}
    if "norm_scale" in x:
        grads["norm_scale"] = d_q * x["query"]
    if "residual" in x:
        grads["residual"] = d_out
    if "gate" in x:
        grads["gate"] = np.sum(d_out * mix)
    if "null_source" in x:
        grads["null_source"] = d_s[0].reshape(-1, dim).sum(0)
        grads["sources"] = d_s[1:]
    return out, weights, grads


def numpy_dtype(name: str) -> np.dtype:
    """float32, float16 or bfloat16 for NumPy."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def error(got, want) -> float:
    """‖got − want‖ / ‖want‖; where the answer is zero, ‖got‖."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (scale if scale else 1.0))
