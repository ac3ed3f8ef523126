"""Reads ``adapter_config.json``: the modules of a base that a LoRA adapter changes, and how much. Runs in the sandbox.

Names match by PEFT's rules. adapter.py decides which tensors are required. A pattern is untrusted and may run for ever:
an instance that does not become ready is ended, as with any function's code.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from dormouse.client_shim.llm.folder import BadFolder, read_json

CONFIG: Final = "adapter_config.json"
MAX_PATTERNS: Final = 4096
"""In one field: four times the modules of the largest dense models, as some tools name each."""

_REFUSED: Final = {
    "use_dora": "DoRA, whose magnitudes are not served; train it with use_dora=False",
    "use_qalora": "QALoRA, which pools inputs and is for quantized bases only",
    "use_bdlora": "block-diagonal LoRA, which is not served",
    "alora_invocation_tokens": "an activated LoRA, which starts in the midst of a prompt and is not served",
    "arrow_config": "a router among adapters, which is not served",
    "kasa_config": "KaSA, whose singular values are not served",
    "monteclora_config": "MonteCLoRA, which is not served",
    "velora_config": "VeLoRA, which is not served",
    "layer_replication": "layers that the base has once are used twice, which is not served",
    "trainable_token_indices": "single rows of the embeddings are trained, which is not served; put embed_tokens into "
    "modules_to_save",
    "target_parameters": "parameters without a module are adapted, which is not served",
}
"""They change the computation, unless they are off."""

_IGNORED: Final = {
    "how it came to be": "task_type peft_type auto_mapping peft_version revision inference_mode runtime_config",
    "in training only": "lora_dropout loftq_config eva_config corda_config lora_ga_config",
    "for merging: A and B are stored alike with and without": "fan_in_fan_out",
    "for layers that no base here has": "megatron_config megatron_core qalora_group_size",
}
"""They change nothing here, by the reason."""

_INIT: Final = ("gaussian", "eva", "orthogonal", "mica", "true", "false", "none")
"""They change only A and B, which are in the file."""

_BASES_TOO: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""These have changed the base's weights before the first step. A suffix, as in pissa_niter_16, does not matter."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as PEFT names them, with its defaults."""

    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None


def read_config(folder: str) -> AdapterConfig:
    """Raises BadFolder."""
    raw = read_json(folder, CONFIG)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise BadFolder(f"{CONFIG}: peft_type is {kind!r}; only adapters of type LORA are served")
    for name, why in _REFUSED.items():
        if raw.get(name) not in (None, False, [], {}):
            raise BadFolder(f"{CONFIG} has {name}: {why}")
    known = {*" ".join(_IGNORED.values()).split(), *_REFUSED, *AdapterConfig.__struct_fields__}
    for name, value in raw.items():
        if name not in known and value not in (None, False, [], {}, ""):
            raise BadFolder(f"{CONFIG} has {name[:80]!r}, which is not known, and may change what is computed")
    try:
        config = msgspec.convert(raw, AdapterConfig)
    except msgspec.ValidationError as error:
        raise BadFolder(f"{CONFIG}: {error}") from error
    init = str(config.init_lora_weights)
    if init.lower() not in _INIT:
        why = (
            "which has changed the base's weights before training: save it with "
            "path_initial_model_for_weight_conversion; or, if the base was saved after that change, deploy over that, "
            "with init_lora_weights true"
            if init.lower().startswith(_BASES_TOO)
            else "which is not known, and may have changed the base's weights"
        )
        raise BadFolder(f"{CONFIG}: init_lora_weights is {init[:80]!r}, {why}")
    _check_lists(config)
    return config


def _check_lists(config: AdapterConfig) -> None:
    for name in AdapterConfig.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, list | dict) and len(value) > MAX_PATTERNS:
            raise BadFolder(f"{CONFIG}: {name} has {len(value):,} entries, more than {MAX_PATTERNS:,}")
    chosen = config.layers_to_transform not in (None, [])
    if chosen and isinstance(config.target_modules, str):
        raise BadFolder(f"{CONFIG}: layers_to_transform goes with a list of target_modules, not with a pattern")
    if config.layers_pattern and not chosen:
        raise BadFolder(f"{CONFIG}: layers_pattern is there, and layers_to_transform is not")


class Targets:
    """The modules that are adapted, among the names that a base has. Raises BadFolder."""

    def __init__(self, config: AdapterConfig, linears: Iterable[str]) -> None:
        """``linears`` are the modules that "all-linear" stands for."""
        wanted = config.target_modules
        if isinstance(wanted, str) and wanted.lower() == "all-linear":
            wanted = list(linears)
        self._wanted = _pattern(wanted) if isinstance(wanted, str) else frozenset(wanted)
        without = config.exclude_modules or []
        self._without = _pattern(without) if isinstance(without, str) else frozenset(without)
        self._saved = [_pattern(rf"(^|.*\.){name}($|\..*)") for name in config.modules_to_save or []]
        layers = config.layers_to_transform
        self._layers = frozenset([layers] if isinstance(layers, int) else layers or [])
        patterns = config.layers_pattern or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        named = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns]
        self._layer = [_pattern(each) for each in named or [r".*?\.[^.]*\.(?P<idx>\d+)\."]]

    def unknown(self, names: Iterable[str]) -> str | None:
        """A module that is wanted, and that a base with these names does not have."""
        if isinstance(self._wanted, re.Pattern):
            pattern = self._wanted
            return None if any(pattern.fullmatch(name) for name in names) else pattern.pattern
        had = {suffix for name in names for suffix in _suffixes(name)}
        return min(self._wanted - had, default=None)

    def __contains__(self, name: str) -> bool:
        if _matches(self._without, name) or any(pattern.match(name) for pattern in self._saved):
            return False
        if isinstance(self._wanted, re.Pattern) or name in self._wanted or not self._layers:
            return _matches(self._wanted, name)
        return _matches(self._wanted, name) and self._is_chosen(name)

    def _is_chosen(self, name: str) -> bool:
        found = next((match for pattern in self._layer if (match := pattern.match(name))), None)
        return found is not None and int(found["idx"]) in self._layers


class Scales:
    """Rank and scale of a module. Raises BadFolder."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._ranks = _by_pattern(config.rank_pattern or {})
        self._alphas = _by_pattern(config.alpha_pattern or {})

    def of(self, name: str) -> tuple[int, float]:
        rank = next((rank for pattern, rank in self._ranks if pattern.match(name)), self._config.r)
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(name)), self._config.lora_alpha)
        rank = int(rank)
        if rank < 1:
            raise BadFolder(f"{CONFIG}: the rank of {name} is {rank}; it has to be 1 or more")
        return rank, alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


def _by_pattern(values: Mapping[str, float]) -> list[tuple[re.Pattern[str], float]]:
    return [(_pattern(rf"(.*\.)?({key})$"), value) for key, value in values.items()]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadFolder(f"{CONFIG}: {text[:80]!r} is no regular expression: {error}") from error


def _matches(wanted: re.Pattern[str] | frozenset[str], name: str) -> bool:
    if isinstance(wanted, re.Pattern):
        return wanted.fullmatch(name) is not None
    return any(suffix in wanted for suffix in _suffixes(name))


def _suffixes(name: str) -> Iterator[str]:
    """The name, and its suffix after each dot."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
