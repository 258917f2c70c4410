"""The table of devices, by the names that torch gives them."""

from __future__ import annotations

import pytest

from dit.device_specs import DEVICES, device_named, peak_flops


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 PCIe", None),
        ("CPU", None),
    ],
)
def test_peak_of_a_device(name, flops):
    assert peak_flops(name) == flops


def test_a_device_is_found_by_its_name():
    assert device_named("NVIDIA H200") is DEVICES["h200"]
    assert device_named("NVIDIA H200 NVL") is device_named("CPU") is None
