"""The papers' baselines: early binding, processes that are kept alive or not, nothing reused, and clusters of nodes."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.simulator import main
from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.baselines import HISTORY, KEEP_S, IdleTimes, Processes
from dormouse.controller.simulator.cluster import Cluster
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.scenario import POLICIES, Scenario, parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

NAN = float("nan")


def scenario(models: list[dict[str, Any]] | None = None, **changes: Any) -> Scenario:
    """Functions of 400 MB on a GPU of 1 GB, over 1 GB/s. ``changes`` are by ``table__key``."""
    tree: dict[str, Any] = {
        "gpus": {"count": 1, "memory": "1GB", "link": "1GB"},
        "arrivals": {"process": "regular", "rate": 1, "minutes": 3, "warm": False},
        "models": models or [{"name": "m", "size": "400MB", "run": "100ms", "functions": 3}],
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if not key:
            tree[table] = value
        elif table == "models":
            tree["models"] = [{**model, key: value} for model in tree["models"]]
        else:
            tree.setdefault(table, {})[key] = value
    return parse_scenario(tree, "s.toml")


def latencies(made: Scenario, policy: str | Policy, asked: list[tuple[float, int]], warm: int = 0) -> list[float]:
    simulation = main.simulation_of(made, POLICIES[policy] if isinstance(policy, str) else policy, 0)
    times_s = np.array([at_s for at_s, _ in asked])
    found: list[float] = simulation.run(times_s, np.array([function for _, function in asked]), warm).tolist()
    if isinstance(simulation, Simulation):
        simulation.core.check()
    return found


# --- early binding


def test_bound_functions_have_their_room_for_good_and_others_none() -> None:
    """Two of 400 MB fit; the third is refused, again and again, though the others are idle."""
    asked = [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 0), (4.0, 1), (5.0, 2)]
    assert latencies(scenario(), "nonswap", asked) == pytest.approx([0.4, 0.4, NAN, 0.1, 0.1, NAN], nan_ok=True)


def test_what_a_bound_function_needs_while_it_runs_it_has_for_good() -> None:
    asked = [(0.0, 0), (1.0, 1), (2.0, 0)]
    found = latencies(scenario(models__activation="200MB"), "nonswap", asked)
    assert found == pytest.approx([0.6, NAN, 0.1], nan_ok=True)


def test_functions_are_bound_to_the_gpu_with_most_unbound_memory_and_stay() -> None:
    """Functions 0 and 2 are on GPU 0, 1 on GPU 1: at 10 s, 0 and 2 wait for each other though GPU 1 is idle."""
    asked = [(0.0, 0), (1.0, 1), (2.0, 2), (10.0, 0), (10.0, 2), (10.05, 0), (10.06, 1)]
    found = latencies(scenario(gpus__count=2), "nonswap", asked)
    assert found == pytest.approx([0.4, 0.4, 0.4, 0.1, 0.2, 0.25, 0.1])


def test_a_gpu_with_too_much_to_do_does_not_keep_the_others_waiting() -> None:
    """Function 0 has 500 requests at once on GPU 0, and is served in order; those of function 1 find GPU 1 free."""
    busy = [(10.0, 0)] * 500
    asked = [(0.0, 0), (1.0, 1), *busy, (10.01, 1), (11.0, 1)]
    found = latencies(scenario(gpus__count=2), "nonswap", asked)
    assert found[-2:] == pytest.approx([0.1, 0.1])
    assert found[2:-2] == pytest.approx([0.1 * (number + 1) for number in range(500)])


def test_requests_of_one_gpu_are_served_by_arrival() -> None:
    """Function 0 asks twice, 1 between: its second request comes after 1's, though its instance had the lease."""
    asked = [(0.0, 0), (1.0, 1), (10.0, 0), (10.01, 1), (10.02, 0)]
    assert latencies(scenario(), "nonswap", asked)[2:] == pytest.approx([0.1, 0.19, 0.28])


def test_room_that_a_running_wake_takes_is_not_counted_on() -> None:
    """GPU 0 has been told to copy function 0's, which it has not confirmed when function 1 is bound."""
    asked = [(0.0, 0), (0.05, 1)]
    assert latencies(scenario(gpus__count=2), "nonswap", asked) == pytest.approx([0.4, 0.4])


def test_functions_of_a_lost_gpu_are_bound_anew() -> None:
    faults = [{"gpu": 0, "at": "5s"}]
    asked = [(0.0, 0), (1.0, 1), (6.0, 0), (7.0, 2), (8.0, 0)]
    found = latencies(scenario(gpus__count=2, faults=faults), "nonswap", asked)
    assert found == pytest.approx([0.4, 0.4, 0.4, NAN, 0.1], nan_ok=True)


