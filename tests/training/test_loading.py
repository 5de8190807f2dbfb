"""`load_model` on run directories, the sample and the routing map."""

import logging
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from mhar_jax import load_model
from mhar_jax.config.schema import SampleConfig
from mhar_jax.data import load_tokenizer
from mhar_jax.errors import UserError
from mhar_jax.sampling import sample_text
from mhar_jax.training.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def run(tools, tmp_path_factory):
    """A run directory with the checkpoints of two steps, and the last state."""
    run_dir = tmp_path_factory.mktemp("loading") / "run"
    config = tools.config(run_dir=str(run_dir))
    trainer = tools.trainer(config)
    state = trainer.init()
    with Checkpoints(run_dir) as checkpoints:
        for seed in (0, 1):
            state, _ = trainer.step(state, tools.tokens(trainer, seed))
            checkpoints.save(state, config, {}, "text")
    return run_dir, config, trainer, state


def logits(model, tokens):
    """Of a model's own parameters; compiled, and equal programs are compiled once."""
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))


def test_logits_are_those_of_the_averaged_weights(run, tools):
    run_dir, config, trainer, state = run
    model, loaded = load_model(run_dir)
    assert loaded == config
    tokens = np.asarray(tools.tokens(trainer))[:2, :-1]
    expected = logits(trainer.functions.merge(state["ema"]), tokens)
    np.testing.assert_array_equal(logits(model, tokens), expected)
    assert not np.array_equal(logits(trainer.functions.merge(state["params"]), tokens), expected)


def test_a_run_without_averages_gives_its_parameters(run, tools, tmp_path):
    _, _, trainer, state = run
    config = tools.config(optimizer={"ema": 0.0}, run_dir=str(tmp_path))
    plain = {k: v for k, v in state.items() if k != "ema"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(plain, config, {}, "text")
    model, loaded = load_model(str(tmp_path))
    assert loaded == config
    tokens = np.asarray(tools.tokens(trainer))[:2, :-1]
    expected = logits(trainer.functions.merge(state["params"]), tokens)
    np.testing.assert_array_equal(logits(model, tokens), expected)


def test_a_damaged_run(run, tmp_path, caplog):
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    (copy / "checkpoints" / "2" / "ema" / "manifest.ocdbt").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "mhar_jax"):
        load_model(copy)
    assert [r.getMessage()[:20] for r in caplog.records if r.name == "mhar_jax"] == ["skipping checkpoint "]
    (copy / "checkpoints" / "1" / "meta" / "metadata").unlink()
    with pytest.raises(UserError, match="holds no readable checkpoint"):
        load_model(copy)


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "no-steps", "long"])
def test_what_is_no_model(tmp_path, kind):
    path = pathlib.Path("m" * 300) if kind == "long" else tmp_path / "model"
    if kind == "file":
        path.write_text("x")
    elif kind in ("empty", "no-steps"):
        (path / "checkpoints" if kind == "no-steps" else path).mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        load_model(path)
    assert str(path)[:200] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sample_depends_on_the_seed_only(run, tools):
    _, config, trainer, state = run
    tokenizer = load_tokenizer("bytes")
    with_sample = lambda **fields: tools.config(sample={"tokens": 6, **fields})
    once, again = (sample_text(with_sample(), trainer, state["params"], tokenizer) for _ in range(2))
    assert once == again
    assert once.startswith("It is a truth")
    # Greedy: each token is the likeliest after the tokens before it.
    greedy = with_sample(prompt="The ", temperature=0.0)
    text = sample_text(greedy, trainer, state["params"], tokenizer)
    ids = tokenizer.encode(text)
    best = logits(trainer.functions.merge(state["params"]), ids[None])[0, :, : tokenizer.vocab_size].argmax(-1)
    assert len(ids) == 10, "no end of text and nothing but bytes that are characters, or choose another prompt"
    np.testing.assert_array_equal(ids[4:], best[3:-1])
    assert config.sample == SampleConfig(tokens=0)


@pytest.mark.parametrize(("prompt", "tokens"), [("", 3), ("x" * 200, 3), ("x" * 62, 9)])
def test_prompts_of_any_length(run, tools, prompt, tokens):
    _, _, trainer, state = run
    config = tools.config(sample={"prompt": prompt, "tokens": tokens})
    text = sample_text(config, trainer, state["params"], load_tokenizer("bytes"))
    assert text.startswith(prompt[-63:][: len(text)])


def test_the_sample_and_the_map_on_a_mesh(tools, run):
    """Eight devices show what one shows."""
    _, config, one, state = run
    eight = tools.trainer(config, (2, 2, 2))
    tokens = np.asarray(tools.tokens(one))
    moved = jax.device_put(
        jax.tree.map(np.asarray, state["params"]), jax.tree.map(lambda s: s.sharding, eight.shapes["params"])
    )
    a = jax.device_get(one.summarise(state["params"], jax.device_put(tokens, one.batch.sharding)))
    b = jax.device_get(eight.summarise(moved, jax.device_put(tokens, eight.batch.sharding)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    assert a[1].weights.shape == (3, 3, 2)
    tokenizer = load_tokenizer("bytes")
    greedy = tools.config(sample={"tokens": 3, "temperature": 0.0})
    assert sample_text(greedy, eight, moved, tokenizer) == sample_text(greedy, one, state["params"], tokenizer)
