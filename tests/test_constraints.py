"""The lock file, with every package that is needed at one version with hashes; and the audit."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = ROOT / ".ci/constraints.txt"
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
PIN = re.compile(r"([a-z0-9-]+)==([^ ;]+)(?: ; (.+?))? \\")
HERE = {"extra": ""}


class Pin:
    """One line of the lock file."""

    def __init__(self, name: str, version: str, marker: str | None) -> None:
        self.name, self.version = name, Version(version)
        self.marker = Marker(marker) if marker else None
        self.num_hashes = 0

    @property
    def is_here(self) -> bool:
        """Whether this platform and Python have it."""
        return self.marker is None or self.marker.evaluate()


@pytest.fixture(scope="module")
def pins() -> list[Pin]:
    found: list[Pin] = []
    for line in LOCK.read_text().splitlines():
        if pin := PIN.fullmatch(line):
            found.append(Pin(*pin.groups()))
        else:
            assert HASH.fullmatch(line), f"neither a version nor a hash: {line}"
            found[-1].num_hashes += 1
    return found


def pin_of(name: str, pins: list[Pin]) -> Pin | None:
    return next((p for p in pins if p.name == canonicalize_name(name) and p.is_here), None)


def test_every_version_has_hashes_and_nothing_else(pins: list[Pin]) -> None:
    assert len(pins) > 100
    assert all(pin.num_hashes for pin in pins)
    here = [pin.name for pin in pins if pin.is_here]
    assert len(here) == len(set(here))


def test_it_has_what_pyproject_asks_for(pins: list[Pin]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(text for extra in extras for text in extra)]
    for requirement in map(Requirement, asked):
        found = [p for p in pins if p.name == canonicalize_name(requirement.name)]
        assert found, f"{requirement}: make lock"
        for pin in found:
            assert pin.version in requirement.specifier, f"{requirement}: make lock"


def test_torch_is_that_of_the_makefile(pins: list[Pin]) -> None:
    made = re.search(r"^TORCH := torch==(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made
    assert {pin.version for pin in pins if pin.name == "torch"} == {Version(made[1])}


def test_it_has_what_its_packages_need(pins: list[Pin]) -> None:
    """As far as they are installed here at these versions."""
    num_checked = 0
    for each in distributions():
        pin = pin_of(each.metadata["Name"], pins)
        if pin is None or str(pin.version) != each.version:
            continue
        num_checked += 1
        for requirement in map(Requirement, each.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(HERE):
                need = pin_of(requirement.name, pins)
                assert need is not None, f"{each.name} needs {requirement}"
                assert requirement.specifier.contains(need.version, prereleases=True), requirement
    assert num_checked > 20


# ---------------------------------------------------------------- .ci/audit

AUDITS = {
    "nothing": ("echo fine", 0, "nothing found"),
    "unreachable": (
        "echo 'request failed: ENOTFOUND, ConnectionError' >&2; exit 1",
        0,
        "NOT CHECKED",
    ),
    "a finding": ("echo 'thing 1.0 GHSA-1234'; exit 1", 1, "GHSA-1234"),
}


@pytest.mark.parametrize("npm", AUDITS)
@pytest.mark.parametrize("pip", AUDITS)
def test_an_audit_says_what_it_found_and_what_it_could_not_check(
    tmp_path: Path, pip: str, npm: str
) -> None:
    """Beside programs that answer as pip-audit and npm do."""
    programs = {".venv/bin/python": "exit 0", "build/audit/bin/pip-audit": AUDITS[pip][0]}
    for name, text in {**programs, ".venv/bin/npm": AUDITS[npm][0]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/audit", tmp_path / ".ci/audit")
    done = subprocess.run([tmp_path / ".ci/audit"], capture_output=True, text=True)
    assert done.returncode == max(AUDITS[pip][1], AUDITS[npm][1])
    for name, (_, _, says) in (("pip-audit", AUDITS[pip]), ("npm audit", AUDITS[npm])):
        told = done.stdout.partition(f"{name}: ")[2].partition("npm audit: ")[0]
        assert says in told, done.stdout


def test_ci_shows_an_audit() -> None:
    assert ".ci/audit" in (ROOT / ".ci/run").read_text()
