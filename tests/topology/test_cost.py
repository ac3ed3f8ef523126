"""What a real node says that its functions have used, to whom, and after a restart."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.decisions.memory.holdings import STATE_S
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas.admin import Wish

PRICES = 'currency = "EUR"\ngpu_s = 1.0\ngpu_gib_s = 1.0\nhost_gib_s = 1.0\nprompt_tokens_1m = 1\n'


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    """Two models of one tenant that share a runtime, and another tenant's function; all have been asked."""
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder)
    with running_node(CONFIG, node='tenants = "many"') as running:
        deploy(running, "one", folder)
        deploy(running, "two", folder)
        running.deployed("plain", ORDINARY, tenant="other")
        with connected(running) as client:
            ask(client, new=40, name="one")
            ask(client, new=10, name="two")
        assert running.result("plain", 1.0) == 499500.0
        running.wait(lambda: done(running), 60.0, "usage that tells of all requests")
        yield running


def used(node: TestNode, name: str = "", ago_s: float = 3600.0) -> dict[str, dict[str, Any]]:
    return {row["function"]: row for row in node.admin.usage(time.time() - ago_s, name)["functions"]}


def done(node: TestNode) -> bool:
    rows = used(node)
    held = ("requests", "gpu_s", "weights_nbyte_s", "host_nbyte_s")
    told = all(rows.get(name, {}).get(what) for name in ("one", "two", "plain") for what in held)
    return (
        told and (rows["one"]["made_tokens"], rows["two"]["made_tokens"]) == (40, 10) and rows["one"]["kv_nbyte_s"] > 0
    )


