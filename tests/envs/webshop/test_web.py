"""The local page: a purchase over HTTP and in a real browser, with hostile product data and hostile requests."""

import http.client
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from empo2_jax.cli import main
from empo2_jax.envs import webshop
from empo2_jax.envs.webshop.web import LARGEST, SESSIONS, ShopServer
from tests.fixtures.browser import CHROMIUM, browser
from tests.fixtures.shop import INJECTION, raw, write_data

ASIN = "B000000001"
HUMAN = {
    ASIN: [
        {
            "instruction": f"shoes {INJECTION}",
            "instruction_attributes": ["soft"],
            "instruction_options": ["9.5", "navy blue"],
        },
        {"instruction": "other shoes", "instruction_attributes": ["soft"], "instruction_options": []},
        {"instruction": "more shoes", "instruction_attributes": ["soft"], "instruction_options": []},
    ]
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopServer]:
    folder = tmp_path_factory.mktemp("web")
    products = [raw(ASIN, name=f"Trail Shoes {INJECTION}", pricing="$20.00")]
    data = write_data(folder / "data", products, {ASIN: {"attributes": ["soft"]}}, HUMAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_CACHE", str(folder / "cache"))
        family = webshop.family(data=data)
    wishes = {
        family.goals["human"][task.variation].options: task
        for split in ("test", "train")
        for task in family.tasks(split)
    }
    with ShopServer(family, [wishes["9.5", "navy blue"]]) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: ShopServer, method: str, path: str, form=None, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, urlencode(form) if form is not None else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def start(server: ShopServer) -> str:
    status, _, headers = ask(server, "GET", "/")
    assert status == 303
    return headers["Location"]


def test_a_purchase_over_http(server: ShopServer) -> None:
    path = start(server)
    status, page, headers = ask(server, "GET", path)
    assert status == 200 and 'data-page="search"' in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    page = ask(server, "POST", path, {"search": "trail shoes"})[1]
    assert 'value="b000000001"' in page
    for click in ("b000000001", "9.5", "navy blue"):
        page = ask(server, "POST", path, {"click": click})[1]
    assert page.count('aria-pressed="true"') == 2
    page = ask(server, "POST", path, {"click": "buy now"})[1]
    assert 'data-page="done"' in page and "<p>1</p>" in page
    assert ask(server, "GET", path)[1] == page


def test_product_data_and_goal_are_escaped(server: ShopServer) -> None:
    path = start(server)
    for form in ({"search": "trail"}, {"click": "b000000001"}, {"click": "description"}):
        page = ask(server, "POST", path, form)[1]
        assert "<script" not in page and "<b>" not in page and page.count("</main>") == 1
        assert "&lt;script&gt;document.title=&#x27;owned&#x27;&lt;/script&gt;" in page


@pytest.mark.parametrize(
    "form",
    [
        {"click": "buy now"},
        {"click": "<script>alert(1)</script>"},
        {"search": ""},
        {"search": "  \n "},
        {"search": "x" * 1000},
        {"click": "a]\nclick[buy now"},
        {},
        {"other": "x"},
    ],
)
def test_impossible_actions_are_a_note(server: ShopServer, form) -> None:
    status, page, _ = ask(server, "POST", start(server), form)
    assert status == 200 and "That is not possible here." in page and 'data-page="search"' in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("POST", "/nowhere", {}, 404),
        ("GET", "/../../etc/passwd", {}, 404),
        ("GET", "/", {"Host": "evil.example"}, 403),
        ("POST", "/", {"Origin": "http://evil.example"}, 403),
        ("POST", "/x", {"Content-Length": str(LARGEST + 1)}, 413),
        ("POST", "/x", {"Content-Length": "-5"}, 413),
        ("DELETE", "/", {}, 501),
    ],
)
def test_foreign_and_broken_requests(server: ShopServer, method: str, path: str, headers, status: int) -> None:
    form = {"click": "x"} if method == "POST" and "Content-Length" not in headers else None
    assert ask(server, method, path, form, **headers)[0] == status


def test_only_so_many_sessions_are_kept(server: ShopServer) -> None:
    first = start(server)
    paths = [start(server) for _ in range(SESSIONS)]
    assert ask(server, "GET", first)[0] == 404
    assert ask(server, "GET", paths[0])[0] == 200
    assert len(set(paths)) == SESSIONS


@pytest.mark.medium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_purchase_in_a_real_browser(server: ShopServer, tmp_path: Path) -> None:
    def click(value: str, page: str) -> None:
        found = f"""document.querySelector('button[value="{value}"]')"""
        tab.wait(f"{found} !== null")
        tab.evaluate(f"window.old = true, {found}.click()")
        tab.wait(f"window.old === undefined && document.querySelector('main').dataset.page === '{page}'")

    with browser(tmp_path / "profile") as tab:
        tab.open(server.url)
        tab.wait("document.querySelector('main') !== null")
        assert INJECTION in tab.evaluate("document.querySelector('#goal').textContent")
        tab.evaluate("document.querySelector('input').value = 'trail shoes', document.querySelector('button').click()")
        click("b000000001", "item")
        click("9.5", "item")
        click("navy blue", "item")
        assert tab.evaluate("[...document.querySelectorAll('.chosen')].map(b => b.textContent)") == ["9.5", "navy blue"]
        assert tab.evaluate("document.querySelectorAll('script, b').length") == 0
        click("description", "description")
        click("< prev", "item")
        click("buy now", "done")
        assert tab.evaluate("document.title") == "WebShop"
        assert tab.evaluate("document.querySelector('main').innerText").split("\n")[-3:][0] == "1"


def test_the_command_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["play", "toy", "--web"]) == 2
    assert capsys.readouterr().err == "error: --web: toy has no page; webshop has one\n"
    assert main(["play", "webshop", "--web", "--port", "70000"]) == 2
    assert main(["play", "webshop", "--web", "--env.data", str(tmp_path / "nowhere")]) == 2
    assert re.fullmatch(r"error: --port 70000.*\nerror: env.data = .*no such folder\n", capsys.readouterr().err)
