"""Stochastic rounding: where the random bits come from, that they are used once, and that they are random."""

import itertools
import math

import pytest
import torch
from helpers import assert_same_buffers, assert_same_bytes, buffers_of, make_input, reference
from native import MODES, RNG_STATE, native_quantizer, poisoned_buffers

from nvfp4_quant import NVFP4Quantizer

MODE = {"stochastic_rounding": True}
TOO_RARE = 5.0  # standard deviations


def drawn_seed(generator: torch.Generator) -> int:
    """One random64() of a CPU generator, as the contract defines it."""
    return torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=generator).item() % 2**64


def expected(x, rng_state, options=MODE) -> dict:
    return reference.quantize(x.cpu(), rng_state=rng_state, **options)


# ---- the source of the bits


def state_before(device, generator):
    """The (seed, offset) that the next call takes from the generator, and a check of its state after it."""
    if device.type == "cuda":
        before = generator.initial_seed(), generator.get_offset()

        def check():
            assert generator.get_offset() == before[1] + 4

        return before, check
    twin = generator.clone_state()
    before = drawn_seed(twin), 0

    def check():
        assert_same_bytes(generator.get_state(), twin.get_state(), "generator state")

    return before, check


def default_generator(device) -> torch.Generator:
    return (
        torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else torch.default_generator
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if "stochastic" in mode])
def test_generator_gives_seed_and_offset(mode, device, schedule):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q = native_quantizer(MODES[mode], schedule)
    generator = torch.Generator(device).manual_seed(5)
    for _ in range(3):
        rng_state, check = state_before(device, generator)
        got = q.quantize(x, generator=generator)
        check()
        assert_same_buffers(got, expected(x, rng_state, MODES[mode]))


def test_default_generator_gives_seed_and_offset(device, schedule):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q = native_quantizer(MODE, schedule)
    torch.manual_seed(11)
    for _ in range(3):
        rng_state, check = state_before(device, default_generator(device))
        got = q.quantize(x)
        check()
        assert_same_buffers(got, expected(x, rng_state))


def test_empty_input_and_noop_flag_advance_the_generator(device, schedule):
    q = native_quantizer(MODE, schedule)
    generator = torch.Generator(device).manual_seed(5)
    _, check = state_before(device, generator)
    q.quantize(torch.empty(0, 16, device=device), generator=generator)
    check()
    _, check = state_before(device, generator)
    buffers = poisoned_buffers(q, (16, 16), device)
    noop_flag = torch.ones(1, device=device)
    q.quantize_into(torch.ones(16, 16, device=device), *buffers, noop_flag=noop_flag, generator=generator)
    check()


def test_one_direction_advances_as_two(device, schedule):
    x = torch.ones(16, 16, device=device)
    for usage in ({"rowwise": False}, {"columnwise": False}):
        generator = torch.Generator(device).manual_seed(5)
        _, check = state_before(device, generator)
        native_quantizer(MODE | usage, schedule).quantize(x, generator=generator)
        check()


def test_rng_state_leaves_the_generator_alone(device, schedule):
    before = default_generator(device).get_state()
    native_quantizer(MODE, schedule).quantize(torch.ones(16, 16, device=device), rng_state=RNG_STATE)
    assert_same_bytes(default_generator(device).get_state(), before)


def test_rounding_to_nearest_leaves_the_generator_alone(device, schedule):
    before = default_generator(device).get_state()
    native_quantizer({}, schedule).quantize(torch.ones(16, 16, device=device))
    assert_same_bytes(default_generator(device).get_state(), before)


@pytest.mark.parametrize("rng_state", [(0, 0), (2**64 - 1, 0), (1, 2**64 - 4), (2**63, 2**33)], ids=str)
def test_any_rng_state(rng_state, device, schedule):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    got = native_quantizer(MODE, schedule).quantize(x, rng_state=rng_state)
    assert_same_buffers(got, expected(x, rng_state))
    assert_same_buffers(NVFP4Quantizer(**MODE).quantize(x, rng_state=rng_state), expected(x, rng_state))


