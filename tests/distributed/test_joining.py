"""How processes find each other, which part of a batch each reads, and meshes over slices."""

import dataclasses
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from mhar_jax import distributed, sharding
from mhar_jax.config.schema import MeshConfig
from mhar_jax.distributed import find_processes
from mhar_jax.errors import UserError
from mhar_jax.training.main import take_options
from tests import commands

PLACE = {"coordinator": "host:1234", "processes": "4", "process": "2"}


def test_options_and_environment():
    found = find_processes(PLACE | {"peer_timeout": "5"}, {})
    assert found is not None
    assert (found.coordinator, found.count, found.index, found.peer_timeout) == ("host:1234", 4, 2, 5.0)
    names = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert find_processes({}, names).index == 1
    assert find_processes({"distributed": "off"}, names) is None
    assert find_processes({}, {}) is None
    assert find_processes(PLACE | {"processes": "1", "process": "0"}, {}) is None
    assert find_processes({}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}).count is None, "JAX reads the rest"
    assert find_processes({}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_processes({}, {"TPU_WORKER_HOSTNAMES": "a,b"}) is not None
    assert find_processes({"distributed": "on"}, {}) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": "4"}, "go together"),
        ({"coordinator": "host:1"}, "go together"),
        (PLACE | {"process": "4"}, "from 0 to --processes - 1 = 3, got 4"),
        (PLACE | {"processes": "x"}, "--processes must be a number"),
        (PLACE | {"coordinator": "host"}, "HOST:PORT"),
        (PLACE | {"coordinator": "host:99999"}, "a port from 1 to 65535, got 'host:99999'"),
        (PLACE | {"coordinator": "host:0"}, "a port from 1 to 65535"),
        (PLACE | {"peer_timeout": "0"}, "at least 1 second"),
        ({"distributed": "maybe"}, "auto, on or off"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UserError, match=words):
        find_processes(options, {})


WAITING = """
import time
from mhar_jax import distributed
with distributed._found_within(0.5, distributed.Processes("localhost:1", 2, 1)):
    time.sleep(60)  # as JAX waits
"""


def test_a_process_that_waits_alone_ends_with_a_sentence():
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 3, done
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: the processes of the run did not find each other: process 0 does not answer at ")


def test_found_in_time_is_not_ended(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(distributed, "_not_found", lambda reason: ended.set())
    with distributed._found_within(0.2, distributed.Processes("localhost:1", 2, 1)):
        pass
    assert not ended.wait(0.6)


def test_a_host_that_nobody_knows():
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"no host 'no-such-host\.invalid' was known for 1 s"):
        distributed._resolve("no-such-host.invalid:1234", 1)
    assert time.monotonic() - begun >= 1
    distributed._resolve("localhost:1234", 0)
    distributed._resolve("[::1]:1234", 0)


class Standing:
    """A coordination service that takes calls and does not answer."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def key_value_set(self, *_, **__):
        self.released.wait(60)


def test_a_coordinator_that_stands_still_is_noticed_in_time(monkeypatch):
    """JAX's own calls would wait for it for about a minute."""
    said: list[tuple[str, float]] = []
    noticed = threading.Event()

    def lost(self, sentence):
        said.append((sentence, time.monotonic()))
        self._ended.set()
        noticed.set()

    monkeypatch.setattr(distributed.Peers, "lost", lost)
    client, begun = Standing(), time.monotonic()
    peers = distributed.Peers(client, 1, 2, distributed.Processes("localhost:1", 2, 1, peer_timeout=1))
    assert noticed.wait(20)
    client.released.set()
    peers.close()
    ((sentence, when),) = said
    assert "process 0, which coordinates the 2, does not answer: nothing was heard for 1 s" in sentence
    assert 0.9 <= when - begun < 10


def test_options_are_told_from_fields():
    rest, options = take_options(["tiny", "--steps=3", "--process", "1", "--dry-run", "--peer-timeout=9"])
    assert rest == ["tiny", "--steps=3"]
    assert options == {"process": "1", "dry_run": "true", "peer_timeout": "9"}
    with pytest.raises(UserError, match="--coordinator needs a value"):
        take_options(["--coordinator"])


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as a mesh looks at."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize(
    ("owners", "sizes", "parts"),
    [
        ([0, 0, 1, 1], (4, 1, 1, 1), [(0, 2), (1, 2)]),
        ([0, 1, 0, 1], (4, 1, 1, 1), [(0, 2), (1, 2)]),  # a process's devices are no neighbours
        ([0, 1, 2, 3], (2, 1, 1, 2), [(0, 2), (0, 2), (1, 2), (1, 2)]),  # tensor spans two processes
        ([0, 1, 2, 3], (2, 1, 2, 1), [(0, 2), (0, 2), (1, 2), (1, 2)]),  # context does
        ([0, 1, 2, 3], (1, 1, 1, 4), [(0, 1)] * 4),
        ([0, 0, 1, 1], (1, 2, 1, 2), [(0, 2), (1, 2)]),
    ],
)
def test_each_process_reads_the_rows_of_its_devices(monkeypatch, owners, sizes, parts):
    placed = np.array([Device(i, owner) for i, owner in enumerate(owners)]).reshape(sizes)
    split = sizes[0] * sizes[1]

    class Sharding:
        def __init__(self, mesh, spec):
            pass

        def devices_indices_map(self, shape):
            rows = shape[0] // split
            by_row = placed.reshape(split, -1)
            return {d: (slice(i * rows, (i + 1) * rows),) for i in range(split) for d in by_row[i]}

    monkeypatch.setattr(sharding, "NamedSharding", Sharding)
    mesh = types.SimpleNamespace(shape=dict(zip(sharding.AXES, sizes, strict=True)))
    for process, expected in enumerate(parts):
        monkeypatch.setattr(jax, "process_index", lambda p=process: p)
        share = sharding.data_share(mesh, 8)
        assert (share["process_index"], share["process_count"]) == expected


