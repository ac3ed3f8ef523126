"""The weights in a model's folder: the list of tensors, and their bytes. Runs in the sandbox.

Three kinds: safetensors, judged by their headers before a byte is read; GGUF (gguf_file.py); and pickles, of which only
tensors are taken, and only if the owner has said so. weights.py decides which tensors a model wants.
"""

import json
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pickle import UnpicklingError
from typing import Any, Final, NamedTuple, Protocol

import torch

from dormouse.client_shim.llm import firstbytes
from dormouse.client_shim.llm.folder import BadFolder, first_bytes, read_json
from dormouse.core.modelfolder import PICKLED

MAX_HEADER_NBYTES: Final = 16 << 20
"""A hundred bytes for each tensor of a model with the most tensors that there is."""

MAX_TENSORS: Final = 100_000
INDEX: Final = "model.safetensors.index.json"
_PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
_KINDS: Final = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "I8 U8 BOOL F8_E4M3 F8_E5M2"}
_NBYTES: Final = {kind: nbytes for nbytes, kinds in _KINDS.items() for kind in kinds.split()}
_PART: Final = re.compile(r".+-\d{5}-of-(\d{5})\..+")
"""The name of one of several files."""

_SERVED: Final = ("F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """``kind`` as a safetensors header has it. ``shape`` None: known when it is read."""

    kind: str
    shape: tuple[int, ...] | None

    @property
    def served(self) -> bool:
        return self.kind in _SERVED


class Checkpoint(Protocol):
    """Weights that were found."""

    tensors: dict[str, StoredTensor]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These, in this order, one at a time. Once."""


def find_weights(folder: str, convert: bool) -> Checkpoint:
    """Raises BadFolder."""
    names = sorted(os.listdir(folder))
    if INDEX in names or any(name.endswith(".safetensors") for name in names):
        return SafetensorsFiles(folder, _files(folder, "model.safetensors", INDEX))
    pickled = [name for name in names if name.endswith(PICKLED)]
    if not pickled:
        raise BadFolder("the folder has no model.safetensors")
    if not convert:
        raise BadFolder(
            f"the weights are pickled ({pickled[0]}), which can run code; deploy with --convert: they are read in a "
            "sandbox, as tensors only"
        )
    return PickledFiles(folder, _files(folder, "pytorch_model.bin", _PICKLE_INDEX))


def _files(folder: str, single: str, index: str) -> list[str]:
    """The names of the files that have the weights. Raises BadFolder."""
    names = [single]
    if os.path.exists(os.path.join(folder, index)):
        weights = read_json(folder, index, MAX_HEADER_NBYTES).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise BadFolder(f"{index} has no weight_map")
        names = sorted(set(weights.values()))
        _check_parts(folder, names, index)
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise BadFolder(f"{index} names {name!r}, which is no file of the folder")
        if not os.path.isfile(os.path.join(folder, name)):
            part = next((each for each in sorted(os.listdir(folder)) if name == single and _PART.fullmatch(each)), "")
            raise BadFolder(
                f"the folder has no {name}" + (f", and no {index}, which says what {part} is" if part else "")
            )
    return names


def _check_parts(folder: str, names: Iterable[str], index: str) -> None:
    """Raises BadFolder for a part of this model that the index does not name."""
    counts = {found[1] for name in names if (found := _PART.fullmatch(name))}
    for name in sorted(set(os.listdir(folder)) - set(names)):
        if (found := _PART.fullmatch(name)) and found[1] in counts and name.endswith((".safetensors", *PICKLED)):
            raise BadFolder(f"{index} does not name {name}: the two are of different downloads")


class SafetensorsFiles:
    """See the module. Raises BadFolder."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._paths: dict[str, str] = {}  # of files, by tensor
        for name in names:
            path = os.path.join(folder, name)
            for tensor, stored in _header(path, name).items():
                if tensor in self.tensors:
                    raise BadFolder(f"{name} has {tensor!r}, and so has another file")
                self.tensors[tensor], self._paths[tensor] = stored, path

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(self._paths.values())}
            for name in names:
                yield name, opened[self._paths[name]].get_tensor(name)


def _header(path: str, name: str) -> dict[str, StoredTensor]:
    """The header of a safetensors file, checked. Raises BadFolder."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, MAX_HEADER_NBYTES):
            begins = start + file.read(firstbytes.LOOKED_AT - 8)
            if what := firstbytes.weights_mistaken(begins, size, "safetensors file"):
                raise BadFolder(f"{name} {what}")
            if len(start) < 8:
                raise BadFolder(f"{name} is truncated: it has {size} bytes")
            if size - 8 < length <= MAX_HEADER_NBYTES:
                raise BadFolder(f"{name} is truncated: it has {size:,} bytes, and its header alone {length:,}")
            raise BadFolder(f"{name} is no safetensors file: its header has {length:,} bytes")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_once)
            said = {key: each for key, each in header.items() if key != "__metadata__"}
            spans = sorted((*map(_whole, each["data_offsets"]), key) for key, each in said.items())
            found = {
                key: StoredTensor(str(each["dtype"]), tuple(map(_whole, each["shape"]))) for key, each in said.items()
            }
            needed = {key: math.prod(each.shape or ()) * _NBYTES[each.kind] for key, each in found.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BadFolder(f"{name} is no safetensors file: {error!r}") from error
    if len(found) > MAX_TENSORS:
        raise BadFolder(f"{name} has {len(found):,} tensors")
    end = 0
    for begins, ends, key in spans:
        if begins != end:
            raise BadFolder(f"{name} is no safetensors file: {key!r} begins at {begins:,}, not at {end:,}")
        if ends - begins != needed[key]:
            raise BadFolder(f"{name} is no safetensors file: {key!r} has {ends - begins:,} of {needed[key]:,} bytes")
        end = ends
    if 8 + length + end != size:
        raise BadFolder(f"{name} is truncated: it has {size:,} of {8 + length + end:,} bytes")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)!r} twice")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


