"""Simulated leases that take turns: time on the host, seats whose room others need, and two turns on a GPU."""

from itertools import pairwise

import numpy as np
import pytest

from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.capacity import check_deadlines
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.main import simulate, simulation_of
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

MB = 1_000_000
GB = 1_000.0 * MB
NAN = float("nan")

FIFO = Policy(order="fifo")
KEPT = Policy(order="fifo", turn_ms=1 << 40)
TWO = Policy(order="fifo", turns=2)


def model(
    nbytes: int, run_s: float = 0.1, host_s: float = 0.0, idempotent: bool = False, activation: int = 0
) -> ModelSpec:
    return ModelSpec(
        name="m",
        nbytes=nbytes * MB,
        run_s=run_s,
        host_s=host_s,
        idempotent=idempotent,
        activation_nbytes=activation * MB,
        segment_nbytes=50 * MB,
    )


def made(models: list[ModelSpec], policy: Policy = FIFO, *faults: Fault, gpus: int = 1) -> Simulation:
    """GPUs of 1000 MB, over links of 1 GB/s."""
    return Simulation(policy, Topology(host_bps=GB), gpus, 1000 * MB, models, [9.0] * len(models), 0.9, 0, faults)


def latencies(simulation: Simulation, *asked: tuple[float, int]) -> list[float]:
    times_s = np.array([at_s for at_s, _ in asked])
    found: list[float] = simulation.run(times_s, np.array([function for _, function in asked])).tolist()
    return found


