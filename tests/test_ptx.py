"""Every `.cu` compiles without a warning for each GPU family, and the native conversions are where they exist."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
E2M1 = "cvt.rn.satfinite.e2m1x2.f32"
E4M3 = "cvt.rn.satfinite.e4m3x2.f32"
NATIVE = {
    "80": set(),
    "90": {E4M3},
    "100f": {E4M3, E2M1},
    "103a": {E4M3, E2M1},
    "110f": {E4M3, E2M1},
    "120f": {E4M3, E2M1},
    "121a": {E4M3, E2M1},
}


def compile_to_ptx(source: Path, arch: str, folder: Path) -> str:
    ptx = folder / f"{source.stem}.ptx"
    flags = ["-std=c++17", "-fmad=false", "-DNVFP4_WITH_CUDA", "-Werror", "all-warnings", f"-I{CSRC}"]
    command = ["nvcc", "-ptx", f"-arch=compute_{arch}", *flags, source, "-o", ptx]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{source.name} for {arch}:\n{result.stderr}"
    return ptx.read_text()


def nvcc_knows(arch: str) -> bool:
    command = ["nvcc", "--dryrun", "-c", "-x", "cu", f"-arch=compute_{arch}", "/dev/null"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("arch", NATIVE)
def test_native_conversions(arch, tmp_path):
    if not nvcc_knows(arch):
        pytest.skip(f"this nvcc does not know {arch}")
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    assert sources
    ptx = "".join(compile_to_ptx(source, arch, tmp_path) for source in sources)
    assert {name for name in (E2M1, E4M3) if name in ptx} == NATIVE[arch]
