"""A local page in which a person shops with the very state machine that the policy plays: `empo2 play webshop --web`.

Loopback only, on a port from the operating system; no scripts, no pictures, nothing loaded from elsewhere. All text of
products is escaped. Requests with another host or origin than the page's own are refused, so that no other site can
use it through the browser.
"""

import html
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs

from empo2_jax.envs.webshop.environment import WebShopEnvironment
from empo2_jax.envs.webshop.pages import Part
from empo2_jax.envs.webshop.webshop_family import WebShopFamily
from empo2_jax.types import Task

HOST = "127.0.0.1"
LARGEST = 65_536  # bytes of a form
SESSIONS = 64  # kept; the oldest goes

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STYLE = """body{font:16px/1.5 sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
header{border-bottom:1px solid #c8ccd0;margin-bottom:1rem}form{display:inline}
button{font:inherit;margin:.15rem .3rem .15rem 0;padding:.25rem .7rem;border:1px solid #6a737d;border-radius:.4rem;
background:#fff;cursor:pointer}button.product{font-weight:bold}button.chosen{background:#1b1f24;color:#fff}
input{font:inherit;padding:.25rem .5rem;width:60%}p{margin:.3rem 0}.note{color:#8a3b00}"""


class Shoppers:
    """Running sessions by token; each is played by one person, one request at a time."""

    def __init__(self, family: WebShopFamily, tasks: Sequence[Task]) -> None:
        self._family, self._tasks = family, tasks
        self._running: dict[str, WebShopEnvironment] = {}
        self._started = 0
        self.lock = Lock()

    def start(self) -> str:
        """A new session on the next goal; returns its token."""
        environment = self._family.make()
        environment.reset(self._tasks[self._started % len(self._tasks)], 0)
        self._started += 1
        token = secrets.token_urlsafe(16)
        self._running[token] = environment
        if len(self._running) > SESSIONS:
            del self._running[next(iter(self._running))]
        return token

    def get(self, token: str) -> WebShopEnvironment | None:
        """The session of a token."""
        return self._running.get(token)


class ShopServer(ThreadingHTTPServer):
    """Serves one family; close it with `shutdown` and `server_close`."""

    daemon_threads = True

    def __init__(self, family: WebShopFamily, tasks: Sequence[Task], port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.shoppers = Shoppers(family, tasks)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        """`/` starts a session and leads to it; `/<token>` shows it."""
        if not self._own():
            return
        with self._server.shoppers.lock:
            if self.path == "/":
                self._lead_to(self._server.shoppers.start())
                return
            environment = self._server.shoppers.get(self.path[1:])
            page = render(environment, "") if environment else None
        self._answer(page)

    def do_POST(self) -> None:
        """`/<token>` with the field `click` or `search`: one action, then the page."""
        length = self.headers.get("Content-Length", "")
        if not self._own():
            return
        if not length.isdigit() or int(length) > LARGEST:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"), keep_blank_values=True)
        verb = "search" if "search" in form else "click"
        argument = " ".join(form.get(verb, [""])[0].split())
        with self._server.shoppers.lock:
            environment = self._server.shoppers.get(self.path[1:])
            page = None
            if environment:
                refused = environment.step(f"{verb}[{argument}]").resolution == "invalid"
                page = render(environment, "That is not possible here." if refused else "")
        self._answer(page)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""

    @property
    def _server(self) -> ShopServer:
        assert isinstance(self.server, ShopServer)
        return self.server

    def _own(self) -> bool:
        """Whether the request names this server as its host and, if it says so, as the page it comes from."""
        own = f"{HOST}:{self._server.server_port}", f"localhost:{self._server.server_port}"
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in own and (origin is None or origin in [f"http://{name}" for name in own]):
            return True
        self.send_error(HTTPStatus.FORBIDDEN)
        return False

    def _lead_to(self, token: str) -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", f"/{token}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, page: str | None) -> None:
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND, "no such session; open / for a new one")
            return
        body = page.encode()
        self.send_response(HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def render(environment: WebShopEnvironment, note: str) -> str:
    """The page of a session as HTML; `note` is shown above it."""
    body = "\n".join(map(_part, environment.view()))
    if environment.session.page == "search":
        body = '<form method="post"><input name="search" autofocus aria-label="Search"> <button>Search</button></form>'
    if environment.session.page == "done":
        body += '\n<p><a href="/">Shop for somebody else</a></p>'
    shown = f'<p class="note" role="status">{html.escape(note)}</p>' if note else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>WebShop</title><style>{_STYLE}</style></head>
<body><header><h1>WebShop</h1><p>Instruction: <strong id="goal">{html.escape(environment.goal)}</strong></p></header>
{shown}<main data-page="{environment.session.page}">
{body}
</main></body></html>
"""


def _part(part: Part) -> str:
    text = html.escape(part.text)
    if not part.click:
        return f"<p>{text}</p>"
    pressed = ' aria-pressed="true"' if part.kind == "chosen" else ""
    return (
        f'<form method="post"><button class="{part.kind}"{pressed} name="click" value="{html.escape(part.click)}">'
        f"{text}</button></form>"
    )
