"""The function that makes embeddings: a text model, from its folder to OpenAI's answer. Runs in the sandbox.

It is an ordinary function whose code is here: it uses the modules of `transformers`, and its operations go to the GPU
like any function's. So it can run encoders, which have no KV and see all of a text at once. Wakes, leases, sharing and
extra instances are those of functions. Decoders can be used, too.
"""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from dormouse.client_shim.llm import weights
from dormouse.client_shim.llm.checkpoint import StoredTensor, find_weights
from dormouse.client_shim.llm.embedding_requests import EmbeddingRequest, parse_embedding
from dormouse.client_shim.llm.folder import BadFolder, config_of, dtype_of, family_of, read_json
from dormouse.client_shim.llm.loading import check_layers
from dormouse.client_shim.llm.model import encoded, tokenizer_of
from dormouse.client_shim.llm.pooling import Pooling, pooling_of
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.schemas import messages as m
from dormouse.schemas.llm import FAMILIES, MAX

ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet")
BATCH_TOKENS: Final = 8192
BATCH_TEXTS: Final = 64
"""Of one pass through the model, padding included."""

_OFFSET: Final = ("roberta", "xlm-roberta", "mpnet")
"""Their first position comes behind that of padding."""

_POOLED: Final = ("bert", "roberta", "xlm-roberta", "mpnet")
"""They have a layer for another kind of vector, if it is not refused."""

_HEADS: Final = re.compile(
    r"((cls|lm_head|pooler|classifier|qa_outputs|vocab_\w+|embed_out|score)\..*)|(.*\.pooler\..*)|(.*\.position_ids)"
)
"""Parameters that only other uses of the model need."""


class EmbeddingModel:
    """``load`` and ``handle`` of such a function."""

    def __init__(self, folder: str, settings: m.EmbeddingSettings, name: str) -> None:
        self._folder, self._settings, self._name = folder, settings, name
        self._tokenizer: Any = None
        self._model: Any = None
        self._pooling: Pooling
        self._context = self._vocabulary = 0

    def load(self) -> None:
        """Raises BadFolder."""
        raw = read_json(self._folder, "config.json")
        family = family_of(raw, (*ENCODERS, *FAMILIES))
        for name, value in raw.items():
            if type(value) is int and abs(value) > MAX:
                raise BadFolder(f"config.json: {name} cannot be {value}")
        config = config_of(family, raw)
        dtype = weights.DTYPES[
            dtype_of(raw if family in FAMILIES else {"dtype": "float32", **raw}, self._settings.dtype)
        ]
        checkpoint = find_weights(self._folder, self._settings.convert)
        check_layers(config.num_hidden_layers, checkpoint)
        self._pooling = pooling_of(self._folder, family in FAMILIES)
        self._context = self._longest(config, family)
        self._vocabulary = config.vocab_size
        with torch.device("meta"):  # nothing has confirmed the sizes yet
            wanted = weights.wanted_by(_modules(family, config, dtype))
        names = weights.matched(family, wanted, checkpoint.tensors, _HEADS)
        with _parameters_on_meta():
            model = _modules(family, config, dtype)
        self._tokenizer = tokenizer_of(self._folder, self._vocabulary)
        for name, tensor in checkpoint.read(names):
            weights.check(name, StoredTensor("F32", tuple(tensor.shape)), wanted.shapes[names[name]])
            there = tensor.detach().to(dtype).contiguous().to("cuda")
            path, _, last = names[name].rpartition(".")
            model.get_submodule(path)._parameters[last] = nn.Parameter(there, requires_grad=False)
        self._model = model.to("cuda").eval()

    def _longest(self, config: Any, family: str) -> int:
        positions = int(config.max_position_embeddings) - (config.pad_token_id + 1 if family in _OFFSET else 0)
        wanted = self._settings.context
        if wanted > positions:
            text = f"the context is {wanted} tokens, the model has {positions}; deploy it with --context {positions}"
            raise BadFolder(text)
        return wanted or min(self._pooling.longest or positions, positions)

    # --- requests

    def handle(self, body: Any) -> dict[str, Any]:
        """Raises RefusedRequest."""
        asked = parse_embedding(body)
        texts = self._tokens(asked)
        found = self._vectors(texts)
        size = found.shape[1]
        if asked.dimensions not in (None, size):
            text = f"the model's vectors have {size} dimensions; leave the field out"
            raise RefusedRequest(text, "dimensions", "unsupported_parameter")
        said = _base64 if asked.encoding_format == "base64" else _floats
        count = sum(map(len, texts))
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": said(row)} for i, row in enumerate(found)],
            "model": asked.model or self._name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    def _tokens(self, asked: EmbeddingRequest) -> list[list[int]]:
        texts = []
        for index, each in enumerate(asked.inputs()):
            if isinstance(each, str):
                tokens = encoded(self._tokenizer, self._pooling.prompt + each, "input")
            else:
                tokens = each
                if any(not 0 <= token < self._vocabulary for token in tokens):
                    raise RefusedRequest(f"tokens are numbers from 0 to {self._vocabulary - 1}", "input")
            if not tokens:
                raise RefusedRequest(f"the text at place {index} has no tokens", "input")
            if len(tokens) > self._context:
                text = f"the model's context is {self._context} tokens; the text at place {index} has {len(tokens)}"
                raise RefusedRequest(text, "input", "context_length_exceeded")
            texts.append(tokens)
        return texts

    def _vectors(self, texts: list[list[int]]) -> Any:
        rows: list[Any] = [None] * len(texts)
        for batch in _batches(texts):
            ids, mask = _padded([texts[index] for index in batch], self._model.config.pad_token_id or 0)
            hidden = self._model(input_ids=ids.to("cuda"), attention_mask=(mask := mask.to("cuda"))).last_hidden_state
            found = self._pooling.vectors(hidden, mask).cpu().numpy()
            for index, row in zip(batch, found, strict=True):
                rows[index] = row
        vectors = np.stack(rows)
        if not np.isfinite(vectors).all():
            raise RefusedRequest("the model computed NaN or infinity", "", "model_refused")
        return vectors


def _modules(family: str, config: Any, dtype: torch.dtype) -> Any:
    """Raises BadFolder."""
    from transformers import AutoModel

    config.use_cache = False
    made: Any = AutoModel
    more = {"add_pooling_layer": False} if family in _POOLED else {}
    try:
        return made.from_config(config, dtype=dtype, **more)
    except Exception as error:  # numbers that do not fit together
        raise BadFolder(f"config.json is not one of a {family}: {error}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Only parameters: buffers are computed from the configuration, and small."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def _batches(texts: list[list[int]]) -> Iterator[list[int]]:
    """Their places, those of about the same length together: little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda each: len(texts[each])):
        if batch and (len(batch) == BATCH_TEXTS or (len(batch) + 1) * len(texts[index]) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(texts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[*tokens, *[pad] * (width - len(tokens))] for tokens in texts])
    mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in texts])
    return ids, mask


def _floats(row: Any) -> list[float]:
    numbers: list[float] = row.tolist()
    return numbers


def _base64(row: Any) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
