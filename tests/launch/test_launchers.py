"""Launch files rendered and checked: dry runs, YAML, and the Slurm path with a fake `srun` of local processes."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from empo2_jax.remote_engine import server_urls
from tests.fixtures.processes import ROOT

XPK = ("launch/gke_xpk.sh", "--cluster", "c", "--image", "i", "--tpu-type", "v5litepod-16", "--slices", "2")
TPU_VM = ("launch/tpu_vm.sh", "--name", "pod", "--zone", "z")
RUNS = {  # what comes before CONFIG
    "local": ("launch/local.sh", "--processes", "2", "--devices", "2"),
    "slurm": ("launch/slurm.sbatch",),
    "slurm_sglang": ("launch/slurm_sglang.sbatch",),
    "gke_xpk": XPK,
    "tpu_vm": TPU_VM,
}
CONFIG = ("configs/toy.toml", "--run.name", "a b")
# Starts as many local processes as asked for, with what Slurm tells a task; SIGTERM goes on to them.
SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
arguments = sys.argv[1:]
while arguments[0].startswith("--"):
    arguments.pop(0)
count = int(os.environ["FAKE_TASKS"])
def task(number):
    own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_STEP_NUM_TASKS": str(count),
           "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    return subprocess.Popen(arguments, env=os.environ | own)
tasks = [task(number) for number in range(count)]
signal.signal(signal.SIGTERM, lambda *_: [one.send_signal(signal.SIGTERM) for one in tasks])
codes = [one.wait() for one in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = '#!/usr/bin/env bash\necho "$*" >>"$FAKE_LOG"\n'
TASK = """#!{python}
import json, os, sys, time
from pathlib import Path
from empo2_jax.distributed import membership
found, out = membership(os.environ), Path(os.environ["FAKE_OUT"])
said = [found.coordinator, found.processes, found.process, os.environ["JAX_LOCAL_DEVICE_IDS"], sys.argv[1:]]
(out / f"task{{found.process}}.json").write_text(json.dumps(said))
{then}
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", RUNS)
def test_dry_run_prints_what_would_run_and_runs_nothing(name: str) -> None:
    assert run("-n", RUNS[name][0]).returncode == 0
    done = run(*RUNS[name], "--dry-run", *CONFIG, SGLANG_MODEL="m", PATH="/usr/bin:/bin", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith("+ ") for line in lines)
    words = shlex.split(lines[-1])
    if name in ("gke_xpk", "tpu_vm"):  # the command is one word for another shell
        words = shlex.split(words[words.index("--command") + 1])
    start = words.index("train")
    assert words[start + 1 : start + 4] == list(CONFIG)


@pytest.mark.parametrize("name", RUNS)
def test_help_and_a_missing_config_are_answered(name: str) -> None:
    assert run(RUNS[name][0], "--help").stdout.startswith("usage: ")
    done = run(*RUNS[name], SGLANG_MODEL="m")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"{name}: CONFIG is missing"


def test_the_toy_study_says_what_it_would_run(tmp_path: Path) -> None:
    script = tmp_path / "launch/toy_study.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "launch/toy_study.sh", script)
    arguments = (str(script), "--dry-run", "--seeds", "1")
    commands = ["+ bash launch/setup.sh cpu --extras envs"]
    commands += ["+ .venv/bin/empo2 study configs/studies/toy.toml --dry-run --seeds 1"]
    assert run(*arguments).stdout.splitlines() == commands
    empo2 = tmp_path / ".venv/bin/empo2"
    empo2.parent.mkdir(parents=True)
    empo2.write_text('#!/bin/sh\necho "summary of $*"\n')
    empo2.chmod(0o755)
    summary = "summary of study configs/studies/toy.toml --dry-run --seeds 1"
    assert run(*arguments).stdout.splitlines() == [*commands, summary]
    assert run(str(script), "--help").stdout.startswith("usage: ")


