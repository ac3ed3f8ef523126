"""The life of an instance that serves a language model, after its confinement."""

import gc
import sys

import msgspec
import orjson

from dormouse.client_shim.llm import adapter_upload
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.loading import load
from dormouse.client_shim.llm.serving import LlmServer, ServedModel
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.client_shim.stream.stream import Stream
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError, PeerLost


def serve_llm(fork: m.Fork, settings: m.LlmSettings, folder: str, backend: NodeBackend, stream: Stream) -> int:
    """Load the folder and answer requests; returns the exit status. Raises PeerLost."""
    try:
        found = load(folder, fork.entry, settings, fork.device.total_nbytes)
        backend.may_acquire = False
        stream.commit()  # apart from its adapter: so it is the same bytes as every other function's of that base
        adapter = None if found.adapter is None else adapter_upload.upload(found.spec, found.adapter)
        stream.commit()
    except PeerLost:
        raise
    except Exception as error:  # the folder is untrusted
        text = str(error) if isinstance(error, BadFolder | ConfigError) else f"{type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)
        backend.router.send(m.LoadFailed(code="bad_folder", text=text))
        backend.router.next_run()  # the router has read why, and ends us
        return 1
    if "parts" in (forms := found.words.template.forms).values():
        roles = ", ".join(role for role, form in forms.items() if form == "parts")
        print(
            f"the chat template gets the content of messages as a list of parts: {roles}", file=sys.stderr, flush=True
        )
    gc.collect()
    gc.freeze()
    said = orjson.dumps({"sampling": msgspec.to_builtins(found.words.sampling)})
    loaded = m.Loaded(version=backend.version, nbytes=backend.nbytes, warning=found.warning, schema=said)
    backend.router.send(loaded)
    added, _kept = adapter or ([], [])
    served = ServedModel(found.spec, found.weights + added, None if found.adapter is None else found.adapter.spec)
    LlmServer(backend, fork.directory, fork.function, served, found.words).serve()
    return 0
