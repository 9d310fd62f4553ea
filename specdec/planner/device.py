"""What a device does per second and holds, as its vendor states it."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import ConfigError
from specdec.planner.names import choose

_GB, _T = 10**9, 10**12  # vendors' gigabytes are decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. `flops_per_s` has dense products only: vendors' figures "with sparsity" are twice that."""

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float]  # number format -> FLOP/s, accumulating in fp32
    source: str
    measured: bool = False
    is_cpu: bool = False

    def __post_init__(self) -> None:
        figures = {"memory": self.memory_bytes, "bandwidth": self.bandwidth_bytes_per_s}
        for what, value in (figures | {f"rate in {dtype}": rate for dtype, rate in self.flops_per_s.items()}).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"device {self.name!r} has a {what} of {value}; allowed: a finite number above 0")

    def rate(self, dtype: str) -> float:
        """Return FLOP/s of dense products in a number format.

        Raises:
            ConfigError: the device does not compute in it.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"{self.title} has no dense rate in {dtype}; available: {', '.join(self.flops_per_s)}. "
                "Give one of them as --dtype, or the rate in this one as --flops"
            )
        return self.flops_per_s[dtype]

    def balance(self, dtype: str) -> float:
        """Return the FLOPs per byte at which arithmetic takes as long as reading: below it memory bounds."""
        return self.rate(dtype) / self.bandwidth_bytes_per_s


def _device(
    name: str, title: str, memory_gb: float, gb_per_s: float, tflops: dict[str, float], source: str
) -> tuple[str, Device]:
    return name, Device(
        name=name,
        title=title,
        memory_bytes=round(memory_gb * _GB),
        bandwidth_bytes_per_s=gb_per_s * _GB,
        flops_per_s={dtype: value * _T for dtype, value in tflops.items()},
        source=source,
    )


def _half(half: float, single: float) -> dict[str, float]:
    """Return rates in TFLOP/s. fp32 is that of ordinary units: torch leaves TF32 off by default."""
    return {"fp16": half, "bf16": half, "fp32": single}


# Where a vendor's documents disagree, the faster figure: a floor must not be above what the device can do.
DEVICES: dict[str, Device] = dict(
    (
        _device(
            *("h200", "NVIDIA H200 SXM", 141, 4800, _half(989.5, 67)),
            "NVIDIA H200 Tensor Core GPU datasheet (2024), 1,979 TFLOP/s with sparsity, halved",
        ),
        _device(
            *("h100", "NVIDIA H100 SXM 80 GB", 80, 3350, _half(989.5, 67)),
            "NVIDIA H100 Tensor Core GPU datasheet (2023), 1,979 TFLOP/s with sparsity, halved",
        ),
        _device(
            *("h100-pcie", "NVIDIA H100 PCIe 80 GB", 80, 2000, _half(756.5, 51)),
            "NVIDIA H100 Tensor Core GPU datasheet (2022), 1,513 TFLOP/s with sparsity, halved",
        ),
        _device(
            *("a100-80gb", "NVIDIA A100 SXM 80 GB", 80, 2039, _half(312, 19.5)),
            "NVIDIA A100 Tensor Core GPU datasheet (2021)",
        ),
        _device(
            *("a100-40gb", "NVIDIA A100 SXM 40 GB", 40, 1555, _half(312, 19.5)),
            "NVIDIA A100 Tensor Core GPU datasheet (2020)",
        ),
        _device(
            *("l40s", "NVIDIA L40S", 48, 864, _half(366.5, 91.6)),
            "NVIDIA L40S datasheet (2023), 733 TFLOP/s with sparsity, halved; it prints 362.05 without",
        ),
        _device(
            *("l4", "NVIDIA L4", 24, 300, _half(121, 30.3)),
            "NVIDIA L4 Tensor Core GPU datasheet (2023), 242 TFLOP/s with sparsity, halved",
        ),
        _device(*("a10", "NVIDIA A10", 24, 600, _half(125, 31.2)), "NVIDIA A10 Tensor Core GPU datasheet (2021)"),
        _device(
            *("t4", "NVIDIA T4", 16, 320, {"fp16": 65, "fp32": 8.1}),
            "NVIDIA T4 product brief (2020); rates of the datasheet (2019), which has 300 GB/s; it computes no bf16",
        ),
        _device(
            *("rtx4090", "NVIDIA GeForce RTX 4090", 24, 1008, _half(165.2, 82.6)),
            "NVIDIA Ada GPU architecture whitepaper (2022), appendix A, fp16 with fp32 accumulation",
        ),
        _device(
            *("rtx3090", "NVIDIA GeForce RTX 3090", 24, 936, _half(71, 35.6)),
            "NVIDIA Ampere GA102 GPU architecture whitepaper (2020), appendix A, fp16 with fp32 accumulation",
        ),
        _device(
            *("mi300x", "AMD Instinct MI300X", 192, 5300, _half(1307.4, 163.4)),
            "AMD Instinct MI300X accelerator data sheet (2023)",
        ),
        _device(
            *("m1-max", "Apple M1 Max, 32 GPU cores, 64 GB", 64, 400, {"fp16": 10.4, "fp32": 10.4}),
            "apple.com/newsroom (18 October 2021) but for the rate, an estimate by Notebookcheck for fp32 (2021)",
        ),
        _device(
            *("generic-1tb", "a card of 1 TB/s, 100 TFLOP/s and 80 GB", 80, 1000, _half(100, 50)),
            "round numbers, for arithmetic on paper",
        ),
    )
)
ALIASES = {
    "a100": "a100-80gb",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "a100-80": "a100-80gb",
    "a100-40": "a100-40gb",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "generic": "generic-1tb",
    "1tb/s": "generic-1tb",
}
THIS = "this"


def device_names() -> list[str]:
    """Return every name that --device takes."""
    return [THIS, *DEVICES, *ALIASES]


def find_device(name: str) -> Device:
    """Return a device of the table.

    Raises:
        ConfigError: there is none of that name; the message has the nearest.
    """
    spelled = "-".join(name.strip().lower().replace("_", "-").split())
    spelled = ALIASES.get(spelled, ALIASES.get(spelled.replace("-", ""), spelled))
    if spelled.replace("-", "") in DEVICES:
        spelled = spelled.replace("-", "")
    if spelled in DEVICES:
        return DEVICES[spelled]
    advice = "your own: --bandwidth --flops --memory"
    try:
        choose("device", name, [THIS, *DEVICES])
    except ConfigError as error:
        raise ConfigError(f"{error}; {advice}") from None
    raise ConfigError(f"device {name!r} is measured, not looked up: call this_device()")


_LEAST, _MOST = 1e-6, 1e9  # of each figure in its unit: beyond, times are no numbers any more


def custom_device(
    dtype: str, *, memory_gb: float, bandwidth_gb_per_s: float, tflops: float, base: Device | None = None
) -> Device:
    """Return a device of the user's own figures, for one number format.

    Args:
        dtype: the format that `tflops` is for.
        memory_gb: 10^9 bytes.
        bandwidth_gb_per_s: 10^9 bytes per second.
        tflops: 10^12 floating-point operations per second of dense products.
        base: whose other figures stay, if it is a variant of a known one.

    Raises:
        ConfigError: a figure is not above 0.
    """
    for what, value, unit, flag in (
        ("memory", memory_gb, "GB", "--memory"),
        ("bandwidth", bandwidth_gb_per_s, "GB/s", "--bandwidth"),
        (f"rate in {dtype}", tflops, "TFLOP/s", "--flops"),
    ):
        if not _LEAST <= value <= _MOST:
            raise ConfigError(
                f"your own device has a {what} of {value:g} {unit} ({flag}); allowed: {_LEAST:f} to {_MOST:,.0f} {unit}"
            )
    known = {} if base is None else base.flops_per_s
    return Device(
        name="custom",
        title="your own device" if base is None else f"{base.title}, changed",
        memory_bytes=round(memory_gb * _GB),
        bandwidth_bytes_per_s=bandwidth_gb_per_s * _GB,
        flops_per_s={**known, dtype: tflops * _T},
        source="given" if base is None else f"given; the rest {base.source}",
        is_cpu=base is not None and base.is_cpu,
    )
