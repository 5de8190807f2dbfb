"""Training iterators of both kinds: values against a plain model, resume, processes, workers, prefetching."""

import dataclasses
import itertools
import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from mhar_jax.data import load_tokenizer, make_train_iterator, merge_states
from mhar_jax.data.packing import epoch_order
from mhar_jax.data.split import is_held_out
from mhar_jax.errors import UserError

TOKENIZER = load_tokenizer("bytes")
ORDERS = pytest.mark.parametrize("at_start_mb", [256, 0], ids=["packed", "streams"])
STEPS = 45  # more than two epochs of the packed kind


def batches(iterator, count):
    return [next(iterator)["tokens"] for _ in range(count)]


def start(config, index=0, count=1):
    return make_train_iterator(config, TOKENIZER, process_index=index, process_count=count)


@pytest.fixture(scope="module")
def run(corpus_path):
    """Makes configs of 16 rows of 64 tokens, and straight runs of them, once for each setting."""
    from mhar_jax.config import Config
    from mhar_jax.config.schema import DataConfig

    done = {}

    def make(at_start_mb, **data):
        options = {"path": str(corpus_path), "held_out": 0.2, "tokenize_at_start_mb": at_start_mb, **data}
        return Config(seed=3, batch_size=8, seq_len=64, data=DataConfig(**options))

    def straight(at_start_mb):
        if at_start_mb not in done:
            iterator = start(make(at_start_mb))
            states, values = [iterator.get_state()], []
            for _ in range(STEPS):
                values.append(next(iterator)["tokens"])
                states.append(iterator.get_state())
            iterator.close()
            done[at_start_mb] = values, states
        return done[at_start_mb]

    return make, straight


def train_documents(texts):
    return [text for text in texts if not is_held_out(text, 0.2)]


@ORDERS
def test_type_shape_and_dtype(run, at_start_mb):
    make, _ = run
    iterator = start(make(at_start_mb))
    assert isinstance(iterator, grain.DatasetIterator)
    element = next(iterator)
    iterator.close()
    assert list(element) == ["tokens"]
    assert element["tokens"].shape == (8, 65)
    assert element["tokens"].dtype == np.int32
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@ORDERS
def test_every_token_is_predicted_once(run, at_start_mb):
    """Consecutive windows of a stream share the one token that is a target of the first and an input of the second."""
    _, straight = run
    values = np.stack(straight(at_start_mb)[0])  # [steps, 8, 65]
    if at_start_mb:
        stream = values.reshape(1, -1, 65)
    else:
        stream = values.transpose(1, 0, 2)
    np.testing.assert_array_equal(stream[:, :-1, -1], stream[:, 1:, 0])


def test_packed_values(run, texts):
    train = train_documents(texts)
    values = np.concatenate(run[1](256)[0])[:, :-1].ravel()
    stream = []
    for epoch in range(5):
        for place in epoch_order(len(train), 3, epoch, True):
            stream += [*train[place].encode(), 256]
    assert 2 * sum(len(t.encode()) + 1 for t in train) < STEPS * 8 * 64
    assert values.tolist() == stream[: len(values)]


def test_stream_values(run, texts):
    values = np.stack(run[1](0)[0])[:, :, :-1]
    for row in range(8):
        stream = []
        for number in itertools.count(row, 8):
            epoch, place = divmod(number, len(texts))
            text = texts[epoch_order(len(texts), 3, epoch, True)[place]]
            if not is_held_out(text, 0.2):
                stream += [*text.encode(), 256]
            if len(stream) >= STEPS * 64:
                break
        assert values[:, row].ravel().tolist() == stream[: STEPS * 64]


@ORDERS
def test_resume_at_every_step(run, at_start_mb):
    make, straight = run
    values, states = straight(at_start_mb)
    for step in range(STEPS - 1):
        state = json.loads(json.dumps(states[step]))
        # Another prefetch, and a resume of a resumed run.
        iterator = start(make(at_start_mb, prefetch=1 + step % 4))
        iterator.set_state(state)
        assert iterator.get_state() == state
        np.testing.assert_array_equal(next(iterator)["tokens"], values[step])
        assert iterator.get_state() == states[step + 1]
        iterator.set_state(state)  # back again, with batches already prefetched
        np.testing.assert_array_equal(batches(iterator, 2), values[step : step + 2])
        iterator.close()


@ORDERS
def test_state_is_unchanged_by_prefetching(run, at_start_mb):
    make, straight = run
    iterator = start(make(at_start_mb, prefetch=5))
    iterator.start_prefetch()
    assert iterator.get_state() == straight(at_start_mb)[1][0]
    np.testing.assert_array_equal(next(iterator)["tokens"], straight(at_start_mb)[0][0])
    assert iterator.get_state() == straight(at_start_mb)[1][1]
    iterator.close()


@ORDERS
@pytest.mark.parametrize("count", [2, 4])
def test_processes_make_the_same_global_batch(run, at_start_mb, count):
    make, straight = run
    values, states = straight(at_start_mb)
    iterators = [start(make(at_start_mb), index, count) for index in range(count)]
    for step in range(12):
        parts = [next(iterator)["tokens"] for iterator in iterators]
        np.testing.assert_array_equal(np.concatenate(parts), values[step])
    # The merged state is that of one process, and goes on with any other number of them.
    merged = merge_states([iterator.get_state() for iterator in iterators])
    assert merged == states[12]
    for iterator in iterators:
        iterator.close()
    other = 6 - count
    iterators = [start(make(at_start_mb), index, other) for index in range(other)]
    for iterator in iterators:
        iterator.set_state(merged)
    for step in range(12, 15):
        parts = [next(iterator)["tokens"] for iterator in iterators]
        np.testing.assert_array_equal(np.concatenate(parts), values[step])
    for iterator in iterators:
        iterator.close()


