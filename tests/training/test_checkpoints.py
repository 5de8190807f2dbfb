"""Damaged, foreign and missing checkpoints."""

import contextlib
import json
import pathlib
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_jax.errors import UserError
from mhar_jax.training.checkpoints import Checkpoints, list_steps, read_meta, read_params
from mhar_jax.training.checksums import examine, json_digest

DATA = {"identity": {"seed": 1}, "next_batch": 3}


@pytest.fixture(scope="module")
def world(tools, tmp_path_factory):
    """A run directory with checkpoints of steps 1, 2 and 3, and what is in them."""
    run_dir = tmp_path_factory.mktemp("checkpoints") / "run"
    config = tools.config()
    trainer = tools.trainer(config)
    state = trainer.init()
    states = {}
    with Checkpoints(run_dir) as checkpoints:
        for step in (1, 2, 3):
            state = {**state, "step": jnp.int32(step), "params": jax.tree.map(lambda x: x + 0.5, state["params"])}
            checkpoints.save(state, config, {**DATA, "next_batch": step}, "text")
            states[step] = tools.flat(state)
    return run_dir, config, trainer, states


@pytest.fixture
def copy(world, tmp_path):
    """A copy of the run directory that a test may damage."""
    run_dir = tmp_path / "run"
    shutil.copytree(world[0], run_dir)
    return run_dir


def restore(world, run_dir, config=None, fingerprint="text"):
    """What a run would continue from."""
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.restore(world[2].shapes, config or world[1], fingerprint)


def test_a_run_directory_with_two_dots(world, tmp_path):
    """Orbax refuses such paths."""
    (tmp_path / "a").mkdir()
    run_dir = shutil.copytree(world[0], tmp_path / "run")
    assert restore(world, tmp_path / "a" / ".." / "run").step == restore(world, run_dir).step


def flip(path: pathlib.Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: pathlib.Path) -> None:
    """The second half is missing."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {"flip": flip, "cut": cut, "delete": pathlib.Path.unlink}


def test_the_newest_is_restored_to_the_bit(world, tools, copy, caplog):
    found = restore(world, copy)
    assert (found.step, found.data) == (3, {**DATA, "next_batch": 3})
    tools.assert_same(tools.flat(found.state), world[3][3])
    assert all(
        x.sharding == s.sharding for x, s in zip(*map(jax.tree.leaves, (found.state, world[2].shapes)), strict=True)
    )
    assert not caplog.records


# Every kind of file in a checkpoint, each damaged in each way: either nothing is lost, or the checkpoint is skipped.
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_or_unharmed(world, tools, copy, caplog, damage):
    newest = copy / "checkpoints" / "3"
    kept = copy.with_name("kept")
    shutil.copytree(newest, kept)
    kinds: dict[str, pathlib.Path] = {}  # one file of each kind: the largest
    for file in sorted(
        (f for f in newest.rglob("*") if f.is_file() and f.stat().st_size), key=lambda f: f.stat().st_size
    ):
        parts = file.relative_to(newest).parts
        kinds["/".join(part if len(part) < 30 else "*" for part in parts)] = file.relative_to(newest)
    assert {"meta/metadata", "data/metadata", "params/ocdbt.process_0/d/*", "rest/manifest.ocdbt"} <= kinds.keys()

    outcomes = {}
    for kind, file in kinds.items():
        shutil.rmtree(copy / "checkpoints")
        shutil.copytree(world[0] / "checkpoints", copy / "checkpoints")
        DAMAGES[damage](newest / file)
        caplog.clear()
        found = restore(world, copy)
        tools.assert_same(tools.flat(found.state), world[3][found.step])
        assert found.data["next_batch"] == found.step
        warnings = [r.getMessage() for r in caplog.records if r.name == "mhar_jax"]
        if found.step == 3:
            assert not warnings, kind
        else:
            assert found.step == 2
            assert len(warnings) == 1, (kind, warnings)
            assert warnings[0].startswith(f"skipping checkpoint {newest}, which is cut short or damaged (")
            assert "\n" not in warnings[0]
            assert list_steps(copy / "checkpoints") == [1, 2], kind
            assert (copy / "checkpoints" / "3.damaged").is_dir(), "moved aside, not deleted"
        outcomes[kind] = found.step
    for kind in (
        "meta/metadata",
        "data/metadata",
        "params/ocdbt.process_0/d/*",
        "ema/manifest.ocdbt",
        "rest/_METADATA",
    ):
        assert outcomes[kind] == 2, kind


@pytest.mark.parametrize("item", ["params", "ema", "rest", "data", "meta", "."])
def test_a_missing_item_is_damage(world, tools, copy, item):
    missing = copy / "checkpoints" / "3" / item
    shutil.rmtree(missing)
    missing.mkdir(exist_ok=True)  # an empty directory is as good as none
    assert restore(world, copy).step == 2


@pytest.mark.parametrize(
    ("item", "digit", "changed"), [("data", '"next_batch": 3', '"next_batch": 7'), ("meta", '"seed": 42', '"seed": 43')]
)
def test_a_flipped_bit_that_still_reads_as_json(world, copy, item, digit, changed):
    """Not another config, and no skipped data: damage."""
    path = copy / "checkpoints" / "3" / item / "metadata"
    content = path.read_text()
    assert digit in content
    path.write_text(content.replace(digit, changed))
    assert restore(world, copy).step == 2


def test_reads_that_end_late_print_nothing(world, copy, monkeypatch):
    """tensorstore's threads may finish a cancelled read after its event loop is closed; other errors are still told."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda late: told.append(str(late.exc_value)))
    cut(copy / "checkpoints" / "3" / "params" / "manifest.ocdbt")
    for _ in range(2):
        with Checkpoints(copy) as checkpoints, contextlib.suppress(UserError):
            checkpoints.restore(world[2].shapes, world[1], "text")
            (copy / "checkpoints" / "2" / "params" / "manifest.ocdbt").unlink(missing_ok=True)
    late = lambda error: types.SimpleNamespace(exc_value=error)
    sys.unraisablehook(late(RuntimeError("Event loop is closed")))
    sys.unraisablehook(late(RuntimeError("something else")))
    assert told == ["something else"]