def cost(node: TestNode, *arguments: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "cost", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def test_each_function_has_what_it_used(node: TestNode) -> None:
    rows = used(node)
    one, two, plain = rows["one"], rows["two"], rows["plain"]
    assert (one["tenant"], two["tenant"], plain["tenant"]) == ("default", "default", "other")
    assert (one["requests"], two["requests"], plain["requests"]) == (1, 1, 1)
    assert (one["made_tokens"], two["made_tokens"], plain["made_tokens"]) == (40, 10, 0)
    assert one["prompt_tokens"] == two["prompt_tokens"] > 0
    assert one["kv_nbyte_s"] > 0
    assert plain["kv_nbyte_s"] == 0
    for row in (one, two, plain):
        assert row["weights_nbyte_s"] > 0
        assert row["host_nbyte_s"] > 0
        assert row["gpu_s"] > 0


def test_what_was_held_is_what_was_there(node: TestNode) -> None:
    """All bytes of host memory, over some seconds: shared ones once."""
    looked_s, before_nbyte_s = time.time(), held_by_all(node)
    earlier_nbyte_s = before_nbyte_s
    while before_nbyte_s == earlier_nbyte_s:  # until one more statement has come, since it was looked last
        before_s, looked_s = looked_s, time.time()
        before_nbyte_s = held_by_all(node)
    host_nbytes = node.status()["store"]["host_nbytes"]
    node.wait(lambda: held_by_all(node) > before_nbyte_s + 2.0 * host_nbytes, 60.0, "host memory over two seconds")
    assert held_by_all(node) < before_nbyte_s + (time.time() - before_s + STATE_S) * host_nbytes


def held_by_all(node: TestNode) -> float:
    return float(sum(row["host_nbyte_s"] for row in used(node).values()))


def test_the_command(node: TestNode, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    told = json.loads(cost(node, "--since", "1h", "--prices", str(prices), "--json").stdout)
    assert told["currency"] == "EUR"
    assert {row["function"] for row in told["functions"]} >= {"one", "two", "plain"}
    assert {row["tenant"] for row in told["tenants"]} >= {"default", "other"}
    total = sum(row["cost"]["total"] for row in told["functions"])
    assert total > 0
    assert told["total"]["cost"]["total"] == pytest.approx(total)
    text = cost(node, "one", "--since", "1h", "--prices", str(prices)).stdout
    assert "EUR" in text
    assert "two" not in text
    assert "cost" not in cost(node, "--since", "1h").stdout.splitlines()[1].split("\t")
    prices.write_text("gpu = 1")
    for arguments, status, says in (
        (("--prices", str(prices)), 2, "gpu is no price"),
        (("--prices", str(tmp_path / "no")), 2, "No such file"),
        (("--since", "soon"), 2, "--since is 'soon'"),
        (("--since", "2099-01-01"), 2, "in the future"),
        (("nobody",), 3, "unknown_function"),
    ):
        failed = cost(node, *arguments)
        assert (failed.returncode, says in failed.stderr) == (status, True), failed.stderr


def test_a_tenant_sees_its_own_alone(node: TestNode) -> None:
    key = str(node.admin.create_key(Wish(scopes=("deploy",), tenant="other"))["key"])

    def asked(query: str) -> tuple[int, Any]:
        connection = node.connect(30.0)
        try:
            connection.request("GET", f"/admin/usage?{query}", headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    since = f"since={time.time() - 3600:.0f}"
    status, told = asked(since)
    assert status == 200
    assert [row["function"] for row in told["functions"]] == ["plain"]
    hidden, unknown = asked(f"{since}&name=one"), asked(f"{since}&name=nobody")
    assert hidden[0] == unknown[0] == 404
    assert hidden[1]["error"]["message"].replace("one", "nobody") == unknown[1]["error"]["message"]
    for query, says in (
        ("", "since is ''; write seconds of the Unix clock"),
        ("since=soon", "since is 'soon'"),
        ("since=-1", "since is '-1'"),
        (f"since={time.time() + 3600:.0f}", "since is in the future"),
        (f"{since}&until=3", "until is not known here; write some of since, name"),
    ):
        status, told = asked(query)
        assert (status, says in told["error"]["message"]) == (400, True), told


def scraped(node: TestNode, **headers: str) -> tuple[int, dict[tuple[str, ...], float]]:
    """Samples by name and labels' values, in the order of the labels."""
    connection = node.connect(30.0)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.getheader("content-encoding") == "gzip":
            data = gzip.decompress(data)
    finally:
        connection.close()
    if answer.status != 200:
        return answer.status, {}
    return 200, {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
    }


def test_metrics(node: TestNode) -> None:
    """Its process is started by who asks first, and again when it has died. A tenant's key sees the tenant's own."""
    keys = {
        name: {"Authorization": f"Bearer {node.admin.create_key(wish)['key']}"}
        for name, wish in (
            ("all", Wish(scopes=("metrics",))),
            ("other", Wish(scopes=("metrics",), tenant="other")),
            ("invoke", Wish(scopes=("invoke",))),
        )
    }
    assert "metrics" not in node.status()["node"]["peers"]
    with ThreadPoolExecutor(8) as threads:
        first = [*threads.map(lambda _: scraped(node, **keys["all"]), range(8))]
    assert [status for status, _ in first] == [200] * 8
    found: dict[tuple[str, ...], float] = {}

    def whole() -> bool:
        found.clear()
        found.update(scraped(node, **keys["all"])[1])
        return found["dormouse_controller_answered",] == 1

    node.wait(whole, 60.0, "all of it")
    assert found["dormouse_requests_total", "one", "ok"] == found["dormouse_requests_total", "plain", "ok"] == 1
    assert found["dormouse_generation_tokens_total", "one"] == 40
    assert found["dormouse_gpu_seconds_total", "one"] > 0
    assert found["dormouse_time_to_first_token_seconds_count", "two"] == 1
    assert found["dormouse_process_up", "metrics"] == 1
    assert found["dormouse_disk_free_bytes",] > 1 << 20
    status, packed = scraped(node, **keys["all"], **{"Accept-Encoding": "gzip"})
    assert status == 200
    assert packed["dormouse_requests_total", "one", "ok"] == 1
    status, own = scraped(node, **keys["other"])
    assert status == 200
    assert own["dormouse_requests_total", "plain", "ok"] == 1
    assert not [key for key in own if {"one", "two"} & {*key[1:]} or key[0].startswith("dormouse_process")]
    assert [scraped(node, **headers)[0] for headers in ({}, keys["invoke"])] == [401, 403]
    node.kill("metrics")
    starts = "dormouse_process_starts_total", "metrics"
    node.wait(lambda: scraped(node, **keys["all"])[1].get(starts) == 2, 60.0, "the next one")


def test_the_admin_socket_refuses_the_future_too(node: TestNode) -> None:
    with pytest.raises(CallRefused, match="in the future"):
        used(node, ago_s=-7200.0)


def test_it_is_there_after_a_restart(node: TestNode) -> None:
    """Also what a function had that is removed meanwhile."""
    before = used(node)
    assert node.remove("plain").status == 200
    node.stop()
    node.start()
    after = used(node)
    for name in ("one", "plain"):
        for what in ("requests", "made_tokens", "gpu_s", "kv_nbyte_s"):
            assert after[name][what] >= before[name][what]
    assert used(node, "plain")["plain"]["requests"] == before["plain"]["requests"]
