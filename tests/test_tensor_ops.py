"""The rule for operators that have no handler; detach, autograd, inference mode, dequantized parts."""

import logging
import pickle
from copy import deepcopy

import pytest
import torch
from helpers import assert_same_bytes, make_input
from tensors import MODES, addresses, assert_same_tensor, buffers, make_quantizer, make_tensor

from nvfp4_quant import NVFP4Tensor

LOGGER = "nvfp4_quant"


# ---- operators without a handler

FUNCTIONAL = {
    "add": lambda t: t + 1,
    "radd": lambda t: 2 - t,
    "mul": lambda t: t * t,
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(-1),
    "abs": torch.abs,
    "matmul": lambda t: t @ t.t(),
    "einsum": lambda t: torch.einsum("ik,jk->ij", t, t),
    "batched": lambda t: torch.matmul(t.new_ones((2, 3, 80), dtype=torch.float64).to(t.dtype), t.t()),
    "stack": lambda t: torch.stack([t, t]),
    "where": lambda t: torch.where(t > 0, t, 0),
    "index": lambda t: t[torch.tensor([3, 0, 3], device=t.device)],
    "mask": lambda t: t[t > 0],
    "embedding": lambda t: torch.nn.functional.embedding(torch.tensor([1, 0], device=t.device), t),
    "softmax": lambda t: t.softmax(-1),
    "zeros_like": torch.zeros_like,
    "flip": lambda t: t.flip(0),
    "foreach": lambda t: torch._foreach_mul([t], 2)[0],
    "max": lambda t: t.max(),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_operators_get_the_values(device, name):
    y = make_tensor(device=device)
    got, want = FUNCTIONAL[name](y), FUNCTIONAL[name](y.dequantize())
    assert type(got) is torch.Tensor
    assert_same_bytes(got, want, name)


def test_python_values(device):
    y = make_tensor(shape=(1,), device=device)
    assert y.item() == y.dequantize().item()
    assert bool(torch.equal(y, y.clone())) and torch.allclose(y, y.dequantize())


def test_one_debug_line_for_a_dequantized_operator(device, caplog):
    y = make_tensor(device=device)
    with caplog.at_level(logging.DEBUG, LOGGER):
        torch.sigmoid(y)
    lines = [record for record in caplog.records if record.name.startswith(LOGGER)]
    assert len(lines) == 1 and lines[0].levelno == logging.DEBUG
    assert "aten.sigmoid.default" in lines[0].getMessage()


def test_known_operators_log_nothing(device, caplog):
    y = make_tensor(device=device)
    with caplog.at_level(logging.DEBUG, LOGGER):
        y.clone(), y.detach(), y.to(torch.float16), y[16:], y.t(), torch.empty_like(y)
    assert not [record for record in caplog.records if record.name.startswith(LOGGER)]


MUTATING = {
    "aten.add_": lambda y: y.add_(1),
    "aten.zero_": lambda y: y.zero_(),
    "aten.fill_": lambda y: y.fill_(2.0),
    "aten.mul_": lambda y: y.mul_(y),
    "aten.index_put_": lambda y: y.__setitem__(y.dequantize() > 0, 0),
    "aten.index_fill_": lambda y: y.index_fill_(0, torch.tensor([0], device=y.device), 0),
    "aten.mm.out": lambda y: torch.mm(y.dequantize(), y.dequantize().t().contiguous(), out=y),
    "aten._foreach_add_": lambda y: torch._foreach_add_([y], 1),
    "aten.normal_": lambda y: torch.nn.init.normal_(y),
    "aten.t_": lambda y: y.t_(),
    "aten.resize_": lambda y: y.resize_(4, 4),
    "aten.set_": lambda y: y.set_(),
}
VIEWS = {
    "aten.diagonal": lambda y: y.diagonal(),
    "aten.unfold": lambda y: y.unfold(0, 2, 1),
    "aten.view.dtype": lambda y: y.view(torch.int16),
    "aten.as_strided": lambda y: y.as_strided((2, 2), (1, 1)),
    "aten.view.default": lambda y: y.view(-1, 16),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*MUTATING, *VIEWS])
