"""The live page in a real browser: what an operator sees, and that it stays true and small."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.preloaded import ForkedProgram, output_of
from tests.redis_server import free_port

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright drives it")

CHROMIUM = shutil.which("chromium") or ""
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.timeout(120),
]
PATIENCE_S = 20.0
CONFIG = """
[cache]
device_blocks = 96
host_blocks = 64
"""


class Served:
    """`tierkv serve` or `tierkv gateway` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str | Path, command: str = "serve") -> None:
        with (folder / f"{command}-{free_port()}.log").open("wb") as log:
            own = {"XDG_CACHE_HOME": str(folder / "cache")}
            self.process = ForkedProgram(
                "tierkv", command, *arguments, stderr=log.fileno(), environ=own
            )
        line = self.process.stdout.readline().decode()
        found = re.search(r"listening on (http://\S+)", line)
        assert found, line
        self.url = found[1]

    def ask(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            raw = answer.read()
            return json.loads(raw) if "json" in answer.headers["Content-Type"] else raw.decode()

    def generate(self, prompt: str, name: str) -> None:
        self.ask("/v1/generate", {"prompt": prompt, "max_tokens": 2, "request_id": name})

    def metrics(self) -> dict[str, float]:
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in self.ask("/metrics").splitlines()
            if not line.startswith("#")
        }

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(PATIENCE_S) == 0
        finally:
            self.process.kill()
            self.process.communicate()