# --- processes

NATIVE: dict[str, Any] = {"models__native": "450MB", "models__native_run": "200ms", "models__cold_start": "8s"}


def test_native_processes_start_cold_and_run_at_their_own_speed() -> None:
    """Who asks while one starts waits for it; the start does not hold the GPU. The third process finds no room."""
    asked = [(0.0, 0), (1.0, 1), (2.0, 0), (9.0, 0), (20.0, 2), (30.0, 1)]
    found = latencies(scenario(**NATIVE), "native", asked)
    assert found == pytest.approx([8.2, 8.4, 6.4, 0.2, NAN, 0.2], nan_ok=True)


def test_a_start_that_finds_no_room_fails_all_that_wait_for_it() -> None:
    """And the next request starts another, for which there is still none: nobody waits longer than for one start."""
    asked = [(0.0, 0), (0.0, 1), (10.0, 2), (11.0, 2), (17.9, 2), (18.1, 2)]
    made = scenario(**NATIVE)
    simulation = main.simulation_of(made, POLICIES["native"], 0)
    assert isinstance(simulation, Simulation)
    handle = simulation.core.handle
    refused: list[tuple[float, int]] = []

    def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        refused.extend((now_s, action.request) for action in actions if isinstance(action, ev.RefuseAsk))
        return actions

    with patch.object(simulation.core, "handle", watched):
        simulation.run(np.array([at_s for at_s, _ in asked]), np.array([function for _, function in asked]))
    assert refused == [(18.0, 2), (18.0, 3), (18.0, 4), (26.1, 5)]


def test_processes_are_there_after_warming_up() -> None:
    asked = [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 0), (3.0, 1), (4.0, 2)]
    found = latencies(scenario(**NATIVE), "native", asked, warm=3)
    assert found == pytest.approx([0.2, 0.2, NAN, 0.2, 0.4, NAN], nan_ok=True)


def test_a_process_is_kept_as_long_as_it_has_been_idle_before() -> None:
    """Idle for 10 s after the first request, which is kept for `KEEP_S`; so it leaves 10 s after the second, and the
    third starts anew. It was idle for 20 s then, and so long it is kept now: the fourth finds it. Function 2 has
    room only while the others are not there.
    """
    asked = [(0.0, 0), (18.2, 0), (38.4, 0), (66.0, 0)]
    found = latencies(scenario(**NATIVE), "infless-ka", asked)
    assert found == pytest.approx([8.2, 0.2, 8.2, 0.2])
    asked = [(0.0, 0), (0.0, 1), (10.0, 2), (18.2, 0), (30.0, 2), (40.0, 2)]
    found = latencies(scenario(**NATIVE), "infless-ka", asked)
    # 0 has left at 28.4, so that the process of 2 that starts at 30 finds room at 38
    assert found == pytest.approx([8.2, 8.4, NAN, 0.2, 8.2, 0.2], nan_ok=True)


def test_an_oracle_knows_the_gaps_of_the_whole_trace() -> None:
    """Who knows them keeps a process for as long as 99 of 100 last, from the first request on."""
    asked = [(0.0, 0), (10.0, 0), (15.0, 0), (20.0, 0), (300.0, 1)]
    assert latencies(scenario(**NATIVE), "infless-oracle", asked) == pytest.approx([8.2, 0.2, 0.2, 0.2, 8.2])
    # of 101 gaps one is of 50 s: the process is not kept so long, though it was never idle for longer before
    asked = [*((number * 5.0, 0) for number in range(101)), (550.0, 0)]
    found = latencies(scenario(**NATIVE), "infless-oracle", asked)
    assert found[2:] == pytest.approx([0.2] * 99 + [8.2])


def test_a_lost_gpu_takes_its_processes_with_it() -> None:
    faults = [{"gpu": 0, "at": "10s", "back": "11s"}]
    asked = [(0.0, 0), (9.95, 0), (12.0, 0)]
    found = latencies(scenario(**NATIVE, faults=faults), "native", asked)
    assert found == pytest.approx([8.2, NAN, 8.2], nan_ok=True)
    found = latencies(scenario(**NATIVE, faults=faults, models__idempotent=True), "native", asked)
    assert found == pytest.approx([8.2, 8.25, 6.4])


@given(st.lists(st.floats(0.0, 100.0), max_size=50))
def test_the_window_is_the_99th_percentile_of_past_idle_times(times_s: list[float]) -> None:
    idle = IdleTimes()
    assert idle.window_s == KEEP_S
    for number, one_s in enumerate(times_s):
        idle.add(one_s)
        assert idle.window_s == max(times_s[: number + 1])


