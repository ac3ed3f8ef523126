"""Adapters in an engine: each sequence has its own, in steps of many, as if the base's products had been added to."""

import ctypes
from typing import Any, Final

import needs
import pytest
import torch
from adapted_models import adapted, adapter
from language_models import prompts, reference, wrong_tokens
from runtime_engines import begin, engine
from torch.nn.utils import stateless

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime import groups, kernels, layers
from dormouse.gpuserver.runtime.adapters import TABLE
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.low_rank import MAX, LowRank
from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import MAX_RANK

HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens"


def finish(made: Engine) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    while not made.batch.idle:
        for each in made.step() or ():
            found.setdefault(each.number, []).append(each.chosen)
    return found


@pytest.mark.parametrize("how", ["fused", "modules", "torch"])
@pytest.mark.parametrize("family", [*layers.GATED, "phi", "opt", "gpt_neox"])
def test_each_sequence_has_its_own_beside_others(family: str, how: str) -> None:
    """The same prompt for all: nobody reads KV that another adapter has made."""
    model = reference(family)
    made = engine(model, 64, native=how != "torch", step_tokens=48, fused=how == "fused")
    every = [adapter(model, 1), adapter(model, 2, rank=3), adapter(model, 5, rank=40, only="layers.1.")]
    for each in every:
        made.bind(made.adapters.open(), each)
    (prompt,) = prompts(5, 37)
    given = [NO_ADAPTER, 0, 1, 2, NO_ADAPTER, 1]
    begun = [begin(made, number, prompt, 12, adapter=each) for number, each in enumerate(given)]
    finish(made)
    for sequence in begun:
        with adapted(model, every[sequence.adapter] if sequence.adapter >= 0 else {}):
            assert wrong_tokens(model, sequence.tokens, len(prompt)) == []
    answers = {tuple(sequence.tokens) for sequence in begun}
    assert len(answers) == 4, "each of them says something else"
    assert begun[1].reused == begun[2].reused == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", layers.GATED)
@needs.COMPILER
def test_probabilities_are_the_same_to_the_last_bit_alone_and_beside_others(family: str, fused: bool) -> None:
    model = reference(family)
    given = [(prompt, number % 3 - 1) for number, prompt in enumerate(prompts(6, 5, 37, 21, 64, 1, 9))]

    def answers(chosen: list[int]) -> dict[int, list[Any]]:
        made = engine(model, 64, step_tokens=48, fused=fused)
        for number in range(2):
            made.bind(made.adapters.open(), adapter(model, number, rank=8 - number))
        for number in chosen:
            begin(made, number, given[number][0], 8, Sampling(logprobs=0), given[number][1])
        return finish(made)

    together = answers(list(range(6)))
    for number in range(6):
        assert answers([number])[number] == together[number]


def test_a_number_is_given_again_and_nothing_of_the_last_one_stays() -> None:
    model = reference("llama")
    made = engine(model, 32)
    (prompt,) = prompts(7, 40)
    for seed in (1, 2):
        number = made.adapters.open()
        assert number == 0
        made.bind(number, added := adapter(model, seed, only="v_proj" if seed == 1 else "mlp"))
        sequence = begin(made, seed, prompt, 10, adapter=number)
        finish(made)
        with adapted(model, added):
            assert wrong_tokens(model, sequence.tokens, len(prompt)) == []
        assert sequence.reused == 0
        again = begin(made, 10 + seed, prompt, 10, adapter=number)
        finish(made)
        assert again.tokens == sequence.tokens
        assert again.reused == 32
        made.adapters.close(number)


