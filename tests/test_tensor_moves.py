"""Copies and moves of whole tensors: devices, dtypes, copy_, new tensors, modules, meta and fake tensors."""

from copy import copy, deepcopy

import pytest
import torch
from helpers import DTYPES, assert_same_bytes, make_input
from tensors import (
    MODES,
    addresses,
    assert_apart,
    assert_same_tensor,
    buffers,
    make_quantizer,
    make_tensor,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nvfp4_quant import NVFP4Tensor

# ---- clone, to, devices


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48, 80), (17, 33), (2, 3, 20), (7,), (0, 32), (5, 0)])
def test_clone_is_a_copy_of_everything(device, mode, shape):
    y = make_tensor(mode, shape, device=device)
    for z in (y.clone(), deepcopy(y), y.clone(memory_format=torch.contiguous_format), y.to(y.dtype, copy=True)):
        assert_same_tensor(z, y)
        assert_apart(z, y)
        assert not z.requires_grad


def test_deepcopy_keeps_what_torch_keeps(device):
    p = torch.nn.Parameter(make_tensor(device=device))
    p.grad = torch.ones_like(p.dequantize())
    z = deepcopy(p)
    assert isinstance(z, torch.nn.Parameter) and z.requires_grad
    assert_same_tensor(z, p)
    assert_apart(z, p)
    assert_same_bytes(z.grad, p.grad, "grad")
    part = deepcopy(make_tensor(device=device)[16:])
    part.quantize_(torch.zeros_like(part))  # a copy of a part is a tensor of its own
    assert_same_bytes(part.dequantize(), torch.zeros_like(part.dequantize()), "part")


