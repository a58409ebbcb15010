"""GPUs that lptune knows: what torch calls them, their memory, and how much they can multiply at best.

Peaks are dense and of products that are summed as lptune sums them: bfloat16 and float8 in float32, INT8 in
int32. Two things in a data sheet mislead. It often prints figures "with sparsity", which are twice the dense
ones: the figure here is then half of what is printed. And GeForce cards sum in float32 at half the rate at
which they sum in float16: of an RTX 4090's two float8 figures, 660.6 and 330.3, the second counts.

A device is found by its exact name, for "H100" is the name of three GPUs (SXM, PCIe, NVL) and a part of more.
A slice of a GPU (MIG), a card for laptops or for one market has a name and peaks of its own, and is not here
unless its figures are published.

Imports nothing of lptune but its config, so that every part may ask.
"""

from dataclasses import dataclass

from lptune.config import UserError, closest

FLOAT8_CAPABILITY = (8, 9)
"""Of the first GPUs with float8 GEMMs: Ada, then Hopper."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Peaks in FLOP/s (INT8: operations/s); None where the GPU has no such GEMM."""

    key: str
    """What `lptune plan --device` calls it."""
    name: str
    """What torch.cuda.get_device_name says, without the maker's name before it."""
    memory_bytes: int
    """As the data sheet says it: 80 GB are 80 * 10^9."""
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""
    bf16: float
    int8: float
    float8: float | None
    source: str
    """Where the figures stand, and which ones they are."""

    def peak(self, fmt: str) -> float | None:
        """Of products of `fmt`: `bf16`, `int8` or a float8 format."""
        return {"bf16": self.bf16, "int8": self.int8}.get(fmt, self.float8)


