"""Loads the function of an instance, from its file or, for an embedding model, from ours; checks that it can be served
as deployed.

Runs the user's module, and nothing of it after that.
"""

import inspect
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dormouse.client_shim.instance import report, signatures
from dormouse.client_shim.instance.signatures import Signature
from dormouse.schemas import messages as m


class LoadFailure(Exception):
    """The function cannot be served; ``code`` says why, the text what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(kw_only=True)
class UserFunction:
    """The user's functions."""

    load: Callable[[], Any]
    handle: Callable[[Any, Any], Any]
    unload: Callable[[Any], Any] | None = None
    handle_batch: Callable[[Any, list[Any]], Any] | None = None
    signature: Signature | None = None
    folder: str = ""  # of its files


def import_function(source: bytes, origin: str) -> UserFunction:
    """Run the file as a module. Raises LoadFailure."""
    stem = os.path.basename(origin).removesuffix(".py")
    name = stem if re.fullmatch(r"[A-Za-z_]\w*", stem) and stem not in sys.modules else "dormouse_function"
    module = types.ModuleType(name)
    module.__file__ = origin
    sys.modules[name] = module
    if os.path.dirname(origin):
        folder = os.path.dirname(origin)
        sys.path.insert(0, folder)
        with suppress(OSError):  # hidden from the sandbox: it stays in its own home
            os.chdir(folder)  # so that "./my-model" means the one beside the function
    sys.argv = [origin]
    text = source.decode("utf-8", errors="replace")
    # Tracebacks show the code that runs, not the file's present content.
    linecache.cache[origin] = (len(text), None, text.splitlines(keepends=True), origin)
    try:
        exec(compile(source, origin, "exec"), module.__dict__)
    except (SyntaxError, ValueError) as error:
        raise LoadFailure("bad_source", report.describe(error)) from error
    found: dict[str, Any] = {}
    parts = (
        ("load", (), False),
        ("handle_batch", ("state", "requests"), False),
        ("handle", ("state", "request"), not hasattr(module, "handle_batch")),
        ("unload", ("state",), False),
    )
    for part, values, needed in parts:
        found[part] = getattr(module, part, None)
        if callable(found[part]):
            wrong = _misfit(found[part], part, values)
        elif needed or hasattr(module, part):
            wrong = f"has no {part}" if found[part] is None else f"has something that cannot be called as {part}"
        else:
            continue
        if wrong:
            raise LoadFailure(f"no_{part}", f"{origin} {wrong}; define {part}({', '.join(values)}) in it")
    batch = found["handle_batch"]
    said = getattr(module, "signature", None)
    try:
        signature = signatures.written(said) if isinstance(said, dict) else None  # inspect has one that is a function
    except ValueError as error:
        raise LoadFailure("bad_signature", f"{origin}: {error}") from None
    return UserFunction(
        load=found["load"] or _nothing,
        handle=found["handle"] or partial(_one, batch),
        unload=found["unload"],
        handle_batch=batch,
        signature=signature,
        folder=os.path.dirname(origin),
    )


def _misfit(code: Callable[..., Any], name: str, values: Sequence[str]) -> str:
    """Why it cannot be called with so many; "" if it can, or does not say."""
    try:
        inspect.signature(code).bind(*values)
    except ValueError:  # of some that are written in C
        return ""
    except TypeError as error:
        return f"has a {name} that does not take {len(values)} values ({error})"
    return ""


def _one(handle_batch: Callable[[Any, list[Any]], Any], state: Any, request: Any) -> Any:
    """``handle`` of a function that has none: a batch of one."""
    (result,) = handle_batch(state, [request])
    if isinstance(result, BaseException):
        raise result
    return result


def _nothing() -> None:
    """The ``load()`` of a function without one."""


def coroutine_function(make: Callable[[], UserFunction]) -> UserFunction:
    """One of which an instance can have many requests at once. Raises LoadFailure."""
    function = make()
    if inspect.isasyncgenfunction(function.handle):
        text = "handle yields, but with --concurrency answers come whole: return one, or leave --concurrency out"
        raise LoadFailure("no_coroutine", text)
    if not inspect.iscoroutinefunction(function.handle):
        text = "with --concurrency, handle must be a coroutine function: async def handle(state, request)"
        raise LoadFailure("no_coroutine", text)
    return function


def batch_function(make: Callable[[], UserFunction]) -> UserFunction:
    """One that takes requests in batches. Raises LoadFailure."""
    function = make()
    if function.handle_batch is None or inspect.iscoroutinefunction(function.handle_batch):
        text = "with --batch, define handle_batch(state, requests), which returns a list: def, and not async def"
        raise LoadFailure("no_handle_batch", text)
    if inspect.isgeneratorfunction(function.handle_batch) or inspect.isasyncgenfunction(function.handle_batch):
        text = "handle_batch yields, but answers of a batch come whole: return a list of one result for each request"
        raise LoadFailure("no_handle_batch", text)
    return function


def embedding_function(settings: m.EmbeddingSettings, folder: str, name: str) -> UserFunction:
    """Of a model that makes embeddings: its code is ours."""
    from dormouse.client_shim.llm.embedding import EmbeddingModel  # imports modules that other functions do not need
    from dormouse.client_shim.llm.folder import BadFolder

    model = EmbeddingModel(folder, settings, name)

    def load() -> None:
        try:
            model.load()
        except BadFolder as error:
            raise LoadFailure("bad_folder", str(error)) from error

    return UserFunction(load=load, handle=lambda _, request: model.handle(request))


def hinted(function: UserFunction) -> tuple[Callable[..., Any], bool]:
    """The function whose types are those of requests, and whether it takes lists of them."""
    if isinstance(function.handle, partial) and function.handle_batch is not None:
        return function.handle_batch, True
    return function.handle, False


def function_of(fork: m.Fork, source: bytes, folder: str) -> UserFunction:
    """The function, which must be of the kind that it was deployed as. ``folder`` is its path of its own folder. Raises
    LoadFailure, and the module's own exceptions.
    """
    if fork.embedding is not None:
        make = partial(embedding_function, fork.embedding, folder, fork.function)
    else:
        make = partial(import_function, source, os.path.join(folder, fork.entry))
    if fork.batch:
        return batch_function(make)
    return coroutine_function(make) if fork.concurrency > 1 else make()
