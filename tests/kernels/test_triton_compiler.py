"""The real GPU compiler, on a CPU: cubins without spills, and the kernels inside lowered JAX programs."""

import re
import sys
import types
from importlib import metadata
from importlib.machinery import ModuleSpec

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import gpu_triton

from mhar_kernels import assume_platform, depth_route, triton_gpu, triton_launch
from mhar_kernels.triton_resources import example, resources

MODELS = [(9, 512, 4), (9, 1024, 8), (9, 1280, 8), (9, 4096, 8)]  # the paper's three widths, and 8B


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.exhaustive), 90, pytest.param(100, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("n", "dim", "heads"), MODELS)
def test_compiles_to_machine_code_without_spills(n, dim, heads, direction, capability, record_property):
    delta = dict(has_null=True, has_residual=True, has_gate=True) if dim == 4096 else {}
    found = resources(example(n, dim, heads, stacked=False, **delta), direction, capability)
    record_property(
        "measured",
        f"sm_{capability:<3} {direction:8} {n} x {dim:4}, {heads} heads: {found.registers:3} registers, "
        f"{found.shared:5} bytes shared, {found.spilled} spilled, {found.warps} warps",
    )
    assert found.size > 0
    assert found.spilled == 0
    assert found.shared <= 48 * 1024
    assert found.narrow == 0  # rows move 16 bytes a lane, from and to separate arrays too


def test_a_spill_and_a_narrow_access_would_be_seen():
    tile = (("sources", 4), ("warps", 1), ("width", 256))
    assert resources(example(9, 2048, 1, stacked=True, tile=tile), "backward", 90).spilled > 0
    assert resources(example(9, 77, 7, stacked=True), "forward", 90).narrow > 0


class _Recorder:
    """Stands for jaxlib's CUDA extension, which is not there without the CUDA plugin, and notes what it is given."""

    def __init__(self):
        self.kernels = []

    def install(self, monkeypatch):
        recorder = self

        class TritonKernel:
            def __init__(self, name, warps, ctas, shared, binary, ttir, capability):
                recorder.kernels.append((name, binary, capability))
                self.name = name

        class TritonKernelCall:
            def __init__(self, kernel, x, y, z, parameters):
                self.kernel, self.parameters = kernel, parameters

            def to_proto(self, name, metadata):
                return f"{name} {self.kernel.name} {len(self.parameters)}".encode()

        stand_ins = dict(
            TritonKernel=TritonKernel,
            TritonKernelCall=TritonKernelCall,
            create_array_parameter=lambda *a: a,
            create_scalar_parameter=lambda *a: a,
            get_compute_capability=lambda device: 90,
            get_serialized_metadata=lambda *a: b"",
        )
        for name, value in stand_ins.items():
            monkeypatch.setattr(gpu_triton, name, value, raising=False)
        for module in [m for m in sys.modules if m.split(".")[0] == "jax_triton"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(triton_launch, "gpu", lambda: None)
        return self


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # jax-triton sets it on import; this undoes it after the test
    return _Recorder().install(monkeypatch)


def lowered(f, *args) -> str:
    with assume_platform("gpu"):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> int:
    return len(re.findall(r"custom_call @triton_kernel_call", text))


@pytest.mark.parametrize("stacked", [True, False])
def test_the_lowered_program_holds_the_kernels(recorder, stacked):
    s = jnp.ones((9, 64, 128), jnp.bfloat16)
    sources = s if stacked else tuple(s)
    f = lambda s, q: depth_route(s, q, num_heads=4, implementation="triton")
    loss = lambda s, q: jnp.sum(f(s, q).astype(jnp.float32))
    assert calls(lowered(f, sources, jnp.ones(128))) == 1
    assert [name for name, *_ in recorder.kernels] == ["depth_route_forward"]
    assert calls(lowered(jax.grad(loss, (0, 1)), sources, jnp.ones(128))) == 2
    assert {name for name, *_ in recorder.kernels} == {"depth_route_forward", "depth_route_backward"}
    assert all("st.global" in binary for _, binary, _ in recorder.kernels)


def test_under_remat_the_forward_kernel_runs_twice(recorder):
    s = jnp.ones((4, 64, 128), jnp.bfloat16)
    f = lambda s, q: jnp.sum(depth_route(s, q, num_heads=4, implementation="triton").astype(jnp.float32) ** 2)
    assert calls(lowered(jax.value_and_grad(f, (0, 1)), s, jnp.ones(128))) == 2
    assert calls(lowered(jax.value_and_grad(jax.checkpoint(f), (0, 1)), s, jnp.ones(128))) == 3


def test_no_copy_of_separate_sources_reaches_the_program(recorder):
    sources = tuple(jnp.ones((9, 64, 128), jnp.bfloat16))
    text = lowered(
        jax.grad(lambda s, q: jnp.sum(depth_route(s, q, num_heads=4).astype(jnp.float32)), (0, 1)),
        sources,
        jnp.ones(128),
    )
    assert calls(text) == 2  # and triton is the default on a GPU
    assert "concatenate" not in text
    assert "tensor<9x64x128" not in text


def test_models_of_every_depth_share_kernels(recorder):
    f = lambda s, q: depth_route(s, q, num_heads=4, implementation="triton")
    for n in range(2, 13):
        lowered(f, tuple(jnp.ones((n, 8, 128), jnp.bfloat16)), jnp.ones(128))
    assert len(recorder.kernels) <= 4  # pointer counts 2, 4, 8, 12


def test_works_with_either_name_of_the_output_argument(monkeypatch):
    """jax-triton 0.4 calls `out_shape` `out_type`."""
    seen = {}

    def triton_call(*args, kernel, out_type, grid, **kw):
        seen.update(kw, out=out_type)
        return [jnp.zeros(o.shape, o.dtype) for o in out_type]

    module = types.ModuleType("jax_triton")
    module.__spec__, module.triton_call = ModuleSpec("jax_triton", None), triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    with assume_platform("gpu"):
        depth_route(jnp.ones((3, 4, 8)), jnp.ones(8), num_heads=2, implementation="triton")
    assert seen["out"][0].shape == (4, 8)


def test_says_which_package_is_missing(monkeypatch):
    monkeypatch.setattr(triton_gpu.importlib.util, "find_spec", lambda name: None)
    assert "mhar-jax[gpu]" in triton_gpu.unsupported(example(9, 64, 4, stacked=True))


def test_the_installed_pair_is_one_we_know():
    assert metadata.version("jax-triton") >= "0.3.1"
    assert metadata.version("triton") >= "3.6"
