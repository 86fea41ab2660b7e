"""torch.compile without graph breaks and torch.export: the bytes of eager mode, padding included; writes are seen."""

import pytest
import torch
import torch.nn.functional as F
from helpers import BUFFERS, assert_same_buffers, assert_same_bytes, make_input
from native import MODES, RNG_STATE, oracle, public_quantizer
from torch._dynamo.testing import CompileCounterWithBackend

import nvfp4_quant
from nvfp4_quant import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

SHAPE = (33, 40)
OTHER_SHAPE = (50, 24)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["static", "dynamic"])
def dynamic(request):
    return request.param


def compiled(function, dynamic=None, backend="aot_eager", **options):
    """aot_eager traces all that inductor would, and compiles in a fraction of the time."""
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend, **options)


def make_x(device, shape=SHAPE, seed=0) -> torch.Tensor:
    return make_input("bell", shape, torch.float32, device, seed)


def assert_equal(got, want, path="result") -> None:
    """Tensors by bytes, quantized ones by every buffer and setting, containers by element."""
    if isinstance(want, NVFP4TensorStorage):
        assert type(got) is type(want) and got.shape == want.shape and got.dtype == want.dtype, path
        assert got._settings == want._settings, path
        for name, a, b in zip(BUFFERS, got._buffers(), want._buffers(), strict=True):
            assert_same_bytes(a, b, f"{path}.{name}")
            assert a is None or a.stride() == b.stride()
    elif isinstance(want, torch.Tensor):
        assert_same_bytes(got, want, path)
    elif isinstance(want, tuple):
        assert len(got) == len(want), path
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_equal(a, b, f"{path}[{i}]")
    else:
        assert got == want, path


def assert_as_eager(function, make_arguments, dynamic, backend="aot_eager") -> None:
    """Results and arguments (which may be written) after a compiled call equal those after an eager one."""
    run = compiled(function, dynamic, backend)
    for shape in (SHAPE, OTHER_SHAPE):
        want_arguments, arguments = make_arguments(shape), make_arguments(shape)
        want = function(*want_arguments)
        assert_equal(run(*arguments), want)
        assert_equal(arguments, want_arguments, "arguments")


# ---- one step


@pytest.mark.parametrize("mode", MODES)
def test_quantize_in_every_mode(mode, device):
    q = public_quantizer(MODES[mode] | {"optimize_for_gemm": mode == "plain"})
    rng_state = RNG_STATE if q.stochastic_rounding else None
    assert_as_eager(lambda x: q.quantize(x, rng_state=rng_state), lambda s: (make_x(device, s),), True)


@pytest.mark.parametrize("usage", [{"columnwise": False}, {"rowwise": False}], ids=str)
def test_quantize_one_direction(usage, device, dynamic):
    q = NVFP4Quantizer(**usage)
    assert_as_eager(lambda x: (q(x), q(x.t())), lambda s: (make_x(device, s),), dynamic)