def test_a_step_set_aside_can_be_saved_again(world, tools, copy):
    cut(copy / "checkpoints" / "3" / "meta" / "metadata")
    for round_number in (1, 2):
        with Checkpoints(copy) as checkpoints:
            found = checkpoints.restore(world[2].shapes, world[1], "text")
            assert found.step == 2
            checkpoints.save({**found.state, "step": jnp.int32(3)}, world[1], DATA, "text")
        assert restore(world, copy).step == 3
        if round_number == 1:
            cut(copy / "checkpoints" / "3" / "data" / "metadata")
    names = {p.name for p in (copy / "checkpoints").iterdir()}
    assert names == {"1", "2", "3", "3.damaged", "3.damaged-2"}


def test_all_damaged_is_one_sentence_and_nothing_moves(world, copy):
    for step in (1, 2, 3):
        cut(copy / "checkpoints" / str(step) / "meta" / "metadata")
    with pytest.raises(UserError, match=r"none of the checkpoints in .* can be read \(steps 1, 2, 3\)"):
        restore(world, copy)
    assert list_steps(copy / "checkpoints") == [1, 2, 3]


def test_another_config_is_refused_with_the_fields(world, tools, copy):
    other = tools.config(optimizer={"peak_lr": 0.5, "beta1": 0.8}, log={"every": 7}, steps=100)
    with pytest.raises(UserError) as caught:
        restore(world, copy, other)
    assert "optimizer.peak_lr was 0.001 and is 0.5" in str(caught.value)
    assert "optimizer.beta1 was 0.9 and is 0.8" in str(caught.value)
    assert "log.every" not in str(caught.value)
    assert "steps" not in str(caught.value)


def test_other_data_is_refused(world, copy):
    with pytest.raises(UserError, match="other data"):
        restore(world, copy, fingerprint="another text")


def test_a_checkpoint_under_another_name_is_damage(world, copy):
    (copy / "checkpoints" / "3").rename(copy / "checkpoints" / "30")
    assert restore(world, copy).step == 2


