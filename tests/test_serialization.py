"""pickle, torch.save and torch.load (weights only, mmap, map_location, a fresh process), state_dict, processes."""

import io
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bytes, make_input, reference
from tensors import MODES, addresses, assert_apart, assert_same_tensor, buffers, make_quantizer, make_tensor

from nvfp4_quant import NVFP4Tensor, NVFP4TensorStorage

GOLDEN = Path(__file__).parent / "golden_tensor.pt"


def saved(value) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("protocol", [2, 4, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("mode", MODES)
def test_pickle(device, mode, protocol):
    y = make_tensor(mode, (17, 33), device=device)
    z = pickle.loads(pickle.dumps(y, protocol))
    assert_same_tensor(z, y)
    assert_apart(z, y)


@pytest.mark.parametrize("mode", MODES)
def test_save_and_load_of_weights_only(device, mode):
    y = make_tensor(mode, (2, 9, 33), torch.float16, device)
    z = torch.load(saved({"w": y, "n": 3}), weights_only=True)["w"]
    assert_same_tensor(z, y)
    assert_same_bytes(z.dequantize(), y.dequantize(), "values")


def test_what_belongs_to_a_tensor_is_kept(device):
    p = torch.nn.Parameter(make_tensor(device=device))
    p.tag = "mine"
    z = torch.load(saved(p), weights_only=True)
    assert isinstance(z, torch.nn.Parameter) and z.requires_grad and z.tag == "mine"
    assert not torch.load(saved(p.detach()), weights_only=True).requires_grad
    y = make_tensor(device=device)
    assert_same_tensor(torch.load(saved(y.view(-1))).view(y.shape), y)
    t = torch.load(saved(y.t()))
    assert t.stride() == y.t().stride()
    assert_same_bytes(t.dequantize(), y.dequantize().t(), "transposed")


def test_internal_storage_is_pickled_too(device):
    quantizer = make_quantizer("row_scaled")
    quantizer.internal = True
    y = quantizer(make_input("bell", (17, 33), device=device))
    z = torch.load(saved(y), weights_only=True)
    assert type(z) is type(y) is NVFP4TensorStorage and z.get_usages() == y.get_usages()
    for a, b in zip(buffers(z), buffers(y), strict=True):
        assert_same_bytes(a, b)
    assert_same_bytes(z.dequantize(), y.dequantize(), "values")


def test_shared_buffers_stay_shared(device):
    y = make_tensor(device=device)
    a, b = torch.load(saved([y, y.detach()]), weights_only=True)
    assert addresses(a) == addresses(b)


def test_mmap_and_map_location(device, tmp_path):
    y = make_tensor("2d", device=device)
    torch.save({"w": y}, tmp_path / "w.pt")
    for mmap in (False, True):
        z = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap, map_location="cpu")["w"]
        assert_same_tensor(z, y, device="cpu")
    z = torch.load(tmp_path / "w.pt", weights_only=True, map_location=device)["w"]
    assert_same_tensor(z, y)
    z = torch.load(tmp_path / "w.pt", weights_only=True, map_location="meta")["w"]
    assert z.is_meta and z.shape == y.shape and all(b.is_meta for b in buffers(z))


def test_load_in_a_fresh_process(device, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(80, 48))
    model[0].weight = torch.nn.Parameter(make_tensor("4over6", device=device))
    y = model[0].weight.detach()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    program = (
        "import sys, torch, nvfp4_quant\n"
        "y = torch.load(sys.argv[1], weights_only=True, mmap=True, map_location='cpu')['0.weight']\n"
        "assert type(y) is nvfp4_quant.NVFP4Tensor\n"
        "torch.save([y.dequantize(), y._rowwise_data, y._nvfp4_e4m3_max], sys.argv[2])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "w.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent, timeout=120)
    values, data, bound = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_bytes(values, y.dequantize().cpu(), "values")
    assert_same_bytes(data, y._rowwise_data.cpu(), "data")
    assert bound == 256


def test_broken_pickles_are_refused(device):
    y = make_tensor(device=device)
    rebuild, (cls, tensors, plain, *rest) = y.__reduce_ex__(2)

    def rebuilt(tensors=tensors, **changes):
        return rebuild(cls, tensors, {**plain, **changes}, *rest)

    assert_same_tensor(rebuilt(), y)
    with pytest.raises(ValueError, match="format"):
        rebuilt(format=999)
    with pytest.raises(TypeError, match="float64"):
        rebuilt(dtype="float64")
    with pytest.raises(ValueError, match="shape"):
        rebuilt(shape=[48, 96])
    with pytest.raises(ValueError, match="rowwise_data"):
        rebuilt(shape=[48, 96], layout_shape=[48, 96])
    with pytest.raises(ValueError, match="with_magic"):
        rebuilt(settings={**plain["settings"], "with_magic": True})
    with pytest.raises(RuntimeError, match="amax_rowwise"):
        rebuilt((*tensors[:4], None, tensors[5]))
    with pytest.raises(TypeError, match="cls"):
        rebuild(dict, tensors, plain, *rest)


# ---- a file of this version


def golden_tensors(device="cpu") -> dict:
    """What the file holds: every mode of an odd shape. (`python tests/test_serialization.py` writes it.)"""
    return {mode: golden_quantized(mode, device) for mode in MODES}


def golden_quantized(mode, device):
    rng_state = (7, 8) if mode == "stochastic" else None
    return make_quantizer(mode).quantize(make_input("wide", (19, 35), torch.bfloat16, device), rng_state=rng_state)


def test_golden_file(device):
    tensors = torch.load(GOLDEN, weights_only=True, map_location=device)
    assert list(tensors) == list(MODES)
    for mode, y in tensors.items():
        assert_same_tensor(y, golden_quantized(mode, device))
        options = {**MODES[mode], **({"rng_state": (7, 8)} if mode == "stochastic" else {})}
        want = reference.quantize(make_input("wide", (19, 35), torch.bfloat16), **options)
        for name, buffer in zip(want, buffers(y), strict=True):
            assert_same_bytes(buffer, want[name], f"{mode} {name}")


# ---- state_dict


def make_model(device, quantized: bool, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(80, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8)).to(device)
    if quantized:
        model[0].weight = torch.nn.Parameter(make_tensor(dtype=torch.float32, device=device, seed=seed))
    return model


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_quantized_into_quantized(device, assign):
    source, target = make_model(device, True), make_model(device, True, seed=1)
    where = addresses(target[0].weight)
    state = torch.load(saved(source.state_dict()), weights_only=True)
    assert isinstance(state["0.weight"], NVFP4Tensor) and not state["0.weight"].requires_grad
    assert not target.load_state_dict(state, assign=assign).missing_keys
    assert_same_tensor(target[0].weight.detach(), source[0].weight.detach())
    assert isinstance(target[0].weight, torch.nn.Parameter) and target[0].weight.requires_grad
    assert (addresses(target[0].weight) == where) != assign
    x = torch.ones(3, 80, device=device)
    assert_same_bytes(target(x), source(x), "output")


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_plain_into_quantized(device, assign):
    source, target = make_model(device, False), make_model(device, True, seed=1)
    target.load_state_dict(source.state_dict(), assign=assign)
    plain = source[0].weight.detach()
    if assign:
        assert type(target[0].weight) is torch.nn.Parameter
        assert_same_bytes(target[0].weight, plain, "weight")
    else:
        assert_same_tensor(target[0].weight.detach(), make_quantizer()(plain))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_quantized_into_plain(device, assign):
    source, target = make_model(device, True), make_model(device, False, seed=1)
    target.load_state_dict(source.state_dict(), assign=assign)
    if assign:
        assert_same_tensor(target[0].weight.detach(), source[0].weight.detach())
    else:
        assert type(target[0].weight) is torch.nn.Parameter
        assert_same_bytes(target[0].weight, source[0].weight.dequantize(), "weight")


def test_loading_onto_a_meta_model(device):
    source = make_model(device, True)
    with torch.device("meta"):
        target = torch.nn.Sequential(torch.nn.Linear(80, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same_tensor(target[0].weight.detach(), source[0].weight.detach())


# ---- other processes


def _double_in_place(y, queue, received):
    values = y.dequantize()
    y.quantize_(values * 2)
    queue.put((values, y.clone()))
    received.wait(60)  # shared memory lives as long as one of the processes holds it


def test_multiprocessing(device):
    if device.type == "cuda":
        pytest.skip("CUDA memory is shared by its own handles; the buffers are plain tensors there too")
    y = make_tensor(dtype=torch.float32)
    before = y.dequantize()
    context = torch.multiprocessing.get_context("spawn")
    queue, received = context.Queue(), context.Event()
    process = context.Process(target=_double_in_place, args=(y, queue, received))
    process.start()
    while queue.empty():
        assert process.exitcode is None, "the child failed"
        time.sleep(0.1)
    values, doubled = queue.get()
    assert_same_bytes(values, before, "values in the child")
    assert_same_tensor(doubled, y)  # the buffers are in shared memory: the parent sees what the child wrote
    assert_same_bytes(y.dequantize(), make_quantizer()(before * 2).dequantize(), "values in the parent")
    received.set()
    process.join(60)
    assert process.exitcode == 0


if __name__ == "__main__":
    torch.save(golden_tensors(), GOLDEN)