def test_shallow_copy_shares_buffers(device):
    y = make_tensor(device=device)
    assert addresses(copy(y)) == addresses(y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_nominal_dtypes_keep_the_bytes(device, mode, dtype):
    y = make_tensor(mode, dtype=torch.float32, device=device)
    spellings = [
        y.to(dtype),
        y.to(dtype=dtype),
        y.to(torch.empty((), dtype=dtype, device=device)),
        y.to(device, dtype),
        y.type(dtype),
        {torch.float32: y.float, torch.float16: y.half, torch.bfloat16: y.bfloat16}[dtype](),
    ]
    for z in spellings:
        assert_same_tensor(z, y, dtype=dtype)
        assert_same_bytes(z.dequantize(), y.dequantize(dtype=dtype), "values")
        if dtype != y.dtype:
            assert_apart(z, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_other_dtypes_give_the_values(device, dtype):
    y = make_tensor(device=device)
    for z in (y.to(dtype), y.type(dtype)):
        assert type(z) is torch.Tensor
        assert_same_bytes(z, y.dequantize().to(dtype), "values")


def test_no_move_returns_the_tensor_itself(device):
    y = make_tensor(device=device)
    assert y.to(device) is y and y.to(y.dtype) is y and y.contiguous() is y


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_device_round_trip_in_every_spelling(device, mode):
    y = make_tensor(mode, device=device)
    there = [y.cpu(), y.to("cpu"), y.to(device="cpu"), y.to(torch.device("cpu"), non_blocking=False)]
    there.append(y.to(torch.empty((), dtype=y.dtype)))
    for z in there:
        assert_same_tensor(z, y, device="cpu")
        assert all(b is None or b.device.type == "cpu" for b in buffers(z))
        for back in (z.cuda(), z.to("cuda"), z.to(device), z.to("cuda", torch.float32).to(z.dtype)):
            assert_same_tensor(back, y, device=y.device)


@pytest.mark.cuda
def test_pin_memory(device):
    y = make_tensor(device="cpu")
    assert not y.is_pinned()
    z = y.pin_memory()
    assert z.is_pinned() and all(b.is_pinned() for b in buffers(z))
    assert_same_tensor(z, y)
    assert_same_tensor(z.to(device, non_blocking=True), make_tensor(device=device))


@pytest.mark.cuda
def test_record_stream(device):
    stream = torch.cuda.Stream()
    y = make_tensor(device=device)
    y.record_stream(stream)
    y[3:5].record_stream(stream)


# ---- copy_


@pytest.mark.parametrize("mode", MODES)
def test_copy_between_equal_settings_copies_bytes(device, mode):
    source, target = make_tensor(mode, device=device), make_tensor(mode, dtype=torch.float32, device=device, seed=1)
    where = addresses(target)
    assert target.copy_(source) is target
    assert_same_tensor(target, source, dtype=torch.float32)
    assert addresses(target) == where


@pytest.mark.parametrize("mode", MODES)
def test_copy_from_a_plain_tensor_quantizes_its_nominal_values(device, mode):
    if mode == "stochastic":
        pytest.skip("two draws differ")
    target = make_tensor(mode, device=device)
    x = make_input("bell", target.shape, torch.float64, device, seed=4)
    where = addresses(target)
    target.copy_(x)
    assert_same_tensor(target, make_quantizer(mode)(x.bfloat16()))
    assert addresses(target) == where
    target.copy_(x[0])  # broadcast
    assert_same_tensor(target, make_quantizer(mode)(x[0].bfloat16().expand(target.shape).contiguous()))


@pytest.mark.parametrize("mode", MODES)
def test_copy_to_a_plain_tensor_takes_the_values(device, mode):
    source = make_tensor(mode, device=device)
    target = torch.zeros(source.shape, dtype=torch.float64, device=device)
    target.copy_(source)
    assert_same_bytes(target, source.dequantize().double(), "values")


@pytest.mark.parametrize(
    "target_mode, source_mode", [("1d", "2d"), ("2d", "rowwise"), ("rht", "4over6"), ("1d", "swizzled")]
)
def test_copy_between_other_settings_goes_through_the_values(device, target_mode, source_mode):
    source = make_tensor(source_mode, dtype=torch.float32, device=device)
    target = make_tensor(target_mode, device=device, seed=1)
    target.copy_(source)
    assert_same_tensor(target, make_quantizer(target_mode)(source.dequantize().bfloat16()))


def test_copy_refuses_before_it_writes(device):
    y = make_tensor(device=device)
    before = y.clone()
    with pytest.raises(RuntimeError):
        y.copy_(torch.zeros(3, 5, device=device))
    with pytest.raises(RuntimeError, match="leaf"):
        y.clone().requires_grad_().copy_(before)
    assert_same_tensor(y, before)


# ---- new tensors


@pytest.mark.parametrize("mode", MODES)
def test_new_tensors(device, mode):
    y = make_tensor(mode, device=device)
    for z in (torch.empty_like(y), y.new_empty(y.shape), y.new_zeros(y.shape)):
        assert type(z) is NVFP4Tensor and z.dtype == y.dtype and z.device == y.device
        assert z._quantizer._settings == y._quantizer._settings
        assert [b is None or b.shape for b in buffers(z)] == [b is None or b.shape for b in buffers(y)]
        assert_apart(z, y)
    want = make_quantizer(mode).make_empty((33, 50), dtype=torch.float16, device=device)
    zeros = y.new_zeros((33, 50), dtype=torch.float16)
    assert zeros.shape == (33, 50) and zeros.dtype == torch.float16
    for got, empty in zip(buffers(zeros), buffers(want), strict=True):
        assert_same_bytes(got, None if empty is None else torch.zeros_like(empty), "zeros")
    assert_same_bytes(zeros.dequantize(), torch.zeros(33, 50, dtype=torch.float16, device=device), "values")
    assert type(torch.empty_like(y, dtype=torch.float64)) is torch.Tensor
    assert type(y.new_zeros(3, dtype=torch.int64)) is torch.Tensor
    assert torch.empty_like(y, dtype=torch.float32).dtype == torch.float32


# ---- modules


def make_linear(device, mode="1d", **options) -> torch.nn.Linear:
    layer = torch.nn.Linear(80, 48, device=device, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(make_tensor(mode, device=device), **options)
    return layer


def test_module_to_dtype(device):
    layer = make_linear(device)
    want = layer.weight.clone()
    for move, dtype in ((lambda: layer.half(), torch.float16), (lambda: layer.to(torch.float32), torch.float32)):
        move()
        assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.requires_grad
        assert_same_tensor(layer.weight, want, dtype=dtype)
        assert layer.bias.dtype == dtype
    layer.double()
    assert type(layer.weight) is torch.nn.Parameter
    assert_same_bytes(layer.weight.data, want.dequantize(dtype=torch.float32).double(), "weight")


def test_gradients_move_with_a_module(device):
    layer = make_linear(device)
    layer(torch.ones(2, 80, device=device, dtype=torch.bfloat16)).sum().backward()
    want = layer.weight.grad.clone()
    for dtype in (torch.float16, torch.float32, torch.float64):
        layer.to(dtype)
        assert layer.weight.dtype == dtype
        assert_same_bytes(layer.weight.grad, want.to(dtype), "grad")


def test_shared_memory(device):
    if device.type == "cuda":
        pytest.skip("CUDA memory always counts as shared")
    layer = make_linear(device)
    want = layer.weight.clone()
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared() and all(b.is_shared() for b in buffers(layer.weight))
    assert_same_tensor(layer.weight, want)


@pytest.mark.cuda
def test_module_to_device(device):
    layer = make_linear("cpu")
    want = layer.weight.clone()
    for there in (layer.cuda, lambda: layer.to("cpu"), lambda: layer.to(device, torch.float16)):
        there()
        assert all(b.device == layer.bias.device for b in buffers(layer.weight))
    assert_same_tensor(layer.weight, want, dtype=torch.float16, device=layer.bias.device)


def test_module_to_empty_and_meta(device):
    layer = make_linear(device)
    layer.to("meta")
    assert layer.weight.is_meta and all(b.is_meta for b in buffers(layer.weight))
    layer.to_empty(device=device)
    assert isinstance(layer.weight, NVFP4Tensor) and layer.weight.device == layer.bias.device
    assert all(b.device == layer.bias.device for b in buffers(layer.weight))


def test_zero_grad_and_requires_grad_of_a_module(device):
    layer = make_linear(device)
    layer(torch.ones(2, 80, device=device, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad(set_to_none=False)
    assert not layer.weight.grad.any()
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad


def test_assigning_data(device):
    p = torch.nn.Parameter(make_tensor(device=device))
    other = make_tensor(device=device, seed=1)
    p.data = other
    assert isinstance(p, torch.nn.Parameter)
    assert_same_tensor(p.detach(), other)
    assert_same_bytes(p.dequantize().detach(), other.dequantize(), "values")
    where = addresses(p)
    x = make_input("bell", p.shape, p.dtype, device, seed=2)
    p.data = x
    assert_same_tensor(p.detach(), make_quantizer()(x))
    assert addresses(p) == where
    x = make_input("bell", (3, 20), torch.float16, device)
    p.data = x
    assert p.shape == (3, 20) and p.stride() == (20, 1)
    assert_same_tensor(p.detach(), make_quantizer()(x))
    assert_same_tensor(p.data, p.detach())


# ---- meta and fake tensors


def layout(t):
    return None if t is None else (tuple(t.shape), t.stride(), t.dtype)


OPERATIONS = {
    "itself": lambda y: y,
    "clone": lambda y: y.clone(),
    "detach": lambda y: y.detach(),
    "half": lambda y: y.half(),
    "empty_like": torch.empty_like,
    "new_zeros": lambda y: y.new_zeros((32, 48)),
    "rows": lambda y: y[16:32],
    "columns": lambda y: y[:, 16:],
    "split": lambda y: y.split(16)[2],
    "view": lambda y: y.view(3, 16, 80),
    "flat": lambda y: y.view(-1),
    "t": lambda y: y.t(),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["1d", "columnwise", "rht_columnwise", "row_scaled", "swizzled"])
def test_meta_and_fake_tensors_have_the_real_shapes(device, mode, name, fake):
    y = make_tensor(mode, device=device)
    want = OPERATIONS[name](y)
    if fake:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            got = OPERATIONS[name](fakes.from_tensor(y))
    else:
        got = OPERATIONS[name](y.to("meta"))
    if type(want) is torch.Tensor:
        assert layout(got) == layout(want)
        return
    assert type(got) is NVFP4Tensor and layout(got) == layout(want)
    assert [layout(b) for b in buffers(got)] == [layout(b) for b in buffers(want)]
    for b in buffers(got):
        assert b is None or (isinstance(b, FakeTensor) if fake else b.is_meta)


def test_quantizing_fake_tensors(device):
    with FakeTensorMode():
        y = make_quantizer()(torch.empty(17, 33, device=device, dtype=torch.bfloat16))
        values = y.dequantize()
    want = make_tensor(shape=(17, 33), device=device)
    assert [layout(b) for b in buffers(y)] == [layout(b) for b in buffers(want)]
    assert layout(values) == layout(want.dequantize())
