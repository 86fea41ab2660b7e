"""A slow, readable oracle of the NVFP4 contract in plain torch; it imports nothing native.

Every step is one fp32 operation of eager torch, rounded on its own: no fused multiply-add, and tensors divided by
tensors (torch turns a division by a number into a product with its reciprocal on some devices). A tensor is seen as
`(M, K)`; "lines" are the rows of x (row-wise) or of x transposed (column-wise), zero-padded to multiples of 16.
Works for any strides and on any device. Under `torch.set_flush_denormal(True)` the CPU results are not the contract's.
"""

import math

import torch
import torch.nn.functional as F

BLOCK = 16
FLT_MAX = torch.finfo(torch.float32).max
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RANDOM_SIGN_MASK = 0xD7E8
SIDES = ("rowwise", "columnwise")
BUFFERS = tuple(f"{side}_{part}" for side in SIDES for part in ("data", "scale_inv")) + tuple(
    f"amax_{s}" for s in SIDES
)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def matrix_shape(shape) -> tuple[int, int]:
    """(M, K) of a tensor shape of at least one dimension; `numel() / K` would fail where K is 0."""
    return math.prod(shape[:-1]), shape[-1]


def _full(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _reciprocal(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t) / t


def encode_e2m1(y: torch.Tensor) -> torch.Tensor:
    """float32 of any shape -> uint8 codes 0..15, ties to even; the sign bit is y's own, a NaN gives 7."""
    a = y.abs()
    above = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    return _with_sign(sum(t.to(torch.uint8) for t in above), y)


def encode_e2m1_stochastic(y: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """float32 y and random bytes u of one shape -> uint8 codes; float64 holds every sum that decides exactly."""
    a = y.abs().double()
    position = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    code = torch.floor(position + (2 * u.double() + 1) / 512).nan_to_num(7.0).clamp(max=7)
    return _with_sign(code.to(torch.uint8), y)


def _with_sign(magnitude: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y.isnan(), 7, magnitude | (y.signbit().to(torch.uint8) << 3))


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 -> float32; code 8 is -0."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=code.device)
    return torch.cat([values, -values])[code.long()]


def encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 E4M3 bytes, ties to even, saturating at 448; every NaN gives 0x7F (torch: 0xFF if negative)."""
    byte = value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(value.isnan(), 0x7F, byte)


def decode_e4m3(byte: torch.Tensor) -> torch.Tensor:
    """uint8 E4M3 bytes -> float32."""
    return byte.view(torch.float8_e4m3fn).float()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (..., 2n) -> bytes (..., n): the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Bytes (..., n) -> uint8 codes (..., 2n)."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """A padded (R, C) scale buffer, compact -> the order of block-scaled tensor cores, same shape."""
    rows, cols = scale.shape
    return scale.reshape(rows // 128, 4, 32, cols // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, cols)


def unswizzle(scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `swizzle`."""
    rows, cols = scale.shape
    return scale.reshape(rows // 128, cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, cols)


def _signs(mask: int, device) -> torch.Tensor:
    return torch.tensor([-1.0 if mask >> i & 1 else 1.0 for i in range(BLOCK)], device=device)


def _butterflies(v: torch.Tensor) -> torch.Tensor:
    for stride in (1, 2, 4, 8):
        a, b = v.unflatten(-1, (-1, 2, stride)).unbind(-2)
        v = torch.stack([a + b, a - b], dim=-2).flatten(-3)
    return v


def hadamard(x: torch.Tensor, mask: int) -> torch.Tensor:
    """(x * signs) @ H/4 over groups of 16: float32 (..., 16) -> float32 (..., 16); a zero never becomes -0."""
    v = x * (0.25 * _signs(mask, x.device))
    return _butterflies(torch.where(x == 0, 0.0, v))


def inverse_hadamard(y: torch.Tensor, mask: int) -> torch.Tensor:
    """float32 (..., 16) -> float32 (..., 16); H/4 is its own inverse, the signs come last."""
    return _butterflies(y * 0.25) * _signs(mask, y.device)


def philox(seed: int, subsequence, offset: int) -> list:
    """Four 32-bit words of Philox4x32-10, as at::philox_engine(seed, subsequence, offset) would draw them.

    `subsequence`: an int, or an int64 tensor (two's complement) of any shape; the words are then int64 tensors.
    """
    low = 0xFFFFFFFF
    key = [seed & low, seed >> 32 & low]
    c = [offset & low, offset >> 32 & low, subsequence & low, subsequence >> 32 & low]
    for _ in range(10):
        # int64 products of 32-bit words wrap, which keeps their bits
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32 & low) ^ c[1] ^ key[0], q & low, (p >> 32 & low) ^ c[3] ^ key[1], p & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c


def random_bytes(rng_state: tuple[int, int], lines: int, blocks_per_line: int, columnwise: bool, device):
    """int64 (lines, blocks_per_line, 16) random bytes; they depend on nothing but the element's place."""
    seed, offset = rng_state
    block = torch.arange(lines * blocks_per_line, device=device).reshape(lines, blocks_per_line)
    block = block | (-(2**63) if columnwise else 0)
    words = torch.stack(philox(seed, block, offset // 4), dim=-1)
    shifts = torch.arange(0, 32, 8, device=device)
    return (words[..., None] >> shifts & 0xFF).flatten(-2)


def compute_amax(x: torch.Tensor, dim=None) -> torch.Tensor:
    """Largest abs(x) that is a number, float32 (1,); with `dim` one for each line. 0 where there is none."""
    a = x.float().abs()
    a = torch.where(a.isnan(), 0.0, a)
    if dim is None:
        a, dim = a.reshape(1, -1), 1
    return F.pad(a.movedim(dim, -1), (0, 1)).amax(-1)


def _encode_scale(amax: torch.Tensor, e4m3_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = _full(E2M1_MAX * e4m3_max, amax)
    s_enc = torch.where((amax == 0) | amax.isinf(), 1.0, (top / amax).clamp(max=FLT_MAX))
    return s_enc, _reciprocal(s_enc)


def _block_factor(scale: torch.Tensor, s_dec: torch.Tensor) -> torch.Tensor:
    return _reciprocal(decode_e4m3(scale) * s_dec).clamp(max=FLT_MAX)[..., None]


def _tile_max(b: torch.Tensor) -> torch.Tensor:
    """Block maxima (lines, blocks) -> the maximum of the 16x16 tile that each block lies in, same shape."""
    return b.unflatten(0, (-1, BLOCK)).amax(1).repeat_interleave(BLOCK, 0)


def _sum_in_order(t: torch.Tensor) -> torch.Tensor:
    return sum(t.unbind(-1), torch.zeros_like(t[..., 0]))


def _tile_sum(errors: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """(lines, blocks, 16) -> (lines, blocks): along rows of x first, then the 16 rows' sums as a halving tree."""
    tiles = errors.unflatten(0, (-1, BLOCK)).movedim(1, 2)  # (tile line, block, line, element)
    rows = _sum_in_order(tiles.transpose(2, 3) if columnwise else tiles)
    for half in (8, 4, 2, 1):
        rows = rows[..., :half] + rows[..., half:]
    return rows[..., 0].repeat_interleave(BLOCK, 0)


def _four_over_six(blocks, b, amax, columnwise, two_d, err_mode, e4m3_max) -> torch.Tensor:
    s_enc, s_dec = _encode_scale(amax, e4m3_max)
    base = b / _full(E2M1_MAX, b) * s_enc
    scales, errors = [], []
    for candidate in (base, base * 1.5):
        scale = encode_e4m3(candidate)
        code = decode_e2m1(encode_e2m1(blocks * _block_factor(scale, s_dec)))
        v = code * decode_e4m3(scale)[..., None] * amax[..., None] / _full(E2M1_MAX * e4m3_max, b)
        d = v - blocks
        error = d.abs() if err_mode.upper() == "MAE" else d * d
        errors.append(_tile_sum(error, columnwise) if two_d else _sum_in_order(error))
        scales.append(scale)
    return torch.where(errors[1] < errors[0], scales[1], scales[0])


def _cast(lines, amax, columnwise, two_d, err_mode, e4m3_max, rng_state):
    """Padded float32 lines (L, N) and amax (1, 1) or (L, 1) -> uint8 codes (L, N), scale bytes (L, N/16)."""
    blocks = lines.unflatten(1, (-1, BLOCK))
    b = blocks.abs().amax(-1)  # keeps a NaN, as everything below: it ends as scale 0x7F and codes 7
    b = _tile_max(b) if two_d else b
    s_enc, s_dec = _encode_scale(amax, e4m3_max)
    if err_mode is not None:
        scale = _four_over_six(blocks, b, amax, columnwise, two_d, err_mode, e4m3_max)
    else:
        m = s_enc * _full(1 / E2M1_MAX, b)
        scale = encode_e4m3((b * m).clamp(max=FLT_MAX))
    y = blocks * _block_factor(scale, s_dec)
    if rng_state is None:
        return encode_e2m1(y).flatten(1), scale
    u = random_bytes(rng_state, *scale.shape, columnwise, y.device)
    return encode_e2m1_stochastic(y, u).flatten(1), scale


def _pad_scale(scale: torch.Tensor, swizzled: bool) -> torch.Tensor:
    lines, blocks = scale.shape
    scale = F.pad(scale, (0, round_up(blocks, 4) - blocks, 0, round_up(lines, 128) - lines))
    return swizzle(scale) if swizzled else scale


def quantize(
    x: torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    with_rht: bool = False,
    with_random_sign_mask: bool = True,
    with_2d_quantization: bool = False,
    stochastic_rounding: bool = False,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_e4m3_max: int = 448,
    nvfp4_4over6_err_mode: str = "MAE",
    optimize_for_gemm: bool = False,
    amax=None,
    rng_state: tuple[int, int] | None = None,
) -> dict:
    """Quantizes a bf16, fp16 or fp32 tensor of any `ndim >= 1`; options as in `NVFP4Quantizer`, taken to be valid.

    `amax`: a number or one-element tensor that replaces the reduction. `rng_state`: (seed, offset), needed for
    stochastic rounding. Returns the six buffers by name; those of a direction not asked for are None.
    """
    m, k = matrix_shape(x.shape)
    mp, kp = round_up(m, BLOCK), round_up(k, BLOCK)
    x2d = F.pad(x.reshape(m, k).float(), (0, kp - k, 0, mp - m))
    err_mode = nvfp4_4over6_err_mode if nvfp4_use_4over6 else None
    cast_options = (with_2d_quantization, err_mode, nvfp4_e4m3_max, rng_state if stochastic_rounding else None)
    transposed = x2d.t()
    if with_rht:
        y = hadamard(transposed.unflatten(1, (-1, BLOCK)), RANDOM_SIGN_MASK if with_random_sign_mask else 0).flatten(1)
        transposed = y.bfloat16().float() if x.dtype == torch.bfloat16 else y
    result = dict.fromkeys(BUFFERS)
    row_side = ("rowwise", rowwise, x2d, m, (*x.shape[:-1], kp // 2))
    column_side = ("columnwise", columnwise, transposed, k, (k, mp // 2))
    for side, wanted, source, lines, shape in (row_side, column_side):
        if not wanted:
            continue
        if amax is None:
            line_amax = compute_amax(source, 1 if row_scaled_nvfp4 else None)
        else:
            line_amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device).reshape(1)
        codes, scale = _cast(source, line_amax[:, None], side == "columnwise", *cast_options)
        result[f"{side}_data"] = pack(codes[:lines]).reshape(shape)
        result[f"{side}_scale_inv"] = _pad_scale(scale[:lines], optimize_for_gemm)
        result[f"amax_{side}"] = line_amax[: lines if row_scaled_nvfp4 else 1].clone()
    return result


def dequantize(
    buffers: dict,
    shape,
    dtype: torch.dtype,
    *,
    columnwise: bool | None = None,
    with_rht: bool = False,
    with_random_sign_mask: bool = True,
    nvfp4_e4m3_max: int = 448,
    optimize_for_gemm: bool = False,
) -> torch.Tensor:
    """The values of a tensor of logical `shape`; `columnwise=None` takes the row-wise side where it is there."""
    if columnwise is None:
        columnwise = buffers["rowwise_data"] is None
    name = "columnwise" if columnwise else "rowwise"
    m, k = matrix_shape(shape)
    lines, length = (k, m) if columnwise else (m, k)
    width = round_up(length, BLOCK)
    data, scale = buffers[f"{name}_data"].reshape(lines, width // 2), buffers[f"{name}_scale_inv"]
    amax = buffers[f"amax_{name}"].reshape(-1, 1)
    s = decode_e4m3((unswizzle(scale) if optimize_for_gemm else scale)[:lines, : width // BLOCK].contiguous())
    c = _full(1 / (E2M1_MAX * nvfp4_e4m3_max), s)
    # the second form has the same bits and does not overflow on the way
    f = torch.where(amax > 1, s * 2.0**-12 * amax * (c * 2.0**12), s * amax * c)
    out = decode_e2m1(unpack(data)).unflatten(1, (-1, BLOCK)) * f[..., None]
    if columnwise and with_rht:
        out = inverse_hadamard(out, RANDOM_SIGN_MASK if with_random_sign_mask else 0)
    out = out.flatten(1)[:, :length].to(dtype)
    return (out.t() if columnwise else out).reshape(tuple(shape))
