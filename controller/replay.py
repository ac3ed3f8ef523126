"""`dormouse replay`: feeds a recording's events to a fresh scheduler and compares its actions."""

import sys
from itertools import zip_longest
from typing import Any

import click
import msgspec

from dormouse.controller.recording import Recording
from dormouse.core.decisions.scheduling.events import Action, Event
from dormouse.core.output import show_json


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first action that is not the same. ``number`` counts events from 1, ``at_s`` is the time since the first."""

    number: int
    at_s: float
    event: Event
    recorded: Action | None
    replayed: Action | None


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. ``seconds`` lie between the first event and the last; ``cut_nbytes`` are at the end of a file
    whose writer was killed.
    """

    events: int
    actions: int
    seconds: float
    cut_nbytes: int
    difference: Difference | None


def replay(recording: Recording) -> Replay:
    """Stops at the first difference. Raises ConfigError where the file is damaged."""
    scheduler = recording.header.scheduler()
    events = actions = 0
    began_s = last_s = 0.0
    difference = None
    for entry in recording.events():
        last_s = entry.now_s
        if not events:
            began_s = last_s
        events += 1
        replayed = scheduler.handle(entry.event, entry.now_s)
        if replayed != entry.actions:
            pairs = zip_longest(entry.actions, replayed)
            index, (theirs, ours) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            actions += index
            difference = Difference(
                number=events, at_s=last_s - began_s, event=entry.event, recorded=theirs, replayed=ours
            )
            break
        actions += len(replayed)
    return Replay(
        events=events,
        actions=actions,
        seconds=last_s - began_s,
        cut_nbytes=recording.cut_nbytes,
        difference=difference,
    )


def main(path: str, json_: bool = False) -> None:
    """Replay and print; leaves with status 1 if something differs. Raises ConfigError."""
    recording = Recording(path)
    found = replay(recording)
    if json_:
        show_json(_as_json(recording, found))
    else:
        show(recording, found)
    if found.difference is not None:
        sys.exit(1)


def show(recording: Recording, found: Replay) -> None:
    cut = f"; the last one is cut off ({found.cut_nbytes:,} bytes)" if found.cut_nbytes else ""
    click.echo(f"recorded by Dormouse {recording.header.dormouse}")
    click.echo(f"{found.events:,} whole events in {found.seconds:.3f} s{cut}, {found.actions:,} actions")
    if (difference := found.difference) is None:
        click.echo("identical")
        return
    click.echo(f"different at {difference.at_s:.6f} s, event {difference.number:,}: {difference.event}")
    click.echo(f"  recorded: {_said(difference.recorded)}")
    click.echo(f"  replayed: {_said(difference.replayed)}")


def _said(action: Action | None) -> str:
    return "nothing more" if action is None else str(action)


def _as_json(recording: Recording, found: Replay) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.to_builtins(found)
    difference = found.difference
    if difference is not None:
        value["difference"] |= {
            "event": str(difference.event),
            "recorded": _said(difference.recorded),
            "replayed": _said(difference.replayed),
        }
    return {"dormouse": recording.header.dormouse, "identical": difference is None, **value}
