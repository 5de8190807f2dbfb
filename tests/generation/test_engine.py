"""Tokens from prompts: the given continuations, batches, sampling, compilations, devices."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import inference_helpers
from inference_helpers import placed
from mhar_jax.config.schema import MeshConfig
from mhar_jax.errors import UserError
from mhar_jax.generation import Sampling, TokenGenerator
from mhar_jax.generation.sampling import draw
from mhar_jax.huggingface import load_huggingface
from mhar_jax.inference import bucket, check_tokens
from mhar_jax.sharding import make_mesh
from model_helpers import jit

HF = Path(__file__).parent.parent / "fixtures" / "hf"

# One layer: several are test_cache.py's business.
tiny_model = functools.partial(inference_helpers.tiny_model, num_layers=1)
PROMPTS = [list(b"It is a truth"), [65], list(b"universally acknowledged, that")]


@pytest.fixture(scope="module")
def generator():
    return TokenGenerator(placed(tiny_model()))


def tokens(generator, prompts, count, **sampling):
    return np.stack(list(generator.steps(prompts, count, Sampling(**sampling))), axis=1)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama31"])
def test_greedy_on_the_given_models(name):
    model, _ = load_huggingface(HF / name, compute_dtype="float32")
    expected = np.load(HF / name / "expected.npz")["greedy"][0]
    found = tokens(TokenGenerator(placed(model)), [expected[:8]], 12)
    np.testing.assert_array_equal(found[0], expected[8:])


def test_greedy_equals_whole_passes(generator):
    graph, state = nnx.split(tiny_model())
    logits = jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    row = list(PROMPTS[0])
    for token in tokens(generator, [row], 6)[0]:
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(row)] = row
        assert token == int(jnp.argmax(logits(state, padded)[0, len(row) - 1]))
        row.append(int(token))


@pytest.mark.parametrize("method", ["greedy", "plain", "filtered"])
def test_a_logit_that_is_no_number_draws_no_token(method):
    logits = jnp.zeros((3, 5)).at[1, 4].set(jnp.nan).at[2, 3].set(-jnp.inf)
    found = draw(logits, jnp.zeros(3, jnp.uint32), jnp.int32(0), 1.0, np.int32(3), 0.9, method=method)
    assert found[1] == -1
    assert min(found[0], found[2]) >= 0


@pytest.mark.parametrize(
    "sampling", [pytest.param({}, marks=pytest.mark.slow), {"temperature": 1.5, "top_k": 20, "top_p": 0.9}]
)
def test_a_batch_equals_its_prompts_one_by_one(generator, sampling):
    together = tokens(generator, PROMPTS, 10, **sampling, seed=3)
    for i, prompt in enumerate(PROMPTS):
        alone = tokens(generator, [prompt], 10, **sampling, seed=3 + i)
        np.testing.assert_array_equal(alone[0], together[i])
    assert len({tuple(row) for row in together}) == len(PROMPTS)


def test_one_compilation_for_a_bucket_of_lengths_and_any_settings():
    generator = TokenGenerator(placed(tiny_model()))
    counts = generator._placed.traces
    for length in (1, 7, 16):
        for sampling in ({"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "top_p": 0.4, "seed": 9}):
            tokens(generator, [list(range(length))], 5, **sampling)
    assert counts == {"prefill": 1, "decode": 1}
    tokens(generator, [list(range(17))], 5, temperature=1.0, top_k=3)  # the next bucket
    assert counts == {"prefill": 2, "decode": 2}
    assert [bucket(n, 100) for n in (1, 16, 17, 24, 25, 33, 49, 97, 5000)] == [16, 16, 24, 24, 32, 48, 64, 100, 100]


def test_draws_follow_the_probabilities():
    """Against the softmax, by frequency: 4,000 draws of each way of choosing."""
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    count = 4000
    seeds = jnp.arange(count, dtype=jnp.uint32)
    many = jnp.broadcast_to(logits, (count, 4))

    def frequencies(temperature=1.0, top_k=4, top_p=1.0, method="filtered"):
        values = np.float32(temperature), np.int32(top_k), np.float32(top_p)
        found = draw(many, seeds, jnp.int32(2), *values, method=method)
        return np.bincount(np.asarray(found), minlength=4) / count

    close = {"atol": 0.03}  # four standard deviations of a frequency of 0.4
    np.testing.assert_allclose(frequencies(method="plain"), [0.1, 0.4, 0.2, 0.3], **close)
    np.testing.assert_allclose(frequencies(), [0.1, 0.4, 0.2, 0.3], **close)
    squares = np.array([0.01, 0.16, 0.04, 0.09]) / 0.3
    np.testing.assert_allclose(frequencies(temperature=0.5, method="plain"), squares, **close)
    np.testing.assert_allclose(frequencies(top_k=2), [0, 4 / 7, 0, 3 / 7], **close)
    np.testing.assert_allclose(frequencies(top_p=0.65), [0, 4 / 7, 0, 3 / 7], **close)
    np.testing.assert_allclose(frequencies(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], **close)
    # top_p counts within what top_k left: 0.4 / 0.7 of the two likeliest suffices.
    np.testing.assert_allclose(frequencies(top_k=2, top_p=0.5), [0, 1, 0, 0])
    assert frequencies(top_p=1e-6).tolist() == [0, 1, 0, 0]
    ties = draw(jnp.zeros((200, 4)), seeds[:200], jnp.int32(0), 1.0, np.int32(2), 1.0, method="filtered")
    assert len(set(np.asarray(ties).tolist())) == 2  # exactly k, also where more are equally likely


def test_rows_of_the_embedding_beyond_the_tokenizer_are_never_drawn():
    generator = TokenGenerator(placed(tiny_model()), vocabulary=5)
    for sampling in ({}, {"temperature": 100.0, "top_k": 200}):
        assert tokens(generator, [[1, 2]], 8, **sampling).max() < 5


@pytest.mark.parametrize(
    "shape",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"data": 1, "fsdp": 4, "tensor": 1}, marks=pytest.mark.slow),
    ],
)
def test_sharded_like_training(generator, shape):
    mesh = make_mesh(MeshConfig(**shape), jax.devices()[: np.prod(list(shape.values()))])
    sharded = TokenGenerator(placed(tiny_model(), mesh))
    np.testing.assert_array_equal(tokens(sharded, PROMPTS, 6), tokens(generator, PROMPTS, 6))
    assert sharded._placed.traces == {"prefill": 1, "decode": 1}
    names = jax.tree.map(lambda x: x.sharding.spec, sharded._placed.params)
    split = [spec for spec in jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, jax.P)) if any(spec)]
    assert split  # parameters are split at all


def test_the_cache_is_split_and_stays_where_it_is():
    """The compiled decode step: each device has its rows and heads, and no cache travels."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    held = placed(tiny_model(), mesh)
    batch, slots, config = 4, 48, held.config
    _, cache = held.jit("first", lambda model, t, n: model.prefill(t, n, slots=slots))(
        np.zeros((batch, 16), np.int32), np.full(batch, 5, np.int32)
    )
    local = cache.keys[0].addressable_shards[0].data.shape
    assert local == (batch // 2, config.num_kv_heads // 2, slots, config.attention_head_dim)
    step = jax.jit(lambda params, t, cache: held.merge(params).extend(t, cache))
    with jax.set_mesh(mesh):
        text = step.lower(held.params, np.zeros((batch, 1), np.int32), cache).compile().as_text()
    whole = f"[{batch},{config.num_kv_heads},{slots},{config.attention_head_dim}]"
    half = (f"[{batch},{config.num_kv_heads // 2},{slots},", f"[{batch // 2},{config.num_kv_heads},{slots},")
    assert f"[{batch // 2},{config.num_kv_heads // 2},{slots},{config.attention_head_dim}]" in text
    assert not any(shape in text for shape in (whole, *half))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 257], r"token 257 of the prompt is outside the model's vocabulary of 257 tokens \(0 to 256\)"),
        ([1, -1], "token -1 of the prompt is outside"),
        ([1] * 64, "the prompt has 64 tokens, and the model's context of 64 leaves room for 63"),
    ],
)
def test_prompts_that_are_refused(prompt, message):
    with pytest.raises(UserError, match=message):
        check_tokens(prompt, tiny_model().config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1.0, "temperature must be a number of at least 0, got -1.0"),
        ("temperature", float("nan"), "temperature must be"),
        ("top_k", 0, "top_k must be at least 1, got 0"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
        ("top_p", 1.5, "top_p must be above 0 and at most 1, got 1.5"),
        ("seed", -1, "seed must be from 0"),
    ],
)
def test_settings_that_are_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        Sampling(**{field: value})
