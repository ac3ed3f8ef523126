"""What a deploy's settings become, and how those that mean nothing are refused: by their names."""

from typing import Any

import pytest
from msgspec import structs

from dormouse.core import tenants
from dormouse.core.config import LimitsSection, NodeConfig, NodeSection, TenantSection
from dormouse.router.admin.deploying import spec_of, within_quota
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import EmbeddingSettings, LlmSettings


def spec(entry: str = "config.json", **settings: Any) -> LlmSettings | None:
    return spec_of("chat", entry, a.Settings(**settings)).llm


def test_a_language_models_settings() -> None:
    assert spec() is None
    assert spec(llm=True) == LlmSettings()
    assert spec(llm=True, ttft="1s", tpot=25, context=512, dtype="float32", convert=True) == LlmSettings(
        ttft_ms=1000, tpot_ms=25, context=512, dtype="float32", convert=True
    )
    assert spec("small.gguf", llm=True) == LlmSettings()
    assert spec(llm=True, generation_config="none") == LlmSettings(generation_config="none")


def test_a_model_that_makes_embeddings_is_no_language_model() -> None:
    found = spec_of("e", "config.json", a.Settings(llm=True, embedding=True, context=64))
    assert (found.llm, found.embedding) == (None, EmbeddingSettings(context=64))
    assert found.stateless  # so it may have several instances


def test_d1_a_quota_is_not_its_authors_alone_to_choose() -> None:
    node = NodeConfig(
        node=NodeSection(tenants="many"),
        limits=LimitsSection(host="3GiB"),
        tenants={"a": TenantSection(host="2GiB")},
    )
    assert [tenants.quota_nbytes(node, name) >> 20 for name in ("a", "b")] == [2048, 1536]
    assert tenants.quota_nbytes(structs.replace(node, node=NodeSection()), "b") == 3 << 30
    assert tenants.quota_nbytes(structs.replace(node, limits=LimitsSection(quota="5MiB")), "a") == 5 << 20
    asked = spec_of("f", "f.py", a.Settings(quota="2GiB"))
    assert within_quota(asked, 2 << 30) is asked
    with pytest.raises(ConfigError, match=r"^quota is 2\.0 GiB; this node grants tenant 'default' at most 1\.5 GiB \("):
        within_quota(asked, 1536 << 20)
    unasked = spec_of("f", "f.py", a.Settings(quota="1GiB"))
    assert within_quota(unasked, 5 << 20).quota_nbytes == 5 << 20


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ttft": "soon"}, "ttft: 'soon' is not a duration"),
        ({"ttft": "-5ms"}, "ttft: '-5ms' is not a duration"),
        ({"tpot": "1e9h"}, "tpot: '1e9h' is not a duration"),
        ({"tpot": "9000h"}, "tpot: 9000h is too long"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": ""}, "dtype is ''"),
        ({"context": -1}, "context is -1"),
        ({"context": 10**12}, "context is 1000000000000"),
        ({"generation_config": "vllm"}, "generation_config is 'vllm'; write auto or none"),
        ({"generation_config": "none", "embedding": True}, "generation_config is of language models that make text"),
        ({"embedding": True, "llm": False}, "embedding is set without llm"),
        ({"embedding": True, "entry": "small.gguf"}, "makes no embeddings"),
        ({"embedding": True, "dtype": "int8"}, "dtype is 'int8'"),
        ({"entry": "function.py"}, "the entry of a language model is 'function.py'"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(**{"llm": True, **settings})
    assert says in str(raised.value)
