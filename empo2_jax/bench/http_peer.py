"""The peer of `memory`: a server that a client asks over HTTP with JSON, comparing the entries in a Python loop.

This is how the paper's released code serves its memory: keys stay the lists that JSON made of them, and the cosine of
each is a dot product over two norms. As a program it is that server, and lives as long as its standard input.
"""

import atexit
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from jaxtyping import Float32

from empo2_jax.bench.base import Side
from empo2_jax.bench.memory import THRESHOLD, World, best_of, make_world, side


def peer(entries: int, clusters: int, queries: int) -> Side:
    """Client of a server of its own; its CPU seconds count too."""
    command = [sys.executable, "-m", "empo2_jax.bench.http_peer", str(entries), str(clusters)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # ends it with this process, and is not left to the collector
    assert server.stdout is not None
    port = int(server.stdout.readline())

    def ask(method: str, body: str = "") -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, "/", body)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def find(query: Float32[np.ndarray, " D"]) -> list[int]:
        return ask("POST", json.dumps({"query": query.tolist()}))["ids"]

    plain = side(find, make_world(entries, clusters), queries)
    return Side(plain.run, answer=plain.answer, work=plain.work, helpers_cpu=lambda: ask("GET")["cpu"])


class Handler(BaseHTTPRequestHandler):
    """POST a query for ids, GET the CPU seconds of the server."""

    world: World
    keys: list[list[float]]

    def do_POST(self) -> None:
        """Compare every entry."""
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        hits = [
            entry
            for entry, key in enumerate(self.keys)
            if np.dot(query, key) / (np.linalg.norm(query) * np.linalg.norm(key)) > THRESHOLD
        ]
        self._reply({"ids": best_of(self.world, hits)})

    def do_GET(self) -> None:
        """What the server spent."""
        self._reply({"cpu": time.process_time()})

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(entries: int, clusters: int) -> None:
    """Serve until standard input ends; the first line of output is the port."""
    Handler.world = make_world(entries, clusters)
    Handler.keys = Handler.world.keys.tolist()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def end_with_the_client() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_the_client, daemon=True).start()
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
