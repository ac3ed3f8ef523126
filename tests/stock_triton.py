"""Run by the Python of build/stock/tritonclient, with a node's address: what tritonclient makes of it, as JSON."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

DATATYPES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")


def sent(name: str, array: Any, datatype: str, binary: bool = True) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def failed(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return []


def say(what: str, value: Any) -> None:
    print(json.dumps({what: value}), flush=True)


def texts(array: Any) -> Any:
    return [each.decode() for each in array.ravel()]


def main(address: str) -> None:
    client = triton.InferenceServerClient(address)
    say("lives", [client.is_server_live(), client.is_server_ready(), client.is_model_ready("a")])
    say("versions", [client.is_model_ready("a", "1"), client.is_model_ready("a", "9"), client.is_model_ready("org/a")])
    say("server", client.get_server_metadata()["name"])
    say("model", client.get_model_metadata("signed"))
    say("config", client.get_model_config("signed")["input"])
    say("index", [row["name"] for row in client.get_model_repository_index()])
    ones = np.ones((2, 4), np.float32)
    answer = client.infer("signed", [sent("x", ones, "FP32")], request_id="me")
    say("default", [answer.as_numpy("y").tolist(), texts(answer.as_numpy("names")), answer.get_response()["id"]])
    wanted = [triton.InferRequestedOutput("sum", binary_data=False)]
    answer = client.infer("signed", [sent("x", ones, "FP32", binary=False)], outputs=wanted)
    say("json", [answer.as_numpy("sum").tolist(), [each["name"] for each in answer.get_response()["outputs"]]])
    same = {}
    for datatype in DATATYPES:
        array = np.arange(6).reshape(2, 3).astype(triton_to_np_dtype(datatype))
        answer = client.infer("a", [sent("x", array, datatype)]).as_numpy("x")
        same[datatype] = answer.dtype == array.dtype and bool((answer == array).all())
    say("datatypes", same)
    halves = np.array([[0.5, -2.0]], triton_to_np_dtype("BF16"))
    answer = client.infer("a", [sent("x", halves, "BF16")]).as_numpy("x")
    say("bf16", answer.astype(np.float32).tolist())
    words = np.array([b"a", "\u00e9".encode(), b"\xff"], dtype=object)
    say("bytes", [each.hex() for each in client.infer("a", [sent("x", words, "BYTES")]).as_numpy("x")])
    for each in ("gzip", "deflate"):
        more = {"request_compression_algorithm": each, "response_compression_algorithm": each}
        answer = client.infer("signed", [sent("x", ones, "FP32")], **more)
        say(each, answer.as_numpy("y").tolist() == (2 * ones).tolist())
    say("unknown", failed(lambda: client.infer("org/a", [sent("x", ones, "FP32")])))
    say("wrong", failed(lambda: client.infer("signed", [sent("x", ones.astype(np.float64), "FP64")])))
    running = [client.async_infer("signed", [sent("x", ones * each, "FP32")]) for each in range(4)]
    say("async", [each.get_result().as_numpy("sum").tolist() for each in running])
    say("counts", client.get_inference_statistics("signed")["model_stats"][0]["inference_count"] > 0)
    client.close()
    asyncio.run(of_asyncio(address))


async def of_asyncio(address: str) -> None:
    async with aio.InferenceServerClient(address) as client:
        ones = np.ones((1, 4), np.float32)
        answer = await client.infer("signed", [sent("x", ones, "FP32")])
        say("aio", [await client.is_server_ready(), answer.as_numpy("y").tolist()])


if __name__ == "__main__":
    main(sys.argv[1])
