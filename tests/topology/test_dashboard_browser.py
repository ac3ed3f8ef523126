"""The dashboard as a person has it: a real node, and a real Chromium without a screen."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import MISSING, Browser, running_browser
from language_models import make_folder
from llm_node import CONFIG, MESSAGES, deploy, generated, prompt_tokens

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas.admin import Wish

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING)]

GPU = '[gpu]\ncount = 2\nmemory = "24MiB"\nactivations = "8MiB"\nthreads = 1\n'
FUNCTION = """
import torch

def load():
    return torch.ones(1 << 20).to("cuda")

def handle(weights, request):
    if request == "fail":
        raise ValueError("as asked")
    return weights.sum().item()
"""
HINTED = """
import msgspec

class Asked(msgspec.Struct):
    text: str
    times: int = 3

def load():
    return None

def handle(state, request: Asked) -> str:
    return request.text * request.times
"""
MARKUP = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
HOSTILE = f"""
import torch

def load():
    print({MARKUP!r})
    return torch.ones(1).to("cuda")

def handle(weights, request):
    print({MARKUP!r}, flush=True)
    if request == "fail":
        raise ValueError({MARKUP!r})
    return {MARKUP!r}
"""
BROKEN = f"""
def load():
    raise ValueError({MARKUP!r})

def handle(state, request):
    pass
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(GPU) as running:
        running.deployed("mood", FUNCTION)
        yield running


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(node: TestNode, window: Browser) -> Iterator[Browser]:
    """The overview of the node, connected; afterwards the console must have been silent, and nobody else asked."""
    with shown(node, window) as page:
        yield page


@contextlib.contextmanager
def shown(node: TestNode, window: Browser) -> Iterator[Browser]:
    home = f"http://127.0.0.1:{node.port}/"
    window.open("about:blank")  # else an address with another fragment alone would load nothing
    window.console()
    window.requested()
    window.open(home)
    window.wait(lambda: window.text("#link") == "live", "the stream")
    yield window
    assert window.console() == []
    hosts = {urlsplit(url).netloc for url in window.requested()}
    assert hosts == {f"127.0.0.1:{node.port}"}


def functions(page: Browser) -> list[str]:
    found: list[str] = page.run(
        "return [...document.querySelectorAll('tr[data-function]')].map(r => r.dataset.function)"
    )
    return found


def test_a_deploy_appears_and_a_removal_disappears(node: TestNode, page: Browser) -> None:
    page.wait(lambda: functions(page) == ["mood"], "the function")
    node.deployed("taste", FUNCTION)
    page.wait(lambda: functions(page) == ["mood", "taste"], "the new function")
    assert "Functions (2)" in page.text("#functions")
    node.remove("taste")
    page.wait(lambda: functions(page) == ["mood"], "it to be gone")


def test_a_request_moves_the_timeline_and_the_memory_maps(node: TestNode, page: Browser) -> None:
    assert page.run("return document.querySelector('[data-timeline]').dataset.spans") in ("0", None)
    assert node.result("mood", 1) == 1 << 20
    page.wait(lambda: page.text("[data-timeline]").startswith("1 request in the "), "the request")
    watched = re.match(r"1 request in the (\d+) s that this page has watched: ", page.text("[data-timeline]"))
    assert watched is not None
    assert int(watched[1]) < 60
    page.wait(lambda: page.run("return document.querySelectorAll('[data-stop=\"f:mood\"]').length") >= 1, "its model")
    shades = page.run(
        """const canvas = document.querySelector("canvas"), data = canvas.getContext("2d").getImageData(
             canvas.width / 2, 0, canvas.width / 2, canvas.height).data, seen = new Set();
           for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
           return [...seen];"""
    )
    assert {"93,187,132", "109,169,238", "240,145,90"} & set(shades), "of one of the sources, as style.css has them"


