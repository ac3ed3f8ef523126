"""A peer that hangs up with answers unread is noticed, and the next one is met."""

import asyncio
import threading
from pathlib import Path

import uvloop

from dormouse.core.links.blocking_link import BlockingLink
from dormouse.core.links.link import RawLink

TIMES = 3000
"""Without what is tested, the end of about one in 500 was never noticed."""


def test_the_next_peer_is_met_though_the_last_one_was_answered_when_it_had_gone(tmp_path: Path) -> None:
    paths, met = [str(tmp_path / str(number)) for number in range(4)], [0] * 4

    def clients(number: int) -> None:
        for _ in range(TIMES // 4):
            link = BlockingLink(paths[number])
            if not link.meet(5.0):
                return
            for _ in range(5):
                link.send(b"x" * 1000)
            link.close()
            met[number] += 1

    async def serve() -> None:
        links: list[RawLink] = []

        def answering(number: int) -> RawLink:
            def answer(data: bytes) -> None:
                for _ in range(2):
                    links[number].send_raw(data)

            return RawLink(paths[number], bind=True, on_message=answer)

        links += [answering(number) for number in range(4)]
        threads = [threading.Thread(target=clients, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        for link in links:
            link.close()

    uvloop.run(serve())
    assert met == [TIMES // 4] * 4
