"""The recording of a node that runs: begun with its controller, written out every moment, and given up where it cannot
be written.
"""

import asyncio
from pathlib import Path
from typing import Any

from dormouse.controller.recording import FLUSH_S, FULL, Recorder, RecordingHeader
from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.errors import ConfigError


class NodeRecord:
    """``log`` is the process's. Until `begin`, nothing is recorded."""

    def __init__(self, header: RecordingHeader, log: Any) -> None:
        self._header, self._log = header, log
        self._recorder: Recorder | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, path: Path, config: NodeConfig, first: bool) -> None:
        """A node that starts (``first``) reports the error; one whose controller has died, or whose disk is full, goes
        without. Raises ConfigError.
        """

        def stopped(why: str) -> None:
            self._recorder = None
            self._log.warning("recording_stopped", path=config.record.path, reason=why)

        try:
            self._recorder = Recorder(path, parse_nbytes(config.record.limit), self._header, stopped)
        except (OSError, ConfigError) as error:
            stopped(str(error))
            if not first or (isinstance(error, OSError) and error.errno in FULL):
                return
            if isinstance(error, OSError):
                text = f"record.path: {path}: {error.strerror}; write a path that the node may make files at"
                raise ConfigError(text) from error
            raise

    def add(self, now_s: float, event: ev.Event, actions: list[ev.Action]) -> None:
        if self._recorder is not None:
            self._recorder.record(now_s, event, actions)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._recorder is not None:
            self._recorder.close()
