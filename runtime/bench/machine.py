"""What the figures of a row depend on besides the arm: machine, versions, commit, model."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...io.records import Record
from ..core import Prepared
from ..inspection import machine_facts

SOURCE = Path(__file__).resolve().parents[2]
"""The repository, where the package runs from one."""


def facts() -> dict[str, Any]:
    """Columns of a row that say where and with what it was measured."""
    known = machine_facts()
    return {
        "cpu": cpu_name(),
        "gpu": gpu_name(),
        "cores": known["cores"],
        "memory_bytes": known["memory_bytes"],
        "os": known["platform"],
        "device": "gpu" if mx.default_device() == mx.gpu else "cpu",
        "commit": commit(),
        "python": known["python"],
        "moestream": known["moestream"],
        "mlx": known["mlx"],
        "mlx_lm": known["mlx_lm"],
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as its maker calls it."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_name() -> str:
    """The device that MLX computes on, if that is a GPU."""
    if mx.default_device() != mx.gpu:
        return ""
    return str(mx.device_info(mx.default_device()).get("device_name", ""))


def commit(folder: Path = SOURCE) -> str:
    """What ``git describe`` says of the source; empty where it lies in no repository."""
    if not (folder / ".git").exists():
        return ""
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--tags")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def model_facts(prepared: Prepared, records: tuple[Record, ...]) -> dict[str, Any]:
    """Columns of a row that say what was run.

    Args:
        prepared: the model with all its layers streamed.
        records: of its layers, as they are read.
    """
    layers = prepared.blueprint.size.layers
    config = prepared.blueprint.lazy.config
    return {
        "model": prepared.blueprint.checkpoint.directory.name,
        "model_type": str(config.get("model_type", "")),
        "layers": len(layers),
        "experts": max(layer.experts for layer in layers),
        "top_k": max(layer.top_k for layer in layers),
        "record_bytes": sum(record.stored_bytes for record in records) // len(records),
        "bits": _bits(config),
    }


def _bits(config: Mapping[str, Any]) -> float | None:
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    return float(bits) if isinstance(bits, int | float) else None
