"""What the tests share: the oracle, exact comparison, inputs of every kind, the golden cases."""

import functools
import gzip
import importlib.util
import json
from pathlib import Path

import torch

TESTS = Path(__file__).parent


def _load_reference():
    """The oracle by its path: it must work where the native module is missing or broken."""
    spec = importlib.util.spec_from_file_location("nvfp4_reference", TESTS.parent / "nvfp4_quant" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _load_reference()
BUFFERS = reference.BUFFERS
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
USAGES = ((True, True), (True, False), (False, True))  # (rowwise, columnwise)
INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def no_cuda_reason() -> str:
    """Why CUDA tests cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        import nvfp4_quant
    except ImportError:
        return ""  # the oracle alone can still be tested there
    return "" if nvfp4_quant.build_info()["cuda"] else "a CPU-only build"


# ---- comparison


def _bits(t: torch.Tensor, one_nan: bool) -> torch.Tensor:
    t = t.detach().cpu().contiguous()
    if one_nan:
        t = torch.where(t.isnan(), torch.full((), float("nan"), dtype=t.dtype), t)
    return t.view(INT_OF_SIZE[t.element_size()])


def assert_same_bytes(got, want, name: str = "tensor", *, one_nan: bool = False) -> None:
    """Equal presence, dtype, shape and bytes; reports the first mismatch. `one_nan`: all NaNs count as equal."""
    assert (got is None) == (want is None), f"{name}: got {type(got).__name__}, want {type(want).__name__}"
    if got is None:
        return
    assert got.dtype == want.dtype, f"{name}: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got_bits, want_bits = _bits(got, one_nan), _bits(want, one_nan)
    if torch.equal(got_bits, want_bits):
        return
    wrong = (got_bits != want_bits).nonzero()
    index = tuple(wrong[0].tolist())
    mask = (1 << 8 * got.element_size()) - 1
    got_hex, want_hex = (f"0x{bits[index].item() & mask:X}" for bits in (got_bits, want_bits))
    values = f" ({got[index].item()}, {want[index].item()})" if got.is_floating_point() else ""
    raise AssertionError(
        f"{name}: {len(wrong)} of {got.numel()} differ, first at {index}: got {got_hex}, want {want_hex}{values}"
    )


def assert_same_buffers(got, want: dict, context: str = "") -> None:
    """`got`: a dict, a tuple in flatten order, or an NVFP4Tensor; `want`: the oracle's dict."""
    got = buffers_of(got)
    for name in BUFFERS:
        assert_same_bytes(got[name], want[name], f"{context} {name}".strip())


def buffers_of(y) -> dict:
    if isinstance(y, dict):
        return y
    if isinstance(y, tuple):
        return dict(zip(BUFFERS, y, strict=True))
    return {name: getattr(y, f"_{name}") for name in BUFFERS}


# ---- inputs


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ties(shape, g) -> torch.Tensor:
    """Midpoints of E2M1 times powers of two, with a tensor scale of exactly 1 where 2688 fits in."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = midpoints[torch.randint(0, 8, shape, generator=g)]
    x = x * torch.where(torch.rand(shape, generator=g) < 0.5, -1.0, 1.0)
    flat = x.reshape(-1)
    flat[3::7] = 6.0
    flat[:1] = 2688.0
    return x


def _spoiled(x: torch.Tensor, values, g) -> torch.Tensor:
    flat = x.reshape(-1)
    places = torch.randperm(flat.numel(), generator=g)[: len(values)]
    flat[places] = torch.tensor(values)[: len(places)]
    return x


def make_input(kind: str, shape, dtype=torch.float32, device="cpu", seed: int = 0) -> torch.Tensor:
    """A tensor of one of KINDS, the same on every device."""
    g = _generator(seed)
    info = torch.finfo(dtype)
    bell = torch.randn(shape, generator=g)
    sign = torch.where(torch.rand(shape, generator=g) < 0.5, -1.0, 1.0)
    if kind == "bell":
        x = bell
    elif kind == "wide":
        x = bell * 2.0 ** torch.randint(-12, 12, shape, generator=g)
    elif kind == "sparse":
        x = bell * (torch.rand(shape, generator=g) < 0.1)  # the negative ones become -0
    elif kind == "ties":
        x = _ties(shape, g)
    elif kind == "tiny":
        x = bell * 64 * info.smallest_normal
    elif kind == "least":
        x = torch.randint(-3, 4, shape, generator=g).double() * info.smallest_normal * info.eps
    elif kind == "huge":
        x = sign * torch.rand(shape, generator=g).double() * info.max
    elif kind == "zero":
        x = sign * 0.0
    elif kind == "outlier":
        x = _spoiled(bell * 1e-3, [-3e4], g)
    elif kind == "nan":
        x = _spoiled(bell, [float("nan"), -float("nan"), float("nan")], g)
    elif kind == "inf":
        x = _spoiled(bell, [float("inf"), -float("inf")], g)
    else:
        raise ValueError(f"kind {kind!r}")
    return x.to(dtype).to(device)


KINDS = ("bell", "wide", "sparse", "ties", "tiny", "least", "huge", "zero", "outlier", "nan", "inf")


def strided(kind: str, x: torch.Tensor) -> torch.Tensor:
    """A view that looks like the 2-D tensor x and has the strides named; expanded: every row is row 0."""
    m, k = x.shape
    if kind == "contiguous":
        return x.contiguous()
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "expanded":
        return x[:1].clone().expand(m, k)
    if kind == "expanded_columns":
        return x[:, :1].clone().expand(m, k)
    if kind == "scalar":
        return x.reshape(-1)[:1].clone().as_strided((m, k), (0, 0))
    base, index = {
        "column_slice": ((m, k + 5), (slice(None), slice(3, k + 3))),
        "row_step": ((2 * m, k), (slice(None, None, 2), slice(None))),
        "column_step": ((m, 3 * k), (slice(None), slice(None, None, 3))),
        "odd_offset": ((m * k + 1,), None),
    }[kind]
    storage = torch.full(base, 7777.0, dtype=x.dtype, device=x.device)  # outside the view: must not be read
    view = storage[1:].view(m, k) if index is None else storage[index]
    return view.copy_(x)


STRIDES = (
    "contiguous",
    "transposed",
    "column_slice",
    "row_step",
    "column_step",
    "odd_offset",
    "expanded",
    "expanded_columns",
    "scalar",
)


# ---- golden cases

_GOLDEN_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "uint16": torch.bfloat16,  # bf16 as its 16 bits
    "uint8": torch.uint8,
}
_GOLDEN_BUFFERS = {
    "rowwise_data": "rowwise_data",
    "rowwise_scale": "rowwise_scale_inv",
    "columnwise_data": "columnwise_data",
    "columnwise_scale": "columnwise_scale_inv",
    "rowwise_amax": "amax_rowwise",
    "columnwise_amax": "amax_columnwise",
}


def _golden_tensor(entry) -> torch.Tensor | None:
    if entry is None:
        return None
    data = bytearray.fromhex(entry["hex"])
    return torch.frombuffer(data, dtype=_GOLDEN_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _golden_options(o: dict) -> dict:
    options = {
        "rowwise": o.get("rowwise", True),
        "columnwise": o.get("columnwise", True),
        "with_rht": o.get("rht", False),
        "with_random_sign_mask": o.get("random_sign_mask", True),
        "with_2d_quantization": o.get("two_d", False),
        "stochastic_rounding": "sr" in o,
        "row_scaled_nvfp4": o.get("row_scaled", False),
        "optimize_for_gemm": o.get("swizzled", False),
    }
    if "four_over_six" in o:
        e4m3_max, err_mode = o["four_over_six"]
        options |= {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": e4m3_max, "nvfp4_4over6_err_mode": err_mode}
    return options


@functools.cache
def golden_cases() -> list[dict]:
    """Each with name, options (as the quantizer names them), rng_state, input, expected and dequantized."""
    cases = []
    with gzip.open(TESTS / "golden.jsonl.gz", "rt") as lines:
        for raw in map(json.loads, lines):
            sr = raw["options"].get("sr")
            cases.append(
                {
                    "name": raw["name"],
                    "options": _golden_options(raw["options"]),
                    "rng_state": tuple(sr) if sr else None,
                    "input": _golden_tensor(raw["input"]),
                    "expected": {name: _golden_tensor(raw["expected"][key]) for key, name in _GOLDEN_BUFFERS.items()},
                    "dequantized": {side: _golden_tensor(raw["dequantized_f32"].get(side)) for side in reference.SIDES},
                }
            )
    return cases


def dequantize_options(options: dict) -> dict:
    """Those of a quantizer's options that dequantizing depends on."""
    names = ("with_rht", "with_random_sign_mask", "nvfp4_e4m3_max", "optimize_for_gemm")
    return {name: options[name] for name in names if name in options}
