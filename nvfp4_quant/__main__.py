"""`python -m nvfp4_quant`: a self-check; `python -m nvfp4_quant report FILE`: what NVFP4 does to a checkpoint."""

import argparse
import sys

import torch

from . import __version__
from .report import ReportError, report
from .selfcheck import selfcheck


def device(name: str) -> torch.device:
    """The device of this name; ArgumentTypeError if there is none."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{name!r}: {str(error).splitlines()[0]}") from error


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_quant",
        description="Without a command: quantizes a tensor on every device found and compares the bytes; "
        "exit status 0 if they are right, 1 if not.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    command = commands.add_parser(
        "report", help="per matrix of a checkpoint: amax, SQNR in 1-D and 2-D, zero-scale blocks, bytes"
    )
    command.add_argument("file", metavar="FILE", help="a .safetensors file or a torch checkpoint")
    command.add_argument("--device", type=device, default="cpu", help="where to quantize (default: cpu)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 for a failed self-check, 2 for a bad file."""
    options = parse_arguments(arguments)
    if options.command is None:
        return selfcheck()
    try:
        report(options.file, options.device)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
