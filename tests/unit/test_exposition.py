"""What `/metrics` says of what has been counted, as Prometheus's own reader has it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dormouse.controller.ledger import NOTHING, Used
from dormouse.controller.measures import measures
from dormouse.controller.status import NO_STORE
from dormouse.core.decisions.requests.events import Timing
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.problems import MIN_DISK_NBYTES
from dormouse.router.front.stats import NO_ERRORS, FunctionStats
from dormouse.router.metrics.exposition import IDLE_S, NODES_FAULT, MachineShare, written
from dormouse.router.metrics.main import Spent
from dormouse.schemas import messages as m
from dormouse.schemas.policy import DEFAULT

PROMTOOL = shutil.which("promtool")
NOBODY = FunctionStats()
GIB = 1 << 30


def counted(name: str, stats: FunctionStats = NOBODY, **more: Any) -> m.FunctionCounted:
    values: dict[str, Any] = {
        "tenant": "default",
        "running": 0,
        "waiting": 0,
        "outcomes": stats.outcomes,
        "in_time": stats.in_time,
        "late": stats.late,
        "latency": stats.latency.told(),
        "spent_s": stats.spent_s,
        "idle_s": 0.0,
    }
    return m.FunctionCounted(name=name, **values | more)


def scrape(*functions: m.FunctionCounted, whole: bool = True) -> m.Scrape:
    up = {"router": 2, "metrics": 1}
    spans = {"exported": 7, "failed": 0, "dropped": 1}
    kept = m.KeptCounted(
        builds={"ok": 3, "build_failed": 1},
        environments=2,
        environments_nbytes=GIB,
        secrets={"shop": 4},
        disk_free_nbytes=5,
    )
    return m.Scrape(
        query=1, functions=[*functions], measures=b"", whole=whole, up=up, down=["gpu1"], gzip=False, spans=spans,
        kept=kept, refused={"unauthorized": 3}, deaths={"router": 1, "gpu1": 3},
    )  # fmt: skip


def read(text: bytes) -> dict[tuple[str, ...], float]:
    """By a sample's name and its labels' values, in the order of the labels."""
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def held() -> m.NodeMeasures:
    """Of a node where ``b`` made room for ``a``, which came from the host and from another GPU."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=8, policy=DEFAULT)
    core.handle(ev.ExecutorUp(0, 1, m.PoolStats(free_nbytes=4 * GIB, largest_nbytes=4 * GIB)), 0.0)
    for name in "ab":
        core.handle(ev.InstanceKnown(f"{name}-1", name), 0.0)
        core.handle(ev.ModelSized(f"{name}-1", 1, GIB), 0.0)
    evicted: dict[str, list[tuple[str, int]]] = {"b": [], "a": [("b-1", GIB // 4)]}
    for number, (name, others) in enumerate(evicted.items(), 1):
        (wake,) = (
            action
            for action in core.handle(ev.Asked(number, f"{name}-1", 9.0, 1, True), 0.0)
            if isinstance(action, ev.WakeOn)
        )
        core.handle(ev.Woken(0, 1, wake.lease.serial, 250_000), 0.0)
        stats = m.PoolStats(weights_nbytes=GIB, kv_nbytes=6, free_nbytes=3 * GIB, largest_nbytes=GIB, moved_nbytes=7)
        done = m.Done(
            serial=wake.lease.serial, outcome="ended", gpu_us=10, copied_nbytes=GIB, peer_nbytes=5, file_nbytes=0,
            resident=[(f"{name}-1", GIB), *others], peak_activation_nbytes=0, version=1, stats=stats,
        )  # fmt: skip
        core.handle(ev.LeaseOver(0, 1, done), 1.0)
    core.handle(ev.Asked(9, "a-1", 9.0, 1, True, ev.BatchWanted(((1, 9.0), (2, 9.0), (3, 9.0)), 8, 0.0)), 1.0)
    (lease,) = core.gpus[0].leases
    done = msgspec.structs.replace(done, serial=lease, copied_nbytes=0, peer_nbytes=0)
    core.handle(ev.LeaseOver(0, 1, done), 2.0)
    core.handle(ev.Answered(9, True, 3, 3), 2.0)
    core.handle(ev.Asked(10, "a-1", 9.0, 1, True, ev.BatchWanted(((4, 9.0), (5, 9.0), (6, 9.0)), 8, 0.0)), 2.0)
    (lease,) = core.gpus[0].leases
    core.handle(ev.LeaseOver(0, 1, msgspec.structs.replace(done, serial=lease)), 3.0)
    core.handle(ev.Answered(10, True, 3, 0), 3.0)
    used = {"a": Used(gpu_us=1_500_000, weights=3_000), "b": NOTHING, "c": NOTHING}
    return m.unpacked(m.packed(measures(core, used, {}, NO_STORE)))


def test_requests_by_outcome_deadline_stage_and_bucket() -> None:
    stats, spec = FunctionStats(), msgspec.structs.replace(SPEC, deadline_ms=80)
    stats.answered(Timing(queue_s=0.01, wait_s=0.02, run_s=0.02), None, spec)  # 0.05 s: an upper end has its own bucket
    stats.answered(Timing(queue_s=0.0, wait_s=0.0, run_s=60.0), None, spec)
    stats.failed("function_raised")
    found = read(written(scrape(counted('a"\n\\', stats, running=1, waiting=3)), None))
    name = 'a"\n\\'
    assert found["dormouse_requests_total", name, "ok"] == 2
    assert found["dormouse_requests_total", name, "function_raised"] == 1
    assert (found["dormouse_requests_running", name], found["dormouse_requests_waiting", name]) == (1, 3)
    assert (
        found["dormouse_deadline_requests_total", name, "true"],
        found["dormouse_deadline_requests_total", name, "false"],
    ) == (1, 1)
    assert found["dormouse_request_stage_seconds_total", name, "run"] == 60.02
    buckets = {key[2]: value for key, value in found.items() if key[0] == "dormouse_request_duration_seconds_bucket"}
    assert len(buckets) == 10
    assert {end: buckets[end] for end in ("0.025", "0.05", "30", "+Inf")} == {"0.025": 0, "0.05": 1, "30": 1, "+Inf": 2}
    assert found["dormouse_request_duration_seconds_count", name] == 2
    assert abs(found["dormouse_request_duration_seconds_sum", name] - 60.05) < 1e-9


def test_wakes_by_source_evictions_by_reason_and_memory_by_kind() -> None:
    found = read(written(scrape(counted("a"), counted("b")), held()))
    assert found["dormouse_wakes_total", "a", "host"] == 1
    assert found["dormouse_wake_seconds_sum", "a", "host"] == 0.25
    assert found["dormouse_wake_seconds_count", "a", "host"] == 1
    assert found["dormouse_wake_bytes_total", "a", "host"] == GIB
    assert found["dormouse_evictions_total", "b", "wake"] == 1
    assert ("dormouse_evictions_total", "a", "wake") not in found
    assert found["dormouse_gpu_seconds_total", "a"] == 1.5
    assert found["dormouse_memory_byte_seconds_total", "a", "weights"] == 3
    assert found["dormouse_model_gpu_bytes", "b", "0"] == GIB // 4
    assert found["dormouse_gpu_memory_bytes", "0", "free"] == 3 * GIB
    assert found["dormouse_gpu_memory_bytes", "0", "kv"] == 6
    assert found["dormouse_process_up", "gpu1"] == 0
    assert found["dormouse_process_starts_total", "router"] == 2
    deaths = {key[1]: value for key, value in found.items() if key[0] == "dormouse_process_deaths_total"}
    assert deaths == {"router": 1, "metrics": 0, "gpu1": 3}, "from 0 on, so that the first one is an increase"
    assert found[("dormouse_controller_answered",)] == 1


def test_batches_and_what_is_kept_of_tenants() -> None:
    text = written(scrape(counted("a"), counted("b")), held())
    found = read(text)
    names = ("batches", "batch_requests", "batch_places", "batches_failed")
    assert [found[f"dormouse_{name}_total", "a"] for name in names] == [2, 6, 16, 1]
    assert ("dormouse_batches_total", "b") not in found
    assert found["dormouse_environment_builds_total", "build_failed"] == 1
    assert [found["dormouse_environment_builds_total", each] for each in NODES_FAULT] == [1, 0, 0, 0, 0, 0, 0]
    assert found[("dormouse_disk_free_bytes",)] == 5
    assert found[("dormouse_store_trouble",)] == 0
    assert (found[("dormouse_environments",)], found[("dormouse_environment_bytes",)]) == (2, GIB)
    assert found["dormouse_secrets", "shop"] == 4
    part = written(scrape(counted("a"), whole=False), held())
    assert b"environment" not in part
    assert b"secret" not in part
    assert b"dormouse_disk" not in part


def test_a_store_in_trouble() -> None:
    store = msgspec.structs.replace(NO_STORE, trouble="the disk is full")
    assert read(written(scrape(), msgspec.structs.replace(held(), store=store)))[("dormouse_store_trouble",)] == 1


def test_functions_that_nobody_asks_for_are_one() -> None:
    """Their counters are not there for a while; what they take is."""
    busy, idle = counted("a"), counted("b", idle_s=IDLE_S)
    found = read(written(scrape(busy, idle), held()))
    assert (found["dormouse_functions", "active"], found["dormouse_functions", "idle"]) == (1, 1)
    assert found["dormouse_model_gpu_bytes", "(idle)", "0"] == GIB // 4
    assert not [key for key in found if "b" in key[1:]]
    again = read(written(scrape(busy, counted("b")), held()))
    assert again["dormouse_evictions_total", "b", "wake"] == 1


def test_jobs_by_state_and_who_has_some_to_do_is_not_idle() -> None:
    jobs = {"a": {"queued": 3, "succeeded": 2}, "b": {"succeeded": 1}}
    found = read(written(scrape(*(counted(name, idle_s=IDLE_S, jobs=of) for name, of in jobs.items())), None))
    said = {key[1:]: value for key, value in found.items() if key[0] == "dormouse_jobs"}
    assert said == {("a", "queued"): 3, ("a", "succeeded"): 2}


def test_a_function_with_a_request_is_not_idle() -> None:
    busy = [counted("a", idle_s=IDLE_S, running=1), counted("b", idle_s=IDLE_S, waiting=1)]
    found = read(written(scrape(*busy, counted("c", idle_s=IDLE_S)), held()))
    assert (found["dormouse_functions", "active"], found["dormouse_functions", "idle"]) == (2, 1)
    assert found["dormouse_requests_running", "a"] == found["dormouse_requests_waiting", "b"] == 1


def test_who_may_not_see_the_node_is_told_of_these_functions_alone() -> None:
    found = read(written(scrape(counted("b"), whole=False), held()))
    assert found["dormouse_model_gpu_bytes", "b", "0"] == GIB // 4
    assert not [key for key in found if {"a", "(idle)"} & {*key[1:]}]
    assert not [key for key in found if key[0].startswith(("dormouse_gpu_memory", "dormouse_process", "dormouse_host"))]


def test_without_the_controllers_part_the_rest_is_there() -> None:
    found = read(written(scrape(counted("a")), None))
    assert found[("dormouse_controller_answered",)] == 0
    assert found["dormouse_functions", "active"] == 1
    assert ("dormouse_gpu_memory_bytes", "0", "free") not in found


def test_a_language_models_times_and_tokens() -> None:
    stats, spec = FunctionStats(), msgspec.structs.replace(SPEC, llm=m.LlmSettings(ttft_ms=150, tpot_ms=10))
    begun = m.AnswerBegun(request=1, queue_us=0, runtime_us=0, wake_us=50_000, prefill_us=50_000)
    tokens = m.TokenCounts(prompt=12, made=30, reused=4, tpot_us=20_000)
    stats.answered(Timing(run_s=1.0, first=begun), tokens, spec)
    told = m.TokensCounted(
        first=stats.tokens.first.told(), further=stats.tokens.further.told(),
        prompt=stats.tokens.prompt, made=stats.tokens.made, reused=stats.tokens.reused,
    )  # fmt: skip
    found = read(written(scrape(counted("chat", stats, tokens=told), counted("plain")), None))
    assert found["dormouse_time_to_first_token_seconds_bucket", "chat", "0.1"] == 1
    assert found["dormouse_time_to_first_token_seconds_bucket", "chat", "0.05"] == 0
    assert found["dormouse_time_per_output_token_seconds_bucket", "chat", "0.025"] == 1
    assert found["dormouse_deadline_requests_total", "chat", "false"] == 1, "its further tokens were late"
    assert [found[f"dormouse_{name}_total", "chat"] for name in TOKENS] == [12, 4, 30]
    assert ("dormouse_prompt_tokens_total", "plain") not in found


TOKENS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
SPEC = m.FunctionSpec(name="f", version=1, snapshot="s", entry="f.py")


def asked_in(query: str) -> dict[str, set[str]]:
    """The labels that a query, which Prometheus would take, wants of each of its metrics. Raises ValueError."""
    found: dict[str, set[str]] = {}

    def look(node: Any, wanted: frozenset[str] = frozenset()) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert str(node.modifier).startswith("by"), query
            wanted = frozenset(node.modifier.labels)
        if isinstance(node, promql_parser.VectorSelector):
            found.setdefault(str(node.name), set()).update(wanted, (each.name for each in node.matchers.matchers))
        for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
            if (inner := getattr(node, part, None)) is not None:
                look(inner, wanted)
        for argument in getattr(node, "args", None) or ():
            look(argument, wanted)

    look(promql_parser.parse(query.replace("$__rate_interval", "1m")))
    return found


def all_there_is() -> bytes:
    """A text with each metric in it."""
    stats = FunctionStats()
    stats.answered(Timing(run_s=1.0), None, SPEC)
    store = msgspec.structs.replace(NO_STORE, host_budget_nbytes=1)
    told = m.TokensCounted(first=stats.latency.told(), further=stats.latency.told(), prompt=1, made=1, reused=1)
    node = msgspec.structs.replace(held(), store=store)
    functions = counted("a", stats, tokens=told, jobs={"queued": 1}, broken=True, failing=True), counted("b")
    return written(scrape(*functions), node, {"a": MachineShare(GIB, 2.5)})


def labels_of(text: bytes) -> dict[str, set[str]]:
    """By a sample's name."""
    families = text_string_to_metric_families(text.decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def families(names: Iterable[str]) -> set[str]:
    """Without the ends that the samples of one metric have."""
    return {re.sub(f"({'|'.join(SUFFIXES)})$", "", name) for name in names}


def test_the_dashboard_and_the_alerts_ask_for_what_there_is() -> None:
    """All of it: each query can be read, each metric but Prometheus's own is written, and each that is has a panel."""
    text = all_there_is()
    there = {key[0] for key in read(text)}
    panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
    shows = [asked_in(target["expr"]) for panel in panels for target in panel["targets"]]
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    queries = [*shows, *(asked_in(rule["expr"]) for rule in rules)]
    assert set().union(*queries) - there == {"up"}
    assert families(there) - families(set().union(*shows)) == set()
    labels = labels_of(text)
    for name, wanted in (item for query in queries for item in query.items() if item[0] != "up"):
        assert wanted - labels[name] <= {"instance"}, (name, "Prometheus adds this one")
    assert {name.removeprefix("dormouse_") for name in there if not name.endswith(SUFFIXES)} <= documented()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [(at["x"] + x, at["y"] + y) for at in places for x in range(at["w"]) for y in range(at["h"])]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


def test_what_instances_take_is_of_functions_that_are_asked_and_of_the_others_together() -> None:
    functions = [counted("a"), *(counted(name, idle_s=IDLE_S) for name in ("b", "c"))]
    found = read(written(scrape(*functions), None, {name: MachineShare(GIB, 2.5) for name in ("a", "b", "c")}))
    memory = {key[1]: value for key, value in found.items() if key[0] == "dormouse_function_memory_bytes"}
    assert memory == {"a": GIB, "(idle)": 2 * GIB}
    spent = {key[1]: value for key, value in found.items() if key[0] == "dormouse_function_cpu_seconds_total"}
    assert spent == {"a": 2.5}


def test_processor_time_is_summed_over_instances_that_come_and_go() -> None:
    spins = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    spent, seen = Spent(), []
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", spins], stdin=-1, stdout=-1) as process:
            assert process.stdout is not None
            process.stdout.readline()
            seen += [spent.taken([counted("a", pids=[process.pid])])["a"] for _ in range(2)]
            process.communicate()
    first, again, second, last = seen
    assert first.memory_nbytes > 1 << 20
    assert 0.15 <= first.cpu_s == pytest.approx(again.cpu_s, abs=0.1)
    assert again.cpu_s + 0.15 <= second.cpu_s == pytest.approx(last.cpu_s, abs=0.1)
    assert spent.taken([counted("a", pids=[])])["a"] == (0, last.cpu_s)


def test_a_function_that_is_broken_is_said_though_nobody_asks_for_it() -> None:
    idle = counted("a", idle_s=IDLE_S, broken=True), counted("c", idle_s=IDLE_S, failing=True), counted("b")
    found = read(written(scrape(*idle), None))
    assert [key[1:] for key in found if key[0] == "dormouse_function_broken"] == [("a",)]
    assert [key[1:] for key in found if key[0] == "dormouse_function_failing"] == [("c",)]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint-fatal", "docs/metrics/alerts.yml"),
        ("test", "rules", "tests/alerts.yml"),
        ("check", "metrics"),
    ],
    ids=" ".join,
)
def test_promtool_has_no_complaint(words: tuple[str, ...]) -> None:
    text = all_there_is() if words[1] == "metrics" else b""
    done = subprocess.run([str(PROMTOOL), *words], cwd=DOCS.parents[1], input=text, capture_output=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_the_alert_about_errors_leaves_out_what_status_does() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    (errors,) = (rule["expr"] for rule in rules if rule["alert"] == "DormouseErrors")
    assert re.findall(r'outcome!~"([^"]+)"', errors) == ["|".join(NO_ERRORS)]


def test_the_alerts_about_builds_and_the_disk_know_what_the_node_says() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    by_name = {rule["alert"]: rule["expr"] for rule in rules}
    assert re.findall(r'outcome=~"([^"]+)"', by_name["DormouseBuildsFail"]) == ["|".join(NODES_FAULT)]
    assert by_name["DormouseDisk"] == f"dormouse_disk_free_bytes < {MIN_DISK_NBYTES}"
    where = [*(ROOT / "router" / "admin").glob("environment*.py"), ROOT / "core" / "sandbox" / "builder.py"]
    source = "".join(path.read_text() for path in where)
    assert [code for code in NODES_FAULT if f'"{code}"' not in source] == []


def test_each_alert_has_a_test_for_promtool() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    tried = yaml.safe_load((DOCS.parents[1] / "tests" / "alerts.yml").read_text())["tests"]
    expected = {each["alertname"] for test in tried for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert expected == {rule["alert"] for rule in rules}


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "metrics"
SUFFIXES = ("_bucket", "_count", "_sum", "_created")


def documented() -> set[str]:
    """What docs/metrics.md names."""
    return set(re.findall(r"`([a-z_]+)`", (DOCS.parent / "metrics.md").read_text()))
