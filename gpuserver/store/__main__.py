"""``python -m dormouse.gpuserver.store``: the process of role ``store``."""

from dormouse.core.actor import run_actor
from dormouse.gpuserver.store.main import Store

if __name__ == "__main__":
    run_actor(Store)
