"""The GPUs that lptune knows: their names in torch, memory, and peak rates of GEMMs.

Peaks are those of dense GEMMs with the accumulators that lptune uses: float32 for bfloat16 and float8, int32
for INT8. Two things in data sheets mislead. They often print figures "with sparsity", which are twice the
dense ones; the figure here is then half of the printed one. And GeForce cards accumulate in float32 at half
the rate of float16: of the two float8 figures of an RTX 4090, 660.6 and 330.3, the second counts.

A device is found by its exact name, since "H100" is the name of three GPUs (SXM, PCIe, NVL) and part of other
names. A slice of a GPU (MIG) and a card for laptops or for one market have their own names and peaks. They
are listed only if their figures are published.

Of lptune it imports base and its own package alone, so that every part may ask.
"""

from dataclasses import dataclass

from lptune.base.errors import UserError, closest

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with float8 GEMMs: Ada, before Hopper."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Peaks are in FLOP/s (INT8: operations/s); None: the GPU has no such GEMM."""

    key: str = ""
    """Its name for `lptune plan --device`."""
    name: str
    """The result of torch.cuda.get_device_name, without "NVIDIA "."""
    memory_bytes: int
    """As in the data sheet: 80 GB are 80 * 10^9."""
    bandwidth: float | None = None
    """Of its memory, bytes/s, as in the data sheet; None: unknown."""
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""
    bf16: float = float("nan")
    int8: float = float("nan")
    float8: float | None = float("nan")
    source: str = ""
    """The source of the figures, with the figures as printed there."""

    def peak(self, fmt: str) -> float | None:
        """The peak for `fmt`: `bf16`, `int8`, `e4m3`, `e5m2`, or `e2m1`, whose peak no device has here yet.
        Raises KeyError for any other.
        """
        peaks = {"bf16": self.bf16, "int8": self.int8, "e4m3": self.float8, "e5m2": self.float8, "e2m1": None}
        return peaks[fmt]


def _device(
    key: str,
    name: str,
    memory: tuple[int, int],
    capability: tuple[int, int],
    tera: tuple[float, float, float | None],
    source: str,
) -> Device:
    """memory: GB, and GB/s as in the data sheet."""
    bf16, int8, float8 = tera
    memory_gb, bandwidth_gb = memory
    return Device(
        key=key,
        name=name,
        memory_bytes=memory_gb * 10**9,
        bandwidth=bandwidth_gb * 1e9,
        capability=capability,
        bf16=bf16 * 1e12,
        int8=int8 * 1e12,
        float8=None if float8 is None else float8 * 1e12,
        source=source,
    )


_A100 = "NVIDIA A100 Tensor Core GPU data sheet: BF16 312, INT8 624, dense"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, with sparsity: BF16 1,979, INT8 and FP8 3,958 (SXM)"
_NVL = "with sparsity: BF16 1,671, INT8 and FP8 3,341"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet, with sparsity: BF16 1,979, INT8 and FP8 3,958"
_BLACKWELL = "NVIDIA Blackwell (GB200 NVL72 and HGX B200) data sheet, one GPU, with sparsity"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, dense, FP32 accumulate"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, dense, FP32 accumulate"

