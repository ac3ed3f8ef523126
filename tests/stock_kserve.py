"""Run by the Python of build/stock/kserve, with a node's address: what its client makes of it, as JSON."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


def say(what: str, value: Any) -> None:
    print(json.dumps({what: value}), flush=True)


async def main(address: str) -> None:
    url = f"http://{address}"
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    say("lives", [await client.is_server_live(url), await client.is_server_ready(url)])
    say("model", await client.is_model_ready(url, "a"))
    for binary in (False, True):
        ones = InferInput("x", [2, 4], "FP32")
        ones.set_data_from_numpy(np.ones((2, 4), np.float32), binary_data=binary)
        answer = await client.infer(url, InferRequest("signed", [ones], request_id="me"), model_name="signed")
        found = {each.name: each.as_numpy().tolist() for each in answer.outputs if each.name != "names"}
        say("binary" if binary else "json", [found["y"], found["sum"], answer.id])
    try:
        await client.infer(url, InferRequest("no", [ones]), model_name="no")
    except Exception as error:
        say("unknown", str(error))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