def test_old_idle_times_are_forgotten() -> None:
    idle = IdleTimes()
    for number in range(HISTORY):
        idle.add(float(number))
    assert idle.window_s == 989.0
    for _ in range(HISTORY):
        idle.add(1.0)
    assert idle.window_s == 1.0


def test_only_history_counts() -> None:
    """What comes later changes no window before it."""
    early, late = Processes(1, "history"), Processes(1, "history")
    late.know(np.array([0.0, 1.0, 500.0]), np.zeros(3, np.int64))
    for processes in (early, late):
        processes.asked(0, 0.0)
        assert processes.over(0, 1.0) == 1.0 + KEEP_S
        processes.asked(0, 4.0)
        processes.asked(0, 4.5)
        assert processes.over(0, 5.0) is None
        assert processes.over(0, 6.0) == 9.0


# --- nothing reused; memory allocated for each wake


def test_nothing_is_left_of_a_model_when_another_runs() -> None:
    asked = [(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 0)]
    assert latencies(scenario(), "sllm", asked) == pytest.approx([0.4, 0.1, 0.4, 0.4])
    assert latencies(scenario(), "simple-swap", asked) == pytest.approx([0.4, 0.1, 0.4, 0.1])
    shared = scenario(models__shared=0.5)
    assert latencies(shared, "sllm", asked) == pytest.approx([0.4, 0.1, 0.4, 0.4])
    assert latencies(shared, "simple-swap", asked) == pytest.approx([0.4, 0.1, 0.2, 0.1])


def test_wakes_allocate_before_they_copy() -> None:
    asked = [(0.0, 0), (1.0, 0), (2.0, 1)]
    made = scenario(models__allocate="30ms")
    assert latencies(made, "torpor-block", asked) == pytest.approx([0.43, 0.1, 0.43])
    assert latencies(made, "torpor", asked) == pytest.approx([0.4, 0.1, 0.4])


def test_a_gpu_that_is_lost_while_it_allocates() -> None:
    faults = [{"gpu": 0, "at": "10ms", "back": "1s"}]
    made = scenario(models__allocate="30ms", faults=faults)
    assert latencies(made, "torpor-block", [(0.0, 0), (2.0, 0)]) == pytest.approx([NAN, 0.43], nan_ok=True)


@pytest.mark.parametrize("policy", ["torpor-random", "simple-swap", "sllm"])
def test_random_placement_counts_on_no_peer(policy: str) -> None:
    """Torpor-Random has no copies between GPUs: neither done nor expected."""
    made = scenario(gpus__count=2, gpus__peer="10GB", models__functions=40)
    simulation = main.simulation_of(made, POLICIES[policy], 0)
    assert isinstance(simulation, Simulation)
    simulation.run(np.zeros(1), np.zeros(1, np.int64))
    model = simulation.core.models["f0"]
    (here,) = model.resident
    assert simulation.core._granting.placement.copy_s(model, 1 - here, 20.0) == (0.4, 400_000_000, None)
    simulation = main.simulation_of(made, POLICIES[policy], 0)
    simulation.run(np.repeat(np.arange(1.0, 41.0), 2), np.repeat(np.arange(40), 2))  # two requests at a time
    assert simulation.wakes >= 40
    assert simulation.host_nbytes == 400_000_000 * simulation.wakes


# --- clusters


def test_a_cluster_deals_functions_of_each_model_over_its_nodes() -> None:
    models = [{"name": name, "size": "1MB", "run": "1ms", "functions": count} for name, count in (("a", 4), ("b", 3))]
    made = scenario(models, gpus__nodes=3)
    dealt = [(model.name, node) for model, node in zip(made.models, made.node_of, strict=True)]
    assert [node for name, node in dealt if name == "a"] == [0, 1, 2, 0]
    assert [node for name, node in dealt if name == "b"] == [1, 2, 0]


def test_a_node_of_a_cluster_is_as_one_alone() -> None:
    """Each node's requests have the latencies that they have on that node without the others."""
    made = scenario(gpus__nodes=2, models__functions=7, arrivals__process="poisson", arrivals__rate=300)
    times_s, functions, warm = arrivals(made, 0)
    cluster = main.simulation_of(made, made.policy, 0)
    assert isinstance(cluster, Cluster)
    found = cluster.run(times_s, functions, warm)
    assert len(cluster.busy_s) == 2
    busy_s = []
    for node in range(2):
        mine = [function for function in range(7) if made.node_of[function] == node]
        alone = main.simulation_of(scenario(models__functions=len(mine)), made.policy, 0)
        chosen = np.isin(functions, mine)
        renumbered = np.searchsorted(mine, functions[chosen])
        assert alone.run(times_s[chosen], renumbered).tolist() == found[chosen].tolist()
        busy_s += alone.busy_s
    assert cluster.busy_s == busy_s


