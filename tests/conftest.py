"""Every test takes `device`, and where the order of the GPU work matters also `schedule`."""

import pytest
import torch
from helpers import no_cuda_reason

CUDA_MARKS = [pytest.mark.cuda, pytest.mark.skipif(bool(no_cuda_reason()), reason=no_cuda_reason())]


def pytest_generate_tests(metafunc):
    """`device` is cpu and cuda; a test with `schedule` runs once on the CPU and in every schedule on a GPU."""
    if "device" not in metafunc.fixturenames:
        return
    cuda_only = any(mark.name == "cuda" for mark in metafunc.definition.iter_markers())
    devices = ["cuda"] if cuda_only else ["cpu", "cuda"]
    if "schedule" not in metafunc.fixturenames:
        cases = [pytest.param(torch.device(d), id=d, marks=CUDA_MARKS if d == "cuda" else []) for d in devices]
        metafunc.parametrize("device", cases)
        return
    cases = [] if cuda_only else [pytest.param(torch.device("cpu"), "auto", id="cpu")]
    for schedule in ("auto", "split", "fused"):
        cases.append(pytest.param(torch.device("cuda"), schedule, id=f"cuda-{schedule}", marks=CUDA_MARKS))
    metafunc.parametrize("device, schedule", cases)