def watched(simulation: Simulation) -> list[tuple[ev.Event, list[ev.Action]]]:
    """What its core is told from now on, and answers."""
    log: list[tuple[ev.Event, list[ev.Action]]] = []
    handle = simulation.core.handle

    def handled(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        simulation.core.check()
        log.append((event, actions))
        return actions

    simulation.core.handle = handled  # type: ignore[method-assign]
    return log


SLEEPER = model(300, 0.1, host_s=1.0)


def test_requests_of_others_do_not_wait_for_the_host() -> None:
    """Function 0 copies until 0.3, is on the host until 1.3 and computes until 1.35. It has no turn from 0.32 on: then
    function 1 has it until 0.62, and function 2 until 0.92.
    """
    models = [SLEEPER, model(300, 0.2), model(300, 0.2)]
    asked = ((0.0, 0), (0.1, 1), (0.5, 2))
    simulation = made(models)
    assert latencies(simulation, *asked) == pytest.approx([1.35, 0.52, 0.42])
    assert simulation.busy_s == pytest.approx([0.92 + 0.05])
    assert simulation.host_nbytes == 900 * MB
    kept = made(models, KEPT)
    assert latencies(kept, *asked) == pytest.approx([1.35, 1.55, 1.45])
    assert kept.busy_s == pytest.approx([1.95])


def test_it_waits_for_its_turn_again() -> None:
    """Function 1 computes from 1.2 until 1.5; at 1.3 the host's time is over."""
    assert latencies(made([SLEEPER, model(300)]), (0.0, 0), (1.2, 1)) == pytest.approx([1.55, 0.3])


def test_a_turn_that_nobody_wanted_is_its_own_again() -> None:
    """Who comes at 1.31 waits until 1.35."""
    assert latencies(made([SLEEPER, model(300)]), (0.0, 0), (1.31, 1)) == pytest.approx([1.35, 0.34])


def test_a_short_time_on_the_host_costs_no_turn() -> None:
    """20 ms, and the core is told after 20."""
    models = [model(300, 0.1, host_s=0.02), model(300)]
    assert latencies(made(models), (0.0, 0), (0.1, 1)) == pytest.approx([0.37, 0.57])


def test_what_is_resident_runs_in_two_halves() -> None:
    simulation = made([SLEEPER, model(300)])
    found = latencies(simulation, (0.0, 0), (3.0, 1), (10.0, 0), (10.0, 1))
    assert found == pytest.approx([1.35, 0.3, 1.1, 0.17])  # from 10.07 to 10.17, and the other's second half at 11.05


# --- seats that others need


def test_who_left_its_seat_pays_a_copy_back() -> None:
    """Function 1 needs 300 MB of what function 0 has, at 0.62. When that has its turn again, at 1.6, it copies them:
    for 0.3 s, in which it also computes. So function 1 has 400 MB left.
    """
    simulation = made([model(600, host_s=1.0), model(700)])
    assert latencies(simulation, (0.0, 0), (0.1, 1)) == pytest.approx([1.9, 1.22])
    assert simulation.host_nbytes == (600 + 700 + 300) * MB
    assert simulation.wakes == 2
    assert simulation.core.gpus[0].resident == {"f0": 600 * MB, "f1": 400 * MB}


def test_idle_models_go_before_seats() -> None:
    simulation = made([model(400, host_s=1.0), model(500), model(300)])
    found = latencies(simulation, (0.0, 1), (1.0, 0), (1.1, 2))
    assert found == pytest.approx([0.5, 1.45, 0.62])  # function 2: from 1.42 on, 0.3 s
    residency = simulation.gpus[0].residency
    assert [residency.resident_nbytes(name) for name in ("f0", "f1", "f2")] == [400 * MB, 300 * MB, 300 * MB]


def test_the_seat_without_a_turn_for_longest_is_left() -> None:
    """Functions 0 and 1 are on the host when function 2 needs 400 MB, at 0.84: function 0 gives them, and copies them
    back from 2.4 until 2.8; that takes room from function 2. Function 1 has its own still.
    """
    models = [model(400, host_s=2.0), model(400, host_s=2.0), model(600)]
    simulation = made(models)
    assert latencies(simulation, (0.0, 0), (0.1, 1), (0.2, 2)) == pytest.approx([2.8, 2.87 - 0.1, 1.24])
    assert simulation.host_nbytes == (400 + 400 + 600 + 400) * MB


@pytest.mark.parametrize(("nbytes", "free", "copied"), [(400, 0, 0), (500, 200, 0), (750, 0, 50)])
def test_a_paused_lease_keeps_its_activations_too(nbytes: int, free: int, copied: int) -> None:
    """With 300 MB of them function 0 holds 600 of 1000. When function 1 ends, so much is free; with 500 MB it has taken
    the room of the activations, with 750 a part of the model too.
    """
    simulation = made([model(300, host_s=1.2, activation=300), model(nbytes)])
    log = watched(simulation)
    found = latencies(simulation, (0.0, 0), (0.1, 1))
    first = next(event for event, _ in log if isinstance(event, ev.LeaseOver))
    assert first.done.stats.free_nbytes == free * MB
    assert found == pytest.approx([1.55, 0.32 + nbytes / 1000 - 0.1])
    assert simulation.host_nbytes == (300 + nbytes + copied) * MB
    assert simulation.gpus[0].activation_nbytes == 0


# --- more than one turn


def test_two_share_the_gpus_time() -> None:
    """Function 0 has half of its 0.2 s when function 1 comes, which computes for 0.05 s, and so for 0.1 beside it."""
    models = [model(300, 0.2), model(300, 0.05)]
    asked = ((0.0, 0), (1.0, 1), (10.0, 0), (10.1, 1))
    assert latencies(made(models, TWO), *asked)[2:] == pytest.approx([0.25, 0.1])
    assert latencies(made(models), *asked)[2:] == pytest.approx([0.2, 0.15])


def test_one_computes_while_the_other_copies() -> None:
    models = [model(300, 0.2), model(500, 0.1)]
    found = latencies(made(models, TWO), (0.0, 0), (1.0, 0), (1.0, 1))
    assert found == pytest.approx([0.3, 0.3, 0.5])  # 0.2 s beside 0.1, and the copy is longer


def test_a_third_waits_and_two_models_that_do_not_fit_wait_for_room() -> None:
    """Functions 0 and 1 have the turns of GPU 0; what has no room beside them begins when there is some."""
    found = latencies(made([model(300), model(300), model(300)], TWO), (0.0, 0), (0.0, 1), (0.0, 2))
    assert found == pytest.approx([0.6, 0.6, 0.9])  # one link for two
    found = latencies(made([model(600), model(700)], TWO), (0.0, 0), (0.1, 1))
    assert found == pytest.approx([0.6, 1.2])


def test_a_gpu_with_two_turns_is_busy_once() -> None:
    simulation = made([model(300, 0.2), model(300, 0.2)], TWO)
    latencies(simulation, (0.0, 0), (0.2, 1))
    assert simulation.busy_s == pytest.approx([0.6])


# --- GPUs that are lost


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_gpu_is_lost_while_seats_are_held(idempotent: bool) -> None:
    """At 0.63 function 0 is on the host without a turn, function 1 with one, and function 2 waits. From 2.0 on the GPU
    is back: function 2 is first, which has waited for longest.
    """
    models = [model(300, host_s=1.0, idempotent=idempotent), model(300, host_s=1.0, idempotent=idempotent), model(300)]
    fault = Fault(gpu=0, at_s=0.63, back_s=2.0)
    simulation = made(models, FIFO, fault)
    log = watched(simulation)
    found = latencies(simulation, (0.0, 0), (0.1, 1), (0.2, 2))
    fates: dict[int, list[str]] = {}
    for action in [action for _, actions in log for action in actions]:
        if isinstance(action, ev.FinishLease | ev.LoseLease | ev.RefuseAsk):
            fates.setdefault(action.request, []).append(type(action).__name__)
    if idempotent:  # they copy from 2.3 and 2.62 on, and compute again at 3.6 and 3.92
        assert found == pytest.approx([3.65, 3.97 - 0.1, 2.3 - 0.2])
        assert fates == {0: ["LoseLease", "FinishLease"], 1: ["LoseLease", "FinishLease"], 2: ["FinishLease"]}
    else:
        assert found == pytest.approx([NAN, NAN, 2.3 - 0.2], nan_ok=True)
        assert fates == {0: ["LoseLease"], 1: ["LoseLease"], 2: ["FinishLease"]}
    again_s = 0.32 + (3.6 - 2.62) + 0.05 + 0.05  # function 1 keeps its turn until function 0 wants one
    assert simulation.busy_s == pytest.approx([0.63 + 0.3 + (again_s if idempotent else 0.0)])


def test_a_lease_that_waits_for_room_is_lost_with_its_gpu() -> None:
    models = [model(600, 1.0), model(700)]
    simulation = made(models, TWO, Fault(gpu=0, at_s=0.5, back_s=2.0))
    assert latencies(simulation, (0.0, 0), (0.1, 1), (3.0, 1)) == pytest.approx([NAN, NAN, 0.7], nan_ok=True)


# --- scenarios


def tree(**policy: object) -> dict[str, object]:
    """Half of the functions spend 200 ms on the host."""
    one = {"name": "m", "size": "300MB", "run": "20ms", "deadline": "400ms", "functions": 6}
    return {
        "gpus": {"count": 2, "memory": "1GB", "link": "5GB"},
        "arrivals": {"process": "poisson", "rate": 60, "minutes": 1},
        "models": [one, one | {"host": "200ms"}],
        "policy": policy,
    }


def test_the_key_of_a_scenario() -> None:
    scenario = parse_scenario(tree(turns=2, turn_ms=30), "s.toml")
    assert [spec.host_s for spec in scenario.models[:2]] == [0.0, 0.2]
    assert scenario.wakes_s[:2] == pytest.approx([0.06, 0.06 + 0.2 + 0.01])
    assert (scenario.policy.turns, scenario.policy.turn_ms) == (2, 30)
    wrong = tree()
    wrong["models"] = [{"name": "m", "size": "1GB", "run": "1s", "host": "soon"}]
    with pytest.raises(ConfigError, match=r"s\.toml: models\[0\]\.host is 'soon'; write a number above 0"):
        parse_scenario(wrong, "s.toml")


def test_a_deadline_must_leave_time_for_the_host() -> None:
    short = tree()
    short["models"] = [{"name": "m", "size": "1GB", "run": "1s", "host": "1s", "deadline": "1500ms"}]
    with pytest.raises(ConfigError, match="m runs for 2000ms, its deadline is 1500ms"):
        check_deadlines(parse_scenario(short, "s.toml"), 1.0)


def test_turns_that_are_taken_make_more_requests_in_time() -> None:
    scenario = parse_scenario(tree(), "s.toml")
    late = [simulate(scenario, name, POLICIES[name], 0).late for name in ("default", "turn-kept")]
    assert late[1] > 2 * late[0] > 0.0


@pytest.mark.parametrize("turns", [1, 2])
def test_equal_seeds_give_equal_results(turns: int) -> None:
    scenario = parse_scenario(tree(turns=turns), "s.toml")
    found = []
    for seed in (3, 3, 4):
        simulation = simulation_of(scenario, scenario.policy, seed)
        found.append((simulation.run(*arrivals(scenario, seed)).tolist(), simulation.busy_s, simulation.host_nbytes))
    assert [one == other for one, other in pairwise(found)] == [True, False]
