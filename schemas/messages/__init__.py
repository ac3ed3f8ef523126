"""Every typed message between processes, declared once: one tagged union per link and direction.

Frozen, array-like msgpack with integer tags; tags are appended, never reused. Decoding checks every field and can build
nothing but these. Large data never travels here: a message names bytes in an arena or a slab. A message has no sender:
that is the endpoint at which it arrived. docs/design.md draws the senders and receivers.
"""

from dormouse.schemas.messages.everyone import *  # noqa: F403
from dormouse.schemas.messages.executor import *  # noqa: F403
from dormouse.schemas.messages.executor_to_controller import *  # noqa: F403
from dormouse.schemas.messages.instance import *  # noqa: F403
from dormouse.schemas.messages.llm import *  # noqa: F403
from dormouse.schemas.messages.metrics import *  # noqa: F403
from dormouse.schemas.messages.router import *  # noqa: F403
from dormouse.schemas.messages.router_to_controller import *  # noqa: F403
from dormouse.schemas.messages.runtime import *  # noqa: F403
from dormouse.schemas.messages.shared import *  # noqa: F403
from dormouse.schemas.messages.store import *  # noqa: F403
from dormouse.schemas.messages.store_to_controller import *  # noqa: F403
from dormouse.schemas.messages.supervisor import *  # noqa: F403
from dormouse.schemas.messages.traces import *  # noqa: F403
from dormouse.schemas.messages.zygote import *  # noqa: F403