def test_rows_that_overlap_in_part_are_refused(monkeypatch):
    devices = [Device(0, 0), Device(1, 0), Device(2, 1)]
    rows = {devices[0]: (slice(0, 4),), devices[1]: (slice(4, 8),), devices[2]: (slice(4, 8),)}
    monkeypatch.setattr(
        sharding, "NamedSharding", lambda mesh, spec: types.SimpleNamespace(devices_indices_map=lambda shape: rows)
    )
    with pytest.raises(UserError, match="overlap or differ in size"):
        sharding.data_share(types.SimpleNamespace(shape={"data": 2}), 8)


@pytest.mark.parametrize(
    ("sizes", "across"),
    [
        ((8, 1, 1, 1), 0),
        ((2, 4, 1, 1), 0),
        ((1, 4, 1, 2), 1),
        ((4, 1, 1, 2), 0),
        ((1, 2, 2, 2), 1),
        ((2, 1, 4, 1), 0),
    ],
)
def test_only_data_and_fsdp_cross_slices(sizes, across):
    """Eight devices in two slices: along one axis the first half of the mesh is one slice, the second the other."""
    devices = [Device(i, i // 4, i // 4) for i in range(8)]
    placed = sharding._placed(dict(zip(sharding.AXES, sizes, strict=True)), devices)
    assert placed.shape == sizes
    halves = np.split(placed, 2, axis=across)
    assert [{d.slice_index for d in half.flat} for half in halves] == [{0}, {1}]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (1, 1, 8, 1), (1, 1, 2, 4)])
def test_context_and_tensor_do_not_cross_slices(sizes):
    devices = [Device(i, i // 4, i // 4) for i in range(8)]
    with pytest.raises(UserError, match="multiple of the 2 slices"):
        sharding._placed(dict(zip(sharding.AXES, sizes, strict=True)), devices)


def test_a_mesh_of_one_slice_has_all_devices():
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2), jax.devices())
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}
