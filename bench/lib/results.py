"""Where a number was measured, and the JSON file it is kept in.

It knows nothing of what was measured.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "transformers", "triton")


def describe(device: torch.device) -> dict[str, Any]:
    """Return device, processor, threads, versions, commit and date as plain values."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit_of(ROOT),
        "dirty": _git("status", "--porcelain", "--", ":/tcb", ":/bench/*.py") != "",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """Return the name that a reader knows the device by."""
    if device.type == "cpu":
        return cpu_name()
    return getattr(torch, device.type).get_device_name(device)


def cpu_name() -> str:
    """Return the processor's name as Linux gives it, else what the platform says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_flags() -> str:
    """Return the widest vectors that torch uses on this processor."""
    known = {"AVX512": "AVX-512", "AVX2": "AVX2 only"}
    capability = torch.backends.cpu.get_cpu_capability()
    return known.get(capability, capability)


def store(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `content` to <folder>/<name>.json and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def add_output(parser: argparse.ArgumentParser) -> None:
    """Let a command line name the JSON file that `store` writes, and its folder."""
    parser.add_argument("--name", help="name of the JSON file, without its ending")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")


def commit_of(source: str | Path) -> str | None:
    """Return the commit that a folder's tree is at, or that a revision names."""
    if Path(source).is_dir():
        return _git("rev-parse", "HEAD", folder=Path(source))
    return _git("rev-parse", str(source))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str, folder: Path = ROOT) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
