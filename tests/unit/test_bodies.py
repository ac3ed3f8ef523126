"""The budget of bodies: who waits, in which order, and that all that was taken comes back."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from dormouse.router.front import bodies as b

MIB = 1 << 20


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def filled(bodies: b.Bodies, nbytes: int, data: bytes = b"x") -> b.Body:
    body = b.Body(bodies)
    for start in range(0, nbytes, 50_000):
        await body.add(data * min(50_000, nbytes - start), nbytes)
    return body.complete()


def test_a_small_body_takes_no_room() -> None:
    async def work() -> None:
        bodies = b.Bodies(0)
        body = await filled(bodies, b.SMALL_NBYTES)
        assert (len(body.data), bodies.taken_nbytes) == (b.SMALL_NBYTES, 0)
        body.close()

    run(work())


def test_a_large_one_takes_what_was_announced_and_keeps_what_came() -> None:
    async def work() -> None:
        bodies = b.Bodies(4 * MIB)
        body = b.Body(bodies)
        await body.add(b"a" * 40_000, 3 * MIB)
        assert bodies.taken_nbytes == 0
        await body.add(b"b" * 40_000, 3 * MIB)
        assert bodies.taken_nbytes == 3 * MIB
        body.complete()
        assert bytes(body.data) == b"a" * 40_000 + b"b" * 40_000
        assert bodies.taken_nbytes == 80_000
        body.close()
        assert bodies.taken_nbytes == 0
        body.close()  # again is no harm
        assert bodies.taken_nbytes == 0

    run(work())


def test_who_has_no_room_waits_in_order_of_arrival() -> None:
    async def work() -> None:
        bodies = b.Bodies(3 * MIB)
        first = await filled(bodies, 2 * MIB)
        large = asyncio.ensure_future(filled(bodies, 2 * MIB))
        small = asyncio.ensure_future(filled(bodies, MIB))  # would fit, and is not let past
        left = asyncio.ensure_future(filled(bodies, MIB))
        await asyncio.sleep(0)
        assert bodies.waiting == 3
        left.cancel()
        first.close()
        assert [len((await task).data) for task in (large, small)] == [2 * MIB, MIB]
        assert (bodies.waiting, bodies.taken_nbytes) == (0, 3 * MIB)
        bodies.unread(MIB)  # an answer that is not read counts too
        (await large).close()
        third = asyncio.ensure_future(filled(bodies, 2 * MIB))
        await asyncio.sleep(0)
        assert bodies.waiting == 1
        bodies.unread(0)
        (await third).close()
        (await small).close()
        assert bodies.taken_nbytes == 0

    run(work())


def test_d1_who_announces_much_keeps_room_from_nobody_else() -> None:
    async def work() -> None:
        bodies = b.Bodies(8 * MIB, 4 * MIB)
        hog = [b.Body(bodies, "hog") for _ in range(6)]
        begun = [asyncio.ensure_future(each.expect(MIB)) for each in hog]  # and sends nothing more
        await asyncio.sleep(0)
        assert (bodies.taken_nbytes, bodies.waiting) == (4 * MIB, 2)
        others = [b.Body(bodies, owner) for owner in ("a", "b", "a")]
        for each in others[:2]:
            await each.expect(2 * MIB)
        assert (bodies.taken_nbytes, bodies.waiting) == (8 * MIB, 2)
        waiting = asyncio.ensure_future(others[2].expect(MIB))
        await asyncio.sleep(0)
        hog[0].close()  # the hog's next was before, and has its part again
        await begun[4]
        assert bodies.waiting == 2
        hog[1].complete()
        hog[2].complete()  # nothing came: all of it is given back
        await asyncio.gather(*begun, waiting)
        for each in (*hog, *others[1:]):
            each.close()
        assert (bodies.taken_nbytes, bodies._owned) == (2 * MIB, {"a": 2 * MIB})

    run(work())


def test_who_waits_too_long_is_told_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bodies = b.Bodies(2 * MIB)
        held = await filled(bodies, MIB)
        monkeypatch.setattr(b, "ROOM_S", 0.01)
        waits = asyncio.ensure_future(filled(bodies, 2 * MIB))
        await asyncio.sleep(0)
        monkeypatch.setattr(b, "ROOM_S", 60.0)
        behind = asyncio.ensure_future(filled(bodies, MIB))
        with pytest.raises(b.NoRoom):
            await waits
        (await behind).close()
        held.close()
        assert (bodies.waiting, bodies.taken_nbytes) == (0, 0)

    run(work())


def test_pages_of_a_body_serve_the_next_one_and_show_nothing_of_it() -> None:
    async def work() -> None:
        bodies = b.Bodies(4 * MIB)
        first = await filled(bodies, 2 * MIB, b"a")
        pages = first._pages
        first.close()
        second = b.Body(bodies)
        await second.add(b"b" * 100_000, MIB + 7)
        assert second._pages is pages
        rest = second.rest()
        assert rest is not None
        with rest:
            assert len(rest) == MIB + 7 - 100_000
            rest[:] = b"c" * len(rest)
        second.filled()
        assert bytes(second.complete().data) == b"b" * 100_000 + b"c" * (MIB + 7 - 100_000)
        assert bodies.taken_nbytes == 2 * MIB, "the pages are as large as they are"
        second.close()
        assert bodies.taken_nbytes == 0

    run(work())


def test_pages_are_not_kept_that_others_have_no_room_for() -> None:
    async def work() -> None:
        bodies = b.Bodies(3 * MIB)
        held, first = await filled(bodies, 2 * MIB), await filled(bodies, MIB)
        first.close()
        assert bodies._spare is not None
        again = await filled(bodies, MIB)
        assert bodies._spare is None
        other = asyncio.ensure_future(filled(bodies, MIB))
        await asyncio.sleep(0)
        again.close()  # who waited has the room now
        assert bodies._spare is None
        (await other).close()
        held.close()
        bodies._forget()
        assert (bodies._spare, bodies.taken_nbytes) == (None, 0)

    run(work())
