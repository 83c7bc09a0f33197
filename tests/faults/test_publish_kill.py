"""Kill −9 a process that publishes, at random moments: the last version stays whole and the next publish works."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.manifest import latest, versions
from empo2_jax.sync.orbax_publish import Publisher
from tests.fixtures.processes import LIMIT_S, ROOT
from tests.fixtures.published import CONFIG, params

pytestmark = pytest.mark.medium

# The store alone, which starts in no time: version after version of the tensors of CONFIG, half of them unchanged.
STORE = """
import json, sys
from pathlib import Path
import numpy as np
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.tensor_names import tensor_shapes
from empo2_jax.sync.manifest import versions
from empo2_jax.sync.store import Part, VersionStore
root, config = Path(sys.argv[1]), Qwen2Config.from_hf(json.loads(sys.argv[2]))
shapes = tensor_shapes(config)
store = VersionStore(root, keep=2, durable=False, process=0, processes=1, timeout_s=1)
version = max(versions(root), default=0)
while True:
    version += 1
    draft, part = root / f".draft-0-{version}", Part()
    store.begin(draft, version)
    for half, names in enumerate((list(shapes)[::2], list(shapes)[1::2])):
        tensors = {name: np.full(shapes[name], half * version, np.float32) for name in names}
        part.merge(store.write_shard(draft, f"model-{half}.safetensors", tensors, "float32"))
    (draft / "config.json").write_text(sys.argv[2])
    store.commit(draft, part, names=list(shapes), version=version, kind="full", dtype="float32")
    print(version, flush=True)
"""


def kill(process: subprocess.Popen[str], delay_s: float) -> None:
    """Kill a process so many seconds after its first line."""
    assert process.stdout is not None
    assert process.stdout.readline(), process.communicate()[1][-2000:]
    time.sleep(delay_s)
    assert process.poll() is None, process.communicate()[1][-2000:]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


def check(root: Path, newest: int) -> int:
    """All that can be seen is whole, and nothing that was there is lost."""
    found = versions(root)
    assert found
    assert found[-1] >= newest
    for version in found:
        assert read_bundle(root / str(version), CONFIG).version == version
    return found[-1]


def test_killed_store_keeps_whole_versions(tmp_path: Path) -> None:
    draw, newest, drafts = random.Random(0), 1, 0
    config = json.dumps(CONFIG.to_hf())
    for _ in range(12):
        command = [sys.executable, "-c", STORE, str(tmp_path), config]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        kill(process, draw.uniform(0, 0.1))
        newest = check(tmp_path, newest)
        drafts += any(path.name.startswith((".draft", ".old")) for path in tmp_path.iterdir())
    assert drafts, "no kill came in the middle of a version"
    with Publisher(tmp_path, CONFIG) as publisher:
        folder = publisher.publish(params(), newest + 1).wait()
    assert latest(tmp_path) == folder
    check(tmp_path, newest + 1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".draft", ".old"))]


def test_killed_publisher_with_orbax_keeps_whole_versions(tmp_path: Path) -> None:
    draw, newest = random.Random(1), 0
    for _ in range(2):
        command = [sys.executable, "-m", "tests.fixtures.published", str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        kill(process, draw.uniform(1, 3))
        newest = check(tmp_path, newest)
    with Publisher(tmp_path, CONFIG) as publisher:
        publisher.publish(params(), newest + 1)
    check(tmp_path, newest + 1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".draft", ".old"))]
