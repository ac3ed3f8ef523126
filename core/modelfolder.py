"""A language model's folder, or an adapter's: which one a name stands for, and which of its files travel to a node.

``hf:org/name[@revision]`` stands for a folder of the caller's Hugging Face cache. The cache is read as it lies there,
by the rules of ``huggingface_hub``, which is not needed for that; so nothing is ever downloaded. Knows no socket, and
looks into no file but the cache's references: a model is examined in a sandbox.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from dormouse.core.folder import FunctionFolder, NoFunction

CONFIG: Final = "config.json"
GGUF: Final = ".gguf"
PREFIX: Final = "hf:"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER: Final = ".lora"
"""The folder of an adapter's files in a node, beside those of its base: no file of a base has such a name."""

_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

_TEXT: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of configurations, tokenizers and templates."""

PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def find(text: str, convert: bool = False) -> FunctionFolder:
    """The target of ``--llm``: a folder, a GGUF file, or a model in the cache. Raises NoFunction, OSError."""
    if text.startswith(PREFIX):
        return _in_cache(text.removeprefix(PREFIX), hub_cache(os.environ), partial(_chosen, convert=convert))
    path = Path(text).absolute()
    if path.is_file() and path.suffix == GGUF:
        return FunctionFolder(path.parent, path.name, False, takes=path.name.__eq__)
    if not path.is_dir():
        what = f"is neither a folder nor a {GGUF} file" if path.exists() else "is not there"
        raise NoFunction(f"{path} {what}; name a model's folder, a {GGUF} file, or {PREFIX}ORG/NAME")
    return _chosen(path, convert)


def find_adapter(text: str) -> FunctionFolder:
    """The target of ``--lora``: a folder as PEFT writes it, or one in the cache. Raises NoFunction, OSError."""
    if text.startswith(PREFIX):
        return _in_cache(text.removeprefix(PREFIX), hub_cache(os.environ), _adapter)
    path = Path(text).absolute()
    if not path.is_dir():
        raise NoFunction(f"{path} is no folder; name an adapter's folder, or {PREFIX}ORG/NAME")
    return _adapter(path)


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The directory where ``huggingface_hub`` keeps models."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = environ.get("HF_HOME") or os.path.join(base, "huggingface")
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache))).absolute()


def _in_cache(wanted: str, cache: Path, chosen: Callable[[Path], FunctionFolder]) -> FunctionFolder:
    """Raises NoFunction, which says where was looked, and what downloads it."""
    name, at, revision = wanted.partition("@")
    parts = revision.split("/")
    if not _NAME.fullmatch(name) or "--" in name or (at and any(part in ("", ".", "..") for part in parts)):
        raise NoFunction(f"{PREFIX}{wanted} names no model; write {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REVISION")
    download = f"hf download {name}" + (f" --revision {revision}" if at else "")
    help_ = f"nothing is downloaded here; do it before, with a network: {download}"
    repository = cache / f"models--{name.replace('/', '--')}"
    if not repository.is_dir():
        text = f"the Hugging Face cache {cache} (HF_HUB_CACHE, HF_HOME) has no {name}"
        raise NoFunction(f"{text}: {repository} is not there; {help_}")
    commit = revision if _COMMIT.fullmatch(revision) else _commit(repository / "refs" / (revision or "main"))
    snapshot = repository / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise NoFunction(f"{repository} has no revision {revision or 'main'}; {help_}")
    try:
        return chosen(snapshot)._replace(inside=cache)
    except NoFunction as error:
        raise NoFunction(f"{error}; if the download is not whole: {download}") from error


def _commit(reference: Path) -> str:
    """The commit that a branch or tag stands for; "" if there is none."""
    try:
        text = reference.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return ""
    return text if _COMMIT.fullmatch(text) else ""


def _chosen(folder: Path, convert: bool) -> FunctionFolder:
    """Of several kinds of weights in a folder, the best one travels. Raises NoFunction."""
    names = sorted(name for name in os.listdir(folder) if (folder / name).is_file())
    if any(name.endswith(".safetensors") for name in names):
        return FunctionFolder(folder, _config(folder, names), False, takes=partial(_takes, (".safetensors",)))
    ggufs = [name for name in names if name.endswith(GGUF)]
    if len(ggufs) > 1:
        raise NoFunction(f"{folder} has {len(ggufs)} {GGUF} files ({', '.join(ggufs[:5])}); name one of them")
    if ggufs:
        return FunctionFolder(folder, ggufs[0], False, takes=ggufs[0].__eq__)
    pickled = [name for name in names if name.endswith(PICKLED)]
    config = _config(folder, names)
    if not pickled:
        raise NoFunction(f"{folder} has no weights: neither *.safetensors nor *{GGUF}")
    if not convert:
        raise NoFunction(
            f"the weights in {folder} are pickled ({pickled[0]}), which can run code; deploy with --convert: they are "
            "read in a sandbox, as tensors only"
        )
    return FunctionFolder(folder, config, False, takes=partial(_takes, PICKLED))


def _adapter(folder: Path) -> FunctionFolder:
    """Raises NoFunction."""
    names = os.listdir(folder)
    if ADAPTER_CONFIG not in names:
        raise NoFunction(f"{folder} has no {ADAPTER_CONFIG}: it is no adapter's folder, as PEFT writes it")
    if _ADAPTER_WEIGHTS not in names:
        pickled = next((name for name in names if name.startswith("adapter_model") and name.endswith(PICKLED)), None)
        why = f"is pickled ({pickled}), which can run code: save it again as" if pickled else "has no"
        raise NoFunction(f"the adapter in {folder} {why} {_ADAPTER_WEIGHTS}")
    return FunctionFolder(folder, ADAPTER_CONFIG, False, takes=(ADAPTER_CONFIG, _ADAPTER_WEIGHTS).__contains__)


def _config(folder: Path, names: list[str]) -> str:
    if CONFIG not in names:
        raise NoFunction(f"{folder} has no {CONFIG}: it is no model's folder")
    return CONFIG


def _takes(weights: tuple[str, ...], name: str) -> bool:
    """Whether the file ``name`` below the folder travels. ``consolidated*`` are the same weights once more."""
    if name.endswith(_TEXT):
        return name.count("/") <= 1  # 1_Pooling/config.json, additional_chat_templates/
    return name.endswith(weights) and "/" not in name and not name.startswith("consolidated")
