"""`python -m nvfp4_quant report`: its figures against the oracle, its files, its errors."""

import math
import re

import pytest
import torch
from helpers import DTYPES, make_input, reference

from nvfp4_quant.__main__ import main
from nvfp4_quant.report import measure, open_checkpoint, sqnr_db

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
pytest.importorskip("tqdm", reason="tqdm is not installed")


def oracle_sqnr(x: torch.Tensor, two_d: bool) -> float:
    buffers = reference.quantize(x, columnwise=False, with_2d_quantization=two_d)
    y = reference.dequantize(buffers, x.shape, torch.float32).double()
    x = x.double()
    return (10 * torch.log10(x.square().sum() / (x - y).square().sum())).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (33, 50), (3, 5, 40)])
def test_figures_of_a_matrix(device, dtype, shape):
    x = make_input("bell", shape, dtype)
    row = measure("w", x.to(device))
    lines, width = math.prod(shape[:-1]), math.ceil(shape[-1] / 16) * 8
    scales = math.ceil(lines / 128) * 128 * math.ceil(width / 32) * 4
    assert row.shape == shape and row.amax == x.abs().max().item() and row.zero_blocks == 0
    assert row.sqnr_1d == pytest.approx(oracle_sqnr(x, False), abs=1e-9)
    assert row.sqnr_2d == pytest.approx(oracle_sqnr(x, True), abs=1e-9)
    assert (row.bytes_before, row.bytes_after) == (x.nbytes, lines * width + scales + 4)


def test_share_of_zero_scale_blocks(device):
    x = torch.ones(5, 64, device=device)
    x[0, :16] = 0
    x[1, 16:48] = 2.0**-20  # underflows beside 1024
    x[4, 0] = 1024
    assert measure("w", x).zero_blocks == pytest.approx(3 / 20)


def test_undefined_figures_are_nan(device):
    zero, empty = measure("w", torch.zeros(4, 16, device=device)), measure("w", torch.zeros(0, 16, device=device))
    assert math.isnan(zero.sqnr_1d) and zero.zero_blocks == 1 and zero.amax == 0
    assert math.isnan(empty.sqnr_1d) and math.isnan(empty.zero_blocks) and empty.amax == 0


def test_sqnr(device):
    x = torch.tensor([3.0, 4.0], device=device)
    assert sqnr_db(x, torch.tensor([3.0, 3.5], device=device)) == pytest.approx(20.0)
    assert sqnr_db(x, x) == math.inf
    assert math.isnan(sqnr_db(torch.tensor([math.nan, 1.0], device=device), x))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "layer.weight": make_input("bell", (32, 48), torch.bfloat16),
        "layer.bias": torch.ones(48),
        "ids": torch.arange(4).view(2, 2),
        "spoiled": make_input("nan", (16, 16)),
    }


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:-1]}


def check_report(path, capsys, device, names: tuple[str, str]) -> None:
    assert main(["report", str(path), "--device", str(device)]) == 0
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert tuple(rows) == names
    x = tensors()["layer.weight"]
    shape, amax, sqnr_1d, sqnr_2d, zero, before, after = rows[names[0]]
    assert (shape, amax, zero) == ("32x48", f"{x.abs().max().item():.4g}", "0.00%")
    assert (sqnr_1d, sqnr_2d) == (f"{oracle_sqnr(x, False):.2f}", f"{oracle_sqnr(x, True):.2f}")
    assert (before, after) == ("3,072", "1,284")
    assert rows[names[1]][2] == "-"
    last = "2 matrices: 4,096 bytes, in NVFP4 1,928, 2.12 times smaller; 2 other tensors not quantized"
    assert captured.out.splitlines()[-1] == last
    assert "tensor/s" in captured.err and "tensor/s" not in captured.out


def test_safetensors_file(device, tmp_path, capsys):
    safetensors.save_file(tensors(), tmp_path / "model.safetensors")
    check_report(tmp_path / "model.safetensors", capsys, device, ("layer.weight", "spoiled"))


@pytest.mark.parametrize("zip_format", [True, False])
def test_torch_checkpoint(device, tmp_path, capsys, zip_format):
    path = tmp_path / "model.pt"
    torch.save({"step": 3, "model": tensors()}, path, _use_new_zipfile_serialization=zip_format)
    check_report(path, capsys, device, ("model.layer.weight", "model.spoiled"))


def test_nested_names_and_quantized_tensors(tmp_path, capsys):
    from nvfp4_quant import NVFP4Quantizer

    state = {"a": [torch.ones(2, 16), {"b": torch.ones(3, 16)}], "packed": NVFP4Quantizer()(torch.ones(16, 16))}
    torch.save(state, tmp_path / "model.pt")
    assert list(open_checkpoint(tmp_path / "model.pt")) == ["a.0", "a.1.b", "packed"]
    assert main(["report", str(tmp_path / "model.pt")]) == 0
    assert list(rows_of(capsys.readouterr().out)) == ["a.0", "a.1.b"]


class Runs:
    """Unpickling one runs code."""

    def __reduce__(self):
        return print, ("unpickled",)


def bad_files(folder):
    whole = safetensors.save({"w": torch.ones(64, 64)})
    yield "missing", folder / "missing.safetensors", None
    yield "missing checkpoint", folder / "missing.pt", None
    yield "truncated", folder / "truncated.safetensors", whole[: len(whole) // 2]
    yield "garbage", folder / "garbage.safetensors", b"no safetensors file\n" * 9
    yield "garbage checkpoint", folder / "garbage.pt", b"no checkpoint\n" * 9
    yield "empty", folder / "empty.safetensors", b""
    yield "empty checkpoint", folder / "empty.pt", b""
    yield "no tensors", folder / "none.safetensors", safetensors.save({})


def check_error(path, capsys) -> None:
    assert main(["report", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"error: {re.escape(str(path))}: .+\n", captured.err), captured.err


def test_bad_files_give_one_line_and_status_2(tmp_path, capsys):
    for _, path, content in bad_files(tmp_path):
        if content is not None:
            path.write_bytes(content)
        check_error(path, capsys)
    (tmp_path / "folder.pt").mkdir()
    check_error(tmp_path / "folder.pt", capsys)


def test_checkpoints_that_would_run_code_or_hold_nothing_are_refused(tmp_path, capsys):
    torch.save({"w": torch.ones(16, 16), "code": Runs()}, tmp_path / "code.pt")
    check_error(tmp_path / "code.pt", capsys)
    torch.save({"step": 3}, tmp_path / "step.pt")
    check_error(tmp_path / "step.pt", capsys)


@pytest.mark.parametrize(
    "arguments", [["report"], ["reprot", "x"], ["report", "x", "y"], ["report", "x", "--device", "y"]]
)
def test_wrong_arguments_give_usage_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m nvfp4_quant")
