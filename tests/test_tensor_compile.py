"""The table of operators under torch.compile: NVFP4Tensor as input, output and parameter of a compiled function."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bytes, make_input
from tensors import assert_same_tensor, make_quantizer, make_tensor

from nvfp4_quant import NVFP4Tensor

READS = {
    "linear": lambda y: F.linear(torch.ones(3, 80, dtype=y.dtype, device=y.device), y),
    "dequantize": lambda y: y.dequantize() + 1,
    "clone": lambda y: y.clone(),
    "half": lambda y: y.half(),
    "double": lambda y: y.double(),
    "detach": lambda y: y.detach(),
    "itself": lambda y: (y, y * 2),
    "rows": lambda y: y[16:32],
    "odd rows": lambda y: y[3:5],
    "row": lambda y: y[3] * 2,
    "columns": lambda y: y[:, 16:32],
    "split": lambda y: y.split(16),
    "t": lambda y: y.t(),
    "view": lambda y: y.view(3, 16, 80),
    "flat": lambda y: y.view(-1),
    "cat": lambda y: torch.cat([y, y]),
    "new_zeros": lambda y: y.new_zeros(32, 32),
}
WRITES = {
    "copy_": lambda y, x: y.copy_(x),
    "quantize_": lambda y, x: y.quantize_(x),
    "detach": lambda y, x: y.detach().copy_(x),
    "whole": lambda y, x: y[:].copy_(x),
    "flat": lambda y, x: y.view(-1).copy_(x.view(-1)),
    "setitem": lambda y, x: y.__setitem__(slice(None), x),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function, **options):
    # the backend that runs the traced operators as they are: what the table gives to the tracer is all that matters
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def assert_same(got, want):
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    elif isinstance(want, NVFP4Tensor):
        assert_same_tensor(got, want)
        assert got.stride() == want.stride()
    else:
        assert type(got) is type(want) and got.stride() == want.stride()
        assert_same_bytes(got * 1, want * 1)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("mode", ["1d", "swizzled"])
def test_reading_in_a_compiled_function(device, mode, name):
    y = make_tensor(mode, device=device)
    assert_same(compiled(READS[name])(y), READS[name](y))


DYNAMIC = {
    "rows": lambda y: y[16:32],
    "last rows": lambda y: y[16 : y.shape[0]],
    "columns": lambda y: y[:, 16:32],
    "split": lambda y: y.split(16),
    "cat": lambda y: torch.cat([y, y]),
    "new_zeros": lambda y: y.new_zeros(y.shape[0] + 1, y.shape[1]),
    "view": lambda y: y.view(-1, 1, y.shape[1]),
    "flat": lambda y: y.view(-1),
    "t": lambda y: y.t(),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_symbolic_sizes(device, name):
    function = compiled(DYNAMIC[name], dynamic=True)
    for shape in ((48, 80), (64, 96)):
        y = make_tensor(shape=shape, device=device)
        assert_same(function(y), DYNAMIC[name](y))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_by_later_reads_and_by_the_caller(device, name, dynamic):
    def step(y, x):
        WRITES[name](y, x)
        return y + 1

    for shape in ((48, 80), (17, 33)):
        y, x = make_tensor(shape=shape, device=device), make_input("bell", shape, torch.bfloat16, device, seed=1)
        out = compiled(step, dynamic=dynamic)(y, x)
        assert_same_tensor(y, make_quantizer()(x))
        assert_same_bytes(out, y.dequantize() + 1, "later read")


def test_a_write_into_a_part_is_refused(device):
    def step(y):
        y[3:5].zero_()
        return y + 1

    with pytest.raises(Exception, match="copy of a part"):
        compiled(step)(make_tensor(device=device))


def test_compiled_layer_with_a_quantized_parameter(device):
    layer, plain = (torch.nn.Linear(80, 48, device=device) for _ in range(2))
    layer.weight = torch.nn.Parameter(make_tensor(dtype=torch.float32, device=device))
    plain.load_state_dict({"weight": layer.weight.dequantize().detach(), "bias": layer.bias.detach()})
    inputs = [make_input("bell", (5, 80), torch.float32, device).requires_grad_() for _ in range(2)]
    for module, x in zip((layer, plain), inputs, strict=True):
        compiled(module)(x).square().sum().backward()
    assert_same_bytes(inputs[0].grad, inputs[1].grad, "gradient of the input")
    assert_same_bytes(layer.weight.grad, plain.weight.grad, "gradient of the weight")
    with torch.inference_mode():
        assert_same_bytes(compiled(layer)(inputs[0]), plain(inputs[0]), "inference")