@ORDERS
def test_worker_processes(run, at_start_mb):
    make, straight = run
    values, states = straight(at_start_mb)
    iterator = start(make(at_start_mb, workers=2, prefetch=3))
    iterator.set_state(states[5])
    np.testing.assert_array_equal(batches(iterator, 4), values[5:9])
    assert iterator.get_state() == states[9]
    iterator.close()


@ORDERS
def test_seed_and_shuffle_matter(run, texts, at_start_mb):
    make, straight = run
    ordered = start(make(at_start_mb, shuffle=False))
    other = start(dataclasses.replace(make(at_start_mb), seed=4))
    assert (next(other)["tokens"] != straight(at_start_mb)[0][0]).any()
    first = next(ordered)["tokens"]
    assert (first != straight(at_start_mb)[0][0]).any()
    numbers = itertools.count(0, 1 if at_start_mb else 8)
    expected = next(texts[n] for n in numbers if not is_held_out(texts[n], 0.2))
    assert TOKENIZER.decode(first[0])[:40] == expected[:40]
    for iterator in (ordered, other):
        iterator.close()


@ORDERS
def test_states_of_other_data_are_refused(run, at_start_mb, tmp_path):
    make, straight = run
    state = straight(at_start_mb)[1][3]
    (tmp_path / "a.txt").write_text("\n\n".join(f"another text {i}" * 20 for i in range(40)))
    iterator = start(make(at_start_mb, path=str(tmp_path), held_out=0.3))
    with pytest.raises(UserError, match=r"data differs.*corpus was '.*' and is '.*'; held_out was 0.2 and is 0.3"):
        iterator.set_state(state)
    with pytest.raises(UserError, match="none of ours"):
        iterator.set_state({"next_index": 3})
    iterator.close()
    other = start(make(256 - at_start_mb))
    with pytest.raises(UserError, match="order was"):
        other.set_state(state)
    other.close()


def test_rows_of_another_process_are_asked_for(run):
    make, _ = run
    first, second = (start(make(0), index, 2) for index in range(2))
    with pytest.raises(UserError, match="lacks row 4 of the batch"):
        second.set_state(first.get_state())
    next(first)
    with pytest.raises(UserError, match="not of one run and one step"):
        merge_states([first.get_state(), second.get_state()])
    first.close()
    second.close()


@ORDERS
def test_orbax_checkpoints_it(run, at_start_mb, tmp_path):
    make, straight = run
    iterator = start(make(at_start_mb))
    batches(iterator, 7)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        iterator.close()
        again = start(make(at_start_mb))
        manager.restore(7, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(again)))
    assert again.get_state() == straight(at_start_mb)[1][7]
    np.testing.assert_array_equal(next(again)["tokens"], straight(at_start_mb)[0][7])
    again.close()


def test_errors_in_the_background_arrive(run, tmp_path):
    make, _ = run
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i}" * 99}) + "\n" for i in range(20)) + "{bad}\n")
    iterator = start(make(0, path=str(tmp_path)))
    with pytest.raises(UserError, match="line 21: the line is not JSON"):
        batches(iterator, 30)
    iterator.close()


def test_a_row_of_held_out_documents_only_is_an_error(run, tmp_path):
    make, _ = run
    texts = [t for t in (f"text {i} " * 30 for i in range(60)) if is_held_out(t, 0.5)][:7]
    train = next(t for t in (f"other {i} " * 30 for i in range(60)) if not is_held_out(t, 0.5))
    (tmp_path / "a.txt").write_text("\n\n".join([train, *texts]))
    iterator = start(make(0, path=str(tmp_path), shuffle=False, held_out=0.5))
    with pytest.raises(UserError, match="held-out documents only, with 8 documents in a fixed order"):
        next(iterator)
    iterator.close()


@ORDERS
def test_a_document_longer_than_many_windows(run, at_start_mb, tmp_path):
    make, _ = run
    (tmp_path / "a.txt").write_text("0123456789" * 5_000)
    (tmp_path / "held.txt").write_text("x")
    config = make(at_start_mb, path=str(tmp_path / "a.txt"), held_out_path=str(tmp_path / "held.txt"))
    iterator = start(config)
    values = np.stack(batches(iterator, 200))
    stream = values.reshape(-1, 65) if at_start_mb else values[:, 3]
    flat = stream[:, :-1].ravel()
    expected = np.resize(np.append(np.frombuffer(b"0123456789" * 5_000, np.uint8).astype(np.int32), 256), len(flat))
    np.testing.assert_array_equal(flat, expected)
    iterator.close()


def test_orbax_v1_checkpoints_it(run, tmp_path):
    """The newer interface of Orbax, which calls the iterator's own `save` and `load`."""
    make, straight = run
    iterator = start(make(0))
    batches(iterator, 7)
    ocp1.save_checkpointables(tmp_path / "7", {"data": iterator})
    iterator.close()
    again = start(make(0))
    ocp1.load_checkpointables(tmp_path / "7", {"data": again})
    assert again.get_state() == straight(0)[1][7]
    np.testing.assert_array_equal(next(again)["tokens"], straight(0)[0][7])
    again.close()
