"""Traces as GPUs and TPUs write them, reduced to groups of kernels; that of a CPU is in test_commands.py."""

import pathlib

import jax
import pytest

from mhar_jax.bench import breakdown, profile
from mhar_jax.bench.instructions import GROUPS, Program

pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")

# As `compiled.as_text()` has it: instructions name a frame, frames a place in a file and their caller's number plus 1.
PROGRAM = (pathlib.Path(__file__).parent / "program.hlo.txt").read_text()


def trace(folder, plane, line, events):
    """Writes (kernel, instruction or None, begin in µs, length in µs) as the profiler does."""
    kernels = list(dict.fromkeys(name for name, *_ in events))
    text = f'planes {{ id: 1 name: "{plane}" lines {{ id: 1 name: "{line}" timestamp_ns: 5000\n'
    for name, instruction, begin, length in events:
        says = "" if instruction is None else f'stats {{ metadata_id: 1 str_value: "{instruction}" }}'
        at = f"offset_ps: {int(begin * 1e6)} duration_ps: {int(length * 1e6)}"
        text += f"events {{ metadata_id: {kernels.index(name) + 1} {at} {says} }}\n"
    text += "}\n"
    for i, name in enumerate(kernels, 1):
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
    text += 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }'
    place = folder / "plugins" / "profile" / "2026_11_30"
    place.mkdir(parents=True)
    (place / "host.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    return str(folder)


KERNELS = [
    # kernel, what the trace says it belongs to, µs, µs; the group it is of
    ("merge_kernel", "custom-call.2", 0, 10, "routing"),
    ("gemm_fusion_dot_1", "gemm_fusion_dot.1", 10, 5, "matmuls"),  # attention's output projection
    ("nvjet_tst_64x8", "custom-call.3", 20, 5, "attention"),  # after a gap of 5
    ("input_reduce_fusion_7", None, 22, 8, "attention"),  # 3 of its 8 beside the one before; by its name
    ("loop_multiply_fusion_4", "call.5", 30, 2, "other"),  # from a graph: the call says nothing, its name does
    ("sm90_xmma_gemm_bf16", None, 32, 4, "matmuls"),
    ("cudnn_generated_fort_native_sdpa", "nothing.1", 36, 4, "attention"),
    ("finish_kernel", None, 40, 10, "routing"),
    ("MemcpyD2D", None, 50, 1, "copies"),
    ("wrapped_add", None, 59, 1, "other"),  # after a gap of 8
]


def test_groups_of_a_gpu_trace(tmp_path):
    folder = trace(tmp_path, "/device:GPU:0", "Stream #16(Compute)", [row[:4] for row in KERNELS])
    found = breakdown.break_down(profile.device_events(folder), Program(PROGRAM), per=10)
    assert {name: group for group, name in (full.split(": ") for full in found.kernels)} == {
        kernel: group for kernel, *_, group in KERNELS
    }
    milliseconds = {"routing": 20, "matmuls": 9, "attention": 14, "other": 3, "copies": 1}
    assert found.groups == pytest.approx({name: us * 1e-4 for name, us in milliseconds.items()})
    assert found.idle == pytest.approx(13e-4)
    assert found.span == pytest.approx(60e-4)
    assert found.launches == 1.0
    assert next(iter(found.kernels)) in ("routing: merge_kernel", "routing: finish_kernel")
    assert found.kernels["routing: merge_kernel"] == pytest.approx((10e-4, 0.1))


def test_what_holds_others_has_no_time_of_its_own(tmp_path):
    """TPUs list a loop and what runs in it on one line."""
    events = [
        ("%while.6 = bf16[8,8]{1,0} while(%x)", None, 0, 10),
        ("%custom-call.2 = (bf16[8,8]{1,0}) custom-call(%x)", None, 1, 4),
        ("%input_reduce_fusion.7 = f32[8]{0} fusion(%x)", None, 6, 3),
    ]
    folder = trace(tmp_path, "/device:TPU:0", "XLA Ops", events)
    found = breakdown.break_down(profile.device_events(folder), Program(PROGRAM))
    assert found.groups == pytest.approx(dict.fromkeys(GROUPS, 0.0) | {"routing": 4e-3, "attention": 3e-3})
    assert found.idle == pytest.approx(1e-3)
    assert list(found.kernels) == ["routing: custom-call.2", "attention: input_reduce_fusion.7"]


def test_a_trace_without_kernels(tmp_path):
    folder = trace(tmp_path, "/host:CPU", "python", [("print", None, 0, 1)])
    assert profile.device_events(folder) == profile.device_events(folder, cpu=True) == []
    assert breakdown.break_down([], Program("")).span == 0
