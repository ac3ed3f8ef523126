"""The router's connection to a zygote: its commands, and its reports as events. Decides nothing."""

from collections.abc import Callable
from typing import Any, assert_never

from dormouse.core.config import SandboxSection
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.paths import RunPaths
from dormouse.core.poster import Poster
from dormouse.core.quantities import signal_name
from dormouse.core.sandbox.world import ZYGOTE
from dormouse.router.instances.instances import Instances
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost


class ZygoteLink:
    """``changed`` is called when ``warm`` may have changed; ``lost``, when all that it had forked is gone."""

    def __init__(
        self,
        sandbox: SandboxSection,
        paths: RunPaths,
        instances: Instances,
        dispatch: Callable[[e.Event], None],
        changed: Callable[[], None],
        lost: Callable[[], None],
        log: Any,
        role: str = ZYGOTE,
    ) -> None:
        self.warm = False
        self.modules: frozenset[str] = frozenset()
        self.versions = ("", "")  # of Python and torch
        self._role = role
        self._gone = lost
        self.confinement = ""
        self._sandbox = sandbox
        self._paths = paths
        self._instances = instances
        self._dispatch = dispatch
        self._changed = changed
        self._log = log
        self._epoch = 0
        self._poster: Poster[m.FromZygote, m.ToZygote] | None = None

    def connect(self, epoch: int) -> None:
        """Connect to the zygote of this epoch; 0: there is none."""
        if epoch == self._epoch:
            return
        self._lost()
        self._epoch = epoch
        if epoch:
            try:
                self._poster = Poster(self._paths.zygote(epoch, self._role), m.FromZygote, self._hear, self._lost)
            except PeerLost as error:
                self._log.warning("zygote_unreachable", error=str(error))  # it died meanwhile; a new epoch will come

    def _lost(self) -> None:
        if self._poster is not None:
            self.close()
            self._poster, self.warm = None, False
            self._log.warning("zygote_lost", epoch=self._epoch)
            self._changed()
            self._gone()

    def _hear(self, message: m.FromZygote) -> None:
        match message:
            case m.ZygoteReady(confinement=confinement, python=python, torch=torch, modules=modules):
                self.warm, self.confinement, self.modules = True, confinement, frozenset(modules)
                self.versions = python, torch
                self._instances.own_uids = confinement.startswith("own-uid")
                self._changed()
            case m.Forked(instance=name, pid=pid):
                if (host := self._instances.hosts.get(name)) is not None:
                    host.pid = pid
            case m.Exited(instance=name, limit="memory"):
                met = self._sandbox.limit("memory")
                self._dispatch(e.InstanceExited(name, f"was ended at its {met}", failures.limit_exceeded(met)))
            case m.Exited(instance=name, status=status):
                how = f"exited with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"
                self._dispatch(e.InstanceExited(name, how))
            case m.ForkFailed(instance=name, text=text):
                self._dispatch(e.InstanceExited(name, f"could not be forked: {text}"))
            case _:
                assert_never(message)

    def post(self, message: m.ToZygote, fds: tuple[int, ...] = ()) -> None:
        if self._poster is not None:
            self._poster.post(message, fds)

    def close(self) -> None:
        """Close the link, which ends all that it has forked."""
        if self._poster is not None:
            self._poster.close()

    def reset(self) -> None:
        """The same, and it may be connected to again."""
        self.close()
        self._poster, self.warm, self._epoch = None, False, 0
