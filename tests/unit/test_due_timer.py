"""One timer for whatever is due first."""

import asyncio
import time

from dormouse.core.due_timer import DueTimer

HOUR_S = 3600.0


def test_what_is_due_first_does_not_wait_for_what_was_asked_for_before() -> None:
    """A turn that is given up after 20 ms, when an hour's metering had been asked for."""

    async def ticked() -> None:
        rang = asyncio.Event()
        timer = DueTimer(rang.set)
        timer.set(time.monotonic() + HOUR_S)
        timer.set(time.monotonic())
        timer.set(time.monotonic() + HOUR_S)
        await rang.wait()
        timer.set(time.monotonic() + HOUR_S)
        timer.close()

    asyncio.run(ticked())


def test_nothing_is_due() -> None:
    async def quiet() -> list[str]:
        rang: list[str] = []
        timer = DueTimer(lambda: rang.append("rang"))
        timer.set(None)
        timer.set(time.monotonic())
        timer.close()
        await asyncio.sleep(0)
        return rang

    assert asyncio.run(quiet()) == []
