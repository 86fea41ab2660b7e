"""Builds the native module `nvfp4_quant._C` for the installed torch: CPU kernels, and CUDA kernels where nvcc is.

Environment: NVFP4_CPU_ONLY=1 leaves the CUDA half out; CUDA_HOME names a toolkit; TORCH_CUDA_ARCH_LIST lists compute
capabilities ("8.0 9.0+PTX 10.0f"); MAX_JOBS limits the number of compilers at once. No GPU is needed, none is asked.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import setup

try:
    import torch
except ImportError:
    sys.exit(
        "nvfp4_quant compiles against the installed torch, which this build cannot import: "
        "install torch first, then pass --no-build-isolation to pip."
    )

NAMED_ARCHS = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0f 12.0f+PTX",
}
# The family targets (suffix f) have the native FP4 conversion; 9.0 PTX serves GPUs newer than this toolkit.
DEFAULT_ARCHS = ["8.0", "9.0+PTX", "10.0f", "11.0f", "12.0f"]


def find_nvcc() -> Path | None:
    """The nvcc of CUDA_HOME, else the real one behind the nvcc on PATH (which may be a wrapper script), else None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home, "bin", "nvcc")] if home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    nvcc = next((Path(path) for path in candidates if path and Path(path).is_file()), None)
    if nvcc is None or home:
        return nvcc
    dryrun = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", dryrun.stderr, re.MULTILINE)
    return Path(os.path.realpath(top[1]), "bin", "nvcc") if top else nvcc


def toolkit_version(nvcc: Path) -> str:
    """The toolkit's version, such as 13.0; ends the build with a sentence if torch needs another major version."""
    release = re.search(r"release (\d+\.\d+)", subprocess.check_output([nvcc, "--version"], text=True))[1]
    if release.split(".")[0] != torch.version.cuda.split(".")[0]:
        sys.exit(
            f"{nvcc} is CUDA {release}, but torch {torch.__version__} was built for CUDA {torch.version.cuda}: "
            "set CUDA_HOME to a matching toolkit, or NVFP4_CPU_ONLY=1."
        )
    return release


def gencode_flags(arch: str) -> list[str]:
    """`9.0+PTX` -> the -gencode flags for sm_90 code and compute_90 PTX."""
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if match is None:
        sys.exit(f"TORCH_CUDA_ARCH_LIST: {arch!r} is no compute capability such as 8.0, 9.0+PTX or 10.0f.")
    number = match[1] + match[2] + match[3]
    kinds = ["sm", "compute"] if match[4] else ["sm"]
    return [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]


def nvcc_knows(nvcc: Path, arch: str) -> bool:
    command = [nvcc, "--dryrun", "-c", "-x", "cu", *gencode_flags(arch), os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def cuda_archs(nvcc: Path) -> list[str]:
    """The architectures asked for in TORCH_CUDA_ARCH_LIST, else those of DEFAULT_ARCHS that nvcc can compile for."""
    asked = re.split(r"[\s;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    archs = " ".join(NAMED_ARCHS.get(name, name) for name in asked).split()
    if not archs:
        return [arch for arch in DEFAULT_ARCHS if nvcc_knows(nvcc, arch)]
    unknown = [arch for arch in archs if not nvcc_knows(nvcc, arch)]
    if unknown:
        sys.exit(f"TORCH_CUDA_ARCH_LIST: {nvcc} cannot compile for {', '.join(unknown)}.")
    return list(dict.fromkeys(archs))


def choose_nvcc() -> tuple[Path | None, str]:
    """The nvcc to build the CUDA half with, or None and why there is no CUDA half."""
    if os.environ.get("NVFP4_CPU_ONLY", "0") not in ("", "0"):
        return None, "NVFP4_CPU_ONLY is set"
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} has no CUDA"
    nvcc = find_nvcc()
    return nvcc, "" if nvcc else "no nvcc found"


def wheel_includes() -> list[str]:
    """Header folders of NVIDIA's wheels: torch's headers name cuBLAS and others, which a small toolkit may lack."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else []
    return sorted(path for root in roots for path in glob(f"{root}/*/include"))


def shared_cxx_runtime() -> list[str]:
    """The shared libstdc++ by name, where there is one.

    Some compilers would link the static one, and a second C++ runtime beside torch's crashes in its first stream.
    """
    compiler = os.environ.get("CXX", "g++").split()
    name = "libstdc++.so.6"
    if shutil.which(compiler[0]) is None:
        return []
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return [f"-l:{name}"] if os.path.isabs(found) else []


nvcc, reason = choose_nvcc()
cuda_version = toolkit_version(nvcc) if nvcc else None
archs = cuda_archs(nvcc) if nvcc else []
if nvcc:
    # Read by torch's helper when it is imported; by itself it would take the folder above a wrapper script.
    os.environ["CUDA_HOME"] = str(nvcc.parent.parent)
print(f"nvfp4_quant: CPU and CUDA for {' '.join(archs)} ({nvcc})" if nvcc else f"nvfp4_quant: CPU only, {reason}")

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildNative(BuildExtension):
    """Bakes the facts of the build into the library, and writes beside it for which torch it was built."""

    def build_extensions(self):
        facts = {
            "NVFP4_VERSION": self.distribution.get_version(),
            "NVFP4_TORCH_VERSION": torch.__version__,
            "NVFP4_CUDA_VERSION": cuda_version or "",
            "NVFP4_CUDA_ARCHS": " ".join(archs),
        }
        self.extensions[0].extra_compile_args["cxx"] += [f'-D{name}="{value}"' for name, value in facts.items()]
        super().build_extensions()

    def run(self):
        super().run()
        library = Path(self.get_ext_fullpath("nvfp4_quant._C"))
        library.with_name("_build.py").write_text(f"TORCH = {str(torch.__version__)!r}\nCUDA = {cuda_version!r}\n")


def native_extension():
    # Contraction off: a fused multiply-add would change bits. OpenMP's symbols come from torch's own runtime: linking
    # a second one would ignore torch.set_num_threads. -g0, because Python's own flags ask for debug information.
    # No trapping math: bits stay, but comparisons may be vectorised (twice as fast).
    cxx = [
        "-O3",
        "-g0",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
    ]
    host = ",".join(flag for flag in cxx if flag not in ("-O3", "-fopenmp"))
    cuda = [
        "-O3",
        "-fmad=false",
        "-lineinfo",
        "-DNVFP4_WITH_CUDA",
        f"-Xcompiler={host}",
        *sum(map(gencode_flags, archs), []),
    ]
    make, sources = CppExtension, glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")
    if nvcc:
        make, sources = CUDAExtension, sources + glob("csrc/cuda/*.cu")
        cxx.append("-DNVFP4_WITH_CUDA")
    headers = glob("csrc/**/*.*", recursive=True)  # and the sources left out here: a source distribution has them all
    flags = {"cxx": cxx, "nvcc": cuda}
    extension = make("nvfp4_quant._C", sorted(sources), depends=sorted(headers), extra_compile_args=flags)
    extension.extra_link_args = shared_cxx_runtime()
    # As system headers, so that -Wextra speaks of our code only.
    includes = extension.include_dirs + (wheel_includes() if nvcc else [])
    cxx += [f"-isystem{path}" for path in includes]
    extension.include_dirs = [os.path.abspath("csrc")]  # ninja runs in another folder
    return extension


setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildNative})