@contextmanager
def served(folder: Path, *arguments: str | Path, command: str = "serve") -> Iterator[Served]:
    one = Served(folder, *arguments, command=command)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests that leave it as it is, with some requests behind it."""
    folder = tmp_path_factory.mktemp("node")
    config = folder / "node.toml"
    config.write_text(CONFIG)
    with served(folder, "--port", "0", "--config", config) as one:
        for number in range(24):
            one.generate(
                "A system prompt that all of them share. " * 3 + f"{number} " * 70, f"r{number}"
            )
        one.generate("A system prompt that all of them share. " * 3, "again")
        one.generate("x" * 20, "<img/src=x/onerror=alert(1)>" + "long" * 40)
        yield one


class Opened:
    """A page, with all that it asked for and complained of."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda one: self.complaints.append(f"{one.type}: {one.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)

    def until(self, condition: str, *arguments: Any) -> None:
        """A JavaScript condition comes true. Asked again and again from here: the page's own policy
        forbids to evaluate text in it."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition, *arguments):
            assert time.monotonic() < end, (condition, self.page.inner_text("body")[:2000])
            self.page.wait_for_timeout(50)

    def live(self) -> None:
        self.until("document.body.dataset.samples > 2 && !document.getElementById('main').hidden")

    def has(self, text: str) -> None:
        self.until("text => document.body.innerText.includes(text)", text)

    def samples(self) -> int:
        return int(self.page.evaluate("document.body.dataset.samples"))


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    with ExitStack() as stack:

        def opening(url: str, width: int = 1280, scheme: str = "light") -> Opened:
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme=scheme
            )
            stack.callback(context.close)
            return Opened(context.new_page(), url)

        yield opening


def same_as_metrics(page: Opened, of: Served) -> dict[str, float]:
    """Every figure of the page that names its metric, once it equals what /metrics says."""
    end = time.monotonic() + PATIENCE_S
    while True:
        metrics = of.metrics()
        shown = page.page.evaluate(
            "[...document.querySelectorAll('[data-metric]')]"
            ".map(cell => [cell.dataset.metric, Number(cell.dataset.value)])"
        )
        differs = {
            name: (value, metrics.get(name)) for name, value in shown if value != metrics.get(name)
        }
        if shown and not differs:
            return dict(shown)
        assert time.monotonic() < end, differs
        page.page.wait_for_timeout(200)


IS_DRAWN = """() => [...document.querySelectorAll('canvas')].map(canvas => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) colours.add(pixels.slice(i, i + 3).join());
  return colours.size;
})"""


@pytest.mark.promise("The live page shows the figures of `/metrics`.")
def test_it_shows_what_metrics_say_without_a_complaint_or_a_request_to_others(
    node: Served, opened: Callable[..., Opened]
) -> None:
    page = opened(node.url)
    page.live()
    before = page.samples()
    page.until("seen => document.body.dataset.samples > seen", before + 1)
    shown = same_as_metrics(page, node)
    assert shown['tierkv_lookup_tokens_total{result="hit_device"}'] > 0
    assert shown['tierkv_missed_tokens_total{reason="never_stored"}'] > 0
    tier = "document.querySelector('.tier .quiet').dataset.used"
    page.until(
        f"used => {tier} == used", node.metrics()['tierkv_blocks{state="used",tier="device"}']
    )
    drawn = page.page.evaluate(IS_DRAWN)
    assert len(drawn) >= 2
    assert all(colours > 3 for colours in drawn), drawn
    page.has("accepts requests")
    assert page.page.title().endswith("· tierkv")
    assert page.complaints == []
    here = urlsplit(node.url).netloc
    assert {urlsplit(url).netloc for url in page.asked} == {here}


@pytest.mark.promise("The live page shows sessions, hints, and each request's session.")
def test_it_shows_sessions_and_hints(tmp_path: Path, opened: Callable[..., Opened]) -> None:
    with served(tmp_path, "--port", "0") as node:
        page = opened(node.url)
        page.live()
        page.has("none so far")
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        session = "<img/src=x>"
        for turn in range(2):
            body = {"prompt": "Once upon a time", "max_tokens": 2, "request_id": f"turn{turn}"}
            node.ask("/v1/generate", body | {"session_id": session, "kv_hints": hints})
        page.has("1 kept, 2 turns since the start · hints: 2 followed, 0 ignored")
        page.page.click("button.request:has-text('turn1')")
        page.has(f"Turn of session {session}")
        assert page.page.query_selector("main img") is None
        assert page.complaints == []


def test_a_request_is_explained_on_a_click_and_names_from_outside_stay_text(
    node: Served, opened: Callable[..., Opened]
) -> None:
    page = opened(node.url)
    page.live()
    page.page.click("button.request:has-text('again')")
    page.has("What of its prompt is cached now")
    page.until("!document.querySelector('.detail').innerText.includes('asking')")
    told = page.page.inner_text(".detail")
    assert "on the device" in told
    assert "compute to the first token" in told
    assert "Once upon" not in told
    page.page.click("button.request:has-text('again')")
    assert page.page.query_selector(".detail") is None
    assert page.page.query_selector("main img") is None
    assert page.page.query_selector(".request .id:has-text('<img/src=x')") is not None
    assert page.complaints == []


@pytest.mark.promise("The live page reconnects by itself.")
def test_it_comes_back_by_itself_when_the_node_does(
    tmp_path: Path, opened: Callable[..., Opened]
) -> None:
    port = free_port()
    first = Served(tmp_path, "--port", str(port))
    first.generate("Once upon a time there was a cache", "one")
    page = opened(first.url)
    page.live()
    same_as_metrics(page, first)
    first.end()
    page.has("no connection")
    with served(tmp_path, "--port", str(port)) as second:
        page.until("document.getElementById('link').textContent === 'live'")
        second.generate("And then", "two")
        shown = same_as_metrics(page, second)
        assert sum(shown[name] for name in shown if name.startswith("tierkv_lookup")) == 8
    # The browser's own words for what nobody answers, or answers with 503.
    assert [one for one in page.complaints if "Failed to load resource" not in one] == []


@pytest.mark.promise("The live page shows no data without a token.")
def test_who_brings_no_good_token_gets_a_sentence_and_no_data(
    tmp_path: Path, opened: Callable[..., Opened]
) -> None:
    auth = tmp_path / "auth.json"
    made = output_of("tierkv", "token", "new", "--file", auth, "--name", "eyes", "--role", "read")
    token = re.search(r"tkv_[\w-]+", made)
    assert token
    with served(tmp_path, "--port", "0", "--auth", auth) as one:
        page = opened(one.url)
        page.has("needs a token")
        assert not page.page.is_visible("main")
        page.page.keyboard.type("tkv_0000000000000000_wrong")
        page.page.keyboard.press("Enter")
        page.has("unknown here")
        assert not page.page.is_visible("main")
        page.page.keyboard.type(token[0])
        page.page.keyboard.press("Enter")
        page.live()
        page.page.reload()
        page.live()
        page.page.click("#forget")
        page.has("needs a token")
        assert token[0] not in page.page.content()
        assert page.page.context.cookies() == []


WIDE = """() => [...document.querySelectorAll('main *')].filter(
  (one) => one.getBoundingClientRect().right > 321
    && !one.closest('.unseen, .id, .icicle button, .track')).map((one) => one.outerHTML)