def test_unknown_writes_and_views_raise_and_name_themselves(device, name, inference):
    with torch.inference_mode(inference):
        y = make_tensor(device=device)
        before = y.clone()
        with pytest.raises(NotImplementedError, match=name):
            {**MUTATING, **VIEWS}[name](y)
        assert_same_tensor(y, before)


def test_writing_values_into_a_plain_tensor(device):
    y = make_tensor(device=device)
    d = y.dequantize()
    plain = torch.ones_like(d)
    plain.add_(y)
    assert_same_bytes(plain, torch.ones_like(d) + d, "add_")
    torch.add(y, 1, out=plain)
    assert_same_bytes(plain, d + 1, "out")
    plain[16:32] = y[16:32]
    assert_same_bytes(plain[16:32], d[16:32], "setitem")


def test_optimizer_step_is_refused(device):
    p = torch.nn.Parameter(make_tensor(device=device))
    p.grad = torch.ones_like(p.dequantize())
    with pytest.raises(NotImplementedError, match="NVFP4Tensor"):
        torch.optim.SGD([p], lr=0.1).step()


# ---- detach and derived classes


class Derived(NVFP4Tensor):
    pass


def derived(mode="1d", device="cpu") -> Derived:
    y = make_tensor(mode, device=device)
    y = Derived(**y.get_metadata())
    assert type(y) is Derived
    return y


@pytest.mark.parametrize("mode", MODES)
def test_detach_has_the_same_inner_tensors(device, mode):
    y = make_tensor(mode, device=device).requires_grad_()
    z = y.detach()
    assert z is not y and not z.requires_grad and y.requires_grad
    assert all(a is b for a, b in zip(buffers(z), buffers(y), strict=True))
    assert_same_tensor(z, y)


def test_derived_classes_are_kept(device):
    y = derived(device=device)
    results = [
        y.detach(),
        y.clone(),
        y.to(torch.float32),
        torch.empty_like(y),
        y.new_zeros((32, 32)),
        y[16:32],
        y[:],
        y.view(-1),
        y.t(),
        deepcopy(y),
        pickle.loads(pickle.dumps(y)),
        torch.nn.Parameter(y),
        torch.cat([y[:16], y[16:]]),
    ]
    assert [type(r).__name__ for r in results] == ["Derived"] * len(results)


def test_attributes_can_be_set(device):
    y = make_tensor(device=device)
    y.tag = "mine"  # no __slots__
    assert y.tag == "mine" and deepcopy(y).tag == "mine" and pickle.loads(pickle.dumps(y)).tag == "mine"
    assert not hasattr(y.detach(), "tag")


# ---- autograd


def test_hooks_and_gradients(device):
    y = make_tensor(dtype=torch.float32, device=device).requires_grad_()
    assert y.is_leaf and y.requires_grad
    seen = []
    y.register_hook(lambda grad: seen.append(grad.clone()))
    accumulated = []
    y.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    weight = make_input("bell", y.shape, torch.float32, device, seed=3)
    (y * weight).sum().backward()
    for grad in (y.grad, seen[0], accumulated[0]):
        assert type(grad) is torch.Tensor
        assert_same_bytes(grad, weight, "grad")
    (y * weight).sum().backward()
    assert_same_bytes(y.grad, weight + weight, "accumulated")
    y.requires_grad_(False)
    assert not y.requires_grad


@pytest.mark.parametrize(
    "part",
    [
        lambda y: y[16:32],
        lambda y: y[3:5],
        lambda y: y[:, 16:32],
        lambda y: y[7],
        lambda y: y.t(),
        lambda y: y.split(16)[1],
        lambda y: y.view(2, 24, 80),
        lambda y: y.to(torch.float64),
        lambda y: y.clone(),
        lambda y: torch.cat([y, y]),
    ],
)
def test_gradients_pass_through_parts_and_copies(device, part):
    x = make_input("bell", (48, 80), torch.float32, device).requires_grad_()
    y = make_quantizer()(x)  # straight through
    z = part(y)
    weight = torch.arange(z.numel(), device=device, dtype=z.dtype).view(z.shape)
    (z * weight).sum().backward()
    twin = x.detach().clone().requires_grad_()
    (part(twin) * weight).sum().backward()
    assert_same_bytes(x.grad, twin.grad, "grad")


