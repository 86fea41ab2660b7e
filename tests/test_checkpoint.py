"""save_file and load_file: state dicts with quantized tensors in safetensors files."""

import json

import pytest
import torch
from helpers import assert_same_bytes, make_input
from tensors import MODES, assert_same_tensor, buffers, make_quantizer, make_tensor

from nvfp4_quant import NVFP4Tensor, NVFP4TensorStorage
from nvfp4_quant.checkpoint import METADATA_KEY, load_file, save_file

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import save_file as save_plain_file  # noqa: E402


def read(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48, 80), (2, 3, 33), (7,), (0, 16)])
def test_round_trip(device, path, mode, shape):
    state = {
        "layer.weight": make_tensor(mode, shape, torch.float16, device),
        "layer.bias": make_input("bell", (5,), torch.float64, device),
        "ids": torch.arange(3, device=device),
        "": torch.ones((), device=device),
    }
    save_file(state, path)
    back = load_file(path, device)
    assert back.keys() == state.keys()
    assert_same_tensor(back["layer.weight"], state["layer.weight"])
    for name in ("layer.bias", "ids", ""):
        assert type(back[name]) is torch.Tensor
        assert_same_bytes(back[name], state[name], name)


def test_model_round_trip(device, path):
    model = torch.nn.Sequential(torch.nn.Linear(80, 48), torch.nn.Linear(48, 8)).to(device)
    model[0].weight = torch.nn.Parameter(make_tensor(dtype=torch.float32, device=device))
    save_file(model.state_dict(), path, metadata={"format": "pt", "step": "7"})
    _, metadata = read(path)
    assert metadata["format"] == "pt" and metadata["step"] == "7"
    twin = torch.nn.Sequential(torch.nn.Linear(80, 48), torch.nn.Linear(48, 8)).to(device)
    twin.load_state_dict(load_file(path, device), assign=True)
    x = make_input("bell", (3, 80), torch.float32, device)
    assert_same_bytes(twin(x), model(x), "output")


def test_files_of_others(device, path):
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    save_plain_file(state, path)
    assert_same_bytes(load_file(path)["w"], state["w"])
    save_file(state, path)
    tensors, metadata = read(path)
    assert METADATA_KEY not in metadata
    assert_same_bytes(tensors["w"], state["w"])


def test_what_any_reader_sees(device, path):
    y = make_tensor("rowwise", device=device)
    save_file({"w": y}, path)
    tensors, _ = read(path)
    parts = ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")
    assert tensors.keys() == {f"w.nvfp4.{part}" for part in parts}
    for part in parts:
        assert_same_bytes(tensors[f"w.nvfp4.{part}"], getattr(y, f"_{part}"), part)


def test_storage_and_transposed_and_flat_tensors(device, path):
    quantizer = make_quantizer()
    quantizer.internal = True
    storage = quantizer(make_input("bell", (17, 33), device=device))
    y = make_tensor("2d", device=device)
    save_file({"storage": storage, "t": y.t().clone(), "flat": y.view(-1)}, path)
    back = load_file(path, device)
    assert type(back["storage"]) is NVFP4TensorStorage
    for a, b in zip(buffers(back["storage"]), buffers(storage), strict=True):
        assert_same_bytes(a, b)
    assert back["t"].stride() == y.t().stride()
    assert_same_bytes(back["t"].dequantize(), y.t().dequantize(), "t")
    assert_same_tensor(back["flat"].view(y.shape), y)


def test_parameters_lose_only_what_safetensors_has_no_place_for(device, path):
    save_file({"w": torch.nn.Parameter(make_tensor(device=device))}, path)
    back = load_file(path)["w"]
    assert type(back) is NVFP4Tensor and not back.requires_grad


# ---- files that are not right


def spoil(path, change):
    """Rewrites a good file after `change(tensors, descriptions)`."""
    save_file({"a.w": make_tensor(), "b": torch.ones(3)}, path)
    tensors, metadata = read(path)
    descriptions = json.loads(metadata[METADATA_KEY])
    change(tensors, descriptions)
    save_plain_file(tensors, path, metadata={METADATA_KEY: json.dumps(descriptions)})


def replace(key, value):
    def change(tensors, _):
        tensors[key] = value(tensors[key])

    return change


BROKEN = {
    "missing buffer": (lambda t, d: t.pop("a.w.nvfp4.amax_rowwise"), KeyError, "amax_rowwise"),
    "missing description": (lambda t, d: d.pop("a.w"), KeyError, "a.w.nvfp4"),
    "missing field": (lambda t, d: d["a.w"].pop("dtype"), KeyError, "dtype"),
    "missing setting": (lambda t, d: d["a.w"]["settings"].pop("with_rht"), ValueError, "with_rht"),
    "unlisted buffer": (lambda t, d: d["a.w"]["buffers"].remove("amax_rowwise"), ValueError, "amax_rowwise"),
    "unknown buffer": (lambda t, d: d["a.w"]["buffers"].append("b"), KeyError, "a.w.nvfp4.b"),
    "other shape": (lambda t, d: d["a.w"].update(shape=[48, 96], layout_shape=[48, 96]), ValueError, "rowwise_data"),
    "other format": (lambda t, d: d["a.w"].update(format=2), ValueError, "format"),
    "other dtype": (lambda t, d: d["a.w"].update(dtype="int8"), ValueError, "int8"),
    "bad option": (lambda t, d: d["a.w"]["settings"].update(nvfp4_e4m3_max=256), ValueError, "256"),
    "contradiction": (lambda t, d: d["a.w"]["settings"].update(row_scaled_nvfp4=True), ValueError, "amax_rowwise"),
    "dtype of data": (replace("a.w.nvfp4.rowwise_data", lambda t: t.view(torch.int8)), ValueError, "rowwise_data"),
    "cut data": (replace("a.w.nvfp4.columnwise_data", lambda t: t[1:].clone()), ValueError, "columnwise_data"),
    "both": (lambda t, d: t.update({"a.w": torch.ones(2)}), ValueError, "a.w"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error(device, path, name):
    change, error, message = BROKEN[name]
    spoil(path, change)
    with pytest.raises(error, match=message):
        load_file(path)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"a.w": 3}'])
def test_broken_metadata_is_an_error(device, path, text):
    save_plain_file({"b": torch.ones(3)}, path, metadata={METADATA_KEY: text})
    with pytest.raises(ValueError, match=METADATA_KEY):
        load_file(path)


def test_names_that_the_format_needs(device, path):
    with pytest.raises(ValueError, match=r"w\.nvfp4\.rowwise_data"):
        save_file({"w.nvfp4.rowwise_data": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=METADATA_KEY):
        save_file({"w": torch.ones(2)}, path, metadata={METADATA_KEY: "x"})
    assert not path.exists()
