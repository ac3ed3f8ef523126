"""Description of a language model for the processes that serve it: known fields only, checked on both sides.

A runtime gets this instead of a folder's ``config.json``, so nothing from outside names code, kernels or files to it.
Imports neither torch nor transformers.
"""

import math
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from dormouse.schemas import rope
from dormouse.schemas.errors import ConfigError

Value = int | float | bool | str | list[str] | dict[str, int | float | bool | str | list[float] | None] | None
Dtype = Literal["float32", "bfloat16"]

DONE: Final = b"data: [DONE]\n\n"
"""Ends the events of a streamed answer, in OpenAI's interface."""

GENERATION_CONFIGS: Final = ("auto", "none")
"""Of language models: how their files say that they are sampled is the default, or OpenAI's is."""

ISOLATIONS: Final = ("tenant", "function")
"""Of language models: equal ones of a tenant share a runtime, or each function has its own."""

MAX: Final = 1 << 24
"""Of anything that is counted: ten times the largest vocabulary."""

MAX_LAYERS: Final = 1024
"""Eight times as many as any model has: each costs memory before a weight is there."""

_ACTIVATIONS: Final = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
_LAYERS: Final = ("full_attention", "sliding_attention")

MAX_RANK: Final = 256
"""Of an adapter: it saves little over a full weight by then."""

MAX_MODULES: Final = 16 * MAX_LAYERS
"""That an adapter changes: twice as many as a layer of any family has."""

MAX_NAME: Final = 512
"""Characters in the name of a parameter."""

MAX_LOGPROBS: Final = 20
"""The most probable tokens that are told with each token of an answer: as many as OpenAI's interface has."""


