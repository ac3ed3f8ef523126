"""Messages to the store: from the controller, the executors and the instances."""

from dormouse.schemas.messages.shared import Message


class StoreForget(Message, frozen=True, kw_only=True, tag=1):
    """Controller to store: the instance is gone, free its segments."""

    instance: str


class Keep(Message, frozen=True, kw_only=True, tag=2):
    """Controller to store, at its start and after each change of the catalogue: all functions that are deployed, as
    ``(name, version)``. Models of others are forgotten as soon as no instance has them.
    """

    functions: list[tuple[str, int]]


class AskStore(Message, frozen=True, kw_only=True, tag=3):
    query: int


class MoveDown(Message, frozen=True, kw_only=True, tag=4):
    """Controller to store: have host memory forget the model that these instances have, as far as it is in files and
    nobody else has it or copies from it.
    """

    query: int
    instances: list[str]


ControllerToStore = StoreForget | Keep | AskStore | MoveDown


class AskPlace(Message, frozen=True, kw_only=True, tag=1):
    """Executor to store: room for these storages ``[(storage, nbytes)]`` of an instance."""

    ticket: int
    instance: str
    storages: list[tuple[int, int]]


class Written(Message, frozen=True, kw_only=True, tag=2):
    """Executor to store: the bytes of this ticket are there; forget ``freed``, make it the next manifest version."""

    ticket: int
    freed: list[int]


class LetGo(Message, frozen=True, kw_only=True, tag=3):
    """Executor to store: this ticket of a Fetch or an AskPlace is done with. Nothing of it is read or written from now
    on; what was placed and not Written is given up.
    """

    ticket: int


class Fetch(Message, frozen=True, kw_only=True, tag=4):
    """Executor to store: where are these segments? In the order in which they are wanted."""

    ticket: int
    segments: list[int]


class FirstUse(Message, frozen=True, kw_only=True, tag=5):
    """Executor to store: the order in which a request of this instance first used its segments."""

    instance: str
    version: int
    segments: list[int]


ExecutorToStore = AskPlace | Written | LetGo | Fetch | FirstUse


class StoreUpload(Message, frozen=True, kw_only=True, tag=1):
    """Bytes ``[arena_offset, +nbytes)`` of the stream area are bytes ``[offset, +nbytes)`` of a storage of
    ``total_nbytes``.
    """

    storage: int
    total_nbytes: int
    offset: int
    arena_offset: int
    nbytes: int


class StoreFree(Message, frozen=True, kw_only=True, tag=2):
    storages: list[int]


class Commit(Message, frozen=True, kw_only=True, tag=3):
    """All that has been uploaded and not freed is the next manifest version."""


class StoreFile(Message, frozen=True, kw_only=True, tag=4):
    """Bytes ``[file_offset, +nbytes)`` of an offered file are bytes ``[offset, +nbytes)`` of a storage of
    ``total_nbytes``. Answered like an upload.
    """

    storage: int
    total_nbytes: int
    offset: int
    file: int
    file_offset: int
    nbytes: int


InstanceToStore = StoreUpload | StoreFree | Commit | StoreFile


class FileOffer(Message, frozen=True, kw_only=True, tag=1):
    """Instance to store at its ``files`` socket, with a descriptor that it could open for reading itself; never a path.
    ``file`` is a number of its choice.
    """

    file: int
