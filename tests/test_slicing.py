"""Parts of quantized tensors: which stay packed and with which bytes, views, transposition, concatenation."""

import pytest
import torch
from helpers import BUFFERS, assert_same_bytes, make_input, reference
from tensors import (
    MODES,
    addresses,
    assert_apart,
    assert_same_tensor,
    buffers,
    make_quantizer,
    make_tensor,
    one_side,
)

from nvfp4_quant import NVFP4Tensor
from nvfp4_quant.read_only import DequantizedCopy

SIDES = ("rowwise", "columnwise")
CUTS = {
    "rows": (slice(16, 32), slice(None)),
    "first_rows": (slice(0, 32), slice(None)),
    "last_rows": (slice(32, None), slice(None)),
    "no_rows": (slice(16, 16), slice(None)),
    "columns": (slice(None), slice(16, 64)),
    "last_columns": (slice(None), slice(48, None)),
    "no_columns": (slice(None), slice(32, 32)),
    "both": (slice(16, 48), slice(32, 64)),
}
SHAPE = (71, 83)  # both with a tail, so that the last cut ends inside a block


def is_row_scaled(mode: str) -> bool:
    return mode.startswith("row_scaled")


# ---- packed parts


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_packed_part_holds_the_values_of_both_sides(device, mode, cut):
    y = make_tensor(mode, SHAPE, device=device)
    part = y[CUTS[cut]]
    assert type(part) is NVFP4Tensor and part.get_usages() == y.get_usages()
    assert part._quantizer._settings == y._quantizer._settings
    shapes = make_quantizer(mode).make_empty(part.shape, device=device)
    assert [b is None or b.shape for b in buffers(part)] == [b is None or b.shape for b in buffers(shapes)]
    assert all(b is None or b.is_contiguous() for b in buffers(part))
    assert_apart(part, y)
    for side in SIDES:
        want = one_side(y, side)
        assert_same_bytes(one_side(part, side), want if want is None else want[CUTS[cut]], side)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", ["1d", "rowwise", "columnwise", "2d", "4over6", "swizzled"])
def test_a_packed_part_has_the_bytes_of_its_values_under_the_same_amax(device, mode, cut):
    x = make_input("wide", SHAPE, torch.bfloat16, device)
    part = make_quantizer(mode)(x)[CUTS[cut]]
    want = reference.quantize(x[CUTS[cut]].cpu(), amax=x.abs().max().float().item(), **MODES[mode])
    for name, buffer in zip(BUFFERS, buffers(part), strict=True):
        assert_same_bytes(buffer, want[name], name)  # padding, too


@pytest.mark.parametrize("cut", ["rows", "last_rows", "columns"])
def test_a_row_scaled_part_keeps_the_amax_of_its_lines(device, cut):
    y = make_tensor("row_scaled", SHAPE, device=device)
    part = y[CUTS[cut]]
    rows, columns = CUTS[cut]
    assert_same_bytes(part._amax_rowwise, y._amax_rowwise[rows], "row-wise")
    assert_same_bytes(part._amax_columnwise, y._amax_columnwise[columns], "column-wise")


@pytest.mark.parametrize("mode", MODES)
def test_any_row_of_a_rowwise_tensor_and_no_other(device, mode):
    y = make_tensor(mode, SHAPE, device=device)
    part = y[3:20]
    packed = mode in ("rowwise", "row_scaled_rowwise")
    assert type(part) is (NVFP4Tensor if packed else DequantizedCopy)
    values = part.dequantize() if packed else part * 1
    assert_same_bytes(values, y.dequantize()[3:20], "rows")
    for other in (y[:, 3:20], y[::16], y[5], y[-1, 7]):
        assert type(other) is DequantizedCopy
    assert_same_bytes(y[:, 3:20] * 1, y.dequantize()[:, 3:20], "columns")
    assert_same_bytes(y[5:60:7] * 1, y.dequantize()[5:60:7], "step")
    assert_same_bytes(y[-1] * 1, y.dequantize()[-1], "select")


