"""train.py --dry-run: what a run would take, without a step, without its data and without a run directory."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mhar_jax import topology
from mhar_jax.config.schema import Config
from mhar_jax.data import load_tokenizer
from mhar_jax.models import count_parameters, train_flops_per_token
from mhar_jax.models.sites import num_sublayers
from mhar_jax.sharding import check_batch, make_mesh
from mhar_jax.training.loop import with_vocabulary
from mhar_jax.training.step import make_trainer


def dry_run(config: Config, topology_name: str | None = None) -> int:
    """Prints parameters, bytes on each device, the sharding table, tokens a step and an estimate of memory.

    Args:
      topology_name: a TPU slice that is not there, whose compiler then says what the step really takes.

    Returns:
      The exit code: 1 where the step does not fit a chip of that slice, or moves the depth history.

    Raises:
      UserError: what a run would be refused for: mesh, batch, tokenizer.
    """
    if config.model.vocab_size is None:
        config = with_vocabulary(config, load_tokenizer(config.data.tokenizer, config.data.eos_token))
    devices = None if topology_name is None else topology.topology_devices(topology_name)
    mesh = make_mesh(config.mesh, devices)
    check_batch(config, mesh)
    trainer = make_trainer(config, mesh)
    device = mesh.devices.flat[0]
    print(f"{mesh.size} x {device.device_kind}, mesh {', '.join(f'{a}={n}' for a, n in mesh.shape.items())}")
    print(f"parameters: {count_parameters(config.model):,} ({config.model.variant})")
    tokens = config.batch_size * config.seq_len
    flops = train_flops_per_token(config.model, config.seq_len) * tokens
    print(f"tokens a step: {tokens:,}, in {config.optimizer.accumulate} micro-batches; {flops / 1e12:,.3f} TFLOP")
    for line in sharding_table(trainer.shapes):
        print(line)
    print("memory on each device, estimated, MB:")
    estimate = estimate_memory(config, mesh, trainer.shapes)
    for name, size in (*estimate.items(), ("total", sum(estimate.values()))):
        print(f"  {name:14} {size / 1e6:14,.3f}")
    return 0 if topology_name is None else topology.report(config, topology_name)


def sharding_table(shapes: Any) -> Iterator[str]:
    """A line for each kind of array of the state: how many, their shape, how they are split, bytes on one device."""
    groups: dict[tuple[str, tuple[int, ...], str, str], tuple[int, int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = re.sub(r"(?<=layers/)\d+", "*", jax.tree_util.keystr(path, simple=True, separator="/"))
        spec = "replicated" if leaf.sharding.is_fully_replicated else _spec_text(leaf.sharding.spec)
        key = (name, leaf.shape, leaf.dtype.name, spec)
        count, size = groups.get(key, (0, 0))
        groups[key] = (count + 1, size + bytes_on_a_device(leaf))
    yield f"{'array':54} {'count':>5} {'shape':>16} {'dtype':9} {'split':24} {'MB a device':>12}"
    for (name, shape, dtype, spec), (count, size) in groups.items():
        yield f"{name:54} {count:5} {list(shape)!s:>16} {dtype:9} {spec:24} {size / 1e6:12,.3f}"


def bytes_on_a_device(leaf: Any) -> int:
    """Of one sharded array, for its shape."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def estimate_memory(config: Config, mesh: Any, shapes: Any) -> dict[str, int]:
    """Bytes on one device, by formula; the compiler's own count (`--topology`) is the one to trust.

    State; gradients (float32, laid out as the parameters); the depth history and its cotangents (both whole, in the
    compute dtype); what the sublayers keep for the backward pass, nothing of which with remat; the logits of one chunk.
    """
    model, width = config.model, jnp.dtype(config.model.compute_dtype).itemsize
    local = topology.shapes_on_a_device(config, mesh)
    tokens, split = local.batch * local.length, mesh.shape["tensor"]
    sources = num_sublayers(model) + 1 if model.variant != "additive" else 1
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.attention_head_dim
    kept = tokens * (2 * model.d_model + (heads + 3 * model.ffn_dim) // split) * width * model.num_layers
    vocabulary = model.vocab_size or 0
    return {
        "state": sum(map(bytes_on_a_device, jax.tree.leaves(shapes))),
        "gradients": sum(bytes_on_a_device(s) // s.dtype.itemsize * 4 for s in jax.tree.leaves(shapes["params"])),
        "depth history": 2 * sources * local.source * width,
        "sublayers": kept if model.remat == "none" else kept // model.num_layers,
        "logits": min(tokens, model.loss_chunk) * vocabulary // split * 8,
    }


def _spec_text(spec: Any) -> str:
    return ", ".join("-" if part is None else "+".join(part) if isinstance(part, tuple) else part for part in spec)
