"""Ray Serve with sixteen deployments, each of which returns a constant. ``python ray.py PORT``."""

import importlib
import signal
import sys
from typing import Any

sys.path.pop(0)  # this file's folder, in which this file has the library's name
ray: Any = importlib.import_module("ray")
serve: Any = importlib.import_module("ray.serve")


class Constant:
    async def __call__(self, request: Any) -> dict[str, int]:
        return {"length": len((await request.json())["text"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    constant = serve.deployment(ray_actor_options={"num_cpus": 0})(Constant)
    for number in range(16):
        serve.run(constant.bind(), name=f"f{number}", route_prefix=f"/functions/f{number}/invoke")
    signal.sigwait([signal.SIGTERM])
    ray.shutdown()
