"""The soak's kills, restarts and watch, with small real processes in the places of trainer, servers and simulators."""

import sys
from pathlib import Path

import numpy as np
import pytest

from empo2_jax.bench import soak, soak_processes
from empo2_jax.bench.soak_faults import Fault, count_episodes
from empo2_jax.bench.soak_processes import MAX_EXITS, Soak, SoakError, free_port

# A run of iterations of 0.15 s with a simulator, which is started again when it has died; goes on where its log ends.
TRAINER = """
import json, subprocess, sys, time
from pathlib import Path
run, total, groups, size, fault = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
simulator = [sys.executable, "-c", "import sys; sys.stdin.read()", "py4j.GatewayServer"]
start = lambda: subprocess.Popen(simulator, stdin=subprocess.PIPE)
(run / "episodes").mkdir(parents=True, exist_ok=True)
log = run / "metrics.jsonl"
done, process = log.read_bytes().count(b"\\n") if log.is_file() else 0, start()
while done < total:
    time.sleep(0.15)
    if fault == "dies" and done == 2:
        sys.exit("error: no such luck")
    if fault != "never reaps" and process.poll() is not None:
        process = start()
    names = [f"i{done}/g{g}/e{e}" for g in range(groups) for e in range(size)]
    names = names[1:] if fault == "loses" and done == 4 else names
    lines = [json.dumps({"id": name, "stop_reason": "done", "steps": [{}]}) + "\\n" for name in names]
    done += 1
    (run / f"episodes/{done}.jsonl").write_text("".join(lines))
    with log.open("a") as file:
        file.write(json.dumps({"iteration": done, "total/environment_steps": done * groups * size}) + "\\n")
if fault == "leaves":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
"""
SERVER = "import time; print('serving http://nowhere', flush=True); time.sleep(600)"
ITERATIONS = 12
FAULTS = [
    Fault("JVM", 1, 0.1),
    Fault("trainer", 2, 0.5),
    Fault("server", 3, 0.2),
    Fault("server", 3, 0.9),
    Fault("trainer", 4, 0.0),
    Fault("JVM", 5, 0.3),
]


def soak_of(folder: Path, fault: str = "none") -> Soak:
    trainer = [sys.executable, "-c", TRAINER, str(folder / "run"), str(ITERATIONS), "2", "2", fault]
    servers = [[sys.executable, "-c", SERVER]] * 2
    return Soak(trainer, servers, folder / "run", FAULTS, 4, np.random.default_rng(0))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.01, "SAMPLE_S": 0.05, "PACE_S": 0.15, "END_S": 0.5, "ZOMBIE_S": 0.4}.items():
        monkeypatch.setattr(soak_processes, name, value)
    monkeypatch.setattr(soak, "GROUPS", 2)
    monkeypatch.setattr(soak, "SIZE", 2)
    monkeypatch.setattr(soak, "WARM_UP", 1)


def figures_of(folder: Path, fault: str = "none") -> dict[str, float]:
    with soak_of(folder, fault) as running:
        running.run()
        figures = soak.result(running, count_episodes(folder / "run", ITERATIONS, 2, 2), ITERATIONS)
    assert [kill.fault for kill in running.kills] == FAULTS
    assert all(kill.iteration >= kill.fault.iteration for kill in running.kills)
    return figures


def test_all_kinds_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    figures = figures_of(tmp_path)
    wanted = {"episodes": 48, "trainer_descriptors": 0, "server_descriptors": 0}
    for name in ("lost_episodes", "duplicate_episodes", "miscounted_steps", "own_exits", "zombies", "left_processes"):
        wanted[name] = 0
    for kind in ("JVM", "server", "trainer"):
        wanted |= {f"{kind} killed/injected": 2, f"{kind} killed/survived": 2, f"{kind} killed/lost": 0}
    assert {name: figures[name] for name in wanted} == wanted
    assert 1e6 < figures["simulator_bytes"] < 60e6
    assert abs(figures["trainer_bytes_per_episode"]) < 65536 and figures["server_bytes_per_episode"] == 0
    logs = {path.stem: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["server0-1", *sorted(logs)[1:-3], "trainer-1", "trainer-2", "trainer-3"]
    assert len(logs) == 3 + 2 + 2


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("loses", {"lost_episodes": 1, "miscounted_steps": 1, "trainer killed/lost": 1, "trainer killed/survived": 1}),
        ("never reaps", {"zombies": 1, "lost_episodes": 0}),
        ("leaves", {"left_processes": 1}),
    ],
)
def test_what_is_wrong_with_a_run_is_seen(fault: str, seen: dict[str, float], tmp_path: Path) -> None:
    figures = figures_of(tmp_path, fault)
    assert {name: figures[name] for name in seen} == seen


def test_a_program_that_ends_again_and_again_on_its_own_account_ends_the_soak(tmp_path: Path) -> None:
    with soak_of(tmp_path, "dies") as running, pytest.raises(SoakError) as caught:
        running.run()
    assert str(caught.value) == "; ".join(["trainer: error: no such luck"] * (MAX_EXITS + 1))
    assert running.kills[-1].lost
    assert all(program.code is not None for program in (running.trainer, *running.servers))


def test_a_run_that_takes_too_long_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_processes, "LIMIT_S", 0.5)
    with soak_of(tmp_path) as running, pytest.raises(SoakError, match=r"not at its end within 0\.5 s: iteration \d"):
        running.run()


def test_a_free_port_can_be_had() -> None:
    assert free_port() in soak_processes.PORTS
