"""The whole model in float64 numpy, written from the definitions, sharing no code with the package. Slow and plain."""

import itertools
import math

import numpy as np


def rms(x, eps):
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def norm(x, scale, eps):
    return x * rms(x, eps) * scale


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def route(sources, query, scale, heads, eps):
    """mix [B, T, D] and weights [N, B, T, H]."""
    size = query.shape[0] // heads
    out, weights = [], []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        logits = np.stack([(s * rms(s, eps) * scale)[..., part] @ query[part] for s in sources])
        a = softmax(logits, 0)
        weights.append(a)
        out.append(sum(a[n][..., None] * s[..., part] for n, s in enumerate(sources)))
    return np.concatenate(out, -1), np.stack(weights, -1)


def rotate(x, theta, positions):
    """x [B, T, heads, K]; the pair (j, j + K/2) turns by position · theta^(-2j/K)."""
    half = x.shape[-1] // 2
    y = np.empty_like(x)
    for j in range(half):
        angle = positions * theta ** (-2 * j / x.shape[-1])
        c, s = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
        y[..., j] = x[..., j] * c - x[..., j + half] * s
        y[..., j + half] = x[..., j + half] * c + x[..., j] * s
    return y


def attention(p, h, c, positions):
    """h [B, T, D], or a list of one state for each KV group."""
    groups, size = c.num_kv_heads, c.attention_head_dim
    per_group = c.num_heads // groups
    states = h if isinstance(h, list) else [h] * groups
    outputs = []
    for g in range(groups):
        x = norm(states[g], p["norm"], c.norm_eps)
        take = lambda name, i, x=x: (x @ p[name][:, i * size : (i + 1) * size])[:, :, None]
        k, v = take("w_k", g), take("w_v", g)[:, :, 0]
        if c.qk_norm:
            k = norm(k, p["k_norm"], c.norm_eps)
        k = rotate(k, c.rope_theta, positions)[:, :, 0]
        for i in range(g * per_group, (g + 1) * per_group):
            q = take("w_q", i)
            if c.qk_norm:
                q = norm(q, p["q_norm"], c.norm_eps)
            q = rotate(q, c.rope_theta, positions)[:, :, 0]
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(size)
            scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
            outputs.append(softmax(scores, -1) @ v)
    return np.concatenate(outputs, -1) @ p["w_o"]


def mlp(p, h, c):
    x = norm(h, p["norm"], c.norm_eps)
    gate = x @ p["w_gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["w_up"])) @ p["w_down"]


def forward(params, c, tokens):
    """float64 logits [B, T, V] and the weights of each routing site."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.float64)
    x = params["embedding"][tokens]
    all_weights = []
    r, eps, heads = params.get("routing"), c.norm_eps, c.routing_heads or c.num_kv_heads
    if c.variant == "attention_residuals":
        heads = 1

    def sublayer(i, h):
        p = params["layers"][i // 2]
        return mlp(p["mlp"], h, c) if i % 2 else attention(p["attention"], h, c, positions)

    def mix(site, sources, query):
        m, w = route(sources, query, r["norm_scale"][site], heads, eps)
        all_weights.append(w)
        return m

    count = 2 * c.num_layers
    if c.variant == "additive":
        for i in range(count):
            x = x + sublayer(i, x)
    elif c.variant == "hyper_connections":
        streams, p = [x] * c.hyper_streams, params["hyper"]
        for i in range(count):
            y = sublayer(i, sum(p["read"][i, j] * s for j, s in enumerate(streams)))
            streams = [
                p["write"][i, k] * y + sum(p["carry"][i, j, k] * s for j, s in enumerate(streams))
                for k in range(c.hyper_streams)
            ]
        x = sum(streams) / c.hyper_streams
    elif c.variant in ("attention_residuals", "mhar"):
        sources = [x]
        for i in range(count):
            sources.append(sublayer(i, mix(i, sources, r["query"][i])))
        x = mix(count, sources, r["query"][count])
    elif c.variant == "mhar_headwise":
        sources = [x]
        for i in range(count):
            if i % 2:
                h = mix(i, sources, r["query"][i // 2])
            else:
                pairs = [route(sources, q, r["norm_scale"][i], 1, eps) for q in r["attention_query"][i // 2]]
                h = [m for m, _ in pairs]
                all_weights.append(np.concatenate([w for _, w in pairs], -1))
            sources.append(sublayer(i, h))
        x = mix(count, sources, r["query"][c.num_layers])
    elif c.variant == "block_mhar":
        per_block = 2 * math.ceil(c.num_layers / c.num_blocks)
        outputs = []

        def sources_now():
            parts = [outputs[i : i + per_block] for i in range(0, len(outputs), per_block)]
            return [x0, *(sum(p) for p in parts)]

        x0 = x
        for i in range(count):
            outputs.append(sublayer(i, mix(i, sources_now(), r["query"][i])))
        x = mix(count, sources_now(), r["query"][count])
    else:  # delta, delta_block
        entering = []  # streams that entered each block
        outputs = [x]
        for i in range(count):
            if c.variant == "delta":
                sources = list(outputs)
            else:
                if i % (2 * math.ceil(c.num_layers / c.num_blocks)) == 0:
                    entering.append(x)
                sources = [entering[0], *(b - a for a, b in itertools.pairwise(entering))]
            if c.null_source:
                sources.insert(0, np.broadcast_to(r["null_source"][i], x.shape))
            gate = r["gate"][i] if c.gate else 1.0
            y = sublayer(i, x + gate * mix(i, sources, r["query"][i]))
            outputs.append(y)
            x = x + y
    x = norm(x, params["final_norm"], eps)
    head = params["embedding"].T if c.tie_embeddings else params["head"]
    return x @ head, all_weights
