"""Find a machine's accelerator from its files, without JAX, which would take possession of it.

A TPU has one owner, and JAX takes most of a GPU's memory when it first looks for devices. So this reads the
same environment variables as JAX; no other module in kernels/ reads the environment.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
PACKAGES += ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
_PLATFORMS = {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu", "cpu": "cpu"}  # by JAX_PLATFORMS' words
_GOOGLE = "0x1ae0"  # vendor of PCI devices
_CHIPS = {  # by PCI device, as JAX names them
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
_NO_GPUS = ("", "-1", "NoDevFiles", "none", "void")  # of CUDA_VISIBLE_DEVICES
_KERNELS = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine that kernels are chosen for.

    Attributes:
      platform: "cpu", "gpu" or "tpu". kind: of its devices. driver: its version.
    """

    platform: str
    kind: str = ""
    driver: str = ""


CPU = Machine("cpu")


def recognise(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None, platforms: str | None = None
) -> Machine:
    """The machine with the files under `root`, as far as JAX may and can use it: `CPU` if no accelerator is
    found, or JAX has no plugin for it. `platforms`: as JAX_PLATFORMS; None: JAX's own setting."""
    environ = os.environ if environ is None else environ
    wanted = getattr(jax.config, "jax_platforms", None) if platforms is None else platforms
    first = (wanted or "").split(",")[0]
    if first and first not in _PLATFORMS:
        return CPU
    installed = versions()
    if _PLATFORMS.get(first, "tpu") == "tpu" and "libtpu" in installed and (machine := _tpu(root, environ)):
        return machine
    plugin = any(name.startswith("jax-cuda") for name in installed)
    if _PLATFORMS.get(first, "gpu") == "gpu" and plugin and (machine := _gpu(root, environ)):
        return machine
    return CPU


def _tpu(root: Path, environ: Mapping[str, str]) -> Machine | None:
    """A TPU, by its PCI devices; or by its device files, if the environment of Google's machines names it."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*/vendor"))
    google = [path for path in devices if _read(path) == _GOOGLE]
    kinds = {_CHIPS[name] for path in google if (name := _read(path.with_name("device"))) in _CHIPS}
    named = environ.get("TPU_ACCELERATOR_TYPE", "")
    files = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    if kinds or (named and files):
        return Machine("tpu", " + ".join([*sorted(kinds), *filter(None, [named])]))
    return None


def _gpu(root: Path, environ: Mapping[str, str]) -> Machine | None:
    """A GPU, by the files of NVIDIA's driver, or by nvidia-smi if a container hides these."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _NO_GPUS:
        return None
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", _read(root / "proc/driver/nvidia/version"))
    texts = map(_read, (root / "proc/driver/nvidia/gpus").glob("*/information"))
    kinds = {model.strip() for text in texts for model in re.findall(r"^Model:\s*(.+)$", text, re.M)[:1]}
    if driver and kinds:
        return Machine("gpu", " + ".join(sorted(kinds)), driver[0])
    command, pairs = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if root == Path("/"):
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
            pairs = [line.rpartition(", ") for line in answer.splitlines() if ", " in line]
    names = " + ".join(sorted({name for name, _, _ in pairs}))
    return Machine("gpu", names, pairs[0][2]) if pairs else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@functools.cache
def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that are installed; by default of those that compile programs."""
    installed = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


@functools.cache
def source() -> str:
    """SHA-256 of all source files of kernels/."""
    digest = hashlib.sha256()
    for path in sorted(p for p in _KERNELS.rglob("*") if p.suffix in (".py", ".cc", ".h")):
        digest.update(f"{path.relative_to(_KERNELS)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def flags() -> dict[str, str]:
    """The environment variables that affect the compilers."""
    return {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ}


def taken() -> bool:
    """Whether this process has its devices already."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
