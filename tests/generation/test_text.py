"""Text from tokens: whole characters, stop strings anywhere, why a continuation ended. No model is needed."""

import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from mhar_jax.generation.text import Characters, StopStrings, complete

BYTES = ByteTokenizer()


class Script:
    """A generator whose continuations are given: `texts[i]` follows prompt i, and then end-of-text for ever."""

    def __init__(self, *texts: str, context: int = 1000):
        self.config = types.SimpleNamespace(context=context)
        self.texts, self.drawn = texts, 0

    def steps(self, prompts, max_tokens, sampling):
        rows = [list(text.encode()) for text in self.texts]
        for step in range(max_tokens):
            self.drawn = step + 1
            yield np.array([row[step] if step < len(row) else 256 for row in rows])


def continued(text, **options):
    pieces = []
    found = complete(Script(text), BYTES, ["a"], on_text=lambda i, new: pieces.append(new), **options)[0]
    assert "".join(pieces) == found.text
    return found, pieces


def test_characters_come_whole():
    found, pieces = continued("né – 𝄞!")
    assert found.text == "né – 𝄞!"
    assert pieces == ["n", "é", " ", "–", " ", "𝄞", "!"]
    assert found.reason == "end"


def test_a_character_that_the_limit_cuts_is_shown_as_broken_at_the_end_only():
    found, pieces = continued("ab€", max_tokens=4)
    assert (found.text, found.reason, pieces) == ("ab\ufffd", "length", ["a", "b", "\ufffd"])


def test_a_prompt_that_ends_inside_a_character():
    characters = Characters(BYTES, np.frombuffer("x€".encode()[:-1], np.uint8))
    assert characters.push("€".encode()[-1]) == "€"
    assert characters.push(ord("y")) == "y"


def test_a_prompt_that_ends_in_the_replacement_character():
    """It is a character of the prompt, not half of one, and is not said again."""
    found = complete(Script("b é"), BYTES, ["a\ufffd"])[0]
    assert found.text == "b é"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.lists(st.integers(0, 255), max_size=12))
def test_any_text_and_any_bytes_come_out_as_they_decode(text, junk):
    ids = [*text.encode(), *junk, *text[::-1].encode()]
    characters = Characters(BYTES, [65])
    told = "".join(map(characters.push, ids)) + characters.flush()
    assert told == bytes(ids).decode(errors="replace")


def test_a_stop_string_across_tokens_is_never_shown():
    found, pieces = continued("one\n\nQ: two", stop=["\n\nQ:"])
    assert (found.text, found.reason) == ("one", "stop")
    assert found.tokens == list(b"one\n\nQ:")
    found, pieces = continued("one\n\nP\n\nQ: two", stop=["\n\nQ:"])
    assert found.text == "one\n\nP"
    assert pieces == ["o", "n", "e", "\n\nP"]  # held back until it could not be the stop string any more


def test_the_stop_string_that_comes_first_counts_and_an_unfinished_one_is_text():
    assert continued("a<b>c", stop=["c", "<b>"])[0].text == "a"
    found = continued("abc<", stop=["<end>"])[0]
    assert (found.text, found.reason) == ("abc<", "end")
    found = continued("abc<e", stop=["<end>"], max_tokens=5)[0]
    assert (found.text, found.reason) == ("abc<e", "length")
    assert continued("x€y", stop=["€"])[0].text == "x"


@settings(max_examples=100, deadline=None)
@example("xabcx", ["abc", "b"], 5)
@example("xabcx", ["abc", "b"], 1)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_stops_equal_a_search_in_the_whole_text_however_it_is_cut(text, stops, size):
    scanner, told = StopStrings(stops), ""
    for start in range(0, len(text), size):
        told += scanner.push(text[start : start + size])
        full = text[: start + size]
        first = min(((at + len(s), at) for s in stops if (at := full.find(s)) >= 0), default=None)
        assert scanner.found == (first is not None)
        if first is not None:
            assert told == full[: first[1]]  # of the one that is complete first
            return
        assert full.startswith(told)
        for held in range(len(full)):  # nothing that may still become a stop string has been told
            assert held >= len(told) or not any(s.startswith(full[held:]) for s in stops)
    assert told + scanner.flush() == text


def test_rows_end_by_themselves_and_the_batch_when_all_have():
    script = Script("abc", "a.bc", "abcdefgh")
    found = complete(script, BYTES, ["p", "q", "r"], stop=["."], max_tokens=6)
    assert [(c.text, c.reason) for c in found] == [("abc", "end"), ("a", "stop"), ("abcdef", "length")]
    assert script.drawn == 6
    complete(Script("ab"), BYTES, ["p"], max_tokens=500)
    script = Script("a" * 50, "a" * 50, context=10)
    found = complete(script, BYTES, ["123", "12345678"], max_tokens=100)
    assert [(len(c.tokens), c.reason) for c in found] == [(7, "context"), (2, "context")]


def test_a_model_that_gives_no_numbers_is_refused_but_not_in_rows_that_are_done():
    """-1 stands for a token of NaN."""
    script = Script("ab", "abcd")
    steps = [np.array(row) for row in ((97, 97), (256, 98), (-1, 99), (-1, 256))]
    script.steps = lambda *_: iter(steps)
    assert [c.text for c in complete(script, BYTES, ["p", "q"])] == ["a", "abc"]
    steps[1] = np.array((256, -1))
    with pytest.raises(UserError, match="the model's logits are not numbers"):
        complete(script, BYTES, ["p", "q"])


def test_what_is_refused():
    with pytest.raises(UserError, match="stop string must not be empty"):
        complete(Script("a"), BYTES, ["p"], stop=[""])
    with pytest.raises(UserError, match="max_tokens must be at least 1, got 0"):
        complete(Script("a"), BYTES, ["p"], max_tokens=0)
    assert complete(Script(), BYTES, []) == []
