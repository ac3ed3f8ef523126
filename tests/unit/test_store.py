"""The store as a real process over real links and shared memory: uploads, manifests, fetches, tiers, write-backs."""

import asyncio
import os
from collections.abc import Callable, Iterator

import pytest
from storekit import ARENA, StoreKit, TestExecutor

from dormouse.schemas import messages as m

MIB = 1 << 20
MakeKit = Callable[..., StoreKit]


@pytest.fixture(params=["host", "cuda"])
def make_kit(request: pytest.FixtureRequest) -> Iterator[MakeKit]:
    kits: list[StoreKit] = []

    def make(host: int = 64 * MIB, disk: str = "", sharing: str = "tenant", tenants: str = "one") -> StoreKit:
        kits.append(StoreKit(host, disk, sharing, cuda=request.param == "cuda", tenants=tenants))
        kits[-1].run(kits[-1].start())
        return kits[-1]

    yield make
    for kit in kits:
        kit.close()


def counted(kit: StoreKit, nbytes: int) -> int:
    """What so many bytes of one owner count for: where GPUs pin slabs of 4 MiB, whole ones."""
    return -(-nbytes // (4 * MIB)) * 4 * MIB if kit.config.start.cuda else nbytes


def noise(nbytes: int) -> bytes:
    return os.urandom(nbytes)


def test_what_is_uploaded_is_fetched(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        storages = {1: noise(9 * MIB), 2: noise(100), 3: noise(64 << 10), 4: b"", 5: noise(MIB), 6: noise(7)}
        instance = await kit.instance("a")
        committed = await instance.load(storages)
        assert committed == m.Committed(version=1, nbytes=committed.nbytes)
        size = await kit.heard.of(m.ModelSize)
        assert size == m.ModelSize(instance="a", version=1, nbytes=committed.nbytes)
        executor = await kit.executor()
        assert await executor.contents("a", 1) == storages
        assert len(executor.manifests["a"].segments) == 3
        late = await kit.executor("gpu1")
        assert await late.contents("a", 1) == storages

    kit.run(test())


def test_the_totals_are_of_the_moment_of_the_report(make_kit: MakeKit) -> None:
    """They are told now and then; who asks for the models' shares gets them first, if they have changed."""
    kit = make_kit()

    async def test() -> None:
        instance = await kit.instance("a", "f")
        for count in range(1, 9):
            await instance.load({count: noise(MIB)})
            report = await kit.report()
            totals = [said for said in kit.heard.messages if isinstance(said, m.StoreStatus)][-1]
            assert (totals.segments, totals.host_nbytes) == (count, counted(kit, count * MIB))
            assert report["a"].host_nbytes == count * MIB

    kit.run(test())


def test_equal_tensors_of_two_instances_lie_once(make_kit: MakeKit) -> None:
    kit = make_kit(host=28 * MIB, disk="0")
    if kit.config.start.cuda:
        return  # slabs count whole: there are other sizes for which there is just no room

    async def test() -> None:
        storages = {1: noise(9 * MIB), 2: noise(9 * MIB), 3: noise(1000), 4: noise(30)}
        one = await kit.instance("a", "f")
        await one.load(storages)
        used = (await kit.status(lambda status: status.segments == 3)).host_nbytes
        two = await kit.instance("b", "f")
        await two.load({storage + 10: data for storage, data in storages.items()})  # never has room for both
        fresh = await kit.instance("c", "g", tenant="other")
        assert await fresh.upload(1, storages[1]) == m.Uploaded()
        assert isinstance(await fresh.upload(2, storages[2]), m.StoreFailed)
        fresh.link.send(m.StoreFree(storages=[1]))
        assert (await kit.status(lambda status: status.host_nbytes == used)).segments == 3
        executor = await kit.executor()
        assert await executor.contents("b", 1) == {storage + 10: data for storage, data in storages.items()}
        manifests = executor.manifests
        assert sorted(manifests["a"].segments) == sorted(manifests["b"].segments)
        await kit.forget(one)
        await executor.heard.of(m.Dropped)
        assert await executor.model(manifests["b"]) == {storage + 10: data for storage, data in storages.items()}
        await kit.forget(two)
        await kit.forget(fresh)
        await kit.status(lambda status: (status.segments, status.host_nbytes) == (0, 0))

    kit.run(test())


@pytest.mark.parametrize(("sharing", "expected"), [("none", 3), ("tenant", 2), ("node", 1)])
def test_sharing_is_within_the_scope(make_kit: MakeKit, sharing: str, expected: int) -> None:
    kit = make_kit(sharing=sharing)

    async def test() -> None:
        data = noise(MIB)
        for name, function, tenant in (("a", "f", "t"), ("b", "g", "t"), ("c", "h", "u")):
            await (await kit.instance(name, function, tenant=tenant)).load({1: data})
        await kit.status(lambda status: status.segments == expected)
        report = await kit.report()
        assert report["a"].shared_with == {"none": [], "tenant": ["g"], "node": ["g", "h"]}[sharing]
        assert report["a"].shared_nbytes == (0 if sharing == "none" else MIB)

    kit.run(test())


def test_a_committed_storage_is_copied_when_it_is_written(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        data, small = noise(MIB), [noise(500), noise(600)]
        one, two = await kit.instance("a", "f"), await kit.instance("b", "f")
        for instance in (one, two):
            await instance.load({1: data, 2: small[0], 3: small[1]})
        assert await one.upload(1, b"x" * 10, total=MIB, offset=100) == m.Uploaded()
        assert await one.upload(2, b"y" * 10, total=500, offset=20) == m.Uploaded()
        assert (await one.commit()).version == 2
        executor = await kit.executor()
        changed = data[:100] + b"x" * 10 + data[110:]
        assert await executor.contents("a", 2) == {
            1: changed,
            2: small[0][:20] + b"y" * 10 + small[0][30:],
            3: small[1],
        }
        assert (await executor.contents("b", 1))[1] == data
        assert (await one.commit()).version == 2

    kit.run(test())


def test_freed_memory_reads_as_zero(make_kit: MakeKit) -> None:
    kit = make_kit(disk="0")

    async def test() -> None:
        executor = await kit.executor()
        for turn, name in enumerate("abc"):
            instance = await kit.instance(name)
            assert await instance.upload(1, b"", total=6 * MIB) == m.Uploaded()
            assert await instance.upload(2, b"", total=100_000) == m.Uploaded()
            # each time as far as the one before has written back
            assert await instance.upload(5, b"", total=(1 + 8 * turn) * MIB) == m.Uploaded()
            assert await instance.upload(1, b"\xff" * 10, total=6 * MIB, offset=6 * MIB - 10) == m.Uploaded()
            await instance.commit()
            contents = await executor.contents(name, 1)
            assert not any(contents[1][:-10])
            assert not any(contents[2])
            assert not any(contents[5])
            await executor.write_back(name, {3: b"\xee" * 5 * MIB, 4: b"\xdd" * 100_000})
            await executor.manifest(name, 2)
            await kit.forget(instance)
            await kit.status(lambda status: status.host_nbytes == 0)

    kit.run(test())


def test_write_backs_make_versions_without_waiting_for_a_hash(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        instance = await kit.instance("a", "f", quota=1000)
        data = noise(MIB)
        await instance.load({1: data, 2: noise(10)})
        executor = await kit.executor()
        [segment] = await executor.write_back("a", {7: data}, freed=[2])
        manifest = await executor.manifest("a", 2)
        assert {entry.storage: entry.segment for entry in manifest.entries}[7] == segment
        assert {entry.storage for entry in manifest.entries} == {1, 7}
        assert await executor.model(manifest) == {1: data, 7: data}
        # equal bytes: two segments, one file, one copy in memory
        await kit.status(lambda status: status.file_nbytes == MIB and status.host_nbytes == counted(kit, MIB))
        assert await executor.model(manifest) == {1: data, 7: data}
        _, refused = await executor.place("a", [(9, 1001)])
        assert isinstance(refused, m.PlaceRefused)
        assert "larger quota" in refused.text
        _, refused = await executor.place("nobody", [(9, 1001)])
        assert isinstance(refused, m.PlaceRefused)
        await kit.forget(instance)
        _, refused = await executor.place("a", [(9, 10)])
        assert isinstance(refused, m.PlaceRefused)

    kit.run(test())


def test_tickets_are_given_up_by_letting_go_and_by_death(make_kit: MakeKit) -> None:
    kit = make_kit(disk="0")

    async def test() -> None:
        instance = await kit.instance("a")
        await instance.load({1: noise(MIB)})
        executor = await kit.executor()
        manifest = await executor.manifest("a", 1)
        used = (await kit.status(lambda status: status.segments == 1)).host_nbytes
        ticket, _ = await executor.place("a", [(1, MIB), (2, 100)])
        await kit.status(lambda status: status.segments == 3)
        executor.let_go(ticket)
        await kit.status(lambda status: status.host_nbytes == used)
        executor.link.send(m.Written(ticket=ticket, freed=[]))
        await executor.place("a", [(1, MIB)])
        pinned, _ = await executor.begin([manifest.segments[0][0]])
        await kit.forget(instance)
        await kit.status(lambda status: status.segments == 2)  # pinned, and placed
        kit.kill_executor("gpu0")
        await kit.status(lambda status: (status.segments, status.host_nbytes) == (0, 0))
        successor = await kit.executor()
        successor.let_go(pinned)
        with pytest.raises(AssertionError, match="not known"):
            await successor.begin([manifest.segments[0][0]])

    kit.run(test())


def test_the_order_of_first_use_is_learnt_and_taught(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        storages = {number: noise(100_000 + number) for number in range(4)}
        await (await kit.instance("a", "f")).load(storages)
        executor = await kit.executor()
        before = await executor.manifest("a", 1)
        order = [segment for segment, _ in reversed(before.segments)]
        executor.link.send(m.FirstUse(instance="a", version=1, segments=order[:2]))
        after = await executor.manifest("a", 1)
        wanted = [*order[:2], *sorted(order[2:])]
        assert [segment for segment, _ in after.segments] == wanted
        assert after.entries == before.entries
        await (await kit.instance("b", "f")).load(storages)
        taught = await executor.manifest("b", 1)
        assert [segment for segment, _ in taught.segments] == wanted

    kit.run(test())


# --- two tiers


def test_models_larger_than_the_host_move_down_and_up(make_kit: MakeKit) -> None:
    kit = make_kit(host=24 * MIB)

    async def test() -> None:
        models = {f"i{number}": {1: noise(5 * MIB), 2: noise(5 * MIB), 3: noise(99)} for number in range(5)}
        for name, storages in models.items():
            await (await kit.instance(name, name)).load(storages)
        executor, other = await kit.executor(), await kit.executor("gpu1")
        status = await kit.status(lambda status: status.file_nbytes > 45 * MIB)
        assert status.host_nbytes <= 24 * MIB
        for name, storages in models.items():
            manifest = await executor.manifest(name, 1)
            contents, same = await asyncio.gather(executor.model(manifest), other.model(manifest))
            assert contents == same == storages
        manifest = executor.manifests["i0"]
        _, answers = await executor.begin([segment for segment, _ in manifest.segments])
        assert sum(answer.file_nbytes for answer in answers) == sum(nbytes for _, nbytes in manifest.segments)
        assert [answer.last for answer in answers] == [False, True]
        assert [place.segment for place in answers[1].places] == [segment for segment, _ in manifest.segments]
        spans = sorted((place.slab, place.offset) for place in answers[1].places)
        if not kit.config.start.cuda:  # there, what room there is may lie in pieces
            assert spans == [(place.slab, place.offset) for place in answers[1].places]  # in the order of use, in a row
        _, again = await executor.begin([segment for segment, _ in manifest.segments])
        assert [(answer.file_nbytes, answer.last) for answer in again] == [(0, True)]

    kit.run(test())


def test_a_large_fetch_is_answered_in_parts(make_kit: MakeKit) -> None:
    kit = make_kit(host=100 * MIB)

    async def test() -> None:
        for name, count, nbytes in (("a", 7, 12 * MIB), ("b", 4, 24 * MIB)):  # the second pushes the first down
            instance = await kit.instance(name, name)
            for number in range(count):
                assert await instance.upload(number, b"%d" % number, total=nbytes) == m.Uploaded()
            assert isinstance(await instance.commit(), m.Committed)
            await kit.status(lambda status: status.file_nbytes >= 84 * MIB)
        executor = await kit.executor()
        manifest = await executor.manifest("a", 1)
        ticket, answers = await executor.begin([segment for segment, _ in manifest.segments])
        places = [place.segment for answer in answers for place in answer.places]
        assert sorted(places) == sorted(segment for segment, _ in manifest.segments)
        assert 3 <= len(answers) <= 4
        assert answers[0].file_nbytes == 0
        executor.let_go(ticket)

    kit.run(test())


def test_what_is_pinned_stays_and_a_full_host_says_so(make_kit: MakeKit) -> None:
    kit = make_kit(host=16 * MIB, disk="0")

    async def test() -> None:
        one = await kit.instance("a", "f")
        await one.load({1: noise(10 * MIB)})
        two = await kit.instance("b", "g")
        failed = await two.upload(1, noise(7 * MIB))
        assert isinstance(failed, m.StoreFailed)
        came = 0 if kit.config.start.cuda else 4  # before there was no room for more
        assert f"models use {10 + came}.0 MiB of 16.0 MiB" in failed.text
        assert "raise limits.host" in failed.text
        assert "limits.disk" in failed.text
        assert await two.upload(2, noise(MIB)) == m.Uploaded()
        assert isinstance(await two.commit(), m.Committed)
        executor = await kit.executor()
        await executor.manifest("a", 1)
        _, refused = await executor.place("a", [(5, 7 * MIB)])
        assert isinstance(refused, m.PlaceRefused)
        assert "limits.host" in refused.text

    kit.run(test())


async def full_and_fetched(kit: StoreKit) -> tuple[TestExecutor, int]:
    """Of 16 MiB, 10 are a model's, which is in a file, too; they cannot leave before the executor lets go of the
    ticket.
    """
    await (await kit.instance("a", "f")).load({1: noise(10 * MIB)})
    await kit.status(lambda status: status.file_nbytes == 10 * MIB)
    executor = await kit.executor()
    manifest = await executor.manifest("a", 1)
    ticket, _ = await executor.begin([manifest.segments[0][0]])
    return executor, ticket


def test_room_is_made_when_a_fetch_lets_go(make_kit: MakeKit) -> None:
    kit = make_kit(host=16 * MIB)

    async def test() -> None:
        executor, ticket = await full_and_fetched(kit)
        two = await kit.instance("b", "g")
        upload = asyncio.ensure_future(two.upload(1, noise(10 * MIB)))
        await asyncio.sleep(0.2)
        assert not upload.done()
        executor.let_go(ticket)
        assert await upload == m.Uploaded()

    kit.run(test())


# --- hostile and broken instances


def test_a_broken_instance_is_told_once_and_heard_no_more(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        bad, good = await kit.instance("a"), await kit.instance("b")
        bad.link.send(m.StoreUpload(storage=1, total_nbytes=10, offset=0, arena_offset=ARENA.stream_nbytes, nbytes=1))
        failed = await bad.answer()
        assert isinstance(failed, m.StoreFailed)
        assert "stream area" in failed.text
        bad.link.send(m.Commit())
        await good.load({1: noise(1000)})
        assert bad.heard.messages == []
        worse = await kit.instance("c")
        worse.link.send_raw(b"\x93garbage")
        assert isinstance(await worse.answer(), m.StoreFailed)

    kit.run(test())


def test_what_waits_behind_a_slow_message_is_bounded(make_kit: MakeKit) -> None:
    kit = make_kit(host=16 * MIB)

    async def test() -> None:
        executor, ticket = await full_and_fetched(kit)
        flood = await kit.instance("b", "g")  # its upload waits for room until the fetch lets go
        for offset in (0, 4 * MIB):
            part = m.StoreUpload(storage=1, total_nbytes=10 * MIB, offset=offset, arena_offset=0, nbytes=4 * MIB)
            flood.link.send(part)
        for _ in range(9):
            flood.link.send(m.StoreFree(storages=list(range(20_000))))
        refused = await flood.heard.of(m.StoreFailed)
        assert "wait for the store" in refused.text
        await (await kit.instance("c", "h")).load({1: noise(10)})
        executor.let_go(ticket)

    kit.run(test())


def test_an_instance_that_dies_in_its_load_leaves_nothing(make_kit: MakeKit) -> None:
    kit = make_kit(disk="0")

    async def test() -> None:
        for turn in range(5):
            instance = await kit.instance(f"i{turn}", "f")
            await instance.upload(1, noise(3 * MIB))
            await instance.upload(2, noise(100))
            instance.link.send(m.StoreUpload(storage=3, total_nbytes=4 * MIB, offset=0, arena_offset=0, nbytes=4 * MIB))
            instance.link.send(m.Commit())
            await asyncio.sleep(0.002 * turn)
            await kit.forget(instance)
        await kit.status(lambda status: (status.segments, status.host_nbytes) == (0, 0))
        assert await kit.stop() == 0

    kit.run(test())


def test_an_upload_that_waits_for_room_finds_its_storage_replaced(make_kit: MakeKit) -> None:
    """An executor writes the storage back, and its old segment goes, while a part of it is being uploaded."""
    kit = make_kit(256 * MIB, "1GiB")

    async def test() -> None:
        executor = await kit.executor()
        kit.controller.send(m.Keep(functions=[("g", 1)]))
        filler, instance = await kit.instance("g", function="g"), await kit.instance("a")
        await filler.load({1: b"\x11" * (100 * MIB)})
        await kit.status(lambda status: status.file_nbytes >= 100 * MIB)  # what can make room
        await instance.load({1: b"\x22" * (60 * MIB)})
        ticket, _ = await executor.place("a", [(1, 60 * MIB)])
        instance.arena.view[ARENA.stream_offset : ARENA.stream_offset + MIB] = b"\x33" * MIB
        upload = m.StoreUpload(storage=1, total_nbytes=60 * MIB, offset=0, arena_offset=0, nbytes=MIB)
        instance.link.send(upload)
        await asyncio.sleep(0)
        executor.link.send(m.Written(ticket=ticket, freed=[]))
        assert isinstance(await instance.answer(), m.Uploaded | m.StoreFailed)
        assert await filler.upload(2, b"still there") == m.Uploaded()

    kit.run(test())


def test_d6_what_lies_between_and_behind_a_models_tensors_is_nobodys(make_kit: MakeKit) -> None:
    """The bytes between the tensors of a pack, and what an upload leaves out, where another's model lay before."""
    kit = make_kit(host=64 * MIB, disk="0")
    secret = b"\xa7"

    async def test() -> None:
        executor = await kit.executor()
        other = await kit.instance("o", tenant="s")  # so that the slab stays
        await other.load({1: b"other"})
        base = (await kit.status(lambda status: status.segments == 1)).host_nbytes
        keeper = await kit.instance("a", tenant="s")
        await keeper.load({number: secret * (997 + number) for number in range(300)} | {300: secret * (3 * MIB)})
        manifest = await executor.manifest("a", 1)
        ticket, answers = await executor.begin([segment for segment, _ in manifest.segments])
        before = {place.slab for answer in answers for place in answer.places}
        for place in [place for answer in answers for place in answer.places]:
            assert secret * 997 in await executor.read(place)
        executor.let_go(ticket)
        await kit.forget(keeper)
        await kit.status(lambda status: (status.segments, status.host_nbytes) == (1, base))
        spy = await kit.instance("b", tenant="s")
        assert await spy.upload(0, b"x" * 10, total=3 * MIB, offset=70_000) == m.Uploaded()
        await spy.load({number: b"x" * (number % 500) for number in range(1, 300)})
        manifest = await executor.manifest("b", 1)
        ticket, answers = await executor.begin([segment for segment, _ in manifest.segments])
        places = [place for answer in answers for place in answer.places]
        assert {place.slab for place in places} == before
        content = b"".join([await executor.read(place) for place in places])
        assert len(content) > 3 * MIB
        assert set(content) == set(b"x\0")
        executor.let_go(ticket)

    kit.run(test())


def test_d1_what_is_announced_takes_nothing_from_others(make_kit: MakeKit) -> None:
    """Bytes that came count: not those that an instance says will come, and each tenant has its part."""
    kit = make_kit(host=64 * MIB, disk="0", tenants="many")

    async def test() -> None:
        hog = await kit.instance("a", "f", tenant="hog")
        answers = [await hog.upload(number, b"", total=4 * MIB) for number in range(40)]
        assert isinstance(answers[-1], m.StoreFailed)
        part = (
            "models of tenant 'hog' have 32.0 MiB there" if kit.config.start.cuda else "it would be 68.0 MiB, of 64.0"
        )
        assert f"no host memory for 4.0 MiB: {'' if kit.config.start.cuda else 'with what is being loaded '}{part}" in (
            answers[-1].text
        )
        most = 8 if kit.config.start.cuda else 16  # where GPUs pin slabs, each is there as soon as it is announced
        assert answers == [m.Uploaded()] * most + [answers[-1]] * (40 - most)
        held = 32 * MIB if kit.config.start.cuda else 0
        await kit.status(lambda status: status.host_nbytes == held)  # earlier ones may be on their way
        other = await kit.instance("b", "g", tenant="other")
        await other.load({number: noise(4 * MIB) for number in range(8)})
        refused = await other.upload(9, noise(4 * MIB))
        assert isinstance(refused, m.StoreFailed)
        assert "models of tenant 'other' have 32.0 MiB there that are in no file, of 32.0 MiB" in refused.text
        assert "[tenants.other] host" in refused.text
        for number in range(most):
            answer = await hog.upload(number, noise(4 * MIB))
            assert answer == m.Uploaded() or number >= 8, answer
        assert isinstance(answer, m.StoreFailed) or kit.config.start.cuda
        await kit.forget(hog)
        await kit.status(lambda status: status.host_nbytes == 32 * MIB)
        assert await (await kit.instance("c", "h", tenant="hog")).upload(1, noise(4 * MIB)) == m.Uploaded()

    kit.run(test())


def test_d1_what_is_being_loaded_makes_room_for_a_deployed_model(make_kit: MakeKit) -> None:
    """A wake waits for nobody who does not end: the largest load is ended for it."""
    kit = make_kit(host=16 * MIB)

    async def test() -> None:
        deployed = noise(8 * MIB)
        one = await kit.instance("a", "f")
        await one.load({1: deployed})
        await kit.status(lambda status: status.file_nbytes == 8 * MIB)
        small = await kit.instance("b", "g")
        assert await small.upload(1, noise(MIB), total=2 * MIB) == m.Uploaded()
        hog = await kit.instance("c", "h")
        for number in range(3):
            assert await hog.upload(number, noise(4 * MIB - 1), total=4 * MIB) == m.Uploaded()
        executor = await kit.executor()
        reading = asyncio.ensure_future(executor.contents("a", 1))
        assert await kit.heard.of(m.LoadDisplaced) == m.LoadDisplaced(instance="c")
        await kit.forget(hog)  # as the router does then
        assert await reading == {1: deployed}
        assert await small.upload(1, noise(MIB), total=2 * MIB, offset=MIB) == m.Uploaded()

    kit.run(test())
