"""compute_amax: any length, alignment, stride and dtype; one buffer or two; NaN, infinity, noop flag, refusals."""

from functools import partial

import pytest
import torch
from helpers import DTYPES, KINDS, STRIDES, assert_same_bytes, make_input, reference, strided
from native import gpu_operations

from nvfp4_quant import compute_amax

POISON = -123.0


def poisoned(device, shape=(1,)) -> torch.Tensor:
    return torch.full(shape, POISON, device=device)


def assert_amax(x: torch.Tensor) -> None:
    """Both forms, one buffer and two, give the oracle's amax."""
    want = reference.compute_amax(x.cpu())
    one = poisoned(x.device)
    compute_amax(x, one)
    assert_same_bytes(one, want, "one buffer")
    two = poisoned(x.device), poisoned(x.device)
    compute_amax(x, *two)
    assert_same_bytes(two[0], want, "first of two")
    assert_same_bytes(two[1], want, "second of two")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_length(dtype, device):
    for length in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 1023, 4099, 65_537, 300_001):
        assert_amax(make_input("bell", (length,), dtype, device, seed=length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment(dtype, device):
    storage = make_input("bell", (600,), dtype, device)
    storage[0], storage[-1] = 100.0, -200.0  # outside every view
    for offset in range(1, 18):
        for length in (1, 15, 64, 500, 581):
            assert_amax(storage[offset : offset + length])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stride", STRIDES)
def test_any_stride(stride, dtype, device):
    for shape in ((33, 40), (1, 65), (130, 17)):
        assert_amax(strided(stride, make_input("bell", shape, dtype, device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_dimensions(dtype, device):
    x = make_input("bell", (3, 4, 5, 2, 7), dtype, device)
    for view in (x, x.permute(4, 2, 0, 3, 1), x[:, 1:3, ::2], x.transpose(0, 4)[2:], x[0, 0, 0, 0], x[:, :, :0]):
        assert_amax(view)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3)], ids=str)
def test_empty_input_gives_zero(shape, device):
    amax = poisoned(device), poisoned(device)
    compute_amax(torch.empty(shape, device=device), *amax)
    for t in amax:
        assert_same_bytes(t, torch.zeros(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_values(kind, dtype, device):
    assert_amax(make_input(kind, (37, 91), dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maximum_in_any_place(dtype, device):
    x = torch.zeros(131, dtype=dtype, device=device)
    got = torch.stack([one_place(x, place, sign) for place in range(131) for sign in (1.0, -1.0)])
    assert_same_bytes(got, torch.full_like(got, 3.0))


def one_place(x: torch.Tensor, place: int, sign: float) -> torch.Tensor:
    x.zero_()
    x[place] = 3.0 * sign
    amax = poisoned(x.device)
    compute_amax(x, amax)
    return amax[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_ignored_and_infinity_kept(dtype, device):
    nan, inf = float("nan"), float("inf")
    for values, want in (
        ([nan, 2.0, -3.0], 3.0),
        ([1.0, nan, nan], 1.0),
        ([nan, nan, nan], 0.0),
        ([-nan, -0.0, -nan], 0.0),
        ([nan, -inf, 1.0], inf),
        ([inf, nan, 1.0], inf),
    ):
        amax = poisoned(device)
        compute_amax(torch.tensor(values, dtype=dtype, device=device).repeat(50), amax)
        assert_same_bytes(amax, torch.tensor([want]), str(values))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_buffer_of_one_element_in_any_shape(shape, device):
    x = make_input("bell", (5, 9), device=device)
    amax = poisoned(device, shape), poisoned(device, shape)
    compute_amax(x, *amax)
    for t in amax:
        assert_same_bytes(t, reference.compute_amax(x.cpu()).reshape(shape))


def test_two_elements_of_one_storage_are_two_buffers_or_refused(device):
    """Neighbours of one allocation: right in both, or a ValueError with nothing written."""
    x, both = make_input("bell", (5, 9), device=device), poisoned(device, (2,))
    try:
        compute_amax(x, both[:1], both[1:])
    except ValueError:
        assert_same_bytes(both, poisoned("cpu", (2,)))
    else:
        assert_same_bytes(both, reference.compute_amax(x.cpu()).repeat(2))


@pytest.mark.parametrize("flag", [0.0, 0.5, 2.0, -1.0, float("nan")])
def test_noop_flag_other_than_one_has_no_effect(flag, device):
    x = make_input("bell", (5, 9), device=device)
    amax = poisoned(device), poisoned(device)
    compute_amax(x, *amax, noop_flag=torch.tensor([flag], device=device))
    for t in amax:
        assert_same_bytes(t, reference.compute_amax(x.cpu()))


@pytest.mark.parametrize("shape", [(5, 9), (0, 9)], ids=str)
def test_noop_flag_of_one_writes_nothing(shape, device):
    amax = poisoned(device), poisoned(device)
    compute_amax(torch.ones(shape, device=device), *amax, noop_flag=torch.ones(1, device=device))
    compute_amax(torch.ones(shape, device=device), amax[0], noop_flag=torch.ones((), device=device))
    for t in amax:
        assert_same_bytes(t, poisoned("cpu"))


def test_reused_buffers_follow_a_maximum_that_falls_and_rises(device):
    amax = poisoned(device), poisoned(device)
    for value in (100.0, 1.0, 0.0, 5.0, float("inf"), 2.0):
        compute_amax(torch.full((40, 50), -value, device=device), *amax)
        for t in amax:
            assert_same_bytes(t, torch.tensor([value]))


def refused_buffers(device):
    good = poisoned(device)
    return {
        "two elements": ((poisoned(device, (2,)), None), ValueError),
        "no element": ((poisoned(device, (0,)), None), ValueError),
        "float64": ((good.double(), None), (TypeError, ValueError)),
        "bfloat16": ((good.bfloat16(), None), (TypeError, ValueError)),
        "second of two elements": ((good, poisoned(device, (2,))), ValueError),
        "second int32": ((good, good.int()), (TypeError, ValueError)),
        "the same twice": ((good, good), ValueError),
        "views of one element": ((good, good.view(1, 1)), ValueError),
        "on meta": ((good, torch.empty(1, device="meta")), ValueError),
    }


@pytest.mark.parametrize("case", refused_buffers("cpu"))
def test_refused_buffers(case, device):
    buffers, error = refused_buffers(device)[case]
    with pytest.raises(error, match="amax"):
        compute_amax(torch.ones(40, device=device), *buffers)
    assert_same_bytes(buffers[0], torch.full_like(buffers[0], POISON))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_refused_input_dtype(dtype, device):
    amax = poisoned(device)
    with pytest.raises(TypeError, match="x"):
        compute_amax(torch.ones(40, dtype=dtype, device=device), amax)
    assert_same_bytes(amax, poisoned("cpu"))


def test_refused_noop_flags(device):
    x, amax = torch.ones(40, device=device), poisoned(device)
    for flag, error in (
        (torch.ones(2, device=device), ValueError),
        (torch.ones(1, dtype=torch.float64, device=device), (TypeError, ValueError)),
        (torch.ones(1, device="meta"), ValueError),
    ):
        with pytest.raises(error, match="noop_flag"):
            compute_amax(x, amax, noop_flag=flag)
    assert_same_bytes(amax, poisoned("cpu"))


@pytest.mark.cuda
def test_refused_device(device):
    x = torch.ones(40, device=device)
    with pytest.raises(ValueError, match="amax_rowwise"):
        compute_amax(x, torch.zeros(1))
    with pytest.raises(ValueError, match="amax_columnwise"):
        compute_amax(x, poisoned(device), torch.zeros(1))
    with pytest.raises(ValueError, match="noop_flag"):
        compute_amax(x, poisoned(device), noop_flag=torch.zeros(1))


@pytest.mark.cuda
def test_gpu_operations(device):
    bell = make_input("bell", (330, 410), torch.bfloat16, device)
    buffers = poisoned(device), poisoned(device)
    calls = [
        partial(compute_amax, strided(stride, bell), *used) for stride in STRIDES for used in (buffers, buffers[:1])
    ]
    for names in gpu_operations(*calls):
        assert ["zero_amax_kernel" in n for n in names] == [True, False], names
        assert "amax_kernel" in names[1], names
