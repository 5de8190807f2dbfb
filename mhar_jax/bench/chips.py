"""What a TPU chip offers by its data sheet, for estimates of a step that no chip has run."""

from typing import NamedTuple

from mhar_jax.errors import UserError


class Chip(NamedTuple):
    """Of one chip; Google's system architecture pages (docs.cloud.google.com/tpu), read in November 2026."""

    flops: float  # dense bfloat16 FLOP/s
    hbm_bytes: float
    hbm_bandwidth: float  # bytes/s
    ici_bandwidth: float  # bytes/s out of a chip over all its links, as many in


_CHIPS = {
    "v4": Chip(275e12, 32 * 2**30, 1.2e12, 0.3e12),
    "v5e": Chip(197e12, 16 * 2**30, 0.819e12, 0.2e12),
    "v5p": Chip(459e12, 95 * 2**30, 2.765e12, 0.6e12),
    "v6e": Chip(918e12, 32 * 2**30, 1.64e12, 0.4e12),
}


class Roofline(NamedTuple):
    """The least time of a step if everything but one thing were free, for each thing; seconds."""

    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        """The largest: what it takes if all three overlap perfectly and each runs at the data sheet's rate."""
        return max(self)

    @property
    def bound_by(self) -> str:
        """The name of the largest."""
        return max(self._fields, key=lambda name: getattr(self, name))


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as v5e:16x16.

    Raises:
      UserError: there is no data sheet for it here.
    """
    name = topology.partition(":")[0]
    if name not in _CHIPS:
        raise UserError(f"estimates are known for topologies of {', '.join(_CHIPS)}, got {topology!r}")
    return _CHIPS[name]


def roofline(chip: Chip, *, flops: float, hbm_bytes: float, network_bytes: float) -> Roofline:
    """Of one chip's arithmetic, of what it reads and writes in HBM, and of what it sends to others."""
    return Roofline(flops / chip.flops, hbm_bytes / chip.hbm_bandwidth, network_bytes / chip.ici_bandwidth)
