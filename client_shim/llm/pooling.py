"""Pools a text's hidden states into one vector, as the folder's files of sentence-transformers say.

Runs in the sandbox. A folder that has none of these files gets the usual pooling of its family: the mean of all tokens
for encoders, the last token for decoders, each of length one.
"""

import os
from typing import Any, Final, NamedTuple

import torch

from dormouse.client_shim.llm.folder import BadFolder, read_any, read_json

MODULES: Final = "modules.json"
_MODES: Final = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


class Pooling(NamedTuple):
    """``mode`` is "first", "mean", "max" or "last"; ``longest`` tokens a text has at most, 0: as the model can;
    ``prompt`` stands before each text.
    """

    mode: str
    normalized: bool
    longest: int = 0
    prompt: str = ""

    def vectors(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of ``[texts, tokens, size]``, where ``mask`` is 1; that begins each row. In fp32."""
        hidden, seen = hidden.float(), mask.unsqueeze(-1).float()
        if self.mode == "mean":
            found = (hidden * seen).sum(1) / seen.sum(1)
        elif self.mode == "max":
            found = (hidden + (seen - 1.0) * 1e30).max(1).values
        elif self.mode == "first":
            found = hidden[:, 0]
        else:
            last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            found = hidden.gather(1, last).squeeze(1)
        return torch.nn.functional.normalize(found, dim=1) if self.normalized else found


def pooling_of(folder: str, decoder: bool) -> Pooling:
    """Raises BadFolder for settings that are not supported here."""
    if not os.path.exists(os.path.join(folder, MODULES)):
        return Pooling("last" if decoder else "mean", True)
    mode, normalized = "", False
    for index, (kind, path) in enumerate(_modules(folder)):
        if kind == "Transformer" and index == 0 and path in ("", "0_Transformer"):
            if path:
                raise BadFolder(f"{MODULES} has the model in {path}; put its files beside {MODULES}")
        elif kind == "Pooling" and not mode:
            mode = _mode(read_json(folder, os.path.join(path, "config.json")), path)
        elif kind == "Normalize" and mode:
            normalized = True
        else:
            raise BadFolder(f"{MODULES} has a {kind} at place {index}, which is not computed here")
    if not mode:
        raise BadFolder(f"{MODULES} has no Pooling")
    return Pooling(mode, normalized, _longest(folder), _prompt(folder))


def _modules(folder: str) -> list[tuple[str, str]]:
    """Kind and folder of each."""
    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in read_any(folder, MODULES)]
    except (LookupError, TypeError) as error:
        raise BadFolder(f"{MODULES} cannot be read: {error!r}") from error
    for _, path in modules:
        if os.path.basename(path) != path or path in (".", ".."):
            raise BadFolder(f"{MODULES} names {path!r}, which is no folder beside it")
    return modules


def _mode(config: dict[str, Any], path: str) -> str:
    said = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    if isinstance(named := config.get("pooling_mode"), str):  # as newer files have it
        said = [{"lasttoken": "pooling_mode_lasttoken"}.get(named, f"pooling_mode_{named}_tokens"), *said]
        said = ["pooling_mode_cls_token" if each == "pooling_mode_cls_tokens" else each for each in said]
    if len(said) != 1 or said[0] not in _MODES:
        raise BadFolder(f"{path}/config.json: {' and '.join(said) or 'no pooling_mode'} is not computed here")
    return _MODES[said[0]]


def _longest(folder: str) -> int:
    if not os.path.exists(os.path.join(folder, "sentence_bert_config.json")):
        return 0
    longest = read_json(folder, "sentence_bert_config.json").get("max_seq_length")
    return longest if type(longest) is int and longest > 0 else 0


def _prompt(folder: str) -> str:
    if not os.path.exists(os.path.join(folder, "config_sentence_transformers.json")):
        return ""
    said = read_json(folder, "config_sentence_transformers.json")
    name, prompts = said.get("default_prompt_name"), said.get("prompts")
    return str(prompts.get(name, "")) if name and isinstance(prompts, dict) else ""