# ---- inference mode


@pytest.mark.parametrize("mode", MODES)
def test_inference_mode(device, mode):
    y = make_tensor(mode, device=device)
    d = y.dequantize()
    with torch.inference_mode():
        assert y.to(device) is y or addresses(y.to(device)) == addresses(y)
        assert_same_tensor(y.to(torch.float16), y, dtype=torch.float16)
        assert_same_bytes(y.to(torch.float64), d.double(), "float64")
        assert_same_tensor(y.cpu(), y, device="cpu")
        assert_same_tensor(y.contiguous(), y)
        assert_same_bytes(y.reshape(-1).dequantize(), d.reshape(-1), "reshape")
        assert_same_bytes((y + 1), d + 1, "add")
        assert_same_tensor(y.narrow(0, 0, 48), y)
        assert_same_bytes(y.chunk(3)[1] * 1, d.chunk(3)[1], "chunk")
        fresh = make_tensor(mode, device=device, seed=5)
        fresh.copy_(y)
        assert_same_tensor(fresh.clone(), fresh)


# ---- the dequantized parts


def test_a_dequantized_part_reads_as_a_tensor(device):
    y = make_tensor(device=device, dtype=torch.float32)
    part, want = y[3:5], y.dequantize()[3:5]
    assert not isinstance(part, NVFP4Tensor) and isinstance(part, torch.Tensor)
    assert part.tolist() == want.tolist()
    assert (part.cpu().numpy() == want.cpu().numpy()).all()
    assert torch.equal(torch.from_numpy(y[3].cpu().numpy()), y.dequantize()[3].cpu())
    assert repr(part).startswith("DequantizedCopy(")
    for got in (
        part * 1,
        deepcopy(part),
        pickle.loads(pickle.dumps(part)),
        part.clone(),
        part.to(torch.float64).float(),
    ):
        assert type(got) is torch.Tensor
        assert_same_bytes(got, want, "part")
    assert_same_tensor(make_quantizer()(part), make_quantizer()(want))
    assert_same_bytes(part[0, 2:4] * 1, want[0, 2:4], "part of a part")


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.zero_(),
        lambda t: t.copy_(torch.zeros_like(t)),
        lambda t: t.__setitem__(0, 1),
        lambda t: t.view(t.shape).add_(1),
        lambda t: torch.zeros(t.shape, out=t, dtype=t.dtype),
        lambda t: torch._foreach_zero_([t]),
    ],
)
@pytest.mark.parametrize("part", [lambda y: y[3:5], lambda y: y[16:32], lambda y: y[::2], lambda y: y.t()[:, 3:5]])
def test_writing_into_a_part_raises(device, part, write):
    y = make_tensor(device=device)
    before = y.clone()
    with pytest.raises(NotImplementedError, match="aten"):
        write(part(y))
    assert_same_tensor(y, before)


def test_assignment_to_a_part_raises_and_to_the_whole_works(device):
    y = make_tensor(device=device)
    before = y.clone()
    x = make_input("bell", y.shape, y.dtype, device, seed=9)
    for index in (slice(3, 5), slice(16, 32), 7, (slice(None), slice(0, 16)), (3, 4), Ellipsis):
        if index is Ellipsis:
            y[index] = x
        else:
            with pytest.raises(NotImplementedError, match="aten"):
                y[index] = 0
            with pytest.raises(NotImplementedError, match="aten"):
                y[index] = x[index]
            assert_same_tensor(y, before)
    assert_same_tensor(y, make_quantizer()(x))
    y[:] = before
    assert_same_tensor(y, before)
    with pytest.raises(RuntimeError, match="copy of a part"):
        y[16:32].quantize_(x[16:32])
    y[16:32].clone().quantize_(x[16:32])  # a clone is a tensor of its own
