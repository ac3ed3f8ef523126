"""Triton's kernels on a real GPU against torch on the same GPU, and whole models against `transformers` on the CPU.

Over the fake driver the kernels run in Triton's interpreter, on smaller steps.
"""

import pytest
import torch
import triton_here
from gpu_marks import FAKE, NEEDS_GPU
from language_models import TINY, prompts, reference, spec_of, wrong_tokens

if not triton_here.HERE:
    pytest.skip("needs Triton, which comes with a torch for CUDA", allow_module_level=True)

from attention_world import DEVICE, World, agree

from dormouse.core.decisions.batches.batch import Sequence
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling

pytestmark = NEEDS_GPU

MODELS = {  # query heads, key heads, width of a head, window, cap
    "smollm2": (9, 3, 64, 0, 0.0),
    "llama-3-8b": (32, 8, 128, 0, 0.0),
    "mistral-7b": (32, 8, 128, 100, 0.0),
    "phi-2": (32, 32, 80, 0, 0.0),
    "gemma-2-2b": (8, 4, 256, 100, 50.0),
}
STEPS = {  # tokens of each part, and its context
    "decode": [(1, 1), (1, 17), (1, 64), (1, 900)],
    "prompts": [(64, 64), (33, 50), (200, 300)],
    "mixed": [(1, 300), (2, 2), (100, 130), (1, 40)],
}
LONG = {"long": [(1, 9000), (1, 20)], "many": [(1, 100 + 13 * number) for number in range(64)]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", STEPS if FAKE else [*STEPS, *LONG])
@pytest.mark.parametrize("model", ["smollm2"] if FAKE else MODELS)
def test_kernels_compute_what_torch_computes(model: str, step: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, window, cap = MODELS[model]
    world = World({**STEPS, **LONG}[step], heads, kv_heads, dim, dtype)
    agree(world, window, cap, tolerance=0.0 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"] if FAKE else TINY)
@torch.inference_mode()
def test_a_model_on_the_gpu_says_what_transformers_says(family: str) -> None:
    """In fp32. Sampled tokens, too, come from the same logits."""
    model = reference(family)
    spec = spec_of(model)
    layout = kv_layout(spec)
    memory = torch.full((32 * layout.block_nbytes // 4,), float("nan"), device=DEVICE)
    attention = BlockAttention(layout, memory, TritonBackend(layout, memory, 1 if FAKE else 0))
    built = models.build(spec, attention)
    models.bind(built, {name: parameter.data.to(DEVICE) for name, parameter in model.named_parameters()})
    engine = Engine(built, attention, lambda blocks: False)
    engine.add_extent(0, 0, 32 * layout.block_nbytes)
    new = 4 if FAKE else 24
    given = prompts(1, 5, 40)
    sequences = [Sequence(number, prompt, len(prompt), len(prompt) + new) for number, prompt in enumerate(given)]
    for sequence in sequences:
        engine.add(sequence.number, Generation(sequence, Sampling(), frozenset()))
    sampled = Sequence(9, prompts(2, 9)[0], 9, 9 + new)
    engine.add(9, Generation(sampled, Sampling(temperature=0.8, presence_penalty=0.5, seed=3, logprobs=2), frozenset()))
    while not engine.batch.idle:
        assert engine.step() is not None
    for sequence in sequences:
        assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []
    assert len(sampled.tokens) == sampled.limit
    if not FAKE:  # with 24 new tokens, some steps are of a kind that came before
        assert engine.graphs is not None
        assert (engine.graphs.trouble, engine.graphs.replayed > 10) == ("", True)
