"""One optimizer step: against a plain reference, and as a compiled program."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_jax.training import loop
from mhar_jax.training.step import evaluated_params, init_state, make_trainer


def relative(a, b) -> float:
    """||a - b|| / ||b|| over whole trees, in float64."""
    pairs = [
        (np.asarray(x, np.float64), np.asarray(y, np.float64))
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    ]
    return float(np.sqrt(sum(((x - y) ** 2).sum() for x, y in pairs) / sum((y**2).sum() for _, y in pairs)))


def away_from_start(trainer, seed: int = 1):
    """A state whose norms and queries have left their special starting values."""
    draws = np.random.default_rng(seed)
    state = trainer.init()
    moved = lambda x: jax.device_put(np.asarray(x) + 0.2 * draws.standard_normal(x.shape).astype(x.dtype), x.sharding)
    return {**state, "params": jax.tree.map(moved, state["params"])}


@pytest.fixture(scope="module")
def stepped(tools):
    """The tiny run's trainer (2 micro-batches, EMA, z-loss), a state, a batch, and what one step makes of them."""
    trainer = tools.trainer(tools.config())
    state = away_from_start(trainer)
    before = jax.tree.map(np.asarray, state)
    tokens = np.asarray(tools.tokens(trainer))
    after, metrics = trainer.step(state, jax.device_put(tokens, trainer.batch.sharding))
    return trainer, before, tokens, jax.tree.map(np.asarray, after), jax.device_get(metrics)


@pytest.fixture(scope="module")
def by_hand(stepped):
    """Loss, mean logsumexp² and gradient of the whole batch at once, from the model's logits."""
    trainer, before, tokens, *_ = stepped

    def loss(params):
        logits = trainer.functions.merge(params)(tokens[:, :-1])
        lse = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        nll, z = jnp.mean(lse - picked), jnp.mean(lse**2)
        return nll + trainer.config.optimizer.z_loss * z, (nll, z)

    (_, (nll, z)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(before["params"])
    return float(nll), float(z), jax.tree.map(np.asarray, grads)


def test_accumulated_losses_are_those_of_the_whole_batch(stepped, by_hand):
    metrics = stepped[4]
    # Both sides are float32 sums of some hundred terms.
    assert metrics["loss"] == pytest.approx(by_hand[0], rel=1e-6)
    assert metrics["z"] == pytest.approx(by_hand[1], rel=1e-6)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(by_hand[2])))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["lr"] == pytest.approx(1e-3 / 3)


def test_the_update_is_adamw_with_clipping_and_decay(stepped, by_hand):
    _, before, _, after, metrics = stepped
    norm = float(metrics["grad_norm"])
    assert norm > 1, "the gradient is clipped here"
    rate = 1e-3 / 3
    clipped = jax.tree.map(lambda g: np.asarray(g, np.float64) / norm, by_hand[2])
    moments = after["optimizer"][1][0]
    assert relative(moments.mu, jax.tree.map(lambda g: 0.1 * g, clipped)) < 1e-5
    assert relative(moments.nu, jax.tree.map(lambda g: 0.05 * g**2, clipped)) < 2e-5
    # From the step's own moments: Adam divides by the root of nearly nothing where a gradient is nearly zero.
    adam = lambda m, v: (m / 0.1) / (np.sqrt(v / 0.05) + 1e-8)
    expected = jax.tree.map(
        lambda p, m, v: p - rate * (adam(m.astype(np.float64), v.astype(np.float64)) + 0.1 * p),
        before["params"],
        moments.mu,
        moments.nu,
    )
    moved = lambda params: jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, params, before["params"])
    assert relative(moved(after["params"]), moved(expected)) < 2e-4  # float32 parameters: 6e-8 / rate
    assert int(after["step"]) == int(moments.count) == 1
    np.testing.assert_array_equal(after["rng"], before["rng"])


def test_the_average_follows(stepped):
    _, before, _, after, _ = stepped
    expected = jax.tree.map(lambda e, p: 0.9 * e.astype(np.float64) + 0.1 * p, before["ema"], after["params"])
    assert relative(after["ema"], expected) < 1e-7
    assert relative(before["ema"], before["params"]) > 0.1


def test_what_evaluations_see(tools, stepped):
    state = stepped[3]
    assert evaluated_params(state, tools.config()) is state["ema"]
    assert evaluated_params(state, tools.config(eval={"ema": False})) is state["params"]
    plain = {k: v for k, v in state.items() if k != "ema"}
    assert evaluated_params(plain, tools.config(optimizer={"ema": 0.0})) is state["params"]


def test_evaluation_is_sums_over_tokens(stepped, by_hand):
    trainer, before, tokens, *_ = stepped
    sums = jax.device_get(trainer.evaluate(before["params"], tokens))
    assert sums["tokens"] == 8 * 32
    assert sums["nll"] / sums["tokens"] == pytest.approx(by_hand[0], rel=1e-6)