def _device(
    key: str,
    name: str,
    memory_gb: int,
    capability: tuple[int, int],
    tera: tuple[float, float, float | None],
    source: str,
) -> Device:
    bf16, int8, float8 = tera
    return Device(
        key=key,
        name=name,
        memory_bytes=memory_gb * 10**9,
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
    _device("a100-40gb", "A100-SXM4-40GB", 40, (8, 0), (312, 624, None), _A100),
    _device("a100", "A100-SXM4-80GB", 80, (8, 0), (312, 624, None), _A100),
    _device("a100-pcie-40gb", "A100-PCIE-40GB", 40, (8, 0), (312, 624, None), _A100),
    _device("a100-pcie", "A100 80GB PCIe", 80, (8, 0), (312, 624, None), _A100),
    _device("a30", "A30", 24, (8, 0), (165, 330, None), "NVIDIA A30 data sheet: BF16 165, INT8 330, dense"),
    _device("a10", "A10", 24, (8, 6), (125, 250, None), "NVIDIA A10 data sheet: BF16 125, INT8 250, dense"),
    _device(
        "a10g", "A10G", 24, (8, 6), (70, 140, None), "NVIDIA A10G data sheet (AWS): BF16 70, INT8 140, dense"
    ),
    _device(
        "a40", "A40", 48, (8, 6), (149.7, 299.3, None), "NVIDIA A40 data sheet: BF16 149.7, INT8 299.3, dense"
    ),
    _device(
        "a6000", "RTX A6000", 48, (8, 6), (154.8, 309.7, None), f"{_GA102}: RTX A6000 BF16 154.8, INT8 309.7"
    ),
    _device("3090", "GeForce RTX 3090", 24, (8, 6), (71, 284, None), f"{_GA102}: RTX 3090 BF16 71, INT8 284"),
    _device(
        "l4",
        "L4",
        24,
        (8, 9),
        (121, 242.5, 242.5),
        "NVIDIA L4 data sheet, with sparsity: BF16 242, INT8 and FP8 485",
    ),
    _device(
        "l40",
        "L40",
        48,
        (8, 9),
        (181.05, 362, 362),
        "NVIDIA L40 data sheet: BF16 181.05, INT8 and FP8 362, dense",
    ),
    _device(
        "l40s",
        "L40S",
        48,
        (8, 9),
        (362.05, 733, 733),
        "NVIDIA L40S data sheet: BF16 362.05, INT8 and FP8 733, dense",
    ),
    _device(
        "6000-ada",
        "RTX 6000 Ada Generation",
        48,
        (8, 9),
        (364.25, 728.5, 728.5),
        f"{_ADA}: RTX 6000 Ada BF16 364.25, INT8 and FP8 728.5",
    ),
    _device(
        "4090",
        "GeForce RTX 4090",
        24,
        (8, 9),
        (165.2, 660.6, 330.3),
        f"{_ADA}: RTX 4090 BF16 165.2, INT8 660.6, FP8 330.3 (660.6 with FP16 accumulate)",
    ),
    _device("h100", "H100 80GB HBM3", 80, (9, 0), (989.5, 1979, 1979), _H100),
    _device(
        "h100-pcie",
        "H100 PCIe",
        80,
        (9, 0),
        (756.5, 1513, 1513),
        "NVIDIA H100 Tensor Core GPU data sheet, with sparsity: BF16 1,513, INT8 and FP8 3,026 (PCIe)",
    ),
    _device(
        "h100-nvl",
        "H100 NVL",
        94,
        (9, 0),
        (835.5, 1670.5, 1670.5),
        f"NVIDIA H100 Tensor Core GPU data sheet, {_NVL} (NVL)",
    ),
    _device(
        "h200",
        "H200",
        141,
        (9, 0),
        (989.5, 1979, 1979),
        "NVIDIA H200 Tensor Core GPU data sheet, with sparsity: BF16 1,979, INT8 and FP8 3,958 (SXM)",
    ),
    _device(
        "h200-nvl",
        "H200 NVL",
        141,
        (9, 0),
        (835.5, 1670.5, 1670.5),
        f"NVIDIA H200 Tensor Core GPU data sheet, {_NVL} (NVL)",
    ),
    _device("gh200", "GH200 480GB", 96, (9, 0), (989.5, 1979, 1979), _GH200),
    _device("gh200-144gb", "GH200 144G HBM3e", 144, (9, 0), (989.5, 1979, 1979), _GH200),
    _device(
        "b200", "B200", 180, (10, 0), (2250, 4500, 4500), f"{_BLACKWELL}: B200 BF16 4,500, INT8 and FP8 9,000"
    ),
    _device(
        "gb200",
        "GB200",
        186,
        (10, 0),
        (2500, 5000, 5000),
        f"{_BLACKWELL}: GB200 BF16 5,000, INT8 and FP8 10,000",
    ),
    _device(
        "5090",
        "GeForce RTX 5090",
        32,
        (12, 0),
        (209.5, 838, 419),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper, dense, FP32 accumulate: RTX 5090 BF16 209.5, "
        "INT8 838, FP8 419 (838 with FP16 accumulate)",
    ),
)


def known_device(name: str) -> Device | None:
    """The device that torch calls `name`, "NVIDIA H100 PCIe"; None where it is none of DEVICES."""
    bare = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES if device.name == bare), None)


def named_device(text: str) -> Device:
    """The device whose key is `text`, or which torch calls so, in any case. Raises UserError otherwise."""
    wanted = text.lower().removeprefix("nvidia ")
    for device in DEVICES:
        if wanted in (device.key, device.name.lower()):
            return device
    keys = [device.key for device in DEVICES]
    raise UserError(f"--device: unknown device {text!r}{closest(wanted, keys)}; there are {', '.join(keys)}")


def unknown_device(name: str, memory_bytes: int, capability: tuple[int, int]) -> Device:
    """A GPU that is none of DEVICES, whose peaks are not known."""
    nan = float("nan")
    return Device(
        key="",
        name=name,
        memory_bytes=memory_bytes,
        capability=capability,
        bf16=nan,
        int8=nan,
        float8=nan,
        source="",
    )
