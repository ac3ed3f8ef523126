"""Messages from the store to the controller: models and their bytes in host memory and in files."""

from dormouse.schemas.messages.shared import HeldBytes, Message


class ModelSize(Message, frozen=True, kw_only=True, tag=1):
    """Total of an instance's manifest."""

    instance: str
    version: int
    nbytes: int


class StoreStatus(Message, frozen=True, kw_only=True, tag=2):
    """Said whenever it changes. Bytes and budgets of the two host tiers; a budget of -1 is none."""

    host_nbytes: int
    host_budget_nbytes: int
    file_nbytes: int
    file_budget_nbytes: int
    segments: int
    slabs: int
    trouble: str  # what a person should know: the disk is full, or cannot be written; else empty


class InstanceBytes(Message, frozen=True, kw_only=True):
    """An instance's model by place. ``shared_nbytes`` of ``nbytes`` are in other functions' models too."""

    instance: str
    function: str
    nbytes: int
    host_nbytes: int
    file_nbytes: int
    shared_nbytes: int
    shared_with: list[str]


class StoreReport(Message, frozen=True, kw_only=True, tag=3):
    """Answer to AskStore."""

    query: int
    instances: list[InstanceBytes]


class ModelDamaged(Message, frozen=True, kw_only=True, tag=4):
    """A segment's bytes are not what they were: these instances must be loaded again."""

    instances: list[str]
    text: str


class HostMetered(Message, frozen=True, kw_only=True, tag=5):
    """The use of host memory since the last statement. Owners are functions, or sessions' instances."""

    held: list[HeldBytes]


class MovedDown(Message, frozen=True, kw_only=True, tag=6):
    """The answer to MoveDown: so many bytes of the model stay in host memory."""

    query: int
    left_nbytes: int


class LoadDisplaced(Message, frozen=True, kw_only=True, tag=7):
    """A deployed model needs the host memory that this instance has begun to fill: end it."""

    instance: str


StoreToController = ModelSize | StoreStatus | StoreReport | ModelDamaged | HostMetered | MovedDown | LoadDisplaced
