"""How long streams wait for others of their function: ServerlessLoRA's Eq. 3 as it stands, and fixed delays."""

import pytest

from dormouse.core.batching import EXPIRED, FULL, UNTIMED, BatchRule, GatheringBatch


def prompts_s(tokens: int) -> float:
    """Steps of 256 tokens: 20 ms each, and 1 ms for each token."""
    return -(-tokens // 256) * 0.02 + tokens * 0.001


def literal(ttft_s: float = 1.0) -> GatheringBatch[str]:
    return GatheringBatch(BatchRule("fill-or-expire"), ttft_s)


def fixed(size: int = 2, delay_s: float = 0.5) -> GatheringBatch[str]:
    return GatheringBatch(BatchRule("fixed", size, delay_s), 1.0)


def test_work_conserving_is_no_rule() -> None:
    assert BatchRule.of("now", 1, 0) is None
    assert BatchRule.of("fill-or-expire", 1, 0) == BatchRule("fill-or-expire")
    assert BatchRule.of("fixed", 10, 500) == BatchRule("fixed", 10, 0.5)


def test_a_lone_stream_waits_until_only_its_prompt_is_left_of_its_time() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    assert batch.due_s(prompts_s) == pytest.approx(5.88)
    assert batch.take(5.87, prompts_s) == ([], "")
    assert batch.take(5.89, prompts_s) == (["a"], EXPIRED)
    assert batch.due_s(prompts_s) == float("inf")


def test_a_batch_is_full_when_its_prompts_take_all_the_time_that_its_first_has() -> None:
    batch = literal()
    for number in range(10):
        batch.add(f"{number}", 100, 5.0)
        if number == 7:
            assert batch.due_s(prompts_s) == pytest.approx(5.12)  # 800 tokens take 0.88 s, in four steps
        assert batch.take(5.0, prompts_s) == (([f"{each}" for each in range(10)], FULL) if number == 9 else ([], ""))


def test_one_that_leaves_is_waited_for_no_more() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    batch.add("b", 700, 5.1)
    assert batch.due_s(prompts_s) == pytest.approx(5.12)
    batch.discard("b")
    batch.discard("b")
    assert batch.due_s(prompts_s) == pytest.approx(5.88)
    batch.discard("a")
    assert batch.due_s(prompts_s) == float("inf")


def test_nothing_waits_while_nobody_knows_what_prompts_take() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    assert batch.take(5.0, None) == (["a"], UNTIMED)


def test_a_fixed_batch_waits_for_its_size_or_its_delay() -> None:
    """It needs no times."""
    batch = fixed()
    batch.add("a", 100, 5.0)
    assert batch.due_s(None) == 5.5
    assert batch.take(5.4, None) == ([], "")
    batch.add("b", 9_000, 5.4)
    assert batch.take(5.4, None) == (["a", "b"], FULL)
    batch.add("c", 100, 6.0)
    assert batch.take(6.5, None) == (["c"], EXPIRED)