@pytest.mark.parametrize(
    "shape, index, packed",
    [
        ((4, 8, 32), (slice(2, 4),), True),  # rows 16 to 32
        ((4, 8, 32), (slice(1, 2),), False),  # rows 8 to 16
        ((4, 8, 32), (slice(None), slice(0, 4)), False),  # not one range of rows
        ((1, 48, 32), (slice(None), slice(16, 32)), True),
        ((4, 8, 32), (slice(None), slice(None), slice(16, 32)), True),
        ((64,), (slice(16, 48),), True),
        ((64,), (slice(5, 48),), False),
        ((64,), (slice(-16, None),), True),
        ((48, 16), (slice(-100, 100),), True),
        ((48, 16), (slice(40, 20),), False),  # empty, but not at a block
        ((0, 16), (slice(0, 0),), True),
    ],
)
def test_which_parts_stay_packed(device, shape, index, packed):
    y = make_tensor(shape=shape, device=device)
    part, want = y[index], y.dequantize()[index]
    assert isinstance(part, NVFP4Tensor) == packed and part.shape == want.shape
    if packed and part.numel() < y.numel():
        assert_apart(part, y)
    assert_same_bytes(part.dequantize() if packed else part * 1, want, "values")


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_range_shares_the_buffers(device, mode):
    y = make_tensor(mode, device=device)
    wholes = [y[:], y[...], y[0:48], y[:, 0:80], y.narrow(0, 0, 48), y.split(48)[0], y.chunk(1)[0]]
    wholes += [y.as_strided(y.shape, y.stride()), y.as_strided((48, 80), (80, 1), 0), y.view(y.shape), y.view_as(y)]
    wholes += [torch.split(y, [48])[0], y.detach()]
    x = make_input("bell", y.shape, y.dtype, device, seed=7)
    for whole in wholes:
        assert addresses(whole) == addresses(y)
    narrow = y.narrow(0, 0, 48)
    narrow.copy_(x)
    assert addresses(narrow) == addresses(y)
    if mode != "stochastic":
        assert_same_tensor(y, make_quantizer(mode)(x))


@pytest.mark.parametrize("mode", MODES)
def test_split_and_chunk(device, mode):
    y = make_tensor(mode, SHAPE, device=device)
    d = y.dequantize()
    for split in (
        lambda t: t.split(32),
        lambda t: t.split([16, 32, 23]),
        lambda t: t.split(32, dim=1),
        lambda t: t.split(32, -1),
        lambda t: t.chunk(4),
        lambda t: t.chunk(3, dim=1),
        lambda t: t.tensor_split(2),
        lambda t: t.unbind(),
        lambda t: list(t)[:3],
    ):
        parts, wants = split(y), split(d)
        assert [p.shape for p in parts] == [w.shape for w in wants]
        for part, want in zip(parts, wants, strict=True):
            values = part.dequantize() if isinstance(part, NVFP4Tensor) else part * 1
            assert_same_bytes(values, want * 1 if values is not part else want, "part")
    assert all(isinstance(p, NVFP4Tensor) for p in y.split(16))
    for bad in (lambda t: t.split([16, 16]), lambda t: t.split(-1)):
        with pytest.raises((RuntimeError, ValueError)):
            bad(y)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.split(16, dim=2),
        lambda t: t.split([16, 32], dim=-3),
        lambda t: t.narrow(2, 0, 1),
        lambda t: t.narrow(0, 40, 9),
        lambda t: t.select(2, 0),
        lambda t: t[48],
        lambda t: t.unsqueeze(4),
        lambda t: t.squeeze(3),
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(0, 0),
        lambda t: t.permute(0, 1, 2),
        lambda t: t.view(7, -1),
        lambda t: t.view(-1, -1),
        lambda t: torch.cat([t, t], 2),
    ],
)
def test_what_torch_refuses_is_refused(device, call):
    y = make_tensor(device=device)
    with pytest.raises((IndexError, RuntimeError)):
        call(y.dequantize())
    with pytest.raises((IndexError, RuntimeError, ValueError)) as error:
        call(y)
    assert not isinstance(error.value, NotImplementedError)


# ---- views


