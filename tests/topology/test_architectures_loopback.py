"""Architectures from `transformers`, unmodified, on cuda:0 of a loopback node: the answers are those of native
PyTorch.

Tiny configurations with seeded random weights; each is also asked a second time, which must find every shape known
and wait only for its downloads.
"""

import warnings
from typing import Any

import pytest
import torch
from architectures import CASES, build, tensors

GENERATING = ("gpt2", "llama", "qwen2", "t5", "bart", "whisper")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own deprecations are not ours to fail on
        yield


@pytest.mark.parametrize("name", CASES)
def test_answers_as_native_pytorch_does(name: str, loopback: Any) -> None:
    model, inputs = build(name)
    with torch.no_grad():
        expected = tensors(model(**inputs))
        model.to("cuda")
        loopback.end_lease()
        for attempt in range(2):
            loopback.begin_lease()
            stream = loopback.stream
            questions, misses = stream.questions, stream.shape_misses
            outputs = tensors(model(**{key: value.to("cuda") for key, value in inputs.items()}))
            assert all(value.device == torch.device("cuda", 0) for value in outputs)
            actual = [value.cpu() for value in outputs]
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            if attempt:
                assert stream.shape_misses == misses
                assert stream.questions == questions or name in ASKING
            loopback.end_lease()


ASKING = ("mixtral",)
"""Models whose forward asks for data: the router of a mixture of experts looks at its choices."""


@pytest.mark.parametrize("name", GENERATING)
def test_generates_the_same_tokens(name: str, loopback: Any) -> None:
    model, inputs = build(name)
    inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    with torch.no_grad():
        expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        model.to("cuda")
        loopback.end_lease()
        loopback.begin_lease()
        actual = model.generate(
            **{key: value.to("cuda") for key, value in inputs.items()}, max_new_tokens=6, do_sample=False
        )
        assert actual.is_cuda
        assert actual.cpu().tolist() == expected.tolist()
        loopback.end_lease()
