"""The lock file, with every package that is needed at one version with hashes; and the audit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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


# ---------------------------------------------------------------- .ci/audit.py

THING = {"name": "thing", "version": "1.0", "vulns": []}
FOUND = {**THING, "vulns": [{"id": "CVE-2025-40412", "fix_versions": ["50.3"], "aliases": []}]}
SKIPPED = {"name": "other", "skip_reason": "Dependency not found on PyPI and could not be audited"}
ADVISORY = {"title": "CVE-2025-40412: HTTPError 503 ", "url": "https://example/GHSA-405"}
BROKEN = {"severity": "high", "range": "<2", "via": [ADVISORY]}
TRACE = "Traceback:\n{error}: 503 Server Error"
# What a program writes, and what it ends with: the status of the whole, and what is said.
PIP = {
    "nothing": (0, {"dependencies": [THING]}, 0, ["nothing found"]),
    "a finding": (1, {"dependencies": [FOUND]}, 1, ["found (1)", "CVE-2025-40412"]),
    "both": (1, {"dependencies": [SKIPPED, FOUND]}, 1, ["found (1)", "NOT CHECKED (1)"]),
    "not known there": (0, {"dependencies": [SKIPPED]}, 0, ["NOT CHECKED (1)", "other"]),
    "no network": (1, TRACE.format(error="requests.exceptions.ProxyError"), 0, ["NOT CHECKED"]),
    "no service": (
        1,
        TRACE.format(error="pip_audit._service.interface.ServiceError"),
        0,
        ["NOT CHECKED"],
    ),
    "a wrong call": (1, "ERROR: invalid requirements input: 404.txt", 1, ["failed (1)", "404"]),
    "null": (0, None, 1, ["failed (1)"]),
    "a list": (0, [], 1, ["failed (1)"]),
    "no dependencies": (0, {}, 1, ["failed (1)"]),
    "no word": (0, b"", 1, ["failed (1)", "ended with 0"]),
    "half of it": (0, b'{"dependencies": [', 1, ["failed (1)"]),
    "no text": (0, b"\xff", 1, ["failed (1)"]),
    "killed after it": (137, {"dependencies": [THING]}, 1, ["failed", "ended with 137"]),
    "killed with a finding": (137, {"dependencies": [FOUND]}, 1, ["found (1)", "failed"]),
}
NPM = {
    "nothing": (0, {"vulnerabilities": {}}, 0, ["nothing found"]),
    "a finding": (1, {"vulnerabilities": {"bad": BROKEN}}, 1, ["found (1)", "bad <2: high"]),
    "a small finding": (
        0,
        {"vulnerabilities": {"bad": {**BROKEN, "severity": "low"}}},
        0,
        ["nothing found"],
    ),
    "no network": (1, {"message": "connect ECONNREFUSED"}, 0, ["NOT CHECKED (1)", "ECONN"]),
    "no lock": (1, {"error": {"code": "ENOLOCK"}}, 1, ["failed"]),
    "null": (0, None, 1, ["failed (1)"]),
    "no findings": (0, {"vulnerabilities": None}, 1, ["failed (1)"]),
}


@pytest.mark.parametrize(
    ("pip", "npm"), [*((name, "nothing") for name in PIP), *(("no network", name) for name in NPM)]
)
def test_an_audit_says_what_it_found_and_what_it_could_not_check(
    tmp_path: Path, pip: str, npm: str
) -> None:
    """Beside programs that answer as pip-audit and npm do."""
    for name, cases, which in (("build/audit/bin/pip-audit", PIP, pip), ("bin/npm", NPM, npm)):
        status, told, _, _ = cases[which]
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        to = ">&2" if isinstance(told, str) else ""
        words = told if isinstance(told, bytes) else (told if to else json.dumps(told)).encode()
        script = f"#!/bin/sh\ncat {to} <<'END'\n@\nEND\nexit {status}\n"
        program.write_bytes(script.encode().replace(b"@", words))
        program.chmod(0o700)
    for name in ("web", "tests/js", "web/node_modules/x", ".ci"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "package-lock.json").write_text("{}")
    shutil.copy(ROOT / ".ci/audit.py", tmp_path / ".ci")
    python = tmp_path / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    done = subprocess.run([python, tmp_path / ".ci/audit.py"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == max(PIP[pip][2], NPM[npm][2])
    said: dict[str, str] = {}
    for part in re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)[1:]:
        name = part.partition(":")[0]
        said[name] = said.get(name, "") + part
    audited = {"pip-audit of what is installed": PIP[pip], "pip-audit of the lock file": PIP[pip]}
    audited |= {"npm audit of web": NPM[npm], "npm audit of tests/js": NPM[npm]}
    assert set(said) == set(audited)
    for name, (_, _, _, words) in audited.items():
        assert all(word in said[name] for word in words), done.stdout


def test_ci_shows_an_audit() -> None:
    assert ".ci/audit.py" in (ROOT / ".ci/run").read_text()
