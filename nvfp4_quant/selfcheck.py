"""`python -m nvfp4_quant`: quantizes one fixed tensor in every mode on every device and compares the bytes."""

import hashlib

import torch

from ._native import _C
from .ops import BUFFERS
from .quantizer import NVFP4Quantizer
from .report import sqnr_db, stored_bytes

SHAPE = (333, 1000)  # tails in both directions
RNG_STATE = (0x123456789ABCDEF0, 12)

# mode: (options of the quantizer, SHA-256 of its buffers)
MODES = {
    "1-D": ({}, "85b17ba2e0d1c5de5497010d3b9c88a3b3e81a45d9da23b4793398278cce47d5"),
    "2-D": ({"with_2d_quantization": True}, "6c91052691ede3c102d44815078ab28bb1fe9006e42a23fdd0fd82566459eca0"),
    "Hadamard": ({"with_rht": True}, "22a6ecfb3f97d1d5b7b9f55bea2ab94cadde02d5e023d898143a7f43090073ac"),
    "stochastic": ({"stochastic_rounding": True}, "fdb4bdfa9c67f9c9714f60d3088fc48d3c599d28b9eefb60fb6854d5e43780f6"),
    "row-scaled": ({"row_scaled_nvfp4": True}, "0fc9815dbb4ba388b0aa5adcd505e695cbc93df5f448cec2c470b5baeac906fc"),
    "4over6": ({"nvfp4_use_4over6": True}, "0efe53fda03f0b5f7416966d15c7d47b84b096cc37824c16dfec9647b5484826"),
}


def sample() -> torch.Tensor:
    """A bell-shaped bfloat16 tensor, the same in every torch: integer hashes, summed exactly, rounded once."""
    n = SHAPE[0] * SHAPE[1]
    index = torch.arange(4 * n, dtype=torch.int64).view(4, n)
    hashed = (index * 0x9E3779B1) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    uniform = ((hashed ^ (hashed >> 13)) & 0xFFFF) - 0x8000
    return (uniform.sum(0).float() / 0x8000).bfloat16().view(SHAPE)


def devices() -> list[torch.device]:
    """The CPU, and each GPU if the library was built with CUDA."""
    gpus = torch.cuda.device_count() if _C.build_info()["cuda"] else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))]


def quantize(x: torch.Tensor, options: dict):
    rng_state = RNG_STATE if options.get("stochastic_rounding") else None
    return NVFP4Quantizer(**options).quantize(x, rng_state=rng_state)


def digest(y) -> str:
    """SHA-256 of all buffers of an NVFP4 tensor, in order."""
    parts = (getattr(y, name).cpu().contiguous().view(torch.uint8).numpy().tobytes() for name in BUFFERS)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def first_difference(y, other) -> str | None:
    """Names the first byte at which two NVFP4 tensors differ, or None."""
    for name in BUFFERS:
        a, b = (getattr(t, name).cpu().contiguous().view(torch.uint8).flatten() for t in (y, other))
        if not torch.equal(a, b):
            at = (a != b).nonzero()[0].item() if a.shape == b.shape else -1
            return f"{name}, byte {at}: {b[at]:#04x} instead of {a[at]:#04x}" if at >= 0 else f"size of {name}"
    return None


def check_mode(mode: str, x: torch.Tensor, found: list[torch.device]) -> list[str]:
    """Prints one line for the mode, and returns what is wrong with it on which device."""
    options, expected = MODES[mode]
    y = quantize(x, options)
    wrong = [] if digest(y) == expected else [f"{mode} on cpu: the bytes do not have the stored digest"]
    for device in found[1:]:
        try:
            difference = first_difference(y, quantize(x.to(device), options))
        except (RuntimeError, ValueError) as error:  # such as a GPU that the library holds no code for
            difference = str(error)
        wrong += [f"{mode} on {device}, compared with cpu: {difference}"] if difference else []
    decibels = sqnr_db(x, y.dequantize(dtype=torch.float32))
    saved = 1 - stored_bytes(y) / (2 * x.nbytes)
    amax = y.amax_rowwise.max().item()
    print(f"{mode:<12}{amax:>8.4g}{decibels:>12.2f} dB{saved:>14.1%}   {'WRONG' if wrong else 'ok'}")
    return wrong


def gpu_operations(device: torch.device) -> list[tuple[str, float]]:
    """Name and time in microseconds of each GPU operation of one call of a plain quantizer."""
    from torch.profiler import ProfilerActivity, profile

    x, quantizer = sample().to(device), NVFP4Quantizer()
    quantizer(x)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        quantizer(x)
        torch.cuda.synchronize(device)
    events = (e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def selfcheck() -> int:
    """Prints what it finds and returns the exit status: 0 if all bytes are right, else 1."""
    info, x, found = _C.build_info(), sample(), devices()
    cuda = f"CPU and CUDA {info['cuda']} for {' '.join(info['archs'])}" if info["cuda"] else "CPU only"
    print(f"nvfp4_quant {info['version']} for torch {info['torch']}, {cuda}")
    print("devices: " + ", ".join(str(d) if d.type == "cpu" else f"{d} {torch.cuda.get_device_name(d)}" for d in found))
    if len(found) == 1 and torch.cuda.device_count():
        print("a GPU is there, but this is a CPU-only build of nvfp4_quant: rebuild it with nvcc to use it")
    print(f"input: {x.dtype} {tuple(x.shape)}, quantized in both directions, compared byte for byte\n")
    print(f"{'mode':<12}{'amax':>8}{'SQNR':>15}{'bytes saved':>14}")
    wrong = [line for mode in MODES for line in check_mode(mode, x, found)]
    for device in [] if wrong else found[1:]:
        operations = gpu_operations(device)
        print(f"\nGPU operations of one call on {device}: {len(operations)}")
        print("\n".join(f"  {time:8.1f} us  {name[:100]}" for name, time in operations))
    print("\n" + "\n".join(wrong or ["all bytes are right"]))
    return 1 if wrong else 0
