"""What a chip can do at most, for utilisation figures. A chip that is not here gets none."""

import jax

# Dense bfloat16 peak of one JAX device, FLOP/s, from the vendors' data sheets. By the whole `device_kind`: a slice of a
# GPU ("NVIDIA H200 MIG 1g.18gb") and a slower model of the same name ("NVIDIA H200 NVL") are other chips.
_PEAK = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Dense bfloat16 FLOP/s of one device, or None for a chip that is not in the table."""
    return _PEAK.get(device.device_kind)


def memory_in_use() -> dict[str, int]:
    """Bytes in use and at the peak on the first local device, where the platform reports them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    named = {"memory_bytes": stats.get("bytes_in_use"), "memory_peak_bytes": stats.get("peak_bytes_in_use")}
    return {k: int(v) for k, v in named.items() if v is not None}