@pytest.mark.parametrize("mode", MODES)
def test_views_that_keep_the_last_dimension(device, mode):
    y = make_tensor(mode, (2, 8, 3, 20), device=device)
    d = y.dequantize()
    views = {
        (48, 20): lambda t: t.view(48, 20),
        (16, 3, 20): lambda t: t.reshape(-1, 3, 20),
        (1, 48, 20): lambda t: t.view(1, -1, 20),
        (16, 3, 20, 1): None,
        (2, 24, 20): lambda t: t.flatten(1, 2),
        (2, 1, 8, 3, 20): lambda t: t.unsqueeze(1),
        (4, 4, 3, 20): lambda t: t.view(4, 4, 3, 20),
    }
    for shape, view in views.items():
        if view is None:
            with pytest.raises(NotImplementedError, match="aten.view"):
                y.view(shape)
            continue
        z = view(y)
        assert type(z) is NVFP4Tensor and z.shape == shape and addresses(z) == addresses(y)
        assert_same_tensor(z, make_equal_in_shape(y, z))
        assert_same_bytes(z.dequantize(), view(d), f"{shape}")
        assert_same_tensor(z.view(y.shape), y)
    assert_same_tensor(y.unsqueeze(0).squeeze(0), y)


def make_equal_in_shape(y, z):
    """y with its row-wise data in z's shape: what z should be."""
    data = y._rowwise_data
    metadata = {**y.get_metadata(), "shape": z.shape}
    if data is not None:
        metadata["rowwise_data"] = data.reshape(*z.shape[:-1], data.shape[-1])
    return NVFP4Tensor(**metadata)


@pytest.mark.parametrize("shape", [(48, 80), (17, 33), (2, 3, 20), (7,), (1, 33), (0, 32), (5, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_flat_view_has_the_same_buffers(device, mode, shape):
    y = make_tensor(mode, shape, device=device)
    flat = y.view(-1)
    assert type(flat) is NVFP4Tensor and flat.shape == (y.numel(),) and addresses(flat) == addresses(y)
    assert_same_bytes(flat.dequantize(), y.dequantize().view(-1), "values")
    assert_same_bytes(flat.clone().to(torch.float64), y.dequantize().view(-1).double(), "copy")
    if y.numel():
        assert_same_tensor(flat.view(shape), y)
        assert_same_bytes(flat[3:9] * 1, y.dequantize().view(-1)[3:9], "part")
        x = make_input("bell", shape, y.dtype, device, seed=2)
        flat.copy_(x.view(-1))
        if mode != "stochastic":
            assert_same_tensor(y, make_quantizer(mode)(x))


def test_expand_and_matmul_of_more_dimensions(device):
    y = make_tensor(shape=(3, 16, 32), device=device)
    d = y.dequantize()
    x = make_input("bell", (3, 5, 32), y.dtype, device)
    assert_same_bytes(torch.matmul(x, y.transpose(1, 2)), torch.matmul(x, d.transpose(1, 2)), "batched")
    assert_same_bytes(torch.einsum("bik,bjk->bij", x, y), torch.einsum("bik,bjk->bij", x, d), "einsum")
    assert_same_bytes(y.permute(2, 0, 1) * 1, d.permute(2, 0, 1) * 1, "permute")
    assert_same_bytes(y[:1].expand(4, 16, 32) * 1, d[:1].expand(4, 16, 32) * 1, "expand")


# ---- transposition


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48, 80), (17, 33), (1, 20), (20, 1), (0, 16)])
def test_t_keeps_the_values(device, mode, shape):
    y = make_tensor(mode, shape, device=device)
    d = y.dequantize()
    for t in (y.t(), y.T, y.mT, y.transpose(0, 1), y.transpose(-1, -2), y.permute(1, 0)):
        assert t.shape == d.t().shape and t.stride() == d.t().stride()
        values = t.dequantize() if isinstance(t, NVFP4Tensor) else t
        assert_same_bytes(values, d.t(), "transposed")
        assert type(t) is (torch.Tensor if mode == "rht_columnwise" else NVFP4Tensor)
    if mode == "rht_columnwise":
        return
    sides = y.t().get_usages()
    if mode == "2d":
        assert sides == {"rowwise": True, "columnwise": True}
        assert_same_tensor(y.t().contiguous().t().contiguous(), y)
        assert addresses(y.t()) == [addresses(y)[i] for i in (2, 3, 0, 1, 5, 4)]
    else:
        one = "columnwise" if y.get_usages()["rowwise"] else "rowwise"
        assert sides == {"rowwise": one == "rowwise", "columnwise": one == "columnwise"}
    assert_same_bytes(y.t().t().dequantize(), d, "twice")
    assert_same_bytes(y.t().clone().dequantize(), d.t(), "clone")
    assert_same_bytes(y.t().reshape(-1).dequantize(), d.t().reshape(-1), "reshape")
    assert_same_bytes(y.t()[1:] * 1, d.t()[1:], "part")


