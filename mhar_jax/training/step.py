"""The training state and the jitted functions over it. Everything is a pure function of explicit arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mhar_jax.config.schema import Config
from mhar_jax.models import Decoder, build_model
from mhar_jax.sharding import BATCH, state_shardings
from mhar_jax.training.optimizer import make_optimizer, make_schedule

State = dict[str, Any]  # step, params, optimizer, rng and, with optimizer.ema, ema


class ModelFunctions(NamedTuple):
    """A model split into what is traced and what is not."""

    merge: Callable[[Any], Decoder]  # nested dict of parameters -> model
    init: Callable[[jax.Array], Any]  # key -> nested dict of parameters


def model_functions(config: Config) -> ModelFunctions:
    """Splits the model outside jit, once; `merge` is free inside."""
    graph, template = nnx.split(nnx.eval_shape(lambda: build_model(config.model, rngs=nnx.Rngs(0))))

    def merge(params: Any) -> Decoder:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def init(key: jax.Array) -> Any:
        model = build_model(config.model, rngs=nnx.Rngs(params=key))
        return _string_keys(nnx.to_pure_dict(nnx.state(model)))

    return ModelFunctions(merge, init)


def _string_keys(tree: Any) -> Any:
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def init_state(config: Config, functions: ModelFunctions) -> State:
    """The state before the first step, from `config.seed`; traceable."""
    params_key, run_key = jax.random.split(jax.random.key(config.seed))
    params = functions.init(params_key)
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "optimizer": make_optimizer(config).init(params),
        "rng": jax.random.key_data(run_key),
    }
    if config.optimizer.ema:
        state["ema"] = jax.tree.map(jnp.copy, params)
    return state


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled program of a run: how state and batches are laid out, and the functions over them."""

    config: Config
    mesh: Mesh
    functions: ModelFunctions
    shapes: State  # ShapeDtypeStructs with shardings
    batch_sharding: NamedSharding
    init: Callable[[], State]
    step: Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]  # tokens [batch_size, seq_len + 1]
    evaluate: Callable[[Any, jax.Array], dict[str, jax.Array]]  # parameters, tokens -> sums


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Everything that is compiled for a run."""
    functions = model_functions(config)
    optimizer, schedule = make_optimizer(config), make_schedule(config)
    shapes = jax.eval_shape(lambda: init_state(config, functions))
    shardings = state_shardings(mesh, shapes)
    shapes = jax.tree.map(lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings)
    batch_sharding = NamedSharding(mesh, BATCH)
    replicated = NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss_fn(params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = functions.merge(params)
        total, sums = model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=config.optimizer.z_loss)
        return total / sums["tokens"], {"loss": sums["nll"] / sums["tokens"], "z": sums["z"] / sums["tokens"]}

    def gradients(params: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        micro = config.optimizer.accumulate
        if micro == 1:
            grads, sums = jax.grad(loss_fn, has_aux=True)(params, tokens)
            return grads, sums
        # Micro-batch a takes rows a, a + micro, ...: each device keeps its own rows.
        parts = jnp.swapaxes(tokens.reshape(-1, micro, tokens.shape[1]), 0, 1)

        def add(total, part):
            part = jax.lax.with_sharding_constraint(part, batch_sharding)
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn, has_aux=True)(params, part)), None

        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(jax.grad(loss_fn, has_aux=True), params, parts[0])
        )
        total, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / micro, total)

    def step(state: State, tokens: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        grads, metrics = gradients(state["params"], tokens)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = dict(state, step=state["step"] + 1, params=params, optimizer=optimizer_state)
        if "ema" in state:
            new["ema"] = optax.incremental_update(params, state["ema"], 1 - config.optimizer.ema)
        metrics = dict(metrics, grad_norm=optax.global_norm(grads), lr=schedule(state["step"]))
        return new, metrics

    def evaluate(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        return functions.merge(params).loss(tokens[:, :-1], tokens[:, 1:])[1]

    return Trainer(
        config=config,
        mesh=mesh,
        functions=functions,
        shapes=shapes,
        batch_sharding=batch_sharding,
        init=_in_mesh(mesh, jax.jit(lambda: init_state(config, functions), out_shardings=shardings)),
        step=_in_mesh(
            mesh,
            jax.jit(
                step,
                in_shardings=(shardings, batch_sharding),
                out_shardings=(shardings, replicated),
                donate_argnums=0,
            ),
        ),
        evaluate=_in_mesh(
            mesh,
            jax.jit(evaluate, in_shardings=(shardings["params"], batch_sharding), out_shardings=replicated),
        ),
    )


def _in_mesh(mesh: Mesh, function: Callable) -> Callable:
    """Calls with the mesh in scope, which `sharding.constrain` and the kernels look for."""

    def call(*args):
        with jax.set_mesh(mesh):
            return function(*args)

    call.lower = lambda *args: _lower(mesh, function, args)  # type: ignore[attr-defined]
    return call


def _lower(mesh: Mesh, function: Any, args: tuple) -> Any:
    with jax.set_mesh(mesh):
        return function.lower(*args)
