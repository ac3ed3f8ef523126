"""Decides how much of a GPU's memory is for the pool and how much for activations, and the warnings for a person.

Pure: the caller has measured how much is free.
"""

from typing import Final, NamedTuple

from dormouse.core.quantities import size, sizes
from dormouse.gpuserver.device.protocol import DeviceError

HEADROOM_NBYTES: Final = 1 << 30
"""Reserved for later loads by CUDA: kernels, cuBLAS and cuDNN handles. At most a sixteenth of the free memory."""

CONTEXT_NBYTES: Final = 473_000_000
"""Of a process's context where it cannot be measured: the figure of ServerlessLoRA."""

MAX_CONTEXT_NBYTES: Final = 1 << 30
"""No context takes more: where more is taken, others have some of it."""


def context_nbytes(free_nbytes: int, whole_nbytes: int) -> int:
    """Of a context, by the free memory once there is one, and nothing else of this process."""
    taken_nbytes = whole_nbytes - free_nbytes
    return taken_nbytes if taken_nbytes <= MAX_CONTEXT_NBYTES else CONTEXT_NBYTES


class Budget(NamedTuple):
    """``shortage``: for a person, if others hold memory that the node could use."""

    pool_nbytes: int
    activation_nbytes: int
    shortage: str


def divided(
    ordinal: int,
    free_nbytes: int,
    whole_nbytes: int,
    *,
    memory_nbytes: int,
    activation_nbytes: int,
    scratch_nbytes: int,
    unit_nbytes: int,
) -> Budget:
    """The division of GPU ``ordinal``: of ``memory_nbytes``, but at most the free memory (0: all of it), activations
    get ``activation_nbytes`` (0: a quarter). The pool is a number of units. Raises DeviceError if nothing is left for
    it.
    """
    room = free_nbytes - min(HEADROOM_NBYTES, free_nbytes // 16) - scratch_nbytes
    total = min(memory_nbytes or room, room)
    activation_nbytes = activation_nbytes or total // 4
    planned = (total - activation_nbytes) // unit_nbytes * unit_nbytes
    if planned <= 0:
        raise DeviceError(
            f"no room for a pool: of {size(whole_nbytes)} of GPU {ordinal} {size(free_nbytes)} are free, {size(total)} "
            f"may be used, {size(activation_nbytes)} of them for activations; end the other processes on it, or set "
            "[gpu] activations lower"
        )
    return Budget(planned, activation_nbytes, _shortage(ordinal, memory_nbytes, room, free_nbytes, whole_nbytes))


def _shortage(ordinal: int, wanted_nbytes: int, room_nbytes: int, free_nbytes: int, whole_nbytes: int) -> str:
    """A warning about memory of the GPU that others hold; a context itself takes less than an eighth."""
    if wanted_nbytes > room_nbytes:
        wanted, room = sizes(wanted_nbytes, room_nbytes)
        return (
            f"[gpu] memory asks for {wanted} of GPU {ordinal}, and {room} are free for it: the node goes on with those"
        )
    if not wanted_nbytes and whole_nbytes - free_nbytes > whole_nbytes // 8:
        return (
            f"other processes hold {size(whole_nbytes - free_nbytes)} of {size(whole_nbytes)} of GPU {ordinal}: the "
            "node goes on with the rest"
        )
    return ""


def crowding(left_nbytes: int, activation_nbytes: int) -> str:
    """A warning if others have taken memory meant for activations; "" if they have not."""
    if left_nbytes >= activation_nbytes * 15 // 16:
        return ""
    return (
        f"{size(left_nbytes)} are left of the {size(activation_nbytes)} for activations: another process has taken the "
        "rest of this GPU's memory; end it, or set [gpu] memory lower"
    )
