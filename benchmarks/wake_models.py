"""Records what the shim sends of a real model's forward, so that an engine can be driven with it again and again."""

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import torch

ROOT: Final = Path(__file__).parents[1]
SEQUENCE: Final = 128


@dataclass
class Recording:
    """A model's storages and two requests: the first with all definitions, the second as every later one.

    ``frames`` are lists of ``[definitions, commands]``; ``arena`` is what the inputs had been put into.
    """

    name: str
    storages: dict[int, bytes]
    first: list[list[Any]]
    later: list[list[Any]]
    arena: bytes
    expected: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(len(content) for content in self.storages.values())


def bert_large() -> tuple[Any, dict[str, torch.Tensor]]:
    """24 layers, 1024 wide: 1.34 GB (Devlin et al. 2018; the model of Torpor's Bert-qa)."""
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30522
    )
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, (1, SEQUENCE), generator=generator)
    return BertForQuestionAnswering(config), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def resnet_152() -> tuple[Any, dict[str, torch.Tensor]]:
    """Bottlenecks 3, 8, 36, 3: 241 MB (He et al. 2015; the other model of Torpor's Figure 7)."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(depths=[3, 8, 36, 3]))
    return model, {"pixel_values": torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(5))}


MODELS: Final[dict[str, Callable[[], tuple[Any, dict[str, torch.Tensor]]]]] = {
    "ResNet-152": resnet_152,
    "BERT-large": bert_large,
}


def _answer(output: Any) -> torch.Tensor:
    answer: torch.Tensor = output.start_logits if hasattr(output, "start_logits") else output.logits
    return answer


def record(name: str) -> Recording:
    """Run a model natively and through the shim, and keep what went over the wire."""
    spec = importlib.util.spec_from_file_location("dormouse_tests_loopback", ROOT / "tests" / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    loopback = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loopback)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    with torch.no_grad():
        model, inputs = MODELS[name]()
        model.eval()
        expected = _answer(model(**inputs)).clone()
        world = loopback.LoopbackWorld(arena_nbytes=8 << 20)
        try:
            model.to("cuda")
            world.end_lease()
            executor = world.node.executors[0]
            requests = []
            for _ in range(2):
                executor.frames, executor.keep_frames = [], True
                world.begin_lease()
                remote = {key: value.to("cuda") for key, value in inputs.items()}
                result = _answer(model(**remote)).cpu()
                del remote
                executor.keep_frames = False
                requests.append([msgpack.unpackb(frame)[3:] for frame in executor.frames])
                arena = bytes(world.node.memory)
                world.end_lease()
            assert torch.allclose(result, expected, atol=1e-4), "the recording's own answer is wrong"
            storages = {number: bytes(content) for number, content in world.node.store.items()}
        finally:
            world.close()
        del model
        gc.collect()
    first, later = requests
    return Recording(name, storages, first, later, arena, expected)