def test_the_last_hour_is_there_when_the_page_is_opened_and_goes_on(node: TestNode, window: Browser) -> None:
    """What came before anybody watched is in it; of what was before the router's start there is a gap."""
    told = node.http("GET", "/admin/functions/mood/minutes").body
    failed = sum(counts[2] for counts in told["minutes"].values())
    bars = "return [...document.querySelectorAll('%s .hour > div')].map((bar) => [bar.className, bar.title])"
    heights = "return [...document.querySelectorAll('%s .hour .s-failed')].map((part) => part.offsetHeight)"
    assert node.invoke("mood", "fail").status == 500
    with shown(node, window) as page:
        page.wait(lambda: f"{failed + 1} failed" in page.text("#hour [data-hour]"), "what has failed before")
        assert "since the router's start; before that nothing is known" in page.text("#hour [data-hour]")
        spans = page.run(
            "const told = document.querySelector('[data-timeline]').dataset; return [told.spans, told.before]"
        )
        assert (spans[0], int(spans[1]) > 0) == ("0", True)
        assert page.text("[data-timeline]").endswith(f"; {spans[1]} of the last ones before it")
        shown_ = page.run(bars % "#hour")
        assert len(shown_) == 60
        assert shown_[0][0] == "s-gap"
        assert shown_[0][1].endswith(": not known, before the router's start")
        assert [name for name, _ in shown_[-1:]] == [""]
        assert max(page.run(heights % "#hour")) >= 2
        assert node.invoke("mood", "fail").status == 500
        page.wait(lambda: f"{failed + 2} failed" in page.text("#hour [data-hour]"), "one more")
        page.run("location.hash = '#/f/mood'")
        page.wait(lambda: f"{failed + 2} failed" in page.text("#one [data-hour]"), "the function's own")
        assert node.invoke("mood", "fail").status == 500
        page.wait(lambda: f"{failed + 3} failed" in page.text("#one [data-hour]"), "one more")
        page.run("location.hash = ''")
        page.run("document.querySelector('#hour .hour > div[tabindex=\"0\"]').focus()")
        page.press("left")
        said = page.text("#hour [data-hour]")
        assert re.match(r"\d+:\d+.*: ", said), said


def test_an_executor_that_is_killed_shows_and_recovers(node: TestNode, page: Browser) -> None:
    page.wait(lambda: page.run("return document.querySelectorAll('[data-gpu]').length") == 2, "two GPUs")
    page.run(
        """window.seen = [];
           const card = document.querySelector('[data-gpu="1"]');
           new MutationObserver(() => window.seen.push(card.dataset.state)).observe(card, {attributes: true});"""
    )
    node.kill("gpu1")
    page.wait(lambda: "gpu1 ended at" in page.text("#problems"), "what has happened")
    assert "and was up again" in page.text("#problems")
    page.wait(lambda: page.run("return document.querySelector('[data-gpu=\"1\"]').dataset.state") == "up", "its return")
    assert "down" in page.run("return window.seen")
    assert node.result("mood", 1) == 1 << 20


def test_what_fails_is_red_and_its_numbers_are_on_a_telephones_screen(node: TestNode, page: Browser) -> None:
    node.deployed("sour", FUNCTION)
    row = """const row = document.querySelector('tr[data-function="sour"]');"""
    try:
        page.wide(390, 844)
        for _ in range(5):
            assert node.invoke("sour", "fail").status == 500
        page.wait(lambda: page.run(row + "return row?.className") == "broken", "the failures")
        assert "sour fails: its last 5 requests failed" in page.text("#problems")
        page.wait(lambda: functions(page)[0] == "sour", "the failing one before what is well")
        red = page.run(row + "return [row, ...row.cells].map((cell) => getComputedStyle(cell).backgroundColor)")
        assert "rgb(58, 29, 26)" in red
        cells = page.run(
            row
            + """return Object.fromEntries([...row.cells].filter((cell) => cell.offsetWidth).map((cell) => {
                       const at = cell.getBoundingClientRect();
                       return [cell.dataset.column ?? "name", [cell.textContent, at.left >= 0 && at.right <= 390]];
                     }))"""
        )
        assert (cells["errors"], cells["in time"]) == (["5", True], ["0.0%", True])
        assert [name for name, (_, inside) in cells.items() if not inside] == []
        assert page.run("return document.documentElement.scrollWidth") == 390
    finally:
        page.wide(0, 0)
        node.remove("sour")
    page.wait(lambda: functions(page) == ["mood"], "it to be gone")


