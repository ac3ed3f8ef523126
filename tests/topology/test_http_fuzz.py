"""A few thousand mutated HTTP requests against the real router, beside a client whose answers are checked."""

import asyncio
from collections.abc import Iterator

import pytest
from topology.test_router import World, spec

from benchmarks.compare_heads import compare
from benchmarks.fuzz_http import fuzz

REQUESTS = 3000


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World([spec("echo", "echo"), spec("neighbour", "echo")])
    try:
        yield world.ready()
    finally:
        world.close()


def test_d9_no_http_breaks_the_router_or_its_other_clients(world: World) -> None:
    tally = asyncio.run(fuzz(world.port, "echo", "neighbour", REQUESTS))
    assert tally.wrong == []
    assert world.process.poll() is None
    assert tally.past_the_parser >= 0.5
    assert {answer.split()[0] for answer in tally.answers} >= {"200", "400", "404", "405", "413", "431"}
    assert tally.answers["400 bad_http"] > 0
    assert tally.answers["400 bad_json"] > 0
    assert tally.neighbour > 10
    assert tally.silent < REQUESTS / 2
    assert world.row("echo")["queued"] == 0


def test_answers_to_mutated_heads_differ_from_h11s_where_that_is_right() -> None:
    found = asyncio.run(compare(1000, 5))
    assert [key for key in found if not key[-1]] == []
    assert found.total() > 100, "both were asked"
    assert all(own != "waits" for _, own, _, _ in found)
