"""Whether quack-kernels, which epilogues.py extends, is installed; and its import at first use."""

import getpass
import os
import tempfile
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

# the version that the tests run with
VERSION = "0.6.5"
INSTALL = f"pip install 'quack-kernels[cu13]=={VERSION}'"


@cache
def is_installed() -> bool:
    return find_spec("quack") is not None


def serves(device: torch.device) -> bool:
    """Whether quack-kernels runs on this device: NVIDIA's GPUs from Hopper on, compute capability 9.0."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def has_none_compiled() -> bool:
    """Whether quack-kernels keeps what it compiles on this machine's disk, and nothing is there yet."""
    # as quack/cache/jit.py, whose import would take seconds
    if os.environ.get("QUACK_CACHE_ENABLED", "1") != "1":
        return False
    folder = os.environ.get("QUACK_CACHE_DIR")
    if folder is None:
        folder = Path(tempfile.gettempdir(), getpass.getuser(), "quack_cache")
    return not any(Path(folder).rglob("*.o"))


def epilogues() -> ModuleType:
    """kernels.epilogues. Raises ImportError if quack-kernels is missing or does not work here."""
    try:
        return import_module("kernels.epilogues")
    # an incomplete installation raises RuntimeError, one outside of a folder site-packages TypeError
    except Exception as error:
        raise ImportError(
            f"quack-kernels {_installed_version()} cannot be used here ({type(error).__name__}: {error}): "
            f"{INSTALL} into an environment of its own, or pip uninstall quack-kernels and use "
            "fused_gelu=false"
        ) from error


def _installed_version() -> str:
    try:
        return version("quack-kernels")
    except PackageNotFoundError:
        return "(no version)"
