"""How a model's makers want it sampled: its folder's ``generation_config.json``, where a request says nothing.

The fields that are followed are vLLM's (``--generation-config auto``). As in transformers, ``do_sample: false`` takes
the most probable token, and ``stop_strings`` end an answer. What else changes an answer of transformers' ``generate``
is told to who deploys.
"""

import math
import os
from os.path import join
from typing import Any, Final, NamedTuple

import msgspec

from dormouse.client_shim.llm.folder import BadFolder, read_json
from dormouse.client_shim.llm.requests import MOST_STOP_CHARS, MOST_STOPS, RANGES, Request
from dormouse.schemas.llm import DefaultSampling

FILE: Final = "generation_config.json"

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""What is not followed, with the values at which it changes nothing (``null`` never does)."""


_SAID: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FOLLOWED: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def chosen(model: DefaultSampling, asked: Request) -> DefaultSampling:
    """Of one request, which wins. Its own limit and stop strings are not looked at."""
    said = {name: value for name in _SAID if (value := getattr(asked, name)) is not None}
    return msgspec.structs.replace(model, **said)


class FoundSampling(NamedTuple):
    """``warning``: what is not followed, in a sentence; "" if all is."""

    sampling: DefaultSampling
    warning: str


def sampling_of(folder: str) -> FoundSampling:
    """Raises BadFolder if a value is none that a request could have."""
    said = read_json(folder, FILE) if os.path.exists(join(folder, FILE)) else {}
    found: dict[str, Any] = {}
    for field, name in _FOLLOWED.items():
        if (value := said.get(field)) is not None:
            found[name] = _number(field, value, *RANGES[name], whole=name in ("top_k", "max_tokens"))
    sampled = said.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise BadFolder(f"{FILE} has do_sample {sampled!r:.80}; write true or false, or leave it out")
    if sampled is False:
        found["temperature"] = 0.0
    ignored = sorted(name for name, neutral in _NEUTRAL.items() if said.get(name) not in (None, *neutral))
    warning = f"{FILE} has {', '.join(ignored)}, which answers here do not keep to" if ignored else ""
    return FoundSampling(DefaultSampling(**found, stop=_stops(said.get("stop_strings"))), warning)


def _number(field: str, value: Any, low: float, high: float, whole: bool) -> float | int:
    good = type(value) is int or (type(value) is float and math.isfinite(value) and (not whole or value.is_integer()))
    if not good or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        text = f"{FILE} has {field} {value!r:.80}; write {kind} from {low:g} to {high:g}, or leave it out"
        raise BadFolder(text)
    return int(value) if whole else float(value)


def _stops(said: Any) -> tuple[str, ...]:
    stops = [said] if isinstance(said, str) else [] if said is None else said
    good = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not good or not all(isinstance(each, str) and 0 < len(each) <= MOST_STOP_CHARS for each in stops):
        raise BadFolder(f"{FILE} has stop_strings that are not {MOST_STOPS} texts of {MOST_STOP_CHARS} signs at most")
    return tuple(stops)
