"""The kernels' tests on ARM, emulated by qemu; not collected, `make arm-tests` runs them.

Makes, in build/arm, a root with Debian's Python for arm64 and a folder of PyPI's wheels for it;
what is installed on this machine stays as it is. The library is compiled by the cross compiler, for
each of MACHINES in turn. The arguments are pytest's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "arm"
SITE = PLACE / "site"
# The emulated CPU has all of their instructions, so these choose the code: with the dot product of
# bytes, without it, and with vectors of SVE where GCC makes loops of its own.
MACHINES = ["cortex-a76", "cortex-a72", "neoverse-n2"]
DEBIAN = ["python3", "libstdc++6", "libgomp1"]
# The last one whose wheel for ARM needs none of CUDA's libraries. What it requires is named, since
# pip would take what it requires on this machine.
TORCH = "torch==2.10.0"
NEEDED = ["filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "numpy"]
NEEDED += ["msgspec", "pytest", "pytest-asyncio", "hypothesis"]
PYTHON = """#!/bin/sh
exec qemu-aarch64 -cpu max -L {root} -0 "$0" -E PYTHONHOME=/usr {root}/usr/bin/{name} "$@"
"""
# The last -mcpu counts: the cross compiler does not know the first, "native".
COMPILER = """#!/bin/sh
machine=$1
shift
exec aarch64-linux-gnu-gcc "$@" -mcpu="$machine"
"""
# The native backend's; one of torch's did not end in four minutes. In a child of a process with
# threads qemu 7.2 itself fails.
CHOSEN = "not [torch- and not [torch] and not [triton and not forked"


def make_root(root: Path) -> None:
    """Debian's packages and all that they depend on, unpacked; apt-get's own state is beside it."""
    apt, known = PLACE / "apt", PLACE / "apt" / "status"
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    known.write_text("")  # nothing is installed
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
    settings |= {"APT::Sandbox::User": "root", "Dir::State": str(apt), "Dir::Cache": str(apt)}
    settings |= {"Dir::State::status": str(known)}
    command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*command, "update"], check=True)
    wanted = ["install", "-y", "--no-install-recommends", "--download-only", *DEBIAN]
    subprocess.run([*command, *wanted], check=True)
    for package in sorted((apt / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)


def install(python: str) -> None:
    """PyPI's wheels for the root's Python, say python3.11."""
    platforms = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 36))]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--target", str(SITE), "--upgrade", "--only-binary=:all:", "--no-compile"]
    command += ["--python-version", python.removeprefix("python")]
    command += [f"--platform={name}_aarch64" for name in platforms]
    for packages in ([*NEEDED], ["--no-deps", TORCH]):
        subprocess.run([*command, *packages], check=True)


def write(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def prepare() -> None:
    """All that is in build/arm: made once, the program that runs the emulated Python last."""
    root, program = PLACE / "root", PLACE / "python"
    if program.exists():
        return
    shutil.rmtree(PLACE, ignore_errors=True)
    make_root(root)
    name = (root / "usr" / "bin" / "python3").readlink().name
    install(name)
    write(PLACE / "cc", COMPILER)
    write(program, PYTHON.format(root=shlex.quote(str(root)), name=name))


def run(machine: str, arguments: list[str]) -> int:
    """The tests of tests/kernels with the library compiled for a machine: pytest's exit code."""
    print(f"\n{machine}", flush=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}  # this CPU's
    env |= {"PYTHONPATH": f"{ROOT}:{SITE}", "XDG_CACHE_HOME": str(PLACE / "cache")}
    env |= {"CC": shlex.join([str(PLACE / "cc"), machine]), "OMP_NUM_THREADS": "1"}
    files = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    command = [str(PLACE / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=0", "-k", CHOSEN, *arguments, *files]
    return subprocess.run(command, env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    prepare()
    sys.exit(max([run(machine, sys.argv[1:]) for machine in MACHINES]))
