"""TPU chips by name: what they hold and how fast they are, and the topology of a slice of them.

Figures are the vendor's, per chip: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
"""

from __future__ import annotations

import dataclasses
import re

from .errors import ConfigError

_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU."""

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    bfloat16_flops: float
    counted_in_cores: bool
    """Whether the number in a slice's name counts cores, of which a chip has two, as in v5p-8: four chips."""
    topologies: dict[int, str]
    """By the number of chips."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * 2**30, 1.228e12, 275e12, True, _CUBES),
        Chip("v5e", 16 * 2**30, 0.819e12, 197e12, False, _FLAT),
        Chip("v5p", 95 * 2**30, 2.765e12, 459e12, True, _CUBES),
        Chip("v6e", 32 * 2**30, 1.640e12, 918e12, False, _FLAT),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """So many chips of a kind, as `v5e-8` names them."""

    name: str
    chip: Chip
    num_chips: int

    @property
    def topology(self) -> str:
        """As the TPU compiler takes it. One chip is compiled for as one of the smallest slice."""
        return f"{self.chip.name}:{self.chip.topologies[max(self.num_chips, 4)]}"


def parse_slice(name: str) -> Slice:
    """The slice of that name; ConfigError names what there is."""
    found = re.fullmatch(r"(\w+)-(\d+)", name)
    chip = CHIPS.get(found[1]) if found else None
    if found is None or chip is None:
        raise ConfigError(
            f"chip {name!r}: expected one of {', '.join(CHIPS)} and a number, as in v5e-8 or v5p-8"
        )
    number = int(found[2])
    num_chips = number // 2 if chip.counted_in_cores else number
    if (chip.counted_in_cores and number % 2) or (num_chips != 1 and num_chips not in chip.topologies):
        numbers = [count * (2 if chip.counted_in_cores else 1) for count in (1, *chip.topologies)]
        raise ConfigError(f"chip {name!r}: a slice of {chip.name} has one of {', '.join(map(str, numbers))}")
    return Slice(name, chip, num_chips)
