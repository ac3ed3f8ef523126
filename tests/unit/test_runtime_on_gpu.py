"""What a runtime does otherwise where it has a GPU, as far as it shows without one."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from language_models import TINY, prompts, reference

from dormouse.gpuserver.executor import runtime_zygote
from dormouse.gpuserver.runtime import layers, leaves, recognition
from dormouse.gpuserver.runtime.low_rank import AdapterRows
from dormouse.gpuserver.runtime.sampling import AT_ONCE, Sampling, choose, sampled_rows

WARM = """
from dormouse.gpuserver.runtime import zygote
zygote.import_for_cuda()
import os, sys, torch
print(len(os.listdir("/proc/self/task")), "dormouse.gpuserver.runtime.cuda_mapping" in sys.modules,
      torch.cuda.is_initialized(), any("libcuda.so" in line for line in open("/proc/self/maps")))
"""

NORMS = {"llama": 7, "qwen2": 7, "qwen3": 13, "mistral": 7, "gemma2": 17}
"""By the root mean square: two of each layer, in Qwen3 two more of its heads, in Gemma2 four, and the last one."""

SAMPLINGS = [
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_k=5, seed=2),
    Sampling(temperature=1.3, top_p=0.6, seed=3),
    Sampling(temperature=0.9, min_p=0.2, seed=4),
    Sampling(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=5),
    Sampling(temperature=1.0, top_p=1e-6, seed=6),
    Sampling(temperature=1.0, top_k=1, min_p=1.0, seed=7),
]


@pytest.mark.parametrize("at_once", [AT_ONCE, 700])
def test_rows_that_are_sampled_together_are_sampled_as_each_alone(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go, and two rows at a time."""
    monkeypatch.setattr("dormouse.gpuserver.runtime.sampling.AT_ONCE", at_once)
    logits = 3 * torch.randn(len(SAMPLINGS), 320, generator=torch.Generator().manual_seed(1))
    drawn = set()
    for position in range(40):
        positions = [position + row for row in range(len(SAMPLINGS))]
        found = sampled_rows(logits, SAMPLINGS, positions)
        alone = [
            choose(row, sampling, [0] * place, 1, 0).token
            for row, sampling, place in zip(logits, SAMPLINGS, positions, strict=True)
        ]
        assert found == alone
        drawn.add(tuple(found))
    assert len(drawn) > 30


def test_what_is_told_of_tokens_or_changes_them_is_not_sampled_together() -> None:
    assert Sampling(temperature=0.5, top_p=0.5).only_samples
    others = [Sampling(), Sampling(temperature=1.0, logprobs=0), Sampling(temperature=1.0, bias={3: 1.0})]
    assert [each.only_samples for each in others] == [False] * 3


def test_the_process_that_forks_runtimes_opens_no_device() -> None:
    """Who has opened it cannot fork any more. And it has one thread: no fork has the others."""
    environment = {**os.environ, **runtime_zygote.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["1", "True", "False", "False"], done.stderr


@pytest.mark.parametrize("family", TINY)
@torch.inference_mode()
def test_norms_in_one_operation_are_those_of_the_family(family: str) -> None:
    model, other, tokens = reference(family), reference(family), torch.tensor(prompts(3, 30))
    for each in (model, other):
        for name, parameter in each.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    layers.install_on_gpu(other)
    replaced = sum(isinstance(module.forward, leaves.TorchNorm) for module in other.modules())
    assert replaced == NORMS.get(family, 0)
    torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_weight_that_lacks_one_is_not_rounded_with_it() -> None:
    """Each channel would be 0.15 % off, in all tokens alike."""
    norm: Any = next(each for each in reference("gemma2").modules() if type(each).__name__ == "Gemma2RMSNorm")
    norm = copy.deepcopy(norm).bfloat16()
    generator = torch.Generator().manual_seed(1)
    norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) * 0.6 - 0.1)
    found = recognition.norm(norm)
    assert found is not None
    given = torch.randn(500, len(norm.weight), generator=generator).bfloat16()
    ours, theirs = leaves.TorchNorm(norm, *found)(given), norm(given)
    assert ours.dtype is torch.bfloat16
    assert (ours != theirs).float().mean() < 0.01


def test_rows_are_known_without_asking_the_device() -> None:
    """Its numbers are poison here: whoever reads them waits for all that it has been given."""
    owners = [-1, 0, 0, 2, -1, 2]
    poison = torch.empty(6, dtype=torch.int64, device="meta")
    rows = AdapterRows(poison, poison, (owners, owners[3:]), [0, 2], 8)
    assert [rows.rows(each, False) for each in ([0], [2], [-1, 0])] == [[1, 2], [3, 5], [0, 1, 2, 4]]
    assert rows.rows([2], True) == [0, 2]
    assert rows.at([2], True).device.type == "meta"
    assert [each.shape for each in rows.pieces(False, 16)] == [(3,)] * 3