def test_the_keyboard_reaches_everything(node: TestNode, page: Browser) -> None:
    node.result("mood", 1)
    page.wait(lambda: page.run("return document.querySelectorAll('.map [data-stop]').length") >= 2, "both maps")
    name = """const e = document.activeElement;
      return e.dataset.stop ? "map" : e.id || e.getAttribute("aria-label")?.split(/[ ;]/)[0] || e.textContent"""
    reached = []
    for _ in range(40):
        page.press("tab")
        reached.append(page.run(name))
        if reached[-1] == "mood":
            break
    heads = ["function", "state", "queue", "running", "requests", "errors", "p50", "p99", "deadline"]
    assert [each[:30] for each in reached] == [
        *("Skip to the functions", "Dormouse", "key", "theme", "map", "map", "Pause", "timeline", "map"),
        *("filter", "which", "What is wrong first", *heads, "in time", "model", "where", "wakes", "error", "mood"),
    ]
    page.press("enter")
    page.wait(lambda: page.text("#one h2") == "mood", "its page")
    for _ in range(9):
        page.press("tab")
        if page.run("return document.activeElement.tagName") == "TEXTAREA":
            break
    page.run("document.activeElement.select()")
    page.press("7", "tab", "enter")
    page.wait(lambda: page.text("[data-answer]") == "1048576.0", "the answer")
    page.wait(lambda: page.text("[data-answered]").startswith("200 after "), "its status and time")
    assert page.text("[data-log]") == ""
    assert "Logs and errors need a key" in page.text("#one")
    page.press("escape")
    page.wait(lambda: page.run("return !document.getElementById('home').hidden"), "the overview")
    page.press("/")
    assert page.run(name) == "filter"
    page.press("no such function")
    page.wait(lambda: functions(page) == [], "nothing to be left")


def test_arrows_go_along_the_timeline_and_the_maps(node: TestNode, page: Browser) -> None:
    node.result("mood", 1)
    page.wait(lambda: page.text("[data-timeline]").startswith("1 request "), "the request")
    page.run("document.querySelector('canvas').focus()")
    page.press("right")
    page.wait(lambda: page.text("[data-timeline]").startswith("mood on GPU "), "words about it")
    page.press("escape")
    page.wait(lambda: page.text("[data-timeline]").startswith("1 request "), "words about all")
    page.wait(lambda: page.run("return document.querySelector('[data-stop=\"f:mood\"]') !== null"), "its model")
    page.run("document.querySelector('[data-stop=\"f:mood\"]').focus()")
    page.press("right")
    assert page.run("return document.activeElement.dataset.stop") == "free"
    page.press("left", "enter")
    page.wait(lambda: page.text("#one h2") == "mood", "its page")


def test_dark_and_light_are_the_persons(node: TestNode, page: Browser) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(23, 20, 15)", "rgb(250, 248, 245)"
    assert page.run(back) == dark
    page.scheme("light")
    assert page.run(back) == light
    page.click("#theme")
    assert page.run(back) == dark
    page.reload()
    page.wait(lambda: page.text("#link") == "live", "the stream")
    assert page.run(back) == dark, "the choice is kept"
    page.run("localStorage.clear()")
    page.scheme("dark")


def test_a_router_that_is_started_again_is_found_again(node: TestNode, page: Browser) -> None:
    page.wait(lambda: functions(page) == ["mood"], "the function")
    node.kill("router")
    page.wait(lambda: page.text("#link").startswith("not connected"), "the page to know")
    page.wait(lambda: page.text("#link") == "live", "the stream")
    assert node.result("mood", 1) == 1 << 20
    page.wait(lambda: page.text("[data-timeline]").startswith("1 request "), "the request")
    page.console()  # where it says that it was cut off


def test_500_functions_are_sorted_and_filtered_and_only_rows_that_change_are_written(
    node: TestNode, page: Browser
) -> None:
    """In the page alone: its table, given that many rows."""
    made = page.run(
        """return import("/dashboard/functions.js").then(({ Functions }) => {
             const box = document.createElement("div");
             document.body.append(box);
             const table = new Functions(box), data = {};
             for (let i = 0; i < 500; i++)
               data[`f-${String(i).padStart(3, "0")}`] = {
                 state: i === 77 ? "failed" : "idle", broken: i === 77, late: i === 78,
                 queued: i === 79 ? 1 : 0, running: 0, requests: i, errors: 0, p50_ms: i, p99_ms: i, deadline_ms: 100,
                 counted: 0, tenant: "t", nbytes: 1, gpu_nbytes: {}, error: null, llm: null };
             table.all(data);
             table.draw();
             const all = "tr[data-function]";
             const rows = () => [...box.querySelectorAll(all)].map((row) => row.dataset.function);
             const order = rows();
             table.filter.value = "f-12";
             table.place(true);
             const left = rows();
             table.filter.value = "";
             table.by(7);
             const slowest = rows()[0], observer = new MutationObserver(() => {});
             observer.observe(box, { subtree: true, childList: true, characterData: true });
             for (let i = 100; i < 150; i++) table.changed(`f-${i}`, { ...data[`f-${i}`], requests: 999 });
             const cell = (node) => (node.nodeType === Node.TEXT_NODE ? node.parentElement : node).closest("td");
             const written = observer.takeRecords().map(({ target }) => cell(target));
             const names = written.map((each) => each?.parentElement.dataset.function);
             const texts = [...new Set(written.map((each) => each?.textContent))];
             box.remove();
             return { order, left, slowest, names, texts };
           });"""
    )
    assert (made["order"][:4], len(made["order"])) == (["f-077", "f-078", "f-079", "f-499"], 500)
    assert made["left"] == [f"f-12{digit}" for digit in reversed(range(10))]
    assert made["slowest"] == "f-499"
    assert (made["names"], made["texts"]) == ([f"f-{number}" for number in range(100, 150)], ["999"])