def test_what_is_needed_is_named() -> None:
    for arguments, said in (
        (("launch/slurm.sbatch", *CONFIG), "slurm: not in a Slurm job; start it with sbatch, or use launch/local.sh"),
        (("launch/slurm_sglang.sbatch", *CONFIG), "slurm_sglang: SGLANG_MODEL is not set"),
        (("launch/gke_xpk.sh", *CONFIG), "gke_xpk: --cluster, --image and --tpu-type are needed"),
        (("launch/tpu_vm.sh", *CONFIG), "tpu_vm: --name and --zone are needed"),
        (
            ("launch/local.sh", "--devices", "no", *CONFIG),
            "local: --devices no: a whole number from 1 to 256 is allowed",
        ),
        (("launch/local.sh", "--processes", "9" * 30, *CONFIG), f"local: --processes {'9' * 30}: a whole number from"),
        (("launch/local.sh", "--grace", "-1", *CONFIG), "supervise: --grace -1.0: 0 to 86400 is allowed"),
        (("launch/local.sh", "--grace", "nan", *CONFIG), "supervise: --grace nan: 0 to 86400 is allowed"),
        (("launch/local.sh", "--retries", "x", *CONFIG), "supervise: argument --retries: invalid int value: 'x'"),
        ((*XPK[:-1], "x", *CONFIG), "gke_xpk: --slices x: a whole number from 1 to 10000 is allowed"),
        ((*XPK, "--restarts", "-1", *CONFIG), "gke_xpk: --restarts -1: a whole number from 0 to "),
        (("launch/sglang_servers.sh", "m", "--count", "9" * 30), f"sglang_servers: --count {'9' * 30}: a whole number"),
        (("launch/sglang_servers.sh", "m", "--tp", "0"), "sglang_servers: --tp 0: a whole number from 1 to 256"),
        (("launch/setup.sh", "cpu", "tpu"), "setup: cpu tpu: one accelerator is allowed"),
        (("launch/setup.sh", "--venv", "/dev/null/x", "--dry-run"), "setup: --venv /dev/null/x: cannot be made, since"),
        (("launch/local.sh", "--dry-run", "nowhere.toml"), "local: nowhere.toml: no such configuration file"),
        (("launch/local.sh", "--run.name", "x", "nowhere.toml"), "local: nowhere.toml: no such configuration file"),
        (("launch/local.sh", "--run.name", "x"), "local: CONFIG is missing"),
        (("launch/local.sh", *CONFIG, "--retries"), "local: --retries needs a number"),
        (("launch/test.sh", "--foo"), "test: unknown option: --foo; those of pytest stand after --"),
        (("launch/setup.sh", "--extras", "dev,nosuch"), "setup: --extras nosuch: pyproject.toml has no such extra; "),
        (("launch/setup.sh", "--extras"), "setup: --extras needs a list"),
        (("launch/quickstart.sh", "--iterations"), "quickstart: --iterations needs a number"),
        (
            ("launch/quickstart.sh", "--iterations", "--dry-run"),
            "quickstart: --iterations --dry-run: a whole number from",
        ),
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert done.stderr.splitlines()[-1].startswith(said)


def test_a_port_of_servers_is_a_port() -> None:
    for port in ("x", "0", "70000", "9" * 30):
        done = run("launch/slurm_sglang.sbatch", "--dry-run", *CONFIG, SGLANG_MODEL="m", SGLANG_PORT=port)
        assert (done.returncode, done.stderr) == (2, f"slurm_sglang: SGLANG_PORT={port}: 1 to 65535 is allowed\n")


def test_the_extras_of_pyproject_are_allowed(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    said = run("launch/setup.sh", "--extras", "nosuch").stderr.strip()
    assert said.endswith(f"allowed: {', '.join(extras)}")
    venv = str(tmp_path / "venv")
    done = run("launch/setup.sh", "--extras", ",".join(extras), "--venv", venv, "--dry-run", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr


def test_the_tests_take_arguments_of_pytest() -> None:
    done = run("launch/test.sh", "--dry-run", "-k", "name", "-x", "tests/a.py", "--", "--durations", "3", "--fast")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" --durations 10 -k name -x tests/a.py --durations 3 --fast")


def test_all_tests_need_what_storage_and_trackers_need() -> None:
    setups = {marks: run("launch/test.sh", "--dry-run", *marks).stdout.splitlines()[:2] for marks in ((), ("--all",))}
    assert setups[("--all",)] == ["+ bash launch/setup.sh cpu", "+ bash launch/setup.sh cpu --extras services"]
    assert setups[()][1].endswith("ruff format --check .")


def test_the_first_node_trains_and_the_others_serve() -> None:
    done = run("launch/slurm_sglang.sbatch", "--dry-run", *CONFIG, SGLANG_MODEL="m", SGLANG_ARGS="--tp 8")
    serve, train = (shlex.split(line) for line in done.stdout.splitlines())
    assert "--nodelist=node2,node3,node4" in serve and "--ntasks=3" in serve and serve[-2:] == ["--tp", "8"]
    assert "--nodelist=node1" in train and "--ntasks=1" in train
    assert train[train.index("--rollout.engine") + 1] == "sglang"


def test_jobset_names_its_own_coordinator_and_keeps_a_stopped_run_unfinished() -> None:
    (jobset,) = yaml.safe_load_all((ROOT / "launch/k8s_jobset.yaml").read_text(encoding="utf-8"))
    assert (jobset["kind"], jobset["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    name, (group,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    host, port = environment["EMPO2_COORDINATOR"].split(":")
    assert host == f"{name}-{group['name']}-0-0.{name}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert int(environment["EMPO2_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
    assert container["args"][0] == "train" and (ROOT / container["args"][1]).is_file()
    mesh = container["args"][container["args"].index("--model.mesh") + 1].split(",")
    assert math.prod(map(int, mesh)) == job["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_servers_have_addresses_that_stay_a_key_from_a_secret_and_the_trainers_volume() -> None:
    text = (ROOT / "launch/k8s_sglang.yaml").read_text(encoding="utf-8")
    service, servers = yaml.safe_load_all(text)
    (jobset,) = yaml.safe_load_all((ROOT / "launch/k8s_jobset.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], servers["kind"], service["spec"]["clusterIP"]) == ("Service", "StatefulSet", "None")
    spec = servers["spec"]
    assert spec["serviceName"] == service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    (container,) = spec["template"]["spec"]["containers"]
    (port,) = (item["port"] for item in service["spec"]["ports"])
    assert f"--port={port}" in container["args"]
    assert port == container["ports"][0]["containerPort"] == container["readinessProbe"]["httpGet"]["port"]
    (key,) = container["env"]
    assert f"--api-key=$({key['name']})" in container["args"] and "secretKeyRef" in key["valueFrom"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert container["volumeMounts"] == pod["containers"][0]["volumeMounts"]
    assert spec["template"]["spec"]["volumes"] == pod["volumes"]
    urls = [f"http://{servers['metadata']['name']}-{n}.{spec['serviceName']}:{port}" for n in range(spec["replicas"])]
    assert server_urls(tuple(urls)) == urls and f"--rollout.servers {','.join(urls)}\n" in text


def test_dockerfile_copies_what_is_there_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "launch/Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    assert "USER trainer" in lines and 'ENTRYPOINT ["empo2"]' in lines


def slurm(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    """`slurm.sbatch` as a job of three tasks on this machine; each task writes who it is."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "empo2": TASK.format(python=sys.executable, then=then)}
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "4099",
        "EMPO2": str(tmp_path / "empo2"),
        "FAKE_TASKS": "3",
        "FAKE_OUT": str(tmp_path),
        "FAKE_LOG": str(tmp_path / "scontrol.log"),
    }
    command = ["bash", "launch/slurm.sbatch", *CONFIG]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True)


def test_slurm_tasks_know_each_other_and_the_worst_exit_code_is_the_jobs(tmp_path: Path) -> None:
    job = slurm(tmp_path, "sys.exit(7 if found.process == 1 else 0)")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 7, errors
    said = [json.loads((tmp_path / f"task{number}.json").read_text()) for number in range(3)]
    arguments = ["train", *CONFIG]
    assert said == [["localhost:61443", 3, number, str(number), arguments] for number in range(3)]
    assert not (tmp_path / "scontrol.log").exists()


def test_slurm_sigterm_stops_the_tasks_and_queues_the_job_again(tmp_path: Path) -> None:
    job = slurm(tmp_path, "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(60)")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("task*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # the last one installs its handler
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 143, errors
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4099\n"