class DefaultSampling(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The choice of tokens where a request says nothing; ``top_k`` 0 and ``max_tokens`` None are no limit. ``stop``:
    texts that end an answer that keeps to no schema, unless it ignores ends. ``unfollowed``: fields of the model's
    files that answers do not keep to.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    unfollowed: tuple[str, ...] = ()


Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX


def _layer_count(value: Any) -> bool:
    return _count(value) and value <= MAX_LAYERS


def _maybe_count(value: Any) -> bool:
    return value is None or _count(value)


def _token(value: Any) -> bool:
    return value is None or (type(value) is int and -1 <= value <= MAX)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _maybe_number(value: Any) -> bool:
    return value is None or _number(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _activation(value: Any) -> bool:
    return value in _ACTIVATIONS


def _layers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_LAYERS and all(each in _LAYERS for each in value)


def _any(value: Any) -> bool:
    """Judged with the whole."""
    return True


_COMMON: Final[dict[str, Check]] = {
    "vocab_size": _count,
    "hidden_size": _count,
    "num_hidden_layers": _layer_count,
    "num_attention_heads": _count,
    "max_position_embeddings": _count,
    "pad_token_id": _token,
    "tie_word_embeddings": _flag,
}
_GATED: Final[dict[str, Check]] = {
    **_COMMON,
    "intermediate_size": _count,
    "num_key_value_heads": _count,
    "hidden_act": _activation,
    "rms_norm_eps": _number,
    "rope_parameters": _any,
}
_QWEN: Final[dict[str, Check]] = {
    **_GATED,
    "use_sliding_window": _flag,
    "sliding_window": _maybe_count,
    "max_window_layers": _maybe_count,
    "layer_types": _layers,
}
FAMILIES: Final[dict[str, dict[str, Check]]] = {
    "llama": {**_GATED, "head_dim": _maybe_count, "attention_bias": _flag, "mlp_bias": _flag},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": _maybe_count, "attention_bias": _flag},
    "mistral": {**_GATED, "head_dim": _maybe_count, "sliding_window": _maybe_count},
    "gemma2": {
        **{name: check for name, check in _GATED.items() if name != "hidden_act"},
        "hidden_activation": _activation,
        "head_dim": _maybe_count,
        "attention_bias": _flag,
        "query_pre_attn_scalar": _number,
        "sliding_window": _maybe_count,
        "layer_types": _layers,
        "final_logit_softcapping": _maybe_number,
        "attn_logit_softcapping": _maybe_number,
    },
    "phi": {
        **_COMMON,
        "intermediate_size": _count,
        "num_key_value_heads": _count,
        "hidden_act": _activation,
        "layer_norm_eps": _number,
        "rope_parameters": _any,
        "qk_layernorm": _flag,
    },
    "gpt2": {
        "vocab_size": _count,
        "n_positions": _count,
        "n_embd": _count,
        "n_layer": _layer_count,
        "n_head": _count,
        "n_inner": _maybe_count,
        "activation_function": _activation,
        "layer_norm_epsilon": _number,
        "scale_attn_weights": _flag,
        "scale_attn_by_inverse_layer_idx": _flag,
        "tie_word_embeddings": _flag,
    },
    "opt": {
        **_COMMON,
        "ffn_dim": _count,
        "do_layer_norm_before": _flag,
        "_remove_final_layer_norm": _flag,
        "word_embed_proj_dim": _count,
        "activation_function": _activation,
        "enable_bias": _flag,
        "layer_norm_elementwise_affine": _flag,
    },
    "gpt_neox": {
        **_COMMON,
        "intermediate_size": _count,
        "hidden_act": _activation,
        "layer_norm_eps": _number,
        "use_parallel_residual": _flag,
        "rope_parameters": _any,
        "attention_bias": _flag,
    },
}
"""By ``model_type``: the fields of a configuration that its code reads."""


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decoder. ``config`` has fields of FAMILIES only; ``context`` is the longest sequence in tokens."""

    family: str
    config: dict[str, Value]
    dtype: Dtype
    context: int

    def check(self) -> None:
        """Raises ConfigError, which names the field."""
        fields = FAMILIES.get(self.family)
        if fields is None:
            raise ConfigError(f"the family {self.family!r} is not one of {', '.join(FAMILIES)}")
        for name, value in self.config.items():
            if name not in fields or not fields[name](value):
                raise ConfigError(f"{self.family}: the field {name} cannot be {value!r}")
        if self.head_dim < 1:
            raise ConfigError(f"{self.family}: {self.heads} attention heads have no room in the hidden size")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads")
        if not 0 < self.context <= MAX:
            raise ConfigError(f"a context of {self.context} tokens")
        if "rope_parameters" in self.config:
            why = rope.why_not(self.config["rope_parameters"], self.family, self.head_dim, self.context)
            if why:
                raise ConfigError(f"{self.family}: rope_parameters: {why}")

    def _of(self, *names: str) -> int:
        for name in names:
            if isinstance(value := self.config.get(name), int):
                return value
        raise ConfigError(f"{self.family}: the field {names[0]} is missing")

    @property
    def layers(self) -> int:
        return self._of("num_hidden_layers", "n_layer")

    @property
    def heads(self) -> int:
        return self._of("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int:
        return self._of("num_key_value_heads", "num_attention_heads", "n_head")

    @property
    def head_dim(self) -> int:
        if isinstance(own := self.config.get("head_dim"), int):
            return own
        return self._of("hidden_size", "n_embd") // self.heads

    @property
    def vocabulary(self) -> int:
        return self._of("vocab_size")

    @property
    def positions(self) -> int:
        """The longest sequence that its configuration names."""
        return self._of("max_position_embeddings", "n_positions")


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addition of a LoRA adapter to one module of its base. ``name`` is the module's path in the base.

    A "linear" adds ``scale * (x @ down.T @ up + bias)`` to its output, where ``bias`` says that there is one; ``down``
    is ``[rank, in]``, ``up`` is ``[rank, out]``, ``bias`` is ``[out]``. An "embedding" adds ``scale * (down[token] @
    up)``; there ``down`` is ``[tokens of the vocabulary, rank]``. So of PEFT's tensors ``up`` is B transposed, and
    ``down`` of an embedding is A transposed. Modules of GPT-2's class Conv1D are "linear" too.
    """

    name: str
    kind: Literal["linear", "embedding"]
    rank: int
    scale: float
    bias: bool

    def check(self) -> None:
        """Raises ConfigError."""
        if not 0 < len(self.name) <= MAX_NAME:
            raise ConfigError(f"an adapter's module has a name of {len(self.name)} characters")
        if not 0 < self.rank <= MAX_RANK:
            raise ConfigError(f"the rank of {self.name} is {self.rank}; 1 to {MAX_RANK} are served")
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ConfigError(f"the scale of {self.name} is {self.scale}: it would change nothing, or everything")
        if self.bias and self.kind == "embedding":
            raise ConfigError(f"{self.name} is an embedding, and has a bias")


DOWN: Final = ".lora_down"
UP: Final = ".lora_up"
BIAS: Final = ".lora_bias"
"""Behind a module's name: the names of an adapter's tensors for it, among the weights of its OpenModel. BIAS is there
where the module's ``bias`` is true.
"""

REPLACED: Final = ".replaced"
"""Behind a parameter's name: the name of the adapter's own, of the same shape as the base's."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter of a decoder: the modules to which it adds, and the base's parameters for which it has its own.

    ``replaced`` names each use of a parameter: of tied ones, the other keeps the base's unless it is named too. Their
    two names can be at one place. A module can be in both: the adapter adds to what its own parameter computes. All
    tensors are of the base's dtype, and contiguous.
    """

    modules: list[AdapterModule]
    replaced: list[str]

    def parts(self, most: int) -> list["AdapterSpec"]:
        """The same in parts of so many modules and parameters at most."""
        starts = range(0, max(len(self.modules), len(self.replaced)), most)
        return [
            AdapterSpec(modules=self.modules[at : at + most], replaced=self.replaced[at : at + most]) for at in starts
        ]

    def with_part(self, part: "AdapterSpec") -> "AdapterSpec":
        """Raises ConfigError for more than any has."""
        whole = AdapterSpec(modules=self.modules + part.modules, replaced=self.replaced + part.replaced)
        whole.check_size()
        return whole

    def check_size(self) -> None:
        """Raises ConfigError."""
        if not 0 < len(self.modules) <= MAX_MODULES or len(self.replaced) > MAX_MODULES:
            raise ConfigError(f"an adapter of {len(self.modules)} modules and {len(self.replaced)} parameters")

    @property
    def weights(self) -> list[str]:
        """The names of all tensors that it has."""
        ends = [(module.name, end) for module in self.modules for end in (DOWN, UP, *[BIAS] * module.bias)]
        return [name + end for name, end in (*ends, *((name, REPLACED) for name in self.replaced))]

    def check(self) -> None:
        """Raises ConfigError, which names the module."""
        self.check_size()
        for module in self.modules:
            module.check()
        for names in ([module.name for module in self.modules], self.replaced):
            if len(set(names)) < len(names):
                raise ConfigError("an adapter names a module or a parameter twice")
        if any(not 0 < len(name) <= MAX_NAME for name in self.replaced):
            raise ConfigError("an adapter replaces a parameter whose name is empty, or too long")