def test_a_tab_that_has_left_watches_no_more(node: TestNode, page: Browser) -> None:
    """Browsers keep pages that one may come back to."""
    node.wait(lambda: node.status()["node"]["watchers"] == 1, 60, "those of earlier tests to be gone")
    page.open("about:blank")
    node.wait(lambda: node.status()["node"]["watchers"] == 0, 60, "the watcher to be gone")
    page.back()
    page.wait(lambda: page.text("#link") == "live", "the stream")


# --- a node that wants keys


@pytest.fixture(scope="module")
def keyed() -> Iterator[TestNode]:
    with running_node(GPU, node='tenants = "many"') as running:
        running.deployed("hostile", HOSTILE, tenant="shop")
        running.deployed("mood", FUNCTION)
        running.deployed("hinted", HINTED)
        running.admin.create_key(Wish())
        yield running


@pytest.fixture
def asked(keyed: TestNode, window: Browser) -> Iterator[Browser]:
    """The page of such a node in a tab without a key."""
    home = f"http://127.0.0.1:{keyed.port}/"
    window.open(home)
    window.run("sessionStorage.clear()")
    window.open("about:blank")
    window.requested()
    window.console()
    window.open(home)
    window.wait(lambda: window.text("#link") == "needs a key", "the page to ask")
    yield window
    assert [line for line in window.console() if "401 (Unauthorized)" not in line and "TrustedHTML" not in line] == []
    assert {urlsplit(url).netloc for url in window.requested()} == {f"127.0.0.1:{keyed.port}"}


def key_of(node: TestNode, **wish: Any) -> str:
    return str(node.admin.create_key(Wish(**wish))["key"])


def enter(page: Browser, key: str) -> None:
    """The page has put the person into the field for it."""
    assert page.run("return document.activeElement.id") == "secret"
    page.press(key, "enter")


def test_it_asks_for_a_key_and_keeps_it_for_the_tab(keyed: TestNode, asked: Browser) -> None:
    assert "this needs an API key" in asked.text("#why")
    assert functions(asked) == []
    enter(asked, "dm_000000000000_" + "0" * 40)
    asked.wait(lambda: "there is no such API key" in asked.text("#why"), "the page to ask again")
    enter(asked, key_of(keyed, scopes=("admin",)))
    asked.wait(lambda: functions(asked) == ["hinted", "hostile", "mood"], "all functions")
    assert asked.run("return document.getElementById('ask').hidden")
    assert asked.run("return [Object.keys(sessionStorage), Object.keys(localStorage), document.cookie]") == [
        ["dormouse-key"],
        [],
        "",
    ]
    asked.reload()
    asked.wait(lambda: functions(asked) == ["hinted", "hostile", "mood"], "all functions again")


def test_a_link_of_who_is_at_the_node_needs_no_key_and_is_good_once(keyed: TestNode, asked: Browser) -> None:
    link = keyed.admin.dashboard()
    asked.open("about:blank")
    asked.open(link)
    asked.wait(lambda: functions(asked) == ["hinted", "hostile", "mood"], "all functions")
    assert asked.run("return [location.href, document.getElementById('ask').hidden]") == [link.split("#")[0], True]
    asked.reload()
    asked.wait(lambda: functions(asked) == ["hinted", "hostile", "mood"], "all functions again")
    asked.run("sessionStorage.clear()")
    asked.open("about:blank")
    asked.open(link)
    asked.wait(lambda: "this link was used" in asked.text("#why"), "the page to say why")
    assert functions(asked) == []
    said = [line for line in asked.console() if "401 (Unauthorized)" not in line]
    assert len(said) == 1
    assert "403 (Forbidden)" in said[0]


