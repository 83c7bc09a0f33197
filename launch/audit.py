#!/usr/bin/env python3
"""Ask a vulnerability service about every pinned version of `constraints.txt`, through pip-audit.

usage: python launch/audit.py [options of pip-audit, such as --vulnerability-service osv]

A service is believed only after it has named the vulnerabilities of an old release that is known for them: an index
that knows nothing would find everything sound. Exit code 0: asked, nothing found; 1: something found; 2: a mistake;
3: skipped, as no service answered. What is accepted stands with its reason in pyproject.toml, [tool.empo2.audit].
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KNOWN_BAD = "jinja2==2.4.1"
FOUND, MISTAKE, SKIPPED = 1, 2, 3


class Answer(NamedTuple):
    """What pip-audit said of a requirements file."""

    packages: list[dict[str, Any]]  # name, and version and vulns or skip_reason
    problem: str  # its last words where it said nothing of packages

    @property
    def vulnerable(self) -> list[dict[str, Any]]:
        """Packages with at least one vulnerability that is not accepted."""
        return [package for package in self.packages if package.get("vulns")]

    @property
    def unknown(self) -> list[dict[str, Any]]:
        """Packages that the service does not know."""
        return [package for package in self.packages if "skip_reason" in package]


def main(options: Sequence[str]) -> int:
    """Audit; returns the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    accepted: Mapping[str, str] = project["tool"]["empo2"]["audit"]["accepted"]
    if bare := [name for name, reason in accepted.items() if not reason.strip()]:
        return _say(f"pyproject.toml, [tool.empo2.audit]: {bare[0]} is accepted without a reason", MISTAKE)
    if subprocess.run([sys.executable, "-c", "import pip_audit"], capture_output=True, check=False).returncode:
        return _say("pip-audit is not installed; bash launch/setup.sh installs it", MISTAKE)
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "bad.txt"
        bad.write_text(KNOWN_BAD + "\n", encoding="utf-8")
        probe = ask(bad, options)
    if not probe.vulnerable:
        reason = probe.problem or f"it knows no vulnerability of {KNOWN_BAD}, which has several"
        return _say(f"skipped: no vulnerability service: {reason}", SKIPPED)
    ignored = [word for name in accepted for word in ("--ignore-vuln", name)]
    answer = ask(ROOT / "constraints.txt", [*options, *ignored])
    if answer.problem:
        return _say(answer.problem, MISTAKE)
    return report(answer, accepted)


def ask(requirements: Path, options: Sequence[str]) -> Answer:
    """Run pip-audit on pinned requirements; nothing is resolved or installed."""
    fixed = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *fixed, "--requirement", str(requirements), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return Answer(json.loads(done.stdout)["dependencies"], "")
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Answer([], lines[-1].strip() if lines else f"pip-audit ended with code {done.returncode}")


def report(answer: Answer, accepted: Mapping[str, str]) -> int:
    """Say what was found; returns the exit code."""
    for package in answer.vulnerable:
        for flaw in package["vulns"]:
            fixed = ", ".join(flaw["fix_versions"]) or "no release yet"
            _say(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}", FOUND)
    if answer.unknown:
        _say(f"not known to the service: {', '.join(package['name'] for package in answer.unknown)}", 0)
    asked = len(answer.packages) - len(answer.unknown)
    if answer.vulnerable:
        what = f"{len(answer.vulnerable)} of {asked} pinned packages are vulnerable"
        return _say(f"{what}: raise them in constraints.txt, or accept them in pyproject.toml", FOUND)
    if not asked:
        return _say("no pinned package is known to the service", MISTAKE)
    return _say(f"{asked} pinned packages, no vulnerability known ({len(accepted)} accepted)", 0)


def _say(line: str, code: int) -> int:
    print(f"audit: {line}", file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