"""
FOCUSED = """() => {
  const one = document.activeElement;
  const shown = getComputedStyle(one.matches('.choice input') ? one.nextElementSibling : one);
  const name = one.className || one.name || one.id || one.tagName;
  return [one.closest('.icicle') ? 'prefix' : name, shown.outlineStyle, shown.outlineWidth];
}"""


@pytest.mark.promise("The live page works at 320 px width and by keyboard.")
def test_on_a_phone_nothing_is_beside_the_screen_and_the_dark_scheme_is_dark(
    node: Served, opened: Callable[..., Opened]
) -> None:
    page = opened(node.url, 320, "dark")
    page.live()
    page.page.click("button.request >> nth=1")
    page.until("document.querySelector('.icicle button') && document.querySelector('.detail')")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 320
    wide = page.page.evaluate(WIDE)
    assert wide == []
    light = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(one => one > 200)"
    assert page.page.evaluate(light) is False
    page.page.emulate_media(color_scheme="light")
    page.until(light)
    assert page.complaints == []


@pytest.mark.promise("The live page works at 320 px width and by keyboard.")
def test_all_of_it_can_be_reached_and_seen_with_a_keyboard(
    node: Served, opened: Callable[..., Opened]
) -> None:
    page = opened(node.url)
    page.live()
    page.until("document.querySelector('.icicle button')")
    reached: set[str] = set()
    seen_request = False
    for _ in range(70):
        page.page.keyboard.press("Tab")
        told = page.page.evaluate(FOCUSED)
        if told[0] == "BODY":
            break
        reached.add(told[0])
        assert told[1:] == ["solid", "3px"], told
        if told[0] == "request" and not seen_request:
            seen_request = True
            page.page.keyboard.press("Enter")
            page.has("What of its prompt is cached now")
        if told[0] == "prefix":
            before = page.page.inner_text(".icicle + p")
            page.page.keyboard.press("ArrowRight")
            page.until(
                "before => document.querySelector('.icicle + p').innerText !== before", before
            )
    assert {"span", "plot", "request", "prefix"} <= reached


HOUR = """([samples, from]) => {
  const width = rows[0].length;
  for (let i = from; i < from + samples; i++) {
    const row = Array.from({ length: width }, (_, at) => (at ? i : rows[0][0] + i / 2));
    take('id: 1-' + i + '\\nevent: samples\\ndata: ' + JSON.stringify([row]));
    const at = { began: row[0], admitted: row[0], computed: row[0] + 1, ended: row[0] + 2 };
    take('event: requests\\ndata: ' + JSON.stringify([{ n: 1000 + i, id: 'r' + i, space: '', at,
      tokens: 9, found: [1, 2, 3, 0], missed: 'evicted', since: null, new: 1, problem: '' }]));
    if (i % 20 === 0) draw();
  }
  draw();
  return [rows.length, requests.size, document.querySelectorAll('*').length];
}"""


def heap_of(page: Opened) -> Callable[[], float]:
    """How many bytes of JavaScript's heap are in use, without what is garbage."""
    tools = page.page.context.new_cdp_session(page.page)
    tools.send("Performance.enable")

    def heap() -> float:
        for _ in range(2):
            tools.send("HeapProfiler.collectGarbage")
            page.page.wait_for_timeout(100)
        found = tools.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "JSHeapUsedSize"))

    return heap


def test_a_page_that_stays_open_for_an_hour_grows_no_more(
    node: Served, opened: Callable[..., Opened]
) -> None:
    page = opened(node.url)
    page.live()
    heap = heap_of(page)
    first = page.page.evaluate(HOUR, [1800, 0])
    before = heap()
    second = page.page.evaluate(HOUR, [5400, 1800])
    assert second[:2] == first[:2]
    assert second[0] <= 1200
    assert second[2] <= first[2] + 50
    assert heap() < before + (2 << 20)  # the samples alone would be 7 MB
    assert page.complaints == []


def test_the_gateways_page_shows_nodes_hand_offs_and_failovers(
    tmp_path: Path, opened: Callable[..., Opened]
) -> None:
    storage = ("--storage", (tmp_path / "store").as_uri())
    with (
        served(tmp_path, "--port", "0", "--role", "both", *storage) as one,
        served(tmp_path, "--port", "0", "--role", "decode", *storage) as two,
        served(
            tmp_path, "--port", "0", "--both", one.url, "--decode", two.url, command="gateway"
        ) as gateway,
    ):
        body = {"prompt": "Once upon a time there was a cache of three tiers", "max_tokens": 4}
        end = time.monotonic() + PATIENCE_S
        while gateway.ask("/readyz?verbose")["status"] != "ok":
            assert time.monotonic() < end
            time.sleep(0.05)
        gateway.ask("/v1/completions", body)
        page = opened(gateway.url)
        page.live()
        page.has("2 of 2")
        shown = same_as_metrics(page, gateway)
        routed = sum(value for name, value in shown.items() if "_routed_" in name)
        assert routed == 1
        two.process.kill()
        page.has("1 of 2")
        page.until("document.querySelector('.nodes').innerText.includes('ejected')")
        assert page.page.evaluate("document.querySelectorAll('.nodes tbody tr').length") == 2
        lines_of_a_role = page.page.evaluate(
            """() => {
                const row = document.querySelector(".nodes .reason").closest("tr");
                const role = document.createRange();
                row.querySelector(".reason").textContent = " it cannot be reached".repeat(20);
                role.selectNodeContents(row.children[1]);
                return role.getClientRects().length;
            }"""
        )
        assert lines_of_a_role == 1  # however long its state is
        page.page.set_viewport_size({"width": 320, "height": 800})
        page.until("document.documentElement.scrollWidth <= 320")
        assert page.complaints == []