def test_t_of_one_dimension(device):
    y = make_tensor(shape=(33,), device=device)
    assert_same_tensor(y.t(), y)


def test_writing_into_a_transposed_tensor(device):
    x = make_input("bell", (80, 48), torch.bfloat16, device)
    y = make_tensor("rowwise", device=device)
    y.t().copy_(x)  # its only side, seen from the other direction
    assert_same_tensor(y, make_quantizer("rowwise")(x.t().contiguous()))
    both = make_tensor("1d", device=device)
    before = both.clone()
    with pytest.raises(NotImplementedError, match="copy_"):
        both.t().copy_(x)  # would leave the other side behind
    assert_same_tensor(both, before)


# ---- what FSDP2 does to a parameter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sharding_and_unsharding(device, mode, world):
    """The operators that `fully_shard` applies, in its order."""
    y = torch.nn.Parameter(make_tensor(mode, (16 * 6, 40), device=device)).detach()
    shards = []
    for shard in torch.chunk(y, world, dim=0):
        padded = y.new_zeros(shard.size())
        padded.narrow(0, 0, shard.size(0)).copy_(shard)
        flat = padded.view(-1)
        local = padded.narrow(0, 0, shard.size(0))
        assert addresses(flat) == addresses(local) == addresses(padded)
        assert_same_tensor(local, shard)
        shards.append(torch.nn.Parameter(local))
    whole = torch.cat([shard.detach() for shard in shards])
    out = torch.as_strided(whole, y.size(), y.stride(), storage_offset=0)
    assert_same_tensor(out, y)
    assert type(torch.nn.Parameter(out)) is NVFP4Tensor


# ---- cat


@pytest.mark.parametrize("mode", MODES)
def test_cat_of_parts_gives_the_whole(device, mode):
    y = make_tensor(mode, SHAPE, device=device)
    whole = torch.cat(y.split([32, 16, 23]))
    assert_same_tensor(whole, y)
    assert_apart(whole, y)
    whole.copy_(y)  # may be written


def test_cat_in_three_dimensions(device):
    y = make_tensor(shape=(4, 8, 20), device=device)
    assert_same_tensor(torch.cat([y[:2], y[2:]]), y)
    assert_same_bytes(torch.cat([y, y], 1), torch.cat([y.dequantize()] * 2, 1), "dim 1")


@pytest.mark.parametrize("mode", MODES)
def test_cat_of_other_tensors(device, mode):
    a, b = (make_tensor(mode, (32, 80), device=device, seed=seed) for seed in (0, 1))
    want = torch.cat([a.dequantize(), b.dequantize()])
    both = torch.cat([a, b])  # the amaxes differ
    if is_row_scaled(mode):
        assert type(both) is NVFP4Tensor and both.get_usages() == {"rowwise": True, "columnwise": False}
        assert_same_bytes(both._amax_rowwise, torch.cat([a._amax_rowwise, b._amax_rowwise]), "amax")
        assert_same_bytes(both.dequantize(), want, "values")
        uneven = torch.cat([make_tensor(mode, (5, 80), device=device), b])
        assert type(uneven) is NVFP4Tensor and uneven.shape == (37, 80)
    else:
        assert type(both) is torch.Tensor
        assert_same_bytes(both, want, "values")
    assert_same_bytes(torch.cat([a, b], 1), torch.cat([a.dequantize(), b.dequantize()], 1), "columns")


def test_cat_that_cannot_stay_packed(device):
    y = make_tensor(device=device)
    d = y.dequantize()
    others = {
        "uneven": [make_tensor(shape=(17, 80), device=device)] * 2,
        "settings": [y, make_tensor("2d", device=device)],
        "plain": [y, d],
        "part": [y[3:5], y],
        "dtype": [y, y.float()],
        "transposed": [y.t(), y.t()],
    }
    for name, tensors in others.items():
        got = torch.cat(tensors)
        assert type(got) is torch.Tensor, name
        plain = [t.dequantize() if isinstance(t, NVFP4Tensor) else t * 1 for t in tensors]
        assert_same_bytes(got, torch.cat(plain), name)
