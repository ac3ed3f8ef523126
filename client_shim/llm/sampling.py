"""A model's default sampling, for requests that set none: from its folder's ``generation_config.json``, or a
``config.json`` of the time when there was no such file, or a GGUF file.

The fields that are followed are vLLM's (``--generation-config auto``). As in transformers, ``do_sample: false`` takes
the most probable token, and ``stop_strings`` end an answer. Other fields that change an answer of transformers'
``generate``, and unknown ones, are reported to the deployer.
"""

import math
import os
from os.path import join
from typing import Any, Final

import msgspec

from dormouse.client_shim.llm.folder import BadFolder, read_json
from dormouse.client_shim.llm.gguf_file import gguf_sampling
from dormouse.client_shim.llm.requests import MAX_STOP_CHARS, MAX_STOPS, RANGES, Request
from dormouse.schemas.llm import DefaultSampling

FILE: Final = "generation_config.json"
_CONFIG: Final = "config.json"

MAX_UNFOLLOWED: Final = 32
"""Names that are reported: as many as there are, and bounded for an untrusted file."""

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
    "mirostat": (0,),
    "penalty_last_n": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence": (),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
    "xtc_probability": (0,),
}
"""Fields that are not followed, with the values at which they change nothing (``null`` never does)."""

_HARMLESS: Final = (
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "early_stopping", "eos_token_id", "is_assistant", "length_penalty",
    "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size", "mirostat_eta", "mirostat_tau",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
    "xtc_threshold", "_commit_hash", "_from_model_config",
)  # fmt: skip
"""Fields that change no answer of a decoder that samples: speed, memory, results beside the tokens, ends (model.py),
and those that matter only with beams, an encoder or another field. ``max_length`` counts the prompt, too, and old files
have it from the defaults of their day: the limit is the model's context, as in vLLM.
"""

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
_OTHERS: Final = ("do_sample", "stop_strings")


def chosen(model: DefaultSampling, asked: Request) -> DefaultSampling:
    """Of one request, which wins. Its own limit and stop strings are not looked at."""
    said = {name: value for name in _SAID if (value := getattr(asked, name)) is not None}
    return msgspec.structs.replace(model, **said)


def read_sampling(folder: str, gguf: str = "") -> DefaultSampling:
    """``gguf``: the file that is all of the model. Raises BadFolder."""
    if gguf:
        return sampling_of(gguf_sampling(folder, gguf), gguf)
    if os.path.exists(join(folder, FILE)):
        return sampling_of(read_json(folder, FILE), FILE)
    said = read_json(folder, _CONFIG) if os.path.exists(join(folder, _CONFIG)) else {}
    known = {*_FOLLOWED, *_NEUTRAL, *_OTHERS}
    return sampling_of({name: value for name, value in said.items() if name in known}, _CONFIG)


def sampling_of(said: dict[str, Any], file: str = FILE) -> DefaultSampling:
    """Raises BadFolder, which names the file, if a value is none that a request could have."""
    try:
        found: dict[str, Any] = {}
        for field, name in _FOLLOWED.items():
            if (value := said.get(field)) is not None:
                found[name] = _number(field, value, *RANGES[name], whole=name in ("top_k", "max_tokens"))
        sampled = said.get("do_sample")
        if sampled is not None and not isinstance(sampled, bool):
            raise BadFolder(f"do_sample {sampled!r:.80}; write true or false, or leave it out")
        if sampled is False:
            found["temperature"] = 0.0
        found["stop"] = _stops(said.get("stop_strings"))
    except BadFolder as error:
        text = f"{file} has {error}, or deploy with --generation-config none, which follows nothing of it"
        raise BadFolder(text) from error
    known = {*_HARMLESS, *_FOLLOWED, *_OTHERS}
    ignored = {name for name in said if name not in known}
    ignored -= {name for name in ignored if said[name] in (None, *_NEUTRAL.get(name, ()))}
    ends = said.get("eos_token_id")
    if not all(end is None or type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        ignored.add("eos_token_id")
    return DefaultSampling(**found, unfollowed=tuple(name[:80] for name in sorted(ignored)[:MAX_UNFOLLOWED]))


def warning_of(sampling: DefaultSampling) -> str:
    """A sentence that names the fields that are not followed; "" if all are."""
    named = ", ".join(sampling.unfollowed)
    return f"answers here do not keep to what the model's files say of {named}" if named else ""


def _number(field: str, value: Any, low: float, high: float, whole: bool) -> float | int:
    """Raises BadFolder."""
    good = type(value) is int or (type(value) is float and math.isfinite(value) and (not whole or value.is_integer()))
    if not good or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise BadFolder(f"{field} {value!r:.80}; write {kind} from {low:g} to {high:g}, or leave it out")
    return int(value) if whole else float(value)


def _stops(said: Any) -> tuple[str, ...]:
    """Raises BadFolder."""
    stops = [said] if isinstance(said, str) else [] if said is None else said
    good = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not good or not all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARS for each in stops):
        raise BadFolder(
            f"stop_strings {said!r:.80}; write at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters, or "
            "leave it out"
        )
    return tuple(stops)
