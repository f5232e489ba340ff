"""Dense peaks of the matrix units from the vendors' datasheets, which XLA's target configs do not state."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Measured only on the H200; used for every GPU until others are measured.
LAUNCH_OVERHEAD_US = 2.4
LAUNCH_OVERHEAD_SOURCE = "launch overhead 2.4 µs: gap between kernels of a scan, measured on an H200"


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense peak FLOP/s (or OP/s) by element type; f32 is the matrix units' TF32 rate, which XLA's GEMMs may use."""

    matrix_flops: tuple[tuple[str, float], ...]
    vector_flops: float
    link_bandwidth: float
    """Bytes per second to the other GPUs of a host, in one direction: half of the sum that datasheets state."""
    source: str


def _tera(**teraflops: float) -> tuple[tuple[str, float], ...]:
    return tuple((name, value * 1e12) for name, value in teraflops.items())


_NVLINK_3 = 300e9
"""NVIDIA A100 datasheet: NVLink 600 GB/s, both directions together; 12 links of 25 GB/s each way."""
_NVLINK_4 = 450e9
"""NVIDIA H100 and H200 datasheets (SXM): NVLink 900 GB/s, both directions together; 18 links of 25 GB/s each way."""
_NVLINK_5 = 900e9
"""NVIDIA HGX B200 datasheet: NVLink 1.8 TB/s a GPU, both directions together; 18 links of 50 GB/s each way."""
_PCIE_4 = 32e9
"""PCI Express 4.0 x16, one direction. The RTX A6000's NVLink bridge (112 GB/s, its datasheet) joins only two cards."""
_PCIE_5 = 64e9
"""PCI Express 5.0 x16, one direction: the RTX PRO 6000 has no NVLink (its datasheet)."""

_H200 = Peaks(
    matrix_flops=_tera(bf16=989.4, f16=989.4, f32=494.7, f64=66.9, f8=1978.9, s8=1978.9),
    vector_flops=66.9e12,
    link_bandwidth=_NVLINK_4,
    source="NVIDIA H200 datasheet (SXM), dense: half the sparse figures",
)
_A100 = Peaks(
    matrix_flops=_tera(bf16=312.0, f16=312.0, f32=156.0, f64=19.5, s8=624.0),
    vector_flops=19.5e12,
    link_bandwidth=_NVLINK_3,
    source="NVIDIA A100 datasheet (SXM 80 GB), dense",
)

PEAKS: dict[str, Peaks] = {
    "NVIDIA H200": _H200,
    "NVIDIA H100 80GB HBM3": replace(_H200, source="NVIDIA H100 datasheet (SXM5), dense: half the sparse figures"),
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-SXM4-40GB": replace(_A100, source="NVIDIA A100 datasheet (SXM 40 GB), dense"),
    "NVIDIA B200": Peaks(
        matrix_flops=_tera(bf16=2250.0, f16=2250.0, f32=1125.0, f64=37.0, f4=9000.0, f8=4500.0, s8=4500.0),
        vector_flops=75e12,
        link_bandwidth=_NVLINK_5,
        source="NVIDIA HGX B200 datasheet, one GPU of eight, dense: half the sparse figures",
    ),
    "NVIDIA RTX A6000": Peaks(
        matrix_flops=_tera(bf16=154.8, f16=154.8, f32=77.4, s8=309.7),
        vector_flops=38.7e12,
        link_bandwidth=_PCIE_4,
        source="NVIDIA Ampere GA102 whitepaper (RTX A6000), dense",
    ),
    "NVIDIA RTX PRO 6000 Blackwell": Peaks(
        matrix_flops=_tera(bf16=503.8, f16=503.8, f32=251.9, f4=2015.2, f8=1007.6, s8=1007.6),
        vector_flops=125.9e12,
        link_bandwidth=_PCIE_5,
        source="NVIDIA RTX Blackwell PRO whitepaper (RTX PRO 6000 workstation edition), dense",
    ),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Returns the peaks of a GPU by the name it reports; a name that starts with a known one matches it."""
    near = [name for name in PEAKS if device_name.startswith(name)]
    return PEAKS[max(near, key=len)] if near else None
