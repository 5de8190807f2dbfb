"""Two writers of one place, on one host or two, never damage each other's directory."""

import fcntl
import os

import pytest

from mhar_jax.conversion import aside
from mhar_jax.conversion.aside import written_aside
from mhar_jax.errors import UserError


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_a_directory_becomes_out(tmp_path):
    (tmp_path / "out").mkdir()
    with written_aside(tmp_path / "out") as directory:
        (directory / "a").write_text("1")
        assert names(tmp_path) == sorted([directory.name, "out"])
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["a"]


def write(out, block):
    with written_aside(out) as directory:
        block(directory)


def test_a_living_writers_directory_is_left_alone(tmp_path, monkeypatch):
    """Whatever its process id means here, only its lock counts; a second writer that fails removes its own."""
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def fail(second):
        (second / "b").touch()
        assert names(first) == [aside._LOCK, "a"]
        raise OSError(28, "No space left on device")

    with written_aside(tmp_path / "out") as first:
        (first / "a").touch()
        with pytest.raises(UserError, match="No space left"):
            write(tmp_path / "out", fail)
        assert names(tmp_path) == [first.name]
    assert names(tmp_path / "out") == ["a"]


def test_the_first_of_two_wins(tmp_path):
    def overtaken(late):
        write(tmp_path / "out", lambda early: (early / "early").touch())
        (late / "late").touch()

    with pytest.raises(UserError, match="something else has come to be there"):
        write(tmp_path / "out", overtaken)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["early"]


def test_what_a_dead_writer_left_is_removed(tmp_path):
    left = tmp_path / ".out.unfinished-host-0123456789abcdef"
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "a").touch()
    (left / "link").symlink_to(tmp_path)
    (left / aside._LOCK).touch()
    strange = tmp_path / ".out.unfinished-99999999"  # without a lock file: not ours
    strange.mkdir()
    with written_aside(tmp_path / "out"):
        assert not left.exists()
    assert names(tmp_path) == [strange.name, "out"]


def test_without_shared_locks_a_removed_directory_does_not_become_out(tmp_path, monkeypatch):
    """Two hosts whose file system does not share locks: the second takes the first's for left over."""

    def robbed(first):
        (first / "a").touch()
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        with written_aside(tmp_path / "out") as second:
            assert not first.exists()
            first.mkdir()  # as a write of one more parameter does
            (first / "b").touch()
            (second / "whole").touch()

    with pytest.raises(UserError, match="somebody else removed"):
        write(tmp_path / "out", robbed)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["whole"]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / ".out.unfinished-host-0123456789abcdef"
    left.mkdir()
    (left / aside._LOCK).touch()
    write(tmp_path / "out", lambda directory: (directory / "a").touch())
    assert names(tmp_path) == [left.name, "out"]


def test_paths_that_cannot_be(tmp_path):
    for name, words in (("o" * 300, "File name too long"), (os.fsdecode(b"out\xff"), "must be UTF-8")):
        with pytest.raises(UserError, match=words), written_aside(tmp_path / "new" / name):
            raise AssertionError
    assert names(tmp_path) == []
