"""Several processes are one run: the same numbers as one process, one log, and an end for all when one is gone."""

import json
import pathlib
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.commands import losses, wait_for_step

pytestmark = pytest.mark.timeout(600)


def saved(run_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint, read without our code."""
    item = run_dir / "checkpoints" / str(step) / "params"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(item).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=kinds))
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}


def next_batch(run_dir: pathlib.Path, step: int) -> dict:
    """The saved state of the data."""
    return json.loads((run_dir / "checkpoints" / str(step) / "data" / "metadata").read_text())


def assert_equal(a: pathlib.Path, b: pathlib.Path, step: int) -> None:
    """Losses and parameters: float32 sums over devices in another order."""
    assert [x[:2] for x in losses(a)] == [x[:2] for x in losses(b)]
    np.testing.assert_allclose([x[2] for x in losses(a)], [x[2] for x in losses(b)], rtol=1e-6)
    got, expected = saved(a, step), saved(b, step)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        x, y = got[name].astype(np.float64), value.astype(np.float64)
        assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y), name
    # A softmax over one source is 1 whatever the query: the first site's gradient is 0 to the bit, not what rounding
    # leaves of it, of which Adam would make whole steps. So it stays at its initial 0, and the others do not.
    for queries in (got["routing/query"], expected["routing/query"]):
        assert np.count_nonzero(queries[0]) == 0
        assert np.count_nonzero(queries[1:]) == queries[1:].size
    assert next_batch(a, step) == next_batch(b, step)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Filled by the first test that needs it."""
    return tmp_path_factory.mktemp("alone") / "run"


def run_alone(launch, alone: pathlib.Path) -> pathlib.Path:
    """The run of one process."""
    if not (alone / "checkpoints" / "6").exists():
        assert [code for code, _, _ in launch(1, f"--run_dir={alone}").wait()] == [0]
    return alone


def test_two_processes_equal_one(launch, tmp_path):
    """The least of what the slow tests below do with more meshes, processes and steps."""
    few = ("--steps=3", "--checkpoint.every=0", "--eval.every=0")
    runs = {count: launch(count, f"--run_dir={tmp_path / str(count)}", *few) for count in (1, 2)}
    ends = [end for run in runs.values() for end in run.wait()]
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert "2 x cpu (cpu) of 2 processes, mesh data=2" in ends[1].out
    assert_equal(tmp_path / "2", tmp_path / "1", 3)


@pytest.mark.slow
def test_two_processes_equal_one_and_survive_a_lost_one(launch, alone, tmp_path):
    """Kill one; the other says so and ends; the same command continues; the end is that of one process."""
    expected = run_alone(launch, alone)
    run_dir = tmp_path / "run"
    run = launch(2, f"--run_dir={run_dir}", "--peer_timeout=10")
    while not (run_dir / "checkpoints" / "2").exists():
        assert all(process.poll() is None for process in run.processes), run.wait()
        time.sleep(0.005)
    run.processes[1].kill()
    killed = time.monotonic()
    code, out, err = run.wait()[0]
    assert time.monotonic() - killed < 60
    assert not (run_dir / "checkpoints" / "6").exists(), "killed too late to show anything"
    assert code == 3, (out, err)
    lines = [line for line in err.splitlines() if not line.startswith("WARNING")]
    assert len(lines) == 1, err
    # As the kill fell: in a collective, whose connection broke, or while a save waited.
    assert "process 0 of 2 lost another process" in lines[0] or "was heard for 10 s of process 1 of 2" in lines[0]
    assert "the same command in all processes" in lines[0]

    ends = launch(2, f"--run_dir={run_dir}").wait()
    assert [end[0] for end in ends] == [0, 0], ends
    assert "resuming after step" in ends[0][1]
    assert "2 x cpu (cpu) of 2 processes, mesh data=2" in ends[0][1]
    assert "step" not in ends[1][1], "one log"
    assert_equal(run_dir, expected, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (2, 2, ["--mesh.data=2", "--mesh.fsdp=2"]),
        (4, 1, ["--mesh.data=1", "--mesh.fsdp=4"]),
        (4, 1, ["--mesh.data=2", "--mesh.tensor=2"]),  # two processes share their rows
        (4, 1, ["--mesh.data=2", "--mesh.context=2"]),  # and their rows' sequences are split
        (2, 1, ["--mesh.data=1", "--mesh.tensor=2", "--data.tokenize_at_start_mb=0"]),
    ],
)
def test_processes_equal_one(launch, alone, tmp_path, count, devices, mesh):
    run_dir = tmp_path / "run"
    streams = [argument for argument in mesh if argument.startswith("--data")]
    if streams:
        alone = tmp_path / "alone"
        assert launch(1, f"--run_dir={alone}", *streams).wait()[0][0] == 0
    expected = run_alone(launch, alone)
    ends = launch(count, f"--run_dir={run_dir}", *mesh, devices=devices).wait()
    assert [end[0] for end in ends] == [0] * count, ends
    assert_equal(run_dir, expected, 6)