def test_a_tenant_sees_its_own(keyed: TestNode, asked: Browser) -> None:
    enter(asked, key_of(keyed, scopes=("deploy",), tenant="shop"))
    asked.wait(lambda: functions(asked) == ["hostile"], "its function")
    assert asked.run("return document.querySelectorAll('[data-gpu]').length") == 0
    assert asked.text("#problems") == "Nothing is wrong."


def test_what_functions_write_is_text(keyed: TestNode, asked: Browser) -> None:
    key = key_of(keyed, scopes=("admin",))
    enter(asked, key)
    asked.wait(lambda: "hostile" in functions(asked), "the function")
    keyed.deploy("broken", BROKEN)  # refused, with what it has raised
    headers = {"Authorization": f"Bearer {key}"}
    assert keyed.http("POST", "/functions/hostile/invoke", "fail", headers=headers).status == 500
    asked.run("location.hash = '#/f/hostile'")
    for part in ("[data-log]", "[data-errors]"):
        asked.wait(lambda part=part: "<img src=x" in asked.text(part), f"{part} with it")  # type: ignore[misc]
    written = asked.text("[data-log]").count("<img src=x")
    asked.run("document.querySelector('textarea').value = '1'")
    asked.click("#one form button[type=submit]")
    asked.wait(lambda: "<script>" in asked.text("[data-answer]"), "its answer")
    asked.wait(lambda: asked.text("[data-log]").count("<img src=x") == written + 1, "the log to go on")
    assert asked.run("return document.querySelectorAll('main img, main script').length") == 0
    assert "broken in" not in asked.run("return document.title")
    refused = "try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; }"
    assert asked.run(refused), "the browser itself takes no markup from a script"


def test_a_form_has_an_example_of_what_a_function_takes(keyed: TestNode, asked: Browser) -> None:
    enter(asked, key_of(keyed, scopes=("admin",)))
    asked.wait(lambda: "hinted" in functions(asked), "the function")
    asked.run("location.hash = '#/f/hinted'")
    body = "document.querySelector('textarea').value"
    asked.wait(lambda: "times" in asked.run(f"return {body}"), "an example")
    assert asked.run(f"return JSON.parse({body})") == {"text": "", "times": 3}
    asked.run(f"{body} = JSON.stringify({{text: 'ab'}})")
    asked.click("#one form button[type=submit]")
    asked.wait(lambda: asked.text("[data-answer]") == '"ababab"', "the answer")


def test_a_key_that_only_deploys_is_not_sent_to_be_refused(keyed: TestNode, asked: Browser) -> None:
    enter(asked, key_of(keyed, scopes=("deploy",)))
    asked.wait(lambda: "mood" in functions(asked), "the function")
    asked.run("location.hash = '#/f/mood'")
    asked.wait(lambda: "instance" in asked.text("[data-log]"), "its log")
    assert asked.run("return document.querySelector('#one form button[type=submit]').disabled")
    assert "scope invoke" in asked.text("[data-answered]")


def test_a_language_models_answer_appears_as_it_is_made(window: Browser, tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    with running_node(CONFIG) as node:
        deploy(node, "chat", tmp_path)
        with shown(node, window) as page:
            page.run("location.hash = '#/f/chat'")
            body = "document.querySelector('textarea').value"
            page.wait(lambda: "messages" in page.run(f"return {body}"), "a request")
            page.run(
                """const asked = { ...JSON.parse(document.querySelector("textarea").value), ...arguments[0] };
                   window.parts = 0;
                   const count = (records) => { for (const each of records) window.parts += each.addedNodes.length; };
                   new MutationObserver(count).observe(document.querySelector("[data-answer]"), { childList: true });
                   document.querySelector("textarea").value = JSON.stringify(asked);""",
                {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
            )
            page.click("#one form button[type=submit]")
            page.wait(lambda: page.text("[data-answered]").startswith("200"), "the answer")
            assert page.text("[data-answer]").strip() == generated(model, prompt_tokens(), 8).strip()
            assert page.run("return window.parts") > 2
            page.wait(lambda: "first token" in page.text("#one dl"), "its time")
            page.run("location.hash = '#'")
            page.wait(lambda: page.text("[data-timeline]").startswith("1 request "), "it on the timeline")
