"""LitServe with sixteen APIs, each of which returns a constant. ``python litserve.py PORT``."""

import importlib
import sys
from typing import Any

sys.path.pop(0)  # this file's folder, in which this file has the library's name
ls: Any = importlib.import_module("litserve")


class Constant(ls.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, Any]) -> str:
        return str(request["text"])

    def predict(self, text: str) -> int:
        return len(text)

    def encode_response(self, length: int) -> dict[str, int]:
        return {"length": length}


if __name__ == "__main__":
    apis = [Constant(api_path=f"/functions/f{number}/invoke") for number in range(16)]
    ls.LitServer(apis, accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="error", generate_client_file=False
    )