@pytest.mark.slow
def test_the_coordinator_is_lost(launch, tmp_path):
    run_dir = tmp_path / "run"
    run = launch(2, f"--run_dir={run_dir}", "--steps=4000", "--eval.every=0", "--checkpoint.every=0")
    wait_for_step(run_dir, 3, *run.processes)
    run.processes[0].kill()
    code, _, err = run.wait(60)[1]
    assert code == 3, err
    assert "Traceback" not in err
    assert "process 0, is gone" in err.strip().splitlines()[-1], "after JAX's own page"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "words"),
    [(1, "nothing was heard for 5 s of process 1 of 2"), (0, "process 0, which coordinates the 2, does not answer")],
    ids=["another", "coordinator"],
)
def test_a_process_that_stands_still(launch, tmp_path, stopped, words):
    run_dir = tmp_path / "run"
    more = ("--steps=4000", "--eval.every=0", "--checkpoint.every=0", "--peer_timeout=5")
    run = launch(2, f"--run_dir={run_dir}", *more)
    wait_for_step(run_dir, 3, *run.processes)
    run.processes[stopped].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    other = run.processes[1 - stopped]
    out, err = other.communicate(timeout=60)
    assert time.monotonic() - begun < 20, "5 s, two looks, and a busy machine"
    assert other.returncode == 3, (out, err)
    assert words in err
    run.processes[stopped].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "words"),
    [(0, "not all 2 of them came to localhost:"), (1, "process 0 does not answer at localhost:")],
    ids=["coordinator", "another"],
)
def test_the_other_does_not_come(launch, tmp_path, index, words):
    """JAX's own end of this is a page of log and an abort."""
    run = launch(2, f"--run_dir={tmp_path / 'run'}", "--peer_timeout=10", only=index)
    code, _, err = run.wait(60)[0]
    assert code == 3, err
    assert len(err.strip().splitlines()) == 1, err
    assert f"error: the processes of the run did not find each other: {words}" in err
    assert "within 10 s" in err


@pytest.mark.slow
def test_a_signal_to_one_saves_and_ends_all(launch, tmp_path):
    run_dir = tmp_path / "run"
    run = launch(2, f"--run_dir={run_dir}", "--steps=4000", "--eval.every=0", "--checkpoint.every=0")
    wait_for_step(run_dir, 3, *run.processes)
    run.processes[1].terminate()
    ends = run.wait(60)
    assert [end[0] for end in ends] == [0, 0], ends
    assert "stopped by a signal" in ends[0][1]
    assert len(list((run_dir / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_a_damaged_part_is_skipped_by_all(launch, alone, tmp_path):
    """A file that only one process reads is cut; all go back to the checkpoint before."""
    run_dir = tmp_path / "run"
    mesh = ("--mesh.data=1", "--mesh.fsdp=2")
    assert [end[0] for end in launch(2, f"--run_dir={run_dir}", *mesh).wait()] == [0, 0]
    parts = run_dir / "checkpoints" / "6" / "params" / "ocdbt.process_1" / "d"
    for file in parts.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    ends = launch(2, f"--run_dir={run_dir}", *mesh).wait()
    assert [end[0] for end in ends] == [0, 0], ends
    assert "resuming after step 4" in ends[0][1]
    assert_equal(run_dir, run_alone(launch, alone), 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh.data=3"], "needs 3 devices, and there are 2"),
        (["--batch_size=7"], "batch_size"),
    ],
)
def test_a_refused_run_is_refused_once(launch, tmp_path, arguments, words):
    run_dir = tmp_path / "run"
    ends = launch(2, f"--run_dir={run_dir}", *arguments).wait()
    assert [end[0] for end in ends] == [2, 2], ends
    assert words in ends[0][2]
    assert len(ends[0][2].strip().splitlines()) == 1
    assert not ends[1][2]
    assert not run_dir.exists()