class PickledFiles:
    """Only tensors are unpickled; anything else that a file asks for is refused. Raises BadFolder."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for name in names:
            found = _unpickled(os.path.join(folder, name), name)
            for tensor in found.keys() & self._tensors.keys():
                raise BadFolder(f"{name} has {tensor!r}, and so has another file")
            self._tensors.update(found)
        kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        self.tensors = {
            name: StoredTensor(kinds.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._tensors.pop(name)


def _unpickled(path: str, name: str) -> dict[str, torch.Tensor]:
    start, nbytes = first_bytes(os.path.dirname(path), name)
    zipped = zipfile.is_zipfile(path)
    if what := firstbytes.weights_mistaken(start, nbytes, "pickle" if start[:1] == b"\x80" else "ZIP archive"):
        raise BadFolder(f"{name} {what}")
    if start.startswith(b"PK") and not zipped:
        raise BadFolder(f"{name} is truncated: it begins as torch.save writes, and has no end; download it again")
    try:
        if zipped and any(each.compress_type != zipfile.ZIP_STORED for each in zipfile.ZipFile(path).infolist()):
            raise BadFolder(f"{name} is compressed, which torch.save never does")
        with warnings.catch_warnings(action="ignore"):  # of its old protocol
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except BadFolder:
        raise
    except UnpicklingError as error:
        raise BadFolder(f"{name} has more than tensors in it, and was not read: {_unsupported(str(error))}") from error
    except Exception as error:  # an untrusted file may make it raise anything
        raise BadFolder(f"{name} is no file of weights: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise BadFolder(f"{name} has no tensors by name")
    for key, tensor in found.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not isinstance(key, str) or not plain or tensor.device.type != "cpu":
            raise BadFolder(f"{name} has {str(key)[:80]!r}, which is no tensor")
    return found


def _unsupported(text: str) -> str:
    """The thing that a pickle asked for, without the advice that `torch.load` has around it."""
    lines = [line.strip() for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line]
    return (lines[0] if lines else text.splitlines()[-1]).split(" was not an allowed")[0].removesuffix(".")
