"""The Python client of a node, over HTTP: functions, jobs and streams. Needs httpx2, and not torch.

::

    from dormouse.client import Client

    with Client("http://127.0.0.1:8700") as node:
        print(node.invoke("hello", {"x": [1, 2, 3, 4]}))

The modules of a class are imported when it is first named: httpx2 takes longer than all else here.
"""

from typing import TYPE_CHECKING, Any

from dormouse.client.errors import (
    ApiError,
    BadAnswer,
    CallCancelled,
    CallError,
    CallTimeout,
    ConnectionBroke,
    FunctionFailed,
    FunctionRefused,
    NodeBusy,
    NotAllowed,
    NotThere,
    OutOfRoom,
    OutsideRequest,
    RequestRefused,
    TimedOut,
    Unavailable,
    Unreached,
)

if TYPE_CHECKING:
    from dormouse.client.asynchronous import AsyncClient, AsyncJobHandle
    from dormouse.client.synchronous import Client, JobHandle

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncJobHandle",
    "BadAnswer",
    "CallCancelled",
    "CallError",
    "CallTimeout",
    "Client",
    "ConnectionBroke",
    "FunctionFailed",
    "FunctionRefused",
    "JobHandle",
    "NodeBusy",
    "NotAllowed",
    "NotThere",
    "OutOfRoom",
    "OutsideRequest",
    "RequestRefused",
    "TimedOut",
    "Unavailable",
    "Unreached",
]


def __getattr__(name: str) -> Any:
    if name in ("Client", "JobHandle"):
        from dormouse.client import synchronous

        return getattr(synchronous, name)
    if name in ("AsyncClient", "AsyncJobHandle"):
        from dormouse.client import asynchronous

        return getattr(asynchronous, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