def quantize_and_back(x):
    return NVFP4Quantizer()(x).dequantize(dtype=torch.bfloat16) + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_quantize_and_dequantize(backend, device, dynamic):
    assert_as_eager(quantize_and_back, lambda s: (make_x(device, s),), dynamic, backend)


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (1,), (17,), (2, 3, 40)], ids=str)
def test_other_shapes(shape, device):
    q = NVFP4Quantizer()
    x = make_x(device, shape)
    assert_equal(compiled(lambda x: q(x))(x), q(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tensor_as_input_and_output(backend, device, dynamic):
    q = NVFP4Quantizer(with_rht=True)
    function = lambda y: (y, y.dequantize(), y._with_gemm_swizzled_scales, y._rowwise_data + 1)  # noqa: E731
    assert_as_eager(function, lambda s: (q(make_x(device, s)),), dynamic, backend)


def test_given_amax_and_nominal_dtype(device, dynamic):
    q = NVFP4Quantizer()

    def function(x, amax):
        return q.quantize(x, amax=amax, dtype=torch.bfloat16), q.quantize(x, amax=2.0)

    assert_as_eager(function, lambda s: (make_x(device, s), torch.ones(1, device=device)), dynamic)


def test_internal_storage(device, dynamic):
    q = NVFP4Quantizer()
    q.internal = True
    assert_as_eager(lambda x: (q(x).dequantize(), q(x)._columnwise_data), lambda s: (make_x(device, s),), dynamic)


def test_make_empty(device, dynamic):
    q = NVFP4Quantizer(with_2d_quantization=True)

    def function(x):
        return q.update_quantized(x, q.make_empty(x.shape, dtype=x.dtype, device=x.device))

    assert_as_eager(function, lambda s: (make_x(device, s),), dynamic)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compute_amax(backend, device, dynamic):
    def function(x, amax):
        nvfp4_quant.compute_amax(x, amax)
        first = amax + 1
        both = torch.empty(1, device=x.device), torch.empty(1, device=x.device)
        nvfp4_quant.compute_amax(x * 2, *both)
        nvfp4_quant.compute_amax(x * 3, amax, noop_flag=torch.ones(1, device=x.device))
        return first, both

    assert_as_eager(function, lambda s: (make_x(device, s), torch.zeros(1, device=device)), dynamic, backend)


def test_amax_reduction_is_refused(device):
    q = NVFP4Quantizer(with_amax_reduction=True)
    with pytest.raises(Exception, match="with_amax_reduction"):
        compiled(lambda x: q(x))(make_x(device))


# ---- writes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_update_is_seen_by_later_reads(backend, device, dynamic):
    q = NVFP4Quantizer()

    def function(x, y):
        before = y.dequantize()
        q.update_quantized(x, y)
        between = y.dequantize()
        y.quantize_(x * 3)
        q.quantize(x * 4, out=y)
        return before, between, y.dequantize(), y, F.linear(x, y)

    assert_as_eager(function, lambda s: (make_x(device, s), q(make_x(device, s, 1))), dynamic, backend)


@pytest.mark.parametrize("mode", ["plain", "hadamard_2d", "row_scaled", "4over6_256_mse", "stochastic"])
def test_update_in_other_modes(mode, device, dynamic):
    q = public_quantizer(MODES[mode])
    rng_state = RNG_STATE if q.stochastic_rounding else None

    def function(x, y):
        return q.update_quantized(x, y, rng_state=rng_state).dequantize()

    def arguments(shape):
        return make_x(device, shape), q.quantize(make_x(device, shape, 1), rng_state=rng_state)

    assert_as_eager(function, arguments, dynamic)


def test_update_keeps_the_memory(device, dynamic):
    q = NVFP4Quantizer()
    y, x = q(make_x(device)), make_x(device, seed=1)
    before = y._buffers()
    addresses = [b.data_ptr() for b in before]
    got = compiled(lambda x, y: q.update_quantized(x, y), dynamic, "inductor")(x, y)
    assert got is y
    assert [b.data_ptr() for b in y._buffers()] == addresses
    assert_same_buffers(dict(zip(BUFFERS, before, strict=True)), oracle(x, {}))


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_update_with_a_noop_flag(flag, device, dynamic):
    q = NVFP4Quantizer()

    def function(x, y, noop_flag):
        q.update_quantized(x, y, noop_flag=noop_flag)
        return y.dequantize()

    def arguments(shape):
        return make_x(device, shape), q(make_x(device, shape, 1)), torch.full((1,), flag, device=device)

    assert_as_eager(function, arguments, dynamic)


def test_update_of_a_tensor_made_inside(device, dynamic):
    q = NVFP4Quantizer()

    def function(x):
        y = q(x)
        before = y.dequantize()
        q.update_quantized(x * 2, y)
        return before, y, y.dequantize(), y.get_data_tensors()

    assert_as_eager(function, lambda s: (make_x(device, s),), dynamic)


def test_update_that_would_change_the_settings_is_refused(device):
    q = NVFP4Quantizer(with_2d_quantization=True)
    y = NVFP4Quantizer()(make_x(device))
    with pytest.raises(Exception, match="must keep the settings"):
        compiled(lambda x, y: q.update_quantized(x, y))(make_x(device), y)
    assert_same_buffers(y, oracle(make_x(device), {}))


def test_update_under_a_second_name(device, dynamic):
    """A tensor that comes in twice is one."""
    q = NVFP4Quantizer()

    def function(x, y, same):
        q.update_quantized(x, y)
        return same.dequantize(), same._rowwise_data + 0

    def arguments(shape):
        y = q(make_x(device, shape, 1))
        return make_x(device, shape), y, y

    assert_as_eager(function, arguments, dynamic)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_update_is_seen_in_every_buffer(backend, device, dynamic):
    """Also by what reads the buffers one by one, as a GEMM does, and by the reordering of the scales."""
    q = NVFP4Quantizer()

    def read(y):
        # Not a plain clone: inductor drops it, and the next write of any operator that mutates then reaches the "copy".
        return tuple(getattr(y, f"_{name}") + 1 for name in BUFFERS)

    def function(x, y, z):
        q.update_quantized(x, y)
        first = read(y)
        q.update_quantized(x * 3, y)
        second = read(y)
        z.quantize_(y)
        z.quantize_(x * 5)
        third = read(z)
        nvfp4_quant.swizzle_scales_for_gemm_(z)
        made = q(x)
        made.quantize_(x * 7)
        return first, second, third, read(made), y, z, made

    def arguments(shape):
        return make_x(device, shape), q(make_x(device, shape, 1)), q(make_x(device, shape, 2))

    assert_as_eager(function, arguments, dynamic, backend)


def test_update_usage_of_a_tensor_made_inside(device, dynamic):
    q = NVFP4Quantizer(with_2d_quantization=True, columnwise=False)

    def function(x):
        y, z = q(x), q(x)
        y.update_usage(columnwise_usage=True)
        z.update_usage(columnwise_usage=True)
        z.update_usage(rowwise_usage=False)
        return y, z, z.dequantize()

    assert_as_eager(function, lambda s: (make_x(device, s),), dynamic)


def test_update_usage_of_an_input_is_refused(device):
    """torch hands on writes to the buffers of an input, but not that one is gone: better loud than lost."""
    y = NVFP4Quantizer()(make_x(device))
    with pytest.raises(Exception, match="update_usage: a compiled function cannot"):
        compiled(lambda y: (y.update_usage(columnwise_usage=False), y.dequantize())[1])(y)
    assert y.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_swizzle(backend, device, dynamic):
    q = NVFP4Quantizer()

    def function(x, y):
        nvfp4_quant.swizzle_scales_for_gemm_(y)
        z = nvfp4_quant.swizzle_scales_for_gemm_(q(x))
        back = nvfp4_quant.unswizzle_scales_(nvfp4_quant.swizzle_scales_for_gemm_(q(x)))
        return y, y.dequantize(), y._rowwise_scale_inv + 0, z, z.dequantize(), back

    assert_as_eager(function, lambda s: (make_x(device, s), q(make_x(device, s, 1))), dynamic, backend)


# ---- options and guards


def test_changes_inside_the_graph(device, dynamic):
    q = NVFP4Quantizer()

    def function(x):
        p = q.copy()
        p.set_usage(columnwise=False)
        p.optimize_for_gemm = True
        return p(x), q(x), p.optimize_for_gemm

    assert_as_eager(function, lambda s: (make_x(device, s),), dynamic)
    assert q.columnwise_usage and not q.optimize_for_gemm


def test_a_quantizer_made_inside_works_outside(device):
    def function(x):
        q = NVFP4Quantizer(with_2d_quantization=True)
        return q, q(x)

    q, y = compiled(function)(make_x(device))
    assert_equal(q(make_x(device)), y)


def test_recompiles_for_another_option_only(device):
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(lambda q, x: q(x).dequantize(), backend=counter)
    x = make_x(device)
    q = NVFP4Quantizer()
    for equal in (q, q.copy(), NVFP4Quantizer(), NVFP4Quantizer(nvfp4_4over6_err_mode="mae")):
        run(equal, x)
    assert counter.frame_count == 1
    for i, (name, value) in enumerate(
        [("with_2d_quantization", True), ("rowwise_usage", False), ("optimize_for_gemm", True)]
    ):
        setattr(q, name, value)
        assert_equal(run(q, x), q(x).dequantize())
        assert counter.frame_count == 2 + i, name
    run(NVFP4Quantizer(), x)
    assert counter.frame_count == 4


def test_quantizer_in_a_module(device):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.quantizer = NVFP4Quantizer()

        def forward(self, x):
            return self.quantizer(x)

    counter = CompileCounterWithBackend("aot_eager")
    module = Module()
    run = compiled(module, backend=counter)
    x = make_x(device)
    assert_equal(run(x), module(x))
    module.quantizer = NVFP4Quantizer()
    run(x)
    assert counter.frame_count == 1
    module.quantizer.with_rht = True
    assert_equal(run(x), module(x))
    assert counter.frame_count == 2


def test_recompiles_for_another_kind_of_tensor(device):
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(lambda y: y.dequantize(), backend=counter)
    q, x = NVFP4Quantizer(), make_x(device)
    run(q(x))
    run(q(x + 1))
    assert counter.frame_count == 1
    swizzled = nvfp4_quant.swizzle_scales_for_gemm_(q(x))
    assert_equal(run(swizzled), q(x).dequantize())
    columnwise = NVFP4Quantizer(rowwise=False, with_rht=True)(x)
    assert_equal(run(columnwise), columnwise.dequantize())
    assert counter.frame_count == 3


def test_automatic_dynamic_shapes(device):
    q = NVFP4Quantizer()
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(lambda x, y: (q(x), y.dequantize()), backend=counter)
    for rows in (32, 48, 17, 65, 2):
        x = make_x(device, (rows, 40))
        assert_equal(run(x, q(x)), (q(x), q(x).dequantize()))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    q = NVFP4Quantizer()
    run = compiled(lambda x, y: (q(x), y.dequantize(), q.update_quantized(x, y)))
    with mode():
        x = make_x(device)
        assert_equal(run(x, q(x * 2)), (q(x), q(x * 2).dequantize(), q(x)))


# ---- training


class Linear(torch.autograd.Function):
    """A linear layer that quantizes inputs, weight and gradient, as a training recipe does."""

    @staticmethod
    def forward(ctx, x, w, rng_state):
        qx = NVFP4Quantizer(with_rht=True)(x)
        qw = NVFP4Quantizer(with_2d_quantization=True)(w)
        ctx.save_for_backward(qx.dequantize(), qw.dequantize())
        ctx.rng_state = rng_state
        return qx.dequantize() @ qw.dequantize().t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        q = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)
        grad = q.quantize(grad, rng_state=ctx.rng_state).dequantize()
        return grad @ w, grad.t() @ x, None


def straight_through(x, w, rng_state):
    return F.linear(NVFP4Quantizer()(x), NVFP4Quantizer(with_2d_quantization=True)(w))


@pytest.mark.parametrize("layer", [Linear.apply, straight_through], ids=["function", "straight_through"])
def test_training_step(layer, device, dynamic):
    def loss(x, w, target):
        return (layer(x, w, RNG_STATE) - target).square().sum()

    gradients = []
    for run in (loss, compiled(loss, dynamic)):
        x, w = make_x(device).requires_grad_(), make_x(device, (16, 40), 1).requires_grad_()
        run(x, w, torch.ones(33, 16, device=device)).backward()
        gradients.append((x.grad, w.grad))
    assert_equal(gradients[1], gradients[0])


def test_training_step_with_inductor(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    q = NVFP4Quantizer()

    def loss(x):
        for layer in model:
            x = layer(q(x).dequantize()) if isinstance(layer, torch.nn.Linear) else layer(x)
        return x.square().mean()

    run = compiled(loss, True, "inductor")
    for shape in ((33, 40), (20, 40)):
        x = make_x(device, shape)
        want = torch.autograd.grad(loss(x), list(model.parameters()))
        got = torch.autograd.grad(run(x), list(model.parameters()))
        torch.testing.assert_close(got, want)  # inductor sums in another order


def test_parameter(device, dynamic):
    w = torch.nn.Parameter(NVFP4Quantizer(with_2d_quantization=True)(make_x(device, (16, 40), 1)))
    gradients = []
    for run in (F.linear, compiled(lambda x, w: F.linear(x, w), dynamic)):
        x = make_x(device).requires_grad_()
        run(x, w).square().sum().backward()
        gradients.append((x.grad, w.grad))
        w.grad = None
    assert_equal(gradients[1], gradients[0])


def test_gradient_through_output_tensors(device, dynamic):
    """Plain gradients reach a quantized result of a compiled function, also if only some results have one."""
    q = NVFP4Quantizer()

    def function(x):
        return q(x), (q(x * 2).dequantize() * 3).sum(), q(x)

    for use in (lambda y, loss, z: (y.dequantize() * 5).sum() + loss, lambda y, loss, z: loss):
        gradients = []
        for run in (function, compiled(function, dynamic)):
            x = make_x(device).requires_grad_()
            use(*run(x)).backward()
            gradients.append(x.grad)
        assert_equal(gradients[1], gradients[0])


def test_gradient_of_an_input_tensor(device):
    y = NVFP4Quantizer()(make_x(device)).requires_grad_()
    compiled(lambda y: (y.dequantize() * 2).sum())(y).backward()
    assert_equal(y.grad, torch.full(SHAPE, 2.0, device=device))


def test_activation_checkpointing(device):
    def loss(x):
        block = lambda x: (NVFP4Quantizer()(x).dequantize() * x).sum()  # noqa: E731
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    gradients = []
    for run in (loss, compiled(loss)):
        x = make_x(device).requires_grad_()
        run(x).backward()
        gradients.append(x.grad)
    assert_equal(gradients[1], gradients[0])


# ---- stochastic rounding


def test_two_stochastic_calls_stay_two(device, dynamic):
    q = NVFP4Quantizer(stochastic_rounding=True)

    def function(x):
        return q(x)._rowwise_data, q(x)._rowwise_data

    for x in (make_x(device, (64, 64)), make_x(device, (64, 64)).requires_grad_()):
        run = compiled(function, dynamic)
        first, second = run(x)
        third, _ = run(x)
        assert not torch.equal(first, second) and not torch.equal(first, third)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_stochastic_calls_follow_the_seed(backend, device):
    q = NVFP4Quantizer(stochastic_rounding=True)
    run = compiled(lambda x: (q(x), q(x)), backend=backend)
    x = make_x(device)
    results = []
    for call in (run, run, lambda x: (q(x), q(x))):
        torch.manual_seed(3)
        results.append(call(x))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_unsigned_rng_states(device, dynamic):
    """The operators take them in two's complement."""
    q = NVFP4Quantizer(stochastic_rounding=True)
    run = compiled(lambda x, rng_state: q.quantize(x, rng_state=rng_state), dynamic)
    x = make_x(device)
    for rng_state in ((1, 4), (2**64 - 1, 8), (2**63, 2**64 - 4)):
        assert_equal(run(x, rng_state), q.quantize(x, rng_state=rng_state))


# ---- CUDA


@pytest.mark.cuda
def test_reduce_overhead(device):
    q = NVFP4Quantizer()

    def function(x, y):
        q.update_quantized(x, y)
        return q(x).dequantize() + y.dequantize(), nvfp4_quant.swizzle_scales_for_gemm_(q(x))

    run = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    y, want_y = q(make_x(device)), q(make_x(device))
    for seed in range(4):
        x = make_x(device, seed=seed) / 2**seed
        torch.compiler.cudagraph_mark_step_begin()
        got = run(x, y)
        assert_equal(got, function(x, want_y))
        assert_equal(y, want_y)


# ---- export


class Exported(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.quantizer = public_quantizer(options)
        self.linear = torch.nn.Linear(40, 8)

    def forward(self, x):
        return self.linear(self.quantizer(x).dequantize())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mode", ["plain", "2d", "hadamard", "4over6_256"])
def test_export(mode, strict, device, tmp_path):
    module = Exported(MODES[mode] | {"rowwise": mode != "hadamard"}).to(device)
    x = make_x(device)
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},)
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "nvfp4_quant.quantize.default" in targets and "nvfp4_quant.dequantize.default" in targets
    torch.export.save(exported, tmp_path / "module.pt2")
    for program in (exported, exported.run_decompositions(), torch.export.load(tmp_path / "module.pt2")):
        for rows in (33, 7):
            got = program.module()(x[:rows])
            assert not isinstance(got, NVFP4Tensor)
            assert_same_bytes(got, module(x[:rows]))
