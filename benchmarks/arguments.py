"""What can be timed: the kinds of quantization, the command line, the device and the versions in use."""

import argparse
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

import nvfp4_quant


class Kind(NamedTuple):
    options: dict  # of NVFP4Quantizer
    dtype: torch.dtype = torch.bfloat16
    orders: tuple[bool, ...] = (False, True)  # of the scales: optimize_for_gemm


KINDS = {
    "1d": Kind({}),
    "2d": Kind({"with_2d_quantization": True}),
    "rht": Kind({"with_rht": True}),
    "stochastic": Kind({"stochastic_rounding": True}),
    "row_scaled": Kind({"row_scaled_nvfp4": True}),
    "4over6": Kind({"nvfp4_use_4over6": True}),
    "fp32": Kind({}, torch.float32),
    "fp16": Kind({}, torch.float16),
    "swizzled": Kind({}, orders=(True,)),
}
DEFAULT_KINDS = "1d,2d,rht,stochastic,row_scaled,4over6,fp32"
DEFAULT_SHAPES = "1024x1024,4096x4096,8192x5120,16384x8192"
SCHEDULES = ("auto", "split", "fused")


def _list_of(choices):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(choices):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(choices)}")
        return names

    return parse


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        shapes = [()]
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
        raise argparse.ArgumentTypeError(f"{text}: expected shapes like 1024x1024,4096x4096")
    return shapes


def _positive(number):
    def parse(text: str):
        value = number(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text}: must be positive")
        return value

    return parse


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:  # the second from a torch without CUDA
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return device


def parse_arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--label", default="nvfp4_quant", help="name of this run in the rows and in the plot")
    parser.add_argument("--out", type=Path, help="JSON file for all rows with the device and the versions")
    parser.add_argument("--kinds", type=_list_of(KINDS), default=DEFAULT_KINDS, help=", ".join(KINDS))
    parser.add_argument("--shapes", type=_shapes, default=DEFAULT_SHAPES, help="rows x columns, comma-separated")
    parser.add_argument("--repeats", type=_positive(int), default=3, help="measurements of each wall time")
    parser.add_argument("--min-run-time", type=_positive(float), default=0.01, help="seconds of each, at least")
    parser.add_argument("--trace", action="store_true", help="list the GPU operations of one warm call of each")
    parser.add_argument(
        "--schedule",
        type=_list_of(SCHEDULES),
        default=",".join(SCHEDULES),
        help="the first is that of the wall times, GPU times are measured in all of them",
    )
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", action="store_true", help="also torchao and fouroversix, where installed")
    return parser.parse_args(argv)


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device) -> dict:
    """The device and the versions; None for what cannot be found out."""
    repository = str(Path(__file__).resolve().parent.parent)
    commit = _output_of("git", "-C", repository, "describe", "--always", "--dirty", "--exclude=*")
    found = {"device": str(device), "torch": torch.__version__, "build": nvfp4_quant.build_info(), "commit": commit}
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
    }
