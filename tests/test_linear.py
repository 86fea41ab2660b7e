"""Quantized weights in linear layers: the numbers of the dequantized weight, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, assert_same_bytes, make_input
from tensors import MODES, assert_same_tensor, make_quantizer, make_tensor

from nvfp4_quant import NVFP4Tensor

GRAD_MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
SHAPES = ((48, 80), (17, 33), (1, 16), (130, 64))


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_has_the_numbers_of_the_dequantized_weight(device, mode, dtype, grad_mode):
    for shape in SHAPES:
        y = make_tensor(mode, shape, dtype, device)
        d = y.dequantize()
        bias = make_input("bell", (shape[0],), dtype, device)
        with GRAD_MODES[grad_mode]():
            for lead in ((5,), (2, 3), ()):
                x = make_input("bell", (*lead, shape[1]), dtype, device, seed=1)
                assert_same_bytes(F.linear(x, y), F.linear(x, d), f"{shape} {lead}")
                assert_same_bytes(F.linear(x, y, bias), F.linear(x, d, bias), f"{shape} {lead} bias")
            assert_same_bytes(x @ y.t(), x @ d.t(), "matmul")


@pytest.mark.parametrize("mode", MODES)
def test_parameter_in_a_linear_layer(device, mode):
    y = make_tensor(mode, dtype=torch.float32, device=device)
    layer, plain = (torch.nn.Linear(80, 48, device=device) for _ in range(2))
    layer.weight = torch.nn.Parameter(y)
    plain.load_state_dict({"weight": y.dequantize(), "bias": layer.bias.detach()})
    assert isinstance(layer.weight, NVFP4Tensor) and [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    inputs = [make_input("bell", (2, 5, 80), torch.float32, device).requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((layer, plain), inputs, strict=True)]
    assert_same_bytes(outputs[0], outputs[1], "with grad")
    weight = make_input("bell", outputs[0].shape, torch.float32, device, seed=2)
    for out in outputs:
        (out * weight).sum().backward()
    assert_same_bytes(inputs[0].grad, inputs[1].grad, "gradient of the input")
    assert type(layer.weight.grad) is torch.Tensor
    assert_same_bytes(layer.weight.grad, plain.weight.grad, "gradient of the weight")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_bytes(layer(inputs[0]), plain(inputs[0]), mode.__name__)


def test_layer_moves(device):
    layer = torch.nn.Linear(80, 48, bias=False)
    layer.weight = torch.nn.Parameter(make_tensor(dtype=torch.float32))
    want = layer.weight.clone()
    layer.to(device)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert_same_tensor(layer.weight, want, device=device if device.type == "cpu" else torch.device("cuda", 0))
    x = make_input("bell", (3, 80), torch.float32, device)
    assert_same_bytes(layer(x), F.linear(x, layer.weight.dequantize()), "output")
    layer.to(device, torch.bfloat16)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_straight_through_training_step(device, mode):
    """A layer that quantizes its master weight on the fly gets the gradient of the dequantized weight."""
    master = make_input("bell", (48, 80), torch.float32, device).requires_grad_()
    x = make_input("bell", (5, 80), torch.float32, device, seed=1)
    quantizer = make_quantizer(mode)
    state = {"rng_state": (1, 4)} if mode == "stochastic" else {}
    F.linear(x, quantizer.quantize(master, **state)).square().sum().backward()
    d = quantizer.quantize(master.detach(), **state).dequantize().requires_grad_()
    F.linear(x, d).square().sum().backward()
    assert_same_bytes(master.grad, d.grad, "gradient")


def test_quantized_activations(device):
    y, w = make_tensor(device=device), make_tensor(device=device, shape=(16, 80), seed=1)
    assert_same_bytes(F.linear(y, w), F.linear(y.dequantize(), w.dequantize()), "both quantized")


def test_autocast(device):
    y = make_tensor(dtype=torch.float32, device=device)
    x = make_input("bell", (5, 80), torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = F.linear(x, y)
        want = F.linear(x, y.dequantize(dtype=torch.bfloat16))
    assert_same_bytes(got, want, "autocast")
