"""Amounts of memory as people write and read them, and what a GPU has. Owns the table of GPUs and its sources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness_trainer.errors import ConfigError

GIB = 2**30
_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of the makers' data sheets, dense, without sparsity; memory is what the driver reports."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes/s
    half: float  # FLOP/s in bfloat16 (float16 where there is none)
    single: float  # FLOP/s in float32 outside tensor cores, which is what PyTorch uses by default


def _gpu(name: str, gib: float, gb_s: float, half: float, single: float) -> Gpu:
    return Gpu(name, int(gib * GIB), gb_s * 1e9, half * 1e12, single * 1e12)


# NVIDIA's data sheets of each product; memory as `nvidia-smi` shows it, rounded down.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 15, 320, 65, 8.1),
        _gpu("l4", 22, 300, 121, 30.3),
        _gpu("a10g", 22, 600, 70, 31.2),
        _gpu("l40s", 44, 864, 362, 91.6),
        _gpu("rtx4090", 23.5, 1008, 165, 82.6),
        _gpu("a100-40", 39.5, 1555, 312, 19.5),
        _gpu("a100-80", 79, 2039, 312, 19.5),
        _gpu("h100", 79, 3350, 989, 67),
        _gpu("h200", 139, 4800, 989, 67),
        _gpu("b200", 178, 8000, 2250, 80),
    )
}


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError with the names that are known."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ConfigError(
            f"GPU {name!r} is not in the table, choose from {', '.join(GPUS)}, or give --gpu-memory, e.g. 80GiB"
        ) from None


def parse_bytes(text: str) -> int:
    """Example: parse_bytes("80GiB") == 85899345920. Raises ConfigError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found.group(2).upper() not in _UNITS or float(found.group(1)) == 0:
        raise ConfigError(f"{text!r} is no amount of memory: give a number and MiB, GiB, MB or GB, e.g. 80GiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def gib(number: float | None) -> str:
    """Example: gib(2**30) == "1.00 GiB"; None is "unknown", never 0."""
    return "unknown" if number is None else f"{number / GIB:.2f} GiB"
