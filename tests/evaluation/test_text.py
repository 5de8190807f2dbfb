"""Sliding windows, batches of scores, and what a document's numbers mean."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference_helpers import placed, tiny_model
from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from mhar_jax.evaluation.held_out import read_documents
from mhar_jax.evaluation.scoring import Scorer
from mhar_jax.evaluation.text import TextReport, TextScore, score_documents, sliding_windows
from model_helpers import jit

BYTES = ByteTokenizer()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 23])
@pytest.mark.parametrize(("window", "stride"), [(4, 4), (4, 1), (4, 3), (1, 1), (8, 5), (50, 7)])
def test_every_token_is_predicted_once_from_as_much_context_as_the_window_has(count, window, stride):
    predicted = []
    for number, w in enumerate(sliding_windows(count, window, stride)):
        assert 1 <= w.stop - w.start - 1 <= window  # tokens read
        assert 1 <= w.scored <= w.stop - w.start - 1
        if number:
            assert w.scored <= stride
            assert w.stop - w.start - 1 == window
        # Index i + 1 of [prefix, *document] is token i.
        predicted += range(w.stop - w.scored - 1, w.stop - 1)
    assert predicted == list(range(count))


@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 23])
def test_with_stride_window_they_are_the_harness_windows(count):
    utils = pytest.importorskip("lm_eval.utils")
    ids = list(range(100, 100 + count))
    theirs = list(utils.get_rolling_token_windows(ids, prefix_token=7, max_seq_len=8, context_len=1))
    whole = [7, *ids]
    ours = [(whole[w.start : w.stop - 1], whole[w.stop - w.scored : w.stop]) for w in sliding_windows(count, 8, 8)]
    assert ours == theirs


@pytest.fixture(scope="module")
def scorer():
    return Scorer(placed(tiny_model()), batch_tokens=128)


@pytest.fixture(scope="module")
def direct():
    """Log-probabilities of a row's tokens by one whole forward pass, padded behind."""
    graph, state = nnx.split(tiny_model())
    run = jit(lambda state, tokens: jax.nn.log_softmax(nnx.merge(graph, state)(tokens)))

    def logprobs(row):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(row) - 1] = row[:-1]
        return np.asarray(run(state, jnp.asarray(padded)), np.float64)[0, : len(row) - 1]

    return logprobs


def test_scores_equal_whole_passes_in_any_batch(scorer, direct):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 257, n) for n in (5, 40, 2, 17, 64, 9, 33, 65, 12)]
    done = []
    found = scorer(rows, done.append)
    assert sum(done) == len(rows)
    for row, scores in zip(rows, found, strict=True):
        expected = direct(row)
        at = np.arange(len(row) - 1)
        np.testing.assert_allclose(scores.logprobs, expected[at, row[1:]], rtol=2e-5)  # float32 of 5 to 20 nats
        np.testing.assert_array_equal(scores.best, expected.argmax(-1) == row[1:])
    assert scorer.placed.traces["score"] == 4  # lengths 16, 32, 48 and 64


def test_greedy_tokens_are_seen_as_the_likeliest(scorer, direct):
    row = [65]
    for _ in range(6):
        row.append(int(direct([*row, 0])[-1].argmax()))
    assert scorer([np.array(row)])[0].best.all()
    row[3] = (row[3] + 1) % 257
    assert scorer([np.array(row)])[0].best.tolist()[2] is False


def test_a_document_longer_than_the_window(scorer, direct):
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    ids = [256, *text.encode()]
    window, stride = 16, 5
    expected = 0.0
    for token in range(len(ids) - 1):  # token i from the context that the statement of the window gives it
        done = 0
        while True:
            size = window if not done else stride
            if token < done + size:
                break
            done += size
        stop = min(done + size, len(ids) - 1)
        start = max(0, stop - window)
        piece = ids[start : stop + 1]
        expected -= direct(piece)[token - start, ids[token + 1]]
    report = score_documents(scorer, BYTES, [text], window=window, stride=stride)
    assert report.total("nll") == pytest.approx(expected, rel=1e-6)
    assert report.loss == pytest.approx(expected / len(text))
    assert report.bits_per_byte == pytest.approx(expected / len(text) / math.log(2))
    assert report.perplexity == pytest.approx(math.exp(expected / len(text)))
    assert report.word_perplexity == pytest.approx(math.exp(expected / len(text.split())))
    wider = score_documents(scorer, BYTES, [text], window=64, stride=1)
    assert wider.loss != report.loss


def test_documents_are_weighed_by_their_tokens(scorer):
    texts = ["first", "the second one", "é"]
    together = score_documents(scorer, BYTES, texts, window=64, stride=64)
    alone = [score_documents(scorer, BYTES, [t], window=64, stride=64) for t in texts]
    assert together.total("nll") == pytest.approx(sum(a.total("nll") for a in alone), rel=1e-6)
    assert together.total("tokens") == together.total("num_bytes") == 5 + 14 + 2
    shifted = score_documents(scorer, BYTES, texts, window=64, stride=64, prefix=0)
    assert shifted.loss != together.loss


def test_whole_files_are_read_as_documents_are(tmp_path):
    """Without a byte order mark, lines ended by one byte, or bits per byte would be of other bytes."""
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\ntwo".encode())
    for whole_files in (False, True):
        assert read_documents(str(tmp_path / "x.txt"), "text", "text", whole_files=whole_files) == ["one\ntwo"]


def test_what_is_refused(scorer):
    with pytest.raises(UserError, match="window must be at most the model's context of 64, got 65"):
        score_documents(scorer, BYTES, ["a"], window=65, stride=1)
    with pytest.raises(UserError, match="stride must be from 1 to the window of 8 tokens, got 9"):
        score_documents(scorer, BYTES, ["a"], window=8, stride=9)
    with pytest.raises(UserError, match="no text to score"):
        score_documents(scorer, BYTES, [""], window=8, stride=8)
    with pytest.raises(UserError, match="must have 2 to 65 tokens"):
        scorer([np.zeros(66, int)])
    with pytest.raises(UserError, match="token 300 is outside the model's vocabulary of 257"):
        scorer([np.array([1, 300])])


def test_one_long_word_has_an_infinite_perplexity():
    """A page without white space is a word of thousands of nats."""
    report = TextReport([TextScore(nll=6000.0, tokens=1000, num_bytes=1000, words=1)])
    assert report.word_perplexity == math.inf
    assert report.perplexity == pytest.approx(math.exp(6))
    assert TextReport([TextScore(3000.0, 3, 1, 1)]).byte_perplexity == math.inf


def test_a_model_that_gives_no_numbers_is_refused():
    """Its accuracies would be those of chance."""
    broken = placed(tiny_model(num_layers=1))
    broken.params = jax.tree.map(lambda x: x * jnp.nan, broken.params)
    with pytest.raises(UserError, match="the model's logits are not numbers"):
        Scorer(broken)([np.array([1, 2, 3])])