def test_rounded_parameters_keep_exact_averages_and_sums(tools):
    config = tools.config(model={"param_dtype": "bfloat16", "variant": "additive"})
    trainer = tools.trainer(config)
    dtypes = lambda tree: {x.dtype.name for x in jax.tree.leaves(tree)}
    state = trainer.init()
    for _ in range(2):
        state, metrics = trainer.step(state, tools.tokens(trainer))
        assert dtypes(state["params"]) == {"bfloat16"}
        assert dtypes(state["ema"]) == {"float32"}
        assert dtypes(state["optimizer"]) == {"float32", "int32"}
    assert np.isfinite(jax.device_get(metrics)["grad_norm"])


def test_donated_and_without_transfers(tools):
    trainer = tools.trainer(tools.config())
    state, tokens = trainer.init(), tools.tokens(trainer)
    with warnings.catch_warnings(), jax.transfer_guard("disallow"):
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        for _ in range(2):
            old = state
            state, metrics = trainer.step(state, tokens)
            assert all(x.is_deleted() for x in jax.tree.leaves(old))
            jax.block_until_ready(metrics)
    assert int(jax.device_get(state["step"])) == 2


def test_donation_saves_the_memory_of_the_state(tools):
    trainer = tools.trainer(tools.config())
    memory = trainer.step.lower(trainer.shapes, trainer.batch).compile().memory_analysis()
    size = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(trainer.shapes))
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * size


@pytest.fixture
def compiled():
    """The names of all programs compiled or traced, as they are: (event, name)."""
    seen: list[tuple[str, str]] = []

    def listen(event: str, duration: float, **facts) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append((event.rsplit("/", 1)[1].removesuffix("_duration"), str(facts.get("fun_name"))))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_one_run_compiles_each_program_once(here, monkeypatch, tmp_path, compiled):
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    assert here(f"--run_dir={tmp_path / 'run'}", "--checkpoint.every=3").code == 0
    for name in ("step", "summarise"):  # the one batch of this evaluation is evaluated while it is summarised
        for event in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile"):
            times = [
                n for e, n in compiled if e == event and n.removeprefix("jit_").removeprefix("jit(").rstrip(")") == name
            ]
            assert len(times) == 1, (event, name, times)
    compiled.clear()
    assert here(f"--run_dir={tmp_path / 'run'}").code == 0
    assert not any(e == "backend_compile" and "step" in n for e, n in compiled), "a finished run trains no more"


def test_a_deeper_model_starts_with_the_same_programs(tools, compiled):
    """Drawing all matrices in one program took a minute to compile for 36 layers."""
    programs = []
    for layers in (3, 5):
        trainer = make_trainer(
            tools.config(model={"num_layers": layers, "d_model": 24}), tools.trainer(tools.config()).mesh
        )
        compiled.clear()
        trainer.init()
        programs.append(sorted(name for event, name in compiled if event == "backend_compile"))
    assert programs[0].count("jit(_normal)") == 5  # embedding; q and o; k and v; gate and up; down
    # Beside the matrices, which share their programs: rows of 11 routing sites, and the rest of the state.
    assert programs[1] == ["jit(<lambda>)", "jit(_constant)"]


@pytest.mark.parametrize("variant", ["mhar", "delta_block"])
def test_a_fresh_state_is_made_where_it_belongs(tools, variant):
    """Sharded from the start, the same to the bit on any mesh, and what `init_state` draws in one program."""
    config = tools.config(model={"variant": variant, "num_blocks": 1})
    one, eight = (tools.trainer(config, sizes) for sizes in ((1, 1, 1), (2, 2, 2)))
    state = eight.init()
    for leaf, shape in zip(*map(jax.tree.leaves, (state, eight.shapes)), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    assert not state["params"]["embedding"].is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, one.init(), state)
    whole = jax.jit(lambda: init_state(config, one.functions))()
    assert jax.tree.structure(whole) == jax.tree.structure(state)
    # A float32 step: the tests' compiler options fuse the same arithmetic differently.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7), whole, state)


def test_the_loop_moves_nothing_by_accident(here, monkeypatch, tmp_path):
    """From the first step to the last: batches are put on the devices and numbers fetched, both explicitly."""
    original = loop.Reports.add

    def add(self, step, metrics):
        if step == 2:
            guard.__enter__()
        original(self, step, metrics)
        if step == 7:
            guard.__exit__(None, None, None)

    guard = jax.transfer_guard("disallow")
    monkeypatch.setattr(loop.Reports, "add", add)
    assert here(f"--run_dir={tmp_path / 'run'}", "--eval.every=3", "--checkpoint.every=3").code == 0


def test_the_loop_is_short():
    assert len(pathlib.Path(loop.__file__).read_text().splitlines()) < 400