def test_sequences_wait_for_their_adapter_and_nobody_for_them() -> None:
    """Also when it leaves in their middle, and comes back elsewhere."""
    model = reference("llama")
    made = engine(model, 32)
    (prompt,) = prompts(7, 40)
    number, added = made.adapters.open(), adapter(model, 1)
    begun = [begin(made, 0, prompt, 10, adapter=number), begin(made, 1, prompt, 10)]
    assert {each.number for _ in range(5) for each in made.step() or ()} == {1}
    made.bind(number, added)
    assert {each.number for _ in range(4) for each in made.step() or ()} == {0, 1}
    made.unbind(number)
    some = len(begun[0].tokens)
    finish_others = [each.number for _ in range(3) for each in made.step() or ()]
    assert set(finish_others) == {1}
    assert not made.batch.ready
    assert len(begun[0].tokens) == some
    made.bind(number, {name: LowRank(low.down.clone(), low.up.clone(), low.scale) for name, low in added.items()})
    finish(made)
    for sequence, adds in zip(begun, (added, {}), strict=True):
        assert len(sequence.tokens) == 50
        with adapted(model, adds):
            assert wrong_tokens(model, sequence.tokens, len(prompt)) == []


def test_parameters_of_its_own_leave_with_it_and_come_back_elsewhere() -> None:
    """In fused layers and outside; also for a number that is larger than tables are at first."""
    model = reference("llama", attention_bias=True)
    made = engine(model, 32)
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight")
    parameters = dict(model.named_parameters())
    torch.manual_seed(4)
    replaced = {name: parameters[name].data + torch.randn(parameters[name].shape) * 0.3 for name in names}
    number = max(made.adapters.open() for _ in range(TABLE + 1))
    (prompt,) = prompts(7, 40)
    low = adapter(model, 2, only="v_proj")
    for _ in range(2):
        made.bind(number, {}, replaced)
        made.bind(0, low)
        own, base, other = (begin(made, n, prompt, 10, adapter=of) for n, of in enumerate((number, NO_ADAPTER, 0)))
        finish(made)
        assert wrong_tokens(model, base.tokens, len(prompt)) == []
        with adapted(model, low):
            assert wrong_tokens(model, other.tokens, len(prompt)) == []
        with stateless._reparametrize_module(model, replaced):
            assert wrong_tokens(model, own.tokens, len(prompt)) == []
        assert own.tokens != base.tokens
        made.unbind(0)
        made.unbind(number)
        moved = {name: tensor.clone() for name, tensor in replaced.items()}
        for tensor in replaced.values():
            tensor.fill_(float("nan"))
        replaced = moved
    made.adapters.close(number)
    assert made.adapters.open() == number
    made.bind(number, low)  # of the last one nothing is left
    again = begin(made, 3, prompt, 10, adapter=number)
    finish(made)
    with adapted(model, low):
        assert wrong_tokens(model, again.tokens, len(prompt)) == []


