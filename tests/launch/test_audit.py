"""The audit of the dependencies: what it says of a sound, a vulnerable, an ignorant and an absent service."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fixtures.processes import ROOT

# In the place of pip-audit: answers with the lines of a file, those without a version as unknown to the service.
STAND_IN = """
import json, os, sys
from pathlib import Path
pins = Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().split("\\n")
names = [line.partition("==")[0] for line in pins if line and not line.startswith("#")]
flaws, ignored = json.loads(os.environ["FLAWS"]), {b for a, b in zip(sys.argv, sys.argv[1:]) if a == "--ignore-vuln"}
if flaws is None:
    sys.exit("Traceback (most recent call last):\\nConnectionError: no route to the service")
def of(name):
    if name not in flaws and "*" not in flaws:
        return {"name": name, "skip_reason": "not found"}
    found = [flaw for flaw in flaws.get(name, []) if flaw not in ignored]
    return {"name": name, "version": "1", "vulns": [{"id": flaw, "fix_versions": ["2"]} for flaw in found]}
print(json.dumps({"dependencies": [of(name) for name in names], "fixes": []}))
"""
PROBE = {"*": [], "jinja2": ["PYSEC-1"]}  # also of the jinja2 in constraints.txt


def audit(folder: Path, flaws: object, *options: str, accepted: str = "") -> subprocess.CompletedProcess[str]:
    """Run the audit of a copy of the project's pins, with a stand-in for pip-audit."""
    (folder / "pip_audit").mkdir()
    (folder / "pip_audit/__init__.py").touch()
    (folder / "pip_audit/__main__.py").write_text(STAND_IN)
    script = project(folder, accepted)
    environment = os.environ | {"PYTHONPATH": str(folder), "FLAWS": json.dumps(flaws)}
    return subprocess.run(
        [sys.executable, str(script), *options], env=environment, capture_output=True, text=True, check=False
    )


def project(folder: Path, accepted: str = "", pins: str = "good==1\njinja2==3\n# a comment\n") -> Path:
    (folder / "launch").mkdir()
    (folder / "pyproject.toml").write_text(f"[tool.empo2.audit.accepted]\n{accepted}\n")
    (folder / "constraints.txt").write_text(pins)
    script = folder / "launch/audit.py"
    script.write_bytes((ROOT / "launch/audit.py").read_bytes())
    return script


@pytest.mark.parametrize(
    ("flaws", "accepted", "code", "said"),
    [
        (PROBE, '"PYSEC-1" = "never rendered"', 0, ["2 pinned packages, no vulnerability known (1 accepted)"]),
        (
            PROBE | {"good": ["CVE-7"]},
            '"PYSEC-1" = "never rendered"',
            1,
            ["good 1: CVE-7, fixed in 2", "1 of 2 pinned packages are vulnerable: raise them in constraints.txt, or"],
        ),
        (
            {"jinja2": ["PYSEC-1"]},
            '"PYSEC-1" = "never rendered"',
            0,
            ["not known to the service: good", "1 pinned packages, no vulnerability known (1 accepted)"],
        ),
        (None, "", 3, ["skipped: no vulnerability service: ConnectionError: no route to the service"]),
        ({}, "", 3, ["skipped: no vulnerability service: it knows no vulnerability of jinja2==2.4.1, which has"]),
        ({"*": []}, "", 3, ["skipped: no vulnerability service: it knows no vulnerability of jinja2==2.4.1"]),
        (PROBE, '"PYSEC-1" = " "', 2, ["pyproject.toml, [tool.empo2.audit]: PYSEC-1 is accepted without a reason"]),
    ],
    ids=["sound", "vulnerable", "partly unknown", "unreachable", "empty", "ignorant", "no reason"],
)
def test_exit_code_and_lines(flaws: object, accepted: str, code: int, said: list[str], tmp_path: Path) -> None:
    done = audit(tmp_path, flaws, accepted=accepted)
    assert done.returncode == code, done.stderr
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert len(lines) == len(said)
    assert all(line.startswith(f"audit: {start}") for line, start in zip(lines, said, strict=True)), lines


def test_the_project_has_what_is_read() -> None:
    done = subprocess.run(["bash", "launch/test.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "+ .venv/bin/python launch/audit.py" in done.stdout.splitlines()
    assert "[tool.empo2.audit.accepted]" in (ROOT / "pyproject.toml").read_text().splitlines()
    assert "\npip-audit==" in (ROOT / "constraints.txt").read_text()


class Service(BaseHTTPRequestHandler):
    """Knows one flaw of all releases of jinja2 below 3, in the format of OSV."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        flaw = {"id": "PYSEC-9", "summary": "s", "details": "d", "affected": [], "aliases": []}
        old = asked["package"]["name"] == "jinja2" and asked["version"].startswith("2.")
        body = json.dumps({"vulns": [flaw]} if old else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


@pytest.mark.medium
@pytest.mark.parametrize(("version", "code", "said"), [("3.1.6", 0, "no vulnerability known"), ("2.9", 1, "PYSEC-9")])
def test_the_real_auditor_and_a_service_on_this_machine(
    version: str, code: int, said: str, service: str, tmp_path: Path
) -> None:
    pytest.importorskip("pip_audit")
    script = project(tmp_path, pins=f"jinja2=={version}\nnumpy==2.0\n")
    options = ("--vulnerability-service", "osv", "--osv-url", service)
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
