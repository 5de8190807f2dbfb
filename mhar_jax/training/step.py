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
from mhar_jax.models import Decoder, RoutingSummary, build_model, loss_and_summary
from mhar_jax.sharding import BATCH, constrain, state_shardings
from mhar_jax.training.optimizer import as_float32, make_optimizer, make_schedule

State = dict[str, Any]  # step, params, optimizer, rng and, with optimizer.ema, ema (float32)


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
    params = init_params(config, functions)
    return {"params": params, **_init_rest(config, params)}


def init_params(config: Config, functions: ModelFunctions) -> Any:
    """The parameters of `init_state`. Outside `jax.jit` they are laid out over the mesh in scope, one by one."""
    params_key, _ = jax.random.split(jax.random.key(config.seed))
    return functions.init(params_key)


def _init_rest(config: Config, params: Any) -> State:
    """What the state holds beside fresh parameters."""
    _, run_key = jax.random.split(jax.random.key(config.seed))
    state = {
        "step": jnp.zeros((), jnp.int32),
        "optimizer": make_optimizer(config).init(params),
        "rng": jax.random.key_data(run_key),
    }
    if config.optimizer.ema:
        state["ema"] = jax.tree.map(jnp.copy, as_float32(params))
    return state


def _if_finite(finite: jax.Array, new: State, old: State) -> State:
    """The new state where the step was finite; otherwise the old one, in which only the counters have moved on.

    So the learning rate stays that of the step's number, and the data goes on.
    """

    def choose(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(finite, after, before) if jnp.issubdtype(after.dtype, jnp.floating) else after

    return jax.tree.map(choose, new, old)


class MeshFunction:
    """A function, called with the mesh in scope, which `mhar_jax.sharding` and the kernels look for.

    `trace` and `lower` are for a jitted one.
    """

    def __init__(self, mesh: Mesh, function: Any):
        self._mesh, self._function = mesh, function

    def __call__(self, *args: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._function(*args)

    def trace(self, *args: Any) -> Any:
        """The traced program, for arrays or their shapes; a later call with such arrays does not trace again."""
        with jax.set_mesh(self._mesh):
            return self._function.trace(*args)

    def lower(self, *args: Any) -> Any:
        """The lowered program, for arrays or their shapes."""
        with jax.set_mesh(self._mesh):
            return self._function.lower(*args)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled programs of a run: how state and batches are laid out, and the functions over them."""

    config: Config
    mesh: Mesh
    functions: ModelFunctions
    shapes: State  # ShapeDtypeStructs with shardings
    batch: jax.ShapeDtypeStruct  # tokens of a step: int32 [batch_size, seq_len + 1]
    init: Callable[[], State]  # sharded as it is made, by programs whose number does not grow with depth
    start: Callable[[Any], State]  # the state before the first step, from given parameters
    step: MeshFunction  # state (donated), tokens -> state, {loss, z, grad_norm, lr}
    evaluate: MeshFunction  # parameters, tokens -> {nll, z, tokens}, sums
    summarise: MeshFunction  # of a routed model: as evaluate, and the RoutingSummary of the same forward pass


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Everything that is compiled for a run."""
    functions = model_functions(config)
    optimizer, schedule = make_optimizer(config), make_schedule(config)
    shapes = jax.eval_shape(lambda: init_state(config, functions))
    shardings = state_shardings(mesh, shapes)
    shapes = jax.tree.map(lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings)
    by_rows, replicated = NamedSharding(mesh, BATCH), NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss_fn(params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = functions.merge(params)
        total, sums = model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=config.optimizer.z_loss)
        return total / sums["tokens"], {"loss": sums["nll"] / sums["tokens"], "z": sums["z"] / sums["tokens"]}

    def gradients(params: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Of the mean loss over the whole batch, float32: every micro-batch has as many tokens."""
        gradient = jax.grad(loss_fn, has_aux=True)
        micro = config.optimizer.accumulate
        if micro == 1:
            return as_float32(gradient(params, tokens))

        def summed(params: Any, tokens: jax.Array) -> Any:
            # Micro-batch a takes rows a, a + micro, ...: each device keeps its own rows.
            parts = jnp.swapaxes(tokens.reshape(-1, micro, tokens.shape[1]), 0, 1)

            def add(total, part):
                return jax.tree.map(jnp.add, total, as_float32(gradient(params, constrain(part, "batch", None)))), None

            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), jax.eval_shape(gradient, params, parts[0]))
            return jax.lax.scan(add, zeros, parts)[0]

        ways = mesh.shape["data"]
        if ways == mesh.size > 1:
            # Every device has all parameters: it adds up its own gradients, which are exchanged once a step. The
            # partitioner would exchange those of every micro-batch.
            own = lambda params, tokens: jax.lax.psum(summed(params, tokens), "data")
            replicated = jax.sharding.PartitionSpec()
            total = jax.shard_map(own, in_specs=(replicated, BATCH), out_specs=replicated, check_vma=False)(
                params, tokens
            )
            return jax.tree.map(lambda x: x / (micro * ways), total)
        return jax.tree.map(lambda x: x / micro, summed(params, tokens))

    def step(state: State, tokens: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        grads, metrics = gradients(state["params"], tokens)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = dict(state, step=state["step"] + 1, params=params, optimizer=optimizer_state)
        if "ema" in state:
            new["ema"] = optax.incremental_update(as_float32(params), state["ema"], 1 - config.optimizer.ema)
        metrics = dict(metrics, grad_norm=optax.tree.norm(grads), lr=schedule(state["step"]))
        if config.optimizer.not_finite == "skip":
            new = _if_finite(jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"]), new, state)
        return new, metrics

    def model_of(params: Any) -> Decoder:
        return functions.merge(jax.tree.map(lambda x, s: x.astype(s.dtype), params, shapes["params"]))

    def evaluate(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        return model_of(params).loss(tokens[:, :-1], tokens[:, 1:])[1]

    def summarise(params: Any, tokens: jax.Array) -> tuple[dict[str, jax.Array], RoutingSummary]:
        return loss_and_summary(model_of(params), tokens[:, :-1], tokens[:, 1:])

    shardings_of_rest = {name: value for name, value in shardings.items() if name != "params"}
    init_rest = jax.jit(lambda params: _init_rest(config, params), out_shardings=shardings_of_rest)

    def start(params: Any) -> State:
        return {"params": params, **init_rest(params)}

    def init() -> State:
        params = init_params(config, functions)
        return start(jax.device_put(params, shardings["params"]))  # they are there: moves nothing

    reading: dict[str, Any] = {"in_shardings": (shardings["params"], by_rows), "out_shardings": replicated}
    return Trainer(
        config=config,
        mesh=mesh,
        functions=functions,
        shapes=shapes,
        batch=jax.ShapeDtypeStruct((config.batch_size, config.seq_len + 1), jnp.int32, sharding=by_rows),
        init=MeshFunction(mesh, init),
        start=MeshFunction(mesh, start),
        step=MeshFunction(
            mesh,
            jax.jit(step, in_shardings=(shardings, by_rows), out_shardings=(shardings, replicated), donate_argnums=0),
        ),
        evaluate=MeshFunction(mesh, jax.jit(evaluate, **reading)),
        summarise=MeshFunction(mesh, jax.jit(summarise, **reading)),
    )


def evaluated_params(state: State, config: Config) -> Any:
    """The parameters that evaluations, the routing picture and the sample see: the averaged ones if there are any."""
    return state["ema"] if config.eval.ema and "ema" in state else state["params"]
