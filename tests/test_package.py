"""The package as a whole: its build script, its import, its stubs and its self-check."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BUFFERS, reference

import nvfp4_quant
from nvfp4_quant import _C, _native, selfcheck

ROOT = Path(__file__).parent.parent
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None or not torch.version.cuda, reason="no nvcc for this torch")


def run_setup(path: str = "", **environment: str) -> subprocess.CompletedProcess:
    """`setup.py --version`: chooses compilers and architectures, but builds nothing."""
    unset = ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "NVFP4_CPU_ONLY")
    env = {key: value for key, value in os.environ.items() if key not in unset} | environment
    env["PATH"] = os.pathsep.join(filter(None, (path, env["PATH"])))
    return subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, env=env, capture_output=True, text=True)


def test_build_info():
    info = nvfp4_quant.build_info()
    assert info["version"] == nvfp4_quant.__version__
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert bool(info["cuda"]) == bool(info["archs"])
    nvfp4_quant.build_info()["version"] = "changed"
    assert nvfp4_quant.build_info() == info


def test_all_public_names_exist():
    missing = [name for name in nvfp4_quant.__all__ if not hasattr(nvfp4_quant, name)]
    assert nvfp4_quant.__all__ and not missing


def test_stub_names_what_the_native_module_has():
    assert (ROOT / "nvfp4_quant" / "py.typed").exists()
    tree = ast.parse((ROOT / "nvfp4_quant" / "_C.pyi").read_text())
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named |= {node.target.id: node for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert set(named) == {name for name in dir(_C) if not name.startswith("_")}
    for name, node in named.items():
        if isinstance(node, ast.ClassDef):
            members = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            public = {member for member in dir(getattr(_C, name)) if not member.startswith("_")}
            assert {member for member in members if not member.startswith("_")} == public, name


def test_library_of_another_torch_is_refused_in_a_sentence():
    with pytest.raises(ImportError, match=r"built for torch 2\.3\.0, but torch .* is installed: run `pip"):
        _native._check_built_for("2.3.0", None)
    with pytest.raises(ImportError, match="is installed"):
        _native._check_built_for(torch.__version__, "7.5")
    _native._check_built_for(torch.__version__, torch.version.cuda)


def test_a_missing_native_module_is_named_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvfp4_quant._build", None)  # import then fails as for a missing file
    with pytest.raises(ImportError, match="the native module of nvfp4_quant is not built: run `pip install"):
        _native._load()


def test_setup_without_torch_ends_with_a_sentence(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    result = run_setup(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "--no-build-isolation" in result.stderr


def test_setup_cpu_only():
    result = run_setup(NVFP4_CPU_ONLY="1")
    assert "nvfp4_quant: CPU only, NVFP4_CPU_ONLY is set" in result.stdout
    assert result.stdout.split()[-1] == nvfp4_quant.__version__


@needs_nvcc
def test_setup_finds_the_toolkit_behind_a_wrapper_script(tmp_path):
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("nvcc")} "$@"\n')
    wrapper.chmod(0o755)
    result = run_setup(path=str(tmp_path), TORCH_CUDA_ARCH_LIST="Hopper;8.0 9.0a+PTX")
    line = next(line for line in result.stdout.splitlines() if line.startswith("nvfp4_quant:"))
    assert "CPU and CUDA for 9.0+PTX 8.0 9.0a+PTX" in line
    nvcc = Path(line.split("(")[1].rstrip(")"))
    assert nvcc.parent != tmp_path and (nvcc.parent.parent / "include" / "cuda_runtime.h").exists()


@needs_nvcc
@pytest.mark.parametrize("archs, named", [("99.0", "cannot compile for 99.0"), ("8.0 sm_90", "'sm_90' is no compute")])
def test_setup_names_a_bad_architecture(archs, named):
    result = run_setup(TORCH_CUDA_ARCH_LIST=archs)
    assert result.returncode == 1 and named in result.stderr


@pytest.mark.parametrize("mode", selfcheck.MODES)
def test_stored_digests_are_those_of_the_oracle(mode):
    options, expected = selfcheck.MODES[mode]
    rng_state = selfcheck.RNG_STATE if "stochastic_rounding" in options else None
    buffers = reference.quantize(selfcheck.sample(), rng_state=rng_state, **options)
    assert tuple(buffers) == BUFFERS
    assert selfcheck.digest(type("Buffers", (), buffers)) == expected


def test_selfcheck_passes_in_a_fresh_process(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nvfp4_quant"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all bytes are right"
    assert all(f"\n{mode} " in result.stdout for mode in selfcheck.MODES)


def test_selfcheck_fails_on_other_bytes(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "MODES", {"1-D": ({"with_2d_quantization": True}, selfcheck.MODES["1-D"][1])})
    monkeypatch.setattr(selfcheck, "devices", lambda: [torch.device("cpu")])
    assert selfcheck.selfcheck() == 1
    assert "1-D on cpu: the bytes do not have the stored digest" in capsys.readouterr().out


def test_selfcheck_names_the_first_difference(device):
    x = selfcheck.sample().to(device)
    y, other = nvfp4_quant.NVFP4Quantizer()(x), nvfp4_quant.NVFP4Quantizer()(x)
    assert selfcheck.first_difference(y, other) is None
    other._columnwise_data[0, 3] ^= 0x11
    assert selfcheck.first_difference(y, other).startswith("columnwise_data, byte 3: 0x")


def test_example_of_the_readme_runs(capsys):
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("NVFP4Tensor(shape=(1000, 777)")
    assert "torch.Size([1000, 392]) torch.Size([777, 504])" in printed
