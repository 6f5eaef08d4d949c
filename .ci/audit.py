"""Known vulnerabilities of what is installed, of the lock file, and of every package-lock.json.

pip-audit and npm audit are asked for JSON: a finding is read from that, never from the text of an
error. Exits with 1 for a finding or a program that fails. A service that can't be reached, or does
not know a package, is named as not checked, and is no failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build/audit"
PIP_AUDIT = HOME / "bin/pip-audit"
LIMIT_S = 120.0  # of each program
SHOWN = {"found": 100, "NOT CHECKED": 5, "failed": 40}  # lines of each
LEVELS = ("moderate", "high", "critical")  # of npm's advisories
# How pip-audit ends where its service can't be reached; any other error is a fault of the call.
UNREACHABLE = re.compile(
    r"^(?:requests|urllib3)\.exceptions\.\w+|^pip_audit\._service\.\S+Error\b"
    r"|Could not connect to PyPI|PyPI is not redirecting|your network may be blocking",
    re.MULTILINE,
)


def run(*command: str | Path) -> tuple[Any, str, str]:
    """What a program wrote: its standard output as JSON, None if it is none, and its errors; and
    why it did not come to its end, "" if it did."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None, f"requests.exceptions.Timeout: no answer within {LIMIT_S:g} s", ""
    except OSError as e:
        return None, str(e), ""
    end = f"it ended with {done.returncode}"
    errors = done.stderr.strip() or done.stdout.strip() or end
    failure = "" if done.returncode in (0, 1) else f"{errors}\n{end}"  # 1: it found something
    try:
        return json.loads(done.stdout), errors, failure
    except ValueError:
        return None, errors, failure


def report(name: str, found: list[str], unknown: list[str], failure: str = "") -> bool:
    """Say what an audit came to; returns whether it is one without a finding and a failure."""
    told = {"found": found, "NOT CHECKED": unknown, "failed": failure.strip().splitlines()}
    for verdict, lines in told.items():
        if lines:
            shown = lines[-SHOWN[verdict] :] if verdict == "failed" else lines[: SHOWN[verdict]]
            sys.stdout.write(f"{name}: {verdict} ({len(lines)})\n")
            sys.stdout.writelines(f"  {line[:200]}\n" for line in shown)
    if not any(told.values()):
        sys.stdout.write(f"{name}: nothing found\n")
    sys.stdout.flush()
    return not (found or failure)


def no_answer(name: str, errors: str) -> bool:
    """Say why a program gave no audit: its service is away, or it failed."""
    if UNREACHABLE.search(errors):
        return report(name, [], errors.strip().splitlines()[-1:])
    return report(name, [], [], errors)


def audit_packages(name: str, *flags: str | Path) -> bool:
    """Ask pip-audit about a list of packages."""
    shape = ("--disable-pip", "-f", "json", "--progress-spinner", "off")
    told, errors, failure = run(PIP_AUDIT, *shape, *flags)
    if not (isinstance(told, dict) and isinstance(told.get("dependencies"), list)):
        return no_answer(name, errors)
    found, unknown = [], []
    for package in told["dependencies"]:
        if "skip_reason" in package:
            unknown.append(f"{package['name']}: {package['skip_reason']}")
        for each in package.get("vulns", ()):
            fixed = ", ".join(each["fix_versions"]) or "no version"
            names = " ".join((each["id"], *each.get("aliases", ())))
            found.append(f"{package['name']} {package['version']}: {names}, fixed in {fixed}")
    return report(name, found, unknown, failure)


def npm_locks() -> list[Path]:
    """The folders with a package-lock.json of this repository."""
    found = []
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [x for x in inner if x not in ("node_modules", "build") and x[0] != "."]
        if "package-lock.json" in files:
            found.append(Path(folder))
    return sorted(found)


def audit_lock(folder: Path) -> bool:
    """Ask npm about a folder's package-lock.json."""
    name = f"npm audit of {folder.relative_to(ROOT)}"
    if shutil.which("npm") is None:
        return report(name, [], ["there is no npm here"])
    told, errors, failure = run("npm", "--prefix", folder, "audit", "--json", "--package-lock-only")
    if isinstance(told, dict) and isinstance(told.get("vulnerabilities"), dict):
        found = []
        for package, about in sorted(told["vulnerabilities"].items()):
            why = [x if isinstance(x, str) else f"{x['title']} {x['url']}" for x in about["via"]]
            if about["severity"] in LEVELS:
                found.append(f"{package} {about['range']}: {about['severity']}, {'; '.join(why)}")
        return report(name, found, [], failure)
    if isinstance(told, dict) and "message" in told:  # npm has it from the request alone
        return report(name, [], [told["message"]])
    return no_answer(name, errors)


def main() -> int:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Node may be there
    is_good = True
    if not PIP_AUDIT.exists():
        run(sys.executable, "-m", "venv", HOME)
        run(HOME / "bin/pip", "install", "-q", "pip-audit>=2.10,<3")
    if PIP_AUDIT.exists():
        pins = {
            f"{each.metadata['Name']}=={each.version.partition('+')[0]}\n"
            for each in distributions()
            if '"editable": true' not in (each.read_text("direct_url.json") or "")
        }
        installed = HOME / "installed.txt"
        installed.write_text("".join(sorted(pins)))
        is_good &= audit_packages("pip-audit of what is installed", "--no-deps", "-r", installed)
        lock = ROOT / ".ci/constraints.txt"
        is_good &= audit_packages("pip-audit of the lock file", "--require-hashes", "-r", lock)
    else:
        report("pip-audit", [], ["pip-audit itself can't be installed from here"])
    for path in npm_locks():
        is_good &= audit_lock(path)
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