def test_a_step_without_rows_that_need_it_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that has parameters of its own costs the others nothing while it has no row."""
    model = reference("llama")
    made, low = engine(model, 32), adapter(model, 1)
    parameters = {name: each.data * 1.5 for name, each in model.named_parameters() if "norm" in name or "mlp" in name}
    for parts in ((low, {}), (low, parameters)):
        made.bind(made.adapters.open(), *parts)
    cut: list[frozenset[int]] = []
    only = groups._only

    def counted(attention: Any, step: Any, numbers: frozenset[int]) -> Any:
        cut.append(numbers)
        return only(attention, step, numbers)

    monkeypatch.setattr(groups, "_only", counted)
    (prompt,) = prompts(7, 20)
    for of, wanted in (([NO_ADAPTER, 0], set()), ([NO_ADAPTER, 0, 1], {frozenset([1]), frozenset([NO_ADAPTER, 0])})):
        for number, each in enumerate(of):
            begin(made, number, prompt, 3, adapter=each)
        finish(made)
        assert set(cut) == wanted


@pytest.mark.parametrize("inputs", [64, 65])
@pytest.mark.parametrize("outputs", [40, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs.COMPILER
def test_products_are_those_of_float64(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(8)
    library = kernels.load()
    assert library is not None
    x, weight = torch.randn(300, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    lows = [LowRank(torch.randn(rank, inputs).to(dtype), torch.randn(rank, outputs).to(dtype), 0.5) for rank in (1, 24)]
    native = (kernels.NativeLora * 3)(
        *(kernels.NativeLora(low.down.data_ptr(), low.up.data_ptr(), None, None, low.rank, low.scale) for low in lows)
    )
    numbers = torch.randint(-1, 3, (300,))  # the third adds nothing here
    out = torch.empty(300, outputs)
    library.dormouse_linear(
        dtype is torch.bfloat16, True, x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), 300, inputs, outputs,
        numbers.data_ptr(), ctypes.addressof(native), 24,
    )  # fmt: skip
    exact = x.double() @ weight.double().T
    for number, low in enumerate(lows):
        own = numbers == number
        exact[own] += 0.5 * (x[own].double() @ low.down.double().T @ low.up.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "own", "text"),
    [
        ("model.tail.weight", torch.zeros(64), "replaces 'model.tail.weight', which is no parameter of this model"),
        ("model.norm.weight", torch.zeros(63), r"'model.norm.weight' is \[63\], its model wants \[64\]"),
        ("model.norm.weight", torch.zeros(64).bfloat16(), "not of its model's"),
        ("model.norm.weight", torch.zeros(64, 2)[:, 0], "not contiguous"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused(name: str, own: torch.Tensor, text: str) -> None:
    model = reference("llama")
    made = engine(model, 8)
    number = made.adapters.open()
    with pytest.raises(ConfigError, match=text):
        made.bind(number, adapter(model, 1), {name: own})
    made.bind(number, adapter(model, 1), {"model.norm.weight": torch.ones(64)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda added: added.clear(), "changes nothing"),
        (lambda added: added.update(lm_tail=added[HEAD]), "'lm_tail', which is no linear layer or embedding"),
        (lambda added: _shaped(added, 0, 64, 320), "the adapter's rank at 'lm_head' is 0"),
        (lambda added: _shaped(added, MAX_RANK + 1, 64, 320), f"is {MAX_RANK + 1}; it can be 1 to {MAX_RANK}"),
        (lambda added: _shaped(added, 4, 63, 320), r"\[\[4, 63\], \[4, 320\]\], its model wants \[\[4, 64\]"),
        (lambda added: _shaped(added, 4, 64, 319), r"\[4, 319\]\], its model wants"),
        (lambda added: added.update(lm_head=added[HEAD]._replace(up=added[HEAD].up.bfloat16())), "not of its model's"),
        (lambda added: added.update(lm_head=added[HEAD]._replace(up=torch.zeros(320, 8).T)), "not contiguous"),
        (
            lambda added: added.update(lm_head=added[HEAD]._replace(bias=torch.zeros(319))),
            r"\[319\]\], its model wants",
        ),
        (
            lambda added: added.update({EMBEDDING: LowRank(torch.zeros(4, 320), torch.zeros(4, 64), 1.0)}),
            r"\[\[4, 320\], \[4, 64\]\], its model wants \[\[320, 4\]",
        ),
        (
            lambda added: added.update(
                {EMBEDDING: LowRank(torch.zeros(320, 4), torch.zeros(4, 64), 1, torch.ones(64))}
            ),
            "has a bias at 'model.embed_tokens', which is an embedding",
        ),
    ],
)
def test_what_does_not_fit_is_refused_whole(change: Any, text: str) -> None:
    model = reference("llama")
    made = engine(model, 8)
    added = adapter(model, 1)
    change(added)
    number = made.adapters.open()
    with pytest.raises(ConfigError, match=text):
        made.bind(number, added)
    assert not made.adapters.bound(number)
    made.bind(number, adapter(model, 1))


def test_there_are_so_many_adapters_at_most() -> None:
    made = engine(reference("llama"), 8)
    assert [made.adapters.open() for _ in range(MAX)] == list(range(MAX))
    with pytest.raises(ConfigError, match=f"computes {MAX} adapters at most"):
        made.adapters.open()
    made.adapters.close(7)
    assert made.adapters.open() == 7


def _shaped(added: dict[str, LowRank], rank: int, inputs: int, outputs: int) -> None:
    added[HEAD] = LowRank(torch.zeros(rank, inputs), torch.zeros(rank, outputs), 1.0)