def test_foreign_names_are_left_alone(world, copy):
    for name in ("notes.txt", "best", "007", "4.damaged"):
        (copy / "checkpoints" / name).mkdir()
    assert list_steps(copy / "checkpoints") == [1, 2, 3]
    assert restore(world, copy).step == 3
    assert (copy / "checkpoints" / "best").is_dir()


def test_a_full_memory_is_not_damage(world, copy, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("mhar_jax.training.checkpoints._read_arrays", full)
    with pytest.raises(MemoryError):
        restore(world, copy)
    assert list_steps(copy / "checkpoints") == [1, 2, 3]


def test_retention_keeps_the_newest(world, tools, tmp_path):
    state = world[2].init()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (5, 6, 7, 8):
            checkpoints.save({**state, "step": jnp.int32(step)}, world[1], DATA, "text")
    assert list_steps(tmp_path / "checkpoints") == [7, 8]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_never_saved(world, tmp_path, value):
    state = {**world[2].init(), "step": jnp.int32(4)}
    state["params"] = {**state["params"], "final_norm": state["params"]["final_norm"].at[3].set(value)}
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=r"after step 4 .* not finite"):
        checkpoints.save(state, world[1], DATA, "text")
    assert list_steps(tmp_path / "checkpoints") == []


def test_a_checkpoint_loads_on_another_mesh(world, tools, copy):
    trainer = tools.trainer(world[1], (2, 2, 2))
    with Checkpoints(copy) as checkpoints:
        found = checkpoints.restore(trainer.shapes, world[1], "text")
    tools.assert_same(tools.flat(found.state), world[3][3])
    assert found.state["params"]["embedding"].sharding == trainer.shapes["params"]["embedding"].sharding
    with Checkpoints(copy) as checkpoints:  # and what that mesh saves, one device reads
        checkpoints.save({**found.state, "step": jnp.int32(4)}, world[1], DATA, "text")
    assert restore(world, copy).step == 4
    a, b = (read_meta(copy / "checkpoints" / step)["checksums"] for step in ("3", "4"))
    assert {k: v for k, v in a.items() if k != "step"} == {k: v for k, v in b.items() if k != "step"}


def test_the_reader_for_models_takes_the_averaged_weights(world, tools, copy, caplog):
    shapes = lambda config: world[2].shapes["params"]
    config, step, params = read_params(copy, shapes)
    assert (config, step) == (world[1], 3)
    tools.assert_same(tools.flat({"ema": params}), {k: v for k, v in world[3][3].items() if k.startswith("ema/")})
    cut(copy / "checkpoints" / "3" / "ema" / "manifest.ocdbt")
    assert read_params(copy, shapes)[1] == 2
    assert len(caplog.records) == 1
    assert list_steps(copy / "checkpoints") == [1, 2, 3], "a reader moves nothing"


def test_checksums_see_every_bit_and_no_sharding(tools):
    values = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    expected = examine({"x": jnp.asarray(values)})
    bits = values.view(np.uint32)
    for bit in (0, 17, 31):
        bits[1, 7] ^= 1 << bit
        assert examine({"x": jnp.asarray(values)}).checksums != expected.checksums
        bits[1, 7] ^= 1 << bit
    assert examine({"x": jnp.asarray(values[:, ::-1])}).checksums != expected.checksums
    mesh = tools.trainer(tools.config(), (2, 2, 2)).mesh
    spread = jax.device_put(values, jax.NamedSharding(mesh, jax.P(None, ("data", "fsdp"))))
    assert examine({"x": spread}) == expected
    # By hand: the sum of bits times (2 · position + 1), modulo 2³².
    by_hand = int((bits.ravel().astype(object) * (2 * np.arange(120) + 1)).sum()) % 2**32
    assert expected.checksums == {"x": by_hand}
    assert json_digest({"a": [1, 2], "b": 0.1}) == json_digest(json.loads('{"b": 0.1, "a": [1, 2]}'))


def test_a_save_that_was_cut_short_is_told_and_dropped(tmp_path, caplog):
    """What a kill in the middle of a save leaves behind."""
    unfinished = tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "params").write_text("half")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
    assert [r.getMessage() for r in caplog.records if r.name == "mhar_jax"] == [
        "the save of step 10 was not finished, so it is dropped for the one before it"
    ]