def test_gpus_of_a_cluster_are_counted_through() -> None:
    """GPU 1 is node 1's: function 0 on node 0 goes on, function 1 has no GPU any more."""
    made = scenario(gpus__nodes=2, faults=[{"gpu": 1, "at": "1s"}])
    asked = [(0.0, 0), (0.0, 1), (2.0, 0), (2.0, 1)]
    assert latencies(made, "default", asked) == pytest.approx([0.4, 0.4, 0.1, NAN], nan_ok=True)
    simulation = main.simulation_of(made, made.policy, 0)
    told: list[int] = []
    simulation.on_busy = lambda gpu, began_s, ended_s: told.append(gpu)
    simulation.run(np.array([0.0, 0.0]), np.array([0, 1]))
    assert told == [0, 1]
    one = main.simulate(scenario(gpus__nodes=2), "x", made.policy, 0)
    assert (one.functions, one.requests, one.late) == (3, 9, 0.0)


def test_faults_count_from_the_end_of_warming_up() -> None:
    warm = scenario(arrivals__warm=True, faults=[{"gpu": 0, "at": "5s", "back": "6s"}])
    assert [(fault.at_s, fault.back_s) for fault in warm.faults] == [pytest.approx((6.2, 7.2))]


# --- bad input


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"models__activation": "700MB"}, "models[0].activation is 700,000,000 bytes (m); with its size that is more"),
        ({"models__activation": "-1"}, "models[0].activation: '-1' is not a size"),
        ({"models__shared": 1.5}, "models[0].shared is 1.5; write a share of the size from 0 to 1"),
        ({"models__shared": "1GB"}, "models[0].shared: expected `float`, got `str`"),
        ({"models__idempotent": 1}, "models[0].idempotent: expected `bool`, got `int`"),
        ({"models__native": "2GB"}, "models[0].native is 2,000,000,000 bytes (m); no GPU has more than gpus.memory"),
        ({"models__cold_start": 0}, "models[0].cold_start is 0; write a number above 0"),
        ({"models__allocate": "soon"}, "models[0].allocate is 'soon'; write a number above 0"),
        ({"gpus__nodes": 0}, "gpus.nodes is 0; write a number from 1 to 1024"),
        ({"gpus__nodes": 4}, "models.functions is 3; write at least gpus.nodes, 4, functions in all"),
        ({"faults": [{"gpu": 1, "at": "1s"}]}, "faults[0].gpu is 1; write a number from 0 to 0"),
        ({"faults": [{"gpu": 0}]}, "faults[0].at is missing; write it"),
        ({"faults": [{"gpu": 0, "at": "1s", "why": 1}]}, "faults[0].why is not a key; write one of gpu, at, back"),
        ({"faults": [{"gpu": 0, "at": "2s", "back": "1s"}]}, "faults[0].back is '1s'; write a time after `at`"),
        (
            {"faults": [{"gpu": 0, "at": "1s"}, {"gpu": 0, "at": "2s"}]},
            "faults[1].at is '2s'; GPU 0 is gone then: write a time after it is back",
        ),
        ({"policy": {"drop_ms": -1}}, "[policy]: drop_ms is -1; write a number from 0 to "),
        ({"policy": {"drop_ms": 5, "native": True}}, "[policy]: drop_ms is 5; leave it out: native processes drop"),
        ({"policy": {"keep_alive": "ever"}}, "[policy]: keep_alive is 'ever'; write history or trace, or leave it out"),
        ({"policy": {"keep_alive": "trace"}}, "[policy]: keep_alive is 'trace'; write native = true"),
        ({"policy": {"native": True}}, '[policy]: native is true; write placement = "bound"'),
        ({"policy": {"reuse": 1}}, "policy.reuse: expected `bool`, got `int`"),
    ],
)  # fmt: skip
def test_bad_scenarios_are_told_file_key_and_cure(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as told:
        scenario(**changes)
    assert str(told.value).startswith(f"s.toml: {text}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("policy", "changes", "key", "example"),
    [
        ("native", {}, "native", 'bytes of a process of its own, as native = "1.2GB"'),
        (
            "infless-ka",
            {"models__native": "450MB"},
            "cold_start",
            'how long a process takes to start, as cold_start = "4s"',
        ),
        ("torpor-block", {}, "allocate", 'how long a wake allocates memory, as allocate = "20ms"'),
    ],
)
def test_a_policy_names_the_key_that_it_needs(policy: str, changes: dict[str, Any], key: str, example: str) -> None:
    with pytest.raises(ConfigError) as told:
        main.simulation_of(scenario(**changes), POLICIES[policy], 0)
    assert str(told.value) == f"s.toml: models[0].{key} is missing, and the policy needs it of m; write {example}"
