"""Data-sheet figures of accelerators."""

from __future__ import annotations

from dataclasses import dataclass

_TB, _GB = 1e12, 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Data-sheet figures of an NVIDIA accelerator in its usual server."""

    flops: float
    """Dense bfloat16 FLOP/s of matrix products."""
    memory: float
    """Device memory in bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    link: float
    """Bytes per second to devices of the same server (NVLink), one way."""
    network: float
    """Bytes per second to other servers, one way, by one port of 400 Gb/s (A100: 200 Gb/s) per
    device."""
    host: float
    """Bytes per second from host memory, one way: PCIe 4 or 5 x16; for a GB200 half of Grace's
    NVLink."""
    together: int
    """Number of devices that `link` connects."""


DEVICES = {
    "a100": Device(
        flops=312e12, memory=80 * _GB, bandwidth=2.04 * _TB, link=300 * _GB, network=25 * _GB,
        host=32 * _GB, together=8,
    ),
    "h100": Device(
        flops=989.4e12, memory=80 * _GB, bandwidth=3.35 * _TB, link=450 * _GB, network=50 * _GB,
        host=64 * _GB, together=8,
    ),
    "h200": Device(
        flops=989.4e12, memory=141 * _GB, bandwidth=4.8 * _TB, link=450 * _GB, network=50 * _GB,
        host=64 * _GB, together=8,
    ),
    "b200": Device(
        flops=2250e12, memory=180 * _GB, bandwidth=7.7 * _TB, link=900 * _GB, network=50 * _GB,
        host=64 * _GB, together=8,
    ),
    "gb200": Device(
        flops=2500e12, memory=186 * _GB, bandwidth=8.0 * _TB, link=900 * _GB, network=50 * _GB,
        host=225 * _GB, together=72,
    ),
}  # fmt: skip
_SLOWER = ("h100 pcie", "h100 nvl", "h200 nvl")
"""Slower boards, whose names contain the name of a device in `DEVICES`; they have no entry."""


def device_named(name: str) -> Device | None:
    """The entry of `DEVICES` for the device that torch calls `name`; None if there is no entry."""
    name = name.lower()
    if any(board in name for board in _SLOWER):
        return None
    longest_first = sorted(DEVICES, key=len, reverse=True)  # GB200 before B200
    return next((DEVICES[part] for part in longest_first if part in name), None)


def peak_flops(name: str) -> float | None:
    """bfloat16 FLOP/s of the device that torch calls `name`; None if `DEVICES` has no entry."""
    device = device_named(name)
    return device.flops if device else None
