"""The C++ library: compiled when it is first used, kept, checked, and loaded from memory.

The machine's C++ compiler compiles all *.cpp of this folder for the machine's processor, in about two
seconds. So the installation has no build step, and no torch headers are needed. The library is kept in the
folder of `lptune.base.cache`, under a name that depends on the sources, the command and the processor.

A file that is kept may be cut, or changed by someone else. The SHA-256 at its end is compared with the bytes
before it, and exactly these bytes are loaded, from a copy in memory.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from lptune.base import cache
from lptune.hardware.cpu import cpu_flags

logger = logging.getLogger(__name__)

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_LINK = ("-std=c++17", "-shared", "-fPIC")
# Instruction sets with an INT8 GEMM of lptune's, the fastest first, and the flags that leave out faster ones.
INSTRUCTION_SETS = {
    "amx": (),
    "avx512_vnni": ("-mno-amx-int8",),
    "avx_vnni": ("-mno-amx-int8", "-mno-avx512f"),
    "avx2": ("-mno-amx-int8", "-mno-avx512f", "-mno-avxvnni"),
}
_NUM_DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library; None, with one warning in the log, if it cannot be compiled or loaded.

    With `LPTUNE_KERNELS=avx2`, or another of INSTRUCTION_SETS, that of a processor that has nothing better.
    """
    try:
        compiler = _compiler()
        if compiler is None:
            logger.warning(
                "no C++ compiler found (install g++): INT8 on this CPU runs on torch's own operations, "
                "several times slower"
            )
            return None
        without = INSTRUCTION_SETS.get(os.environ.get("LPTUNE_KERNELS", ""), ())
        return _loaded(_image(compiler, (*_FLAGS, *without)))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("lptune's CPU kernels could not be built, torch's own are used instead: %s", detail)
        return None


def source_digest() -> str:
    """SHA-256 of the C++ files, in hexadecimal."""
    return hashlib.sha256(b"".join(each.read_bytes() for each in (*_SOURCES, *_HEADERS))).hexdigest()


def _compiler() -> list[str] | None:
    """The compiler's command. CXX may have several words (`ccache g++`). ValueError for an open quote."""
    found = shutil.which("g++") or shutil.which("clang++")
    return shlex.split(os.environ.get("CXX", "")) or ([found] if found else None)


def _image(compiler: list[str], flags: tuple[str, ...] = _FLAGS) -> bytes:
    """The library built from this source, by this compiler, for this processor (machines may share a home).

    On disk the SHA-256 of the image follows it: loading a truncated file would end the process by SIGBUS.
    """
    identity = hashlib.sha256(repr((source_digest(), compiler, flags, sorted(cpu_flags()))).encode())
    path = cache.folder() / f"native-{identity.hexdigest()[:24]}.so+sha256"
    try:
        kept = cache.read(path)
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error)
        kept = None
    if kept is not None:
        image, digest = kept[:-_NUM_DIGEST_BYTES], kept[-_NUM_DIGEST_BYTES:]
        if image and hashlib.sha256(image).digest() == digest:
            return image
        logger.warning("%s is damaged and made anew", path)
    with tempfile.TemporaryDirectory(prefix="lptune-") as folder:
        built = Path(folder, "native.so")
        command = [*compiler, *flags, *_LINK, *map(str, _SOURCES), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        image = built.read_bytes()
    try:
        # Ranks that start together each build it; the last rename wins, with the same content.
        cache.write(path, image + hashlib.sha256(image).digest())
    except OSError as error:
        logger.warning("lptune's CPU kernels cannot be kept, each start compiles them again: %s", error)
    return image


def _loaded(image: bytes) -> ctypes.CDLL:
    """Loads the library from a copy in memory: a change of the file after its check has no effect."""
    if not hasattr(os, "memfd_create"):  # not Linux
        with tempfile.TemporaryDirectory(prefix="lptune-") as folder:
            path = Path(folder, "native.so")
            path.write_bytes(image)
            return ctypes.CDLL(str(path))
    # Never closed: with the same descriptor number, glibc would take a second library for this one.
    with os.fdopen(os.memfd_create("lptune-native"), "wb", closefd=False) as file:
        file.write(image)
        file.flush()
        return ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")
