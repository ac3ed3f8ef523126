"""Recordings: what is written is read, whatever happens to the writer or the file; replays find any difference."""

import contextlib
import os
import random
import subprocess
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.controller.recording import FORMAT, FRAME, MAGIC, RecordedEvent, Recorder, Recording, RecordingHeader
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.nodefile import load_config, parse_config
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

UNBOUNDED: Final = 1 << 40
PLAIN: Final[dict[Any, st.SearchStrategy[Any]]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bool: st.booleans(),
    type(None): st.none(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of which messages are made."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([any_of(part) for part in parts])
    if origin is list:
        return st.lists(any_of(parts[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(any_of(parts[0]), any_of(parts[1]), max_size=3)
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(any_of(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[any_of(part) for part in parts])
    assert issubclass(kind, msgspec.Struct), kind
    hints = get_type_hints(kind)
    return st.builds(kind, **{field: any_of(hints[field]) for field in kind.__struct_fields__})


ENTRIES: Final = st.lists(
    st.builds(RecordedEvent, any_of(float), any_of(ev.Event), st.lists(any_of(ev.Action), max_size=3))
)


def header(**changes: Any) -> RecordingHeader:
    made: dict[str, Any] = {
        "seed": 2**127 + 12345,
        "revoke_s": 5.0,
        "max_waiting": 100,
        "policy": Policy(),
        "topology": Topology(),
        "keep_s": 5.0,
    }
    return RecordingHeader.new(**(made | changes))


def unexpected(why: str) -> None:
    raise AssertionError(why)


def write(path: Path, entries: list[RecordedEvent], of: RecordingHeader | None = None) -> None:
    recorder = Recorder(path, UNBOUNDED, of or header(), unexpected)
    for entry in entries:
        recorder.record(entry.now_s, entry.event, entry.actions)
    recorder.close()


def read(path: Path) -> list[RecordedEvent]:
    return list(Recording(str(path)).events())


def ticks(count: int) -> list[RecordedEvent]:
    return [RecordedEvent(float(k), ev.InstanceLost(f"i{k}"), []) for k in range(count)]


@given(entries=ENTRIES)
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries: list[RecordedEvent]) -> None:
    path = tmp_path_factory.mktemp("r") / "record"
    made = header(policy=Policy(order="edf", window=7), topology=Topology(host_bps=1 / 3, peer_bps=((0.0, 1e9),)))
    write(path, entries, made)
    assert Recording(str(path)).header == made
    assert read(path) == entries


def test_a_file_that_ends_anywhere_has_the_whole_events_before(tmp_path: Path) -> None:
    path = tmp_path / "record"
    entries = ticks(3)
    write(path, entries)
    data = path.read_bytes()
    write(tmp_path / "empty", [])
    begin = (tmp_path / "empty").stat().st_size
    frame = (len(data) - begin) // 3
    for nbytes in range(len(data)):
        path.write_bytes(data[:nbytes])
        if nbytes < begin:
            with pytest.raises(ConfigError, match=r"not a recording|nothing was recorded"):
                Recording(str(path))
            continue
        recording = Recording(str(path))
        assert list(recording.events()) == entries[: (nbytes - begin) // frame]
        assert recording.cut_nbytes == (nbytes - begin) % frame


def test_a_changed_byte_never_passes(tmp_path: Path) -> None:
    path = tmp_path / "record"
    entries = ticks(3)
    write(path, entries)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with contextlib.suppress(ConfigError):
            recording = Recording(str(path))
            found = list(recording.events())
            assert recording.cut_nbytes, "a length that points behind the end"
            assert found == entries[: len(found)]


def test_the_place_of_the_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, ticks(3))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    at = path.stat().st_size - (path.stat().st_size - _empty_nbytes(tmp_path)) // 3
    with pytest.raises(ConfigError, match=rf"is damaged after 2 events, at byte {at:,};"):
        read(path)


def _empty_nbytes(folder: Path) -> int:
    write(folder / "none", [])
    return (folder / "none").stat().st_size


@pytest.mark.parametrize("text", [b"", b"# a node file\n", MAGIC[:-1]], ids=["empty", "toml", "short"])
def test_what_is_no_recording(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "record"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is not a recording; give"):
        Recording(str(path))
    with pytest.raises(ConfigError, match="No such file or directory; give"):
        Recording(str(tmp_path / "other"))


NO_TEXT = (
    b"\x82\xa6format\x07\xa8dormouse\xa1\xff",
    msgspec.msgpack.encode(RecordedEvent(1.0, ev.InstanceLost("x"), [])).replace(b"\xa1x", b"\xa1\xff"),
)
"""A header and an event, whose texts are none."""


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", b"\xa1\xff", b"\x91" * 100_000, *NO_TEXT])
def test_frames_that_dormouse_has_not_written_are_said_to_be_none(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "record"
    frame = FRAME.pack(len(body), zlib.crc32(body)) + body
    path.write_bytes(MAGIC + frame)
    with pytest.raises(ConfigError, match="it was not written by Dormouse"):
        Recording(str(path))
    write(path, [])
    with path.open("ab") as file:
        file.write(frame)
    with pytest.raises(ConfigError, match="was recorded by Dormouse"):
        read(path)


@pytest.mark.parametrize("format_", [1, FORMAT - 1, FORMAT + 1], ids=["before seats and turns", "before", "later"])
def test_another_format_names_its_dormouse(tmp_path: Path, format_: int) -> None:
    path = tmp_path / "record"
    write(path, ticks(1), msgspec.structs.replace(header(), format=format_, dormouse="9.9"))
    with pytest.raises(ConfigError, match=r"was recorded by Dormouse 9\.9"):
        Recording(str(path))


def test_the_file_is_its_owners_alone_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "record"
    before = os.umask(0)
    try:
        for count in (1, 2, 3):
            write(path, ticks(count))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (len(read(path)), len(read(tmp_path / "record.1"))) == (3, 2)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["record", "record.1"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_a_recording_is_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    there = tmp_path / name
    if kind == "folder":
        there.mkdir()
    elif kind == "link":
        there.symlink_to(tmp_path / "nowhere")
    else:
        there.write_text("a diary")
    with pytest.raises(ConfigError, match=rf"record\.path: {there} is there and is not a recording"):
        write(tmp_path / "record", ticks(1))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_recording_stops_at_its_limit_and_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "record"
    said: list[str] = []
    recorder = Recorder(path, 2_000, header(), said.append)
    for entry in ticks(1000):
        recorder.record(entry.now_s, entry.event, entry.actions)
    recorder.flush()
    recorder.close()
    assert len(said) == 1
    assert "record.limit, 2.0 KiB" in said[0]
    assert not recorder.on
    assert 1_900 < path.stat().st_size <= 2_000
    recording = Recording(str(path))
    found = list(recording.events())
    assert found == ticks(1000)[: len(found)]
    assert recording.cut_nbytes == 0


FULL: Final = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_recording import Recorder, header, ticks
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a write across it is cut short, the next one fails
said = []
recorder = Recorder(Path(sys.argv[1]), 1 << 40, header(), said.append)
for entry in ticks(10_000):
    recorder.record(entry.now_s, entry.event, entry.actions)
recorder.close()
print(len(said), *said, recorder.on)
"""


def test_a_disk_that_takes_no_more_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "record"
    words = [sys.executable, "-c", FULL, str(path), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert done.stdout == "1 File too large False\n", done.stderr
    assert 60_000 < path.stat().st_size < 100_000, "what was written before is kept"
    recording = Recording(str(path))
    found = list(recording.events())
    assert found == ticks(10_000)[: len(found)]
    assert recording.cut_nbytes == 0


# --- replays


def record_simulation(path: Path, policy: Policy) -> int:
    """A run with evictions, switches and copies between GPUs; returns how many events there were."""
    topology = Topology(
        host_bps=1e9, switch_bps=1.5e9, switches=(0, 0, 1), peer_bps=((0, 3e9, 0), (3e9, 0, 0), (0.0, 0.0, 0.0))
    )
    models = [
        ModelSpec(
            name="m",
            nbytes=(1 + k % 3) * 50_000_000,
            run_s=0.02 + k / 500,
            extra_s=0.004,
            batch=4 * (k % 2),
            batch_wait_s=0.005,
            per_request_s=0.002,
        )
        for k in range(9)
    ]
    simulation = Simulation(policy, topology, 3, 200_000_000, models, [0.15] * 9, 0.9, seed=5)
    made = header(seed=5, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=topology)
    recorder = Recorder(path, UNBOUNDED, made, unexpected)
    core = Scheduler(seed=5, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=topology)
    handle: Callable[[ev.Event, float], list[ev.Action]] = core.handle
    count = 0

    def handled(event: ev.Event, now_s: float) -> list[ev.Action]:
        nonlocal count
        count += 1
        actions = handle(event, now_s)
        recorder.record(now_s, event, actions)
        return actions

    core.handle = handled  # type: ignore[method-assign]
    for gpu in simulation.core.gpus.values():
        handled(ev.ExecutorUp(gpu.number, 1, gpu.stats), 0.0)
    for name, function in simulation.core.functions.items():
        handled(ev.FunctionKnown(name, function.deadline_s, function.percentile, 1.0), 0.0)
    for instance, model in simulation.core.models.items():
        handled(ev.InstanceKnown(instance, instance), 0.0)
        handled(ev.ModelSized(instance, 1, model.nbytes), 0.0)
    simulation.core = core
    rng = np.random.default_rng(3)
    latency_s = simulation.run(np.sort(rng.uniform(0.0, 20.0, 1000)), rng.integers(0, 9, 1000))
    assert np.isfinite(latency_s).all()
    recorder.close()
    return count


def replayed(path: Path, *words: str, hash_seed: str = "0") -> "subprocess.CompletedProcess[str]":
    """`dormouse replay` in a process of its own, in which sets of strings have another order."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "replay", str(path), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(order="rrc-latency", placement="torpor", eviction="torpor", passed_over_ms=0),
        Policy(placement="random", eviction="lru", order="edf"),
        Policy(placement="tangram", eviction="tangram", order="rrc"),
    ],
    ids=lambda policy: policy.placement,
)
def test_a_replay_is_identical(tmp_path: Path, policy: Policy) -> None:
    path = tmp_path / "record"
    count = record_simulation(path, policy)
    found = replay(Recording(str(path)))
    assert found.difference is None
    assert found.events == count
    assert found.actions >= 1500, "a lease and its end for each request or batch"
    assert found.cut_nbytes == 0


def test_a_replay_is_identical_in_processes_with_other_hashes(tmp_path: Path) -> None:
    path = tmp_path / "record"
    count = record_simulation(path, Policy())
    entries = read(path)
    span_s = entries[-1].now_s - entries[0].now_s
    for hash_seed in ("1", "2"):
        done = replayed(path, hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        assert f"\n{count:,} whole events in {span_s:.3f} s, " in done.stdout
        assert done.stdout.endswith("\nidentical\n")


def test_the_first_difference_is_shown_with_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record_simulation(path, Policy())
    entries, made = read(path), Recording(str(path)).header
    at = random.Random(1).choice([k for k, entry in enumerate(entries) if len(entry.actions) > 1])
    true = entries[at].actions
    other = msgspec.structs.replace(true[-1], request=99_999)
    entries[at] = RecordedEvent(entries[at].now_s, entries[at].event, [*true[:-1], other])
    (tmp_path / "changed").mkdir()
    path = tmp_path / "changed" / "record"
    write(path, entries, made)
    found = replay(Recording(str(path)))
    assert found.difference is not None
    assert (found.events, found.difference.number) == (at + 1, at + 1)
    assert found.difference.at_s == entries[at].now_s - entries[0].now_s
    assert (found.difference.recorded, found.difference.replayed) == (other, true[-1])
    assert found.actions == sum(len(entry.actions) for entry in entries[:at]) + len(true) - 1
    done = replayed(path)
    assert done.returncode == 1
    assert f"  recorded: {other}\n  replayed: {true[-1]}\n" in done.stdout
    as_json = msgspec.json.decode(replayed(path, "--json").stdout)
    assert (as_json["identical"], as_json["difference"]["recorded"]) == (False, str(other))


def test_an_action_too_many_or_missing_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "record"
    lost = ev.RevokeOn(0, 1)
    write(path, [RecordedEvent(0.0, ev.Tick(), [lost])])
    missing = replay(Recording(str(path))).difference
    assert missing is not None
    assert (missing.recorded, missing.replayed) == (lost, None)
    asked = ev.InstanceKnown("a", "a"), ev.InstanceLost("a")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "record", [RecordedEvent(0.0, event, []) for event in asked])
    more = replay(Recording(str(tmp_path / "more" / "record"))).difference
    assert more is not None
    assert (more.number, more.recorded, more.replayed) == (2, None, ev.ForgetInstance("a"))


def test_a_cut_file_says_how_many_events_were_whole(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, [RecordedEvent(0.0, ev.Tick(), [])] * 3)
    path.write_bytes(path.read_bytes()[:-2])
    done = replayed(path)
    assert done.returncode == 0
    assert "2 whole events in 0.000 s; the last one is cut off (" in done.stdout
    assert done.stdout.endswith("\nidentical\n")


def test_bad_files_get_one_line(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(MAGIC + FRAME.pack(3, 0) + b"abc")
    for file in (path, tmp_path / "none", tmp_path):
        done = replayed(file)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"dormouse: {file}: ")
        assert done.stderr.count("\n") == 1


def test_the_settings(tmp_path: Path) -> None:
    assert parse_config({}).record.path == ""
    text = '[record]\npath = "events"\nlimit = "much"\n'
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"node\.toml:3: record\.limit: 'much' is not a size; write"):
        load_config(tmp_path / "node.toml")