DEVICES = (
    _device("a100-40gb", "A100-SXM4-40GB", (40, 1555), (8, 0), (312, 624, None), _A100),
    _device("a100", "A100-SXM4-80GB", (80, 2039), (8, 0), (312, 624, None), _A100),
    _device("a100-pcie-40gb", "A100-PCIE-40GB", (40, 1555), (8, 0), (312, 624, None), _A100),
    _device("a100-pcie", "A100 80GB PCIe", (80, 1935), (8, 0), (312, 624, None), _A100),
    _device("a30", "A30", (24, 933), (8, 0), (165, 330, None),
            "NVIDIA A30 data sheet: BF16 165, INT8 330, dense"),
    _device("a10", "A10", (24, 600), (8, 6), (125, 250, None),
            "NVIDIA A10 data sheet: BF16 125, INT8 250, dense"),
    _device("a10g", "A10G", (24, 600), (8, 6), (70, 140, None),
            "NVIDIA A10G data sheet (AWS): BF16 70, INT8 140, dense"),
    _device("a40", "A40", (48, 696), (8, 6), (149.7, 299.3, None),
            "NVIDIA A40 data sheet: BF16 149.7, INT8 299.3, dense"),
    _device("a6000", "RTX A6000", (48, 768), (8, 6), (154.8, 309.7, None),
            f"{_GA102}: RTX A6000 BF16 154.8, INT8 309.7"),
    _device("3090", "GeForce RTX 3090", (24, 936), (8, 6), (71, 284, None),
            f"{_GA102}: RTX 3090 BF16 71, INT8 284"),
    _device("l4", "L4", (24, 300), (8, 9), (121, 242.5, 242.5),
            "NVIDIA L4 data sheet, with sparsity: BF16 242, INT8 and FP8 485"),
    _device("l40", "L40", (48, 864), (8, 9), (181.05, 362, 362),
            "NVIDIA L40 data sheet: BF16 181.05, INT8 and FP8 362, dense"),
    _device("l40s", "L40S", (48, 864), (8, 9), (362.05, 733, 733),
            "NVIDIA L40S data sheet: BF16 362.05, INT8 and FP8 733, dense"),
    _device("6000-ada", "RTX 6000 Ada Generation", (48, 960), (8, 9), (364.25, 728.5, 728.5),
            f"{_ADA}: RTX 6000 Ada BF16 364.25, INT8 and FP8 728.5"),
    _device("4080", "GeForce RTX 4080", (16, 717), (8, 9), (97.5, 389.9, 194.9),
            f"{_ADA}: RTX 4080 BF16 97.5, INT8 389.9, FP8 194.9 (389.9 with FP16 accumulate)"),
    _device("4090", "GeForce RTX 4090", (24, 1008), (8, 9), (165.2, 660.6, 330.3),
            f"{_ADA}: RTX 4090 BF16 165.2, INT8 660.6, FP8 330.3 (660.6 with FP16 accumulate)"),
    _device("h100", "H100 80GB HBM3", (80, 3350), (9, 0), (989.5, 1979, 1979), _H100),
    _device("h100-pcie", "H100 PCIe", (80, 2000), (9, 0), (756.5, 1513, 1513),
            "NVIDIA H100 Tensor Core GPU data sheet, with sparsity: BF16 1,513, INT8 and FP8 3,026 (PCIe)"),
    _device("h100-nvl", "H100 NVL", (94, 3900), (9, 0), (835.5, 1670.5, 1670.5),
            f"NVIDIA H100 Tensor Core GPU data sheet, {_NVL} (NVL)"),
    _device("h200", "H200", (141, 4800), (9, 0), (989.5, 1979, 1979),
            "NVIDIA H200 Tensor Core GPU data sheet, with sparsity: BF16 1,979, INT8 and FP8 3,958 (SXM)"),
    _device("h200-nvl", "H200 NVL", (141, 4800), (9, 0), (835.5, 1670.5, 1670.5),
            f"NVIDIA H200 Tensor Core GPU data sheet, {_NVL} (NVL)"),
    _device("gh200", "GH200 480GB", (96, 4000), (9, 0), (989.5, 1979, 1979), _GH200),
    _device("gh200-144gb", "GH200 144G HBM3e", (144, 4900), (9, 0), (989.5, 1979, 1979), _GH200),
    _device("b200", "B200", (180, 8000), (10, 0), (2250, 4500, 4500),
            f"{_BLACKWELL}: B200 BF16 4,500, INT8 and FP8 9,000"),
    _device("gb200", "GB200", (186, 8000), (10, 0), (2500, 5000, 5000),
            f"{_BLACKWELL}: GB200 BF16 5,000, INT8 and FP8 10,000"),
    _device("5090", "GeForce RTX 5090", (32, 1792), (12, 0), (209.5, 838, 419),
            "NVIDIA RTX Blackwell GPU Architecture whitepaper, dense, FP32 accumulate: RTX 5090 BF16 209.5, "
            "INT8 838, FP8 419 (838 with FP16 accumulate)"),
)  # fmt: skip


def known_device(name: str) -> Device | None:
    """The device with this name in torch, such as "NVIDIA H100 PCIe"; None if DEVICES has none."""
    bare = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES if device.name == bare), None)


def named_device(text: str) -> Device:
    """The device with key or torch name `text`, in upper or lower case. Raises UserError for any other."""
    wanted = text.lower().removeprefix("nvidia ")
    for device in DEVICES:
        if wanted in (device.key, device.name.lower()):
            return device
    keys = [device.key for device in DEVICES]
    raise UserError(f"--device: unknown device {text!r}{closest(wanted, keys)}; there are {', '.join(keys)}")


def gpu_here() -> Device | None:
    """The GPU that torch sees, with unknown peaks (NaN) where DEVICES lacks it; None: torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties()
    return known_device(here.name) or Device(
        name=here.name, memory_bytes=here.total_memory, capability=(here.major, here.minor)
    )