@pytest.mark.parametrize("rng_state", [(1, 1), (1, 6), (-1, 0), (2**64, 0), (1, 2**64)], ids=str)
def test_refused_rng_state(rng_state, device):
    x = torch.ones(16, 16, device=device)
    with pytest.raises(ValueError, match="rng_state"):
        NVFP4Quantizer(**MODE).quantize(x, rng_state=rng_state)


@pytest.mark.cuda
def test_refused_generator_of_another_device(device):
    with pytest.raises(ValueError, match="generator"):
        NVFP4Quantizer(**MODE).quantize(torch.ones(16, 16, device=device), generator=torch.Generator())


def test_public_calls_take_generator_and_rng_state(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    q = NVFP4Quantizer(**MODE)
    y = q.make_empty(x.shape, dtype=x.dtype, device=device)
    q.update_quantized(x, y, rng_state=RNG_STATE)
    assert_same_buffers(y, expected(x, RNG_STATE))
    y.quantize_(x, rng_state=(7, 0))
    assert_same_buffers(y, expected(x, (7, 0)))
    for call in (q.quantize, lambda x, **source: q.update_quantized(x, y, **source), y.quantize_):
        generator = torch.Generator(device).manual_seed(5)
        rng_state, check = state_before(device, generator)
        got = call(x, generator=generator)
        check()
        assert_same_buffers(got, expected(x, rng_state))


def test_operator_takes_twos_complement_seeds(device):
    x = make_input("bell", (33, 40), torch.bfloat16, device)
    operator = torch.ops.nvfp4_quant.quantize
    got = operator(x, stochastic_rounding=True, seed=-1, offset=-4)
    assert_same_buffers(tuple(got), expected(x, (2**64 - 1, 2**64 - 4)))
    for name in ("quantize", "quantize_"):
        assert torch.Tag.nondeterministic_seeded in getattr(torch.ops.nvfp4_quant, name).default.tags


# ---- randomness


def quantize_constant(values: torch.Tensor, device, rng_state=RNG_STATE, **options) -> torch.Tensor:
    """Codes (n, 15) of rows [6, v, v, ...]: under amax 2688 each row's scale is 1, and so is the element's factor."""
    x = torch.cat([torch.full_like(values[:, None], 6.0), values[:, None].expand(-1, 15)], dim=1).to(device)
    q = native_quantizer({"stochastic_rounding": True, "columnwise": False} | options)
    got = buffers_of(q.quantize(x, amax=2688.0, rng_state=rng_state))
    assert (got["rowwise_scale_inv"][: len(values), 0] == 0x38).all()
    return reference.unpack(got["rowwise_data"].cpu())[:, 1:]


def z_score(successes: float, trials: int, p: float) -> float:
    return (successes - trials * p) / math.sqrt(trials * p * (1 - p))


INTERVALS = list(itertools.pairwise(reference.E2M1_VALUES))


@pytest.mark.parametrize("low, high", INTERVALS, ids=str)
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_unbiased_in_each_interval(low, high, sign, device):
    code = reference.E2M1_VALUES.index(low)
    for sixteenths in (1, 4, 8, 11, 15):
        p = sixteenths / 16
        value = sign * (low + (high - low) * p)
        codes = quantize_constant(
            torch.full((4096,), value), device, rng_state=(sixteenths + 100 * sign + 200, 4 * code)
        )
        assert ((codes >> 3) == (sign < 0)).all()
        up = (codes & 7) - code
        assert ((up == 0) | (up == 1)).all()
        z = z_score(up.sum().item(), up.numel(), p)
        assert abs(z) < TOO_RARE, f"{value}: z = {z:.2f}"


def test_code_points_never_move(device):
    values = torch.tensor(reference.E2M1_VALUES).repeat_interleave(64)
    for seed in range(20):
        codes = quantize_constant(values, device, rng_state=(seed, 0))
        assert_same_bytes(codes, torch.arange(8, dtype=torch.uint8).repeat_interleave(64)[:, None].expand(-1, 15))


def ups(device, rng_state=RNG_STATE) -> torch.Tensor:
    """Fair coins (4096, 15): whether 1.25 became 1.5."""
    return (quantize_constant(torch.full((4096,), 1.25), device, rng_state) == 3).double()


def assert_independent(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    z = z_score((a == b).sum().item(), a.numel(), 0.5)
    assert abs(z) < TOO_RARE, f"{what}: z = {z:.2f}"


def test_neighbours_are_independent(device):
    coins = ups(device)
    for distance in range(1, 15):
        assert_independent(coins[:, distance:], coins[:, :-distance], f"elements {distance} apart")
    for distance in (1, 2, 3, 4, 16, 256):
        assert_independent(coins[distance:], coins[:-distance], f"blocks {distance} apart")


def test_calls_seeds_and_offsets_are_independent(device):
    coins = ups(device)
    for rng_state in ((RNG_STATE[0], RNG_STATE[1] + 4), (RNG_STATE[0] + 1, RNG_STATE[1]), (RNG_STATE[0] ^ 2**40, 12)):
        assert_independent(coins, ups(device, rng_state), f"rng_state {rng_state}")


def test_directions_are_independent(device):
    """With 2-D scales both directions round the same numbers; with the same bits their codes would be transposes."""
    x = torch.full((256, 256), 1.25, device=device)
    x[::16, ::16] = 6.0
    options = {"stochastic_rounding": True, "with_2d_quantization": True}
    got = buffers_of(native_quantizer(options).quantize(x, amax=2688.0, rng_state=RNG_STATE))
    rows, columns = (reference.unpack(got[f"{side}_data"].cpu()) for side in reference.SIDES)
    free = x.cpu() == 1.25
    assert_independent(rows[free], columns.t()[free], "row-wise and column-wise")
    assert_independent(rows[free], columns[free], "the same place in both buffers")


def test_two_calls_differ(device, schedule):
    x = make_input("bell", (64, 64), torch.bfloat16, device)
    q = native_quantizer(MODE, schedule)
    first, second = (buffers_of(q.quantize(x)) for _ in range(2))
    for side in reference.SIDES:
        assert not torch.equal(first[f"{side}_data"], second[f"{side}_data"])
        assert_same_bytes(first[f"{side}_scale_inv"], second[f"{side}_scale_inv"])


def test_mean_of_many_calls_is_the_value(device):
    """Every quantization of x is wrong; their mean comes closer to x as the square root of their number."""
    x = make_input("bell", (32, 32), device=device)
    q = NVFP4Quantizer(**MODE, columnwise=False)
    mean = torch.stack([q.quantize(x, rng_state=(seed, 0)).dequantize() for seed in range(400)]).mean(0)
    nearest = NVFP4Quantizer(columnwise=False)(x).dequantize()
    step = (nearest - x).square().mean().sqrt()
    assert (mean - x).square().mean().sqrt() < 0.15 * step


# ---- CUDA graphs


@pytest.mark.cuda
def test_replays_differ_and_follow_reseeding(device, schedule):
    x = make_input("bell", (64, 64), torch.bfloat16, device)
    q = native_quantizer(MODE, schedule)
    q.quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers = q.quantize(x)
    torch.cuda.synchronize()  # torch writes the seed on the capture's stream, and a replay's on another
    replays = []
    for seed in (3, 4, 3):
        torch.cuda.manual_seed(seed)
        for offset in (0, 4, 8):
            graph.replay()
            assert_same_buffers(buffers, expected(x, (seed, offset)), f"seed {seed}, offset {offset}")
            replays.append(buffers[0].clone())
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[0], replays[3])
    assert_same_bytes(replays[0], replays[6])


@pytest.mark.cuda
def test_two_calls_in_one_graph_differ(device, schedule):
    x = make_input("bell", (64, 64), torch.bfloat16, device)
    q = native_quantizer(MODE, schedule)
    q.quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = q.quantize(x), q.quantize(x)
    torch.cuda.synchronize()  # as above
    torch.cuda.manual_seed(9)
    for offset in (0, 8):
        graph.replay()
        assert_same_buffers(first, expected(x, (9, offset)))
        assert_same_buffers(second, expected(x, (9, offset + 4)))
