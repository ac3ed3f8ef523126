"""How much of a long prompt a step takes beside sequences that go on."""

from dormouse.core.decisions.batches.batch import Batch, Sequence
from dormouse.core.decisions.batches.blocks import Blocks
from dormouse.core.decisions.rules.pace import FEW, MIN, Pace


def test_a_long_prompt_takes_what_costs_as_much_as_a_step_without_it() -> None:
    pace = Pace()
    assert pace.tokens(256) == FEW
    pace.learn(0, 40.0)
    pace.learn(64, 40.0 + 64 * 0.5)
    assert pace.tokens(256) == 64
    assert pace.tokens(50) == 50
    for _ in range(40):
        pace.learn(0, 1.0)
    assert pace.tokens(256) == MIN


def test_few_tokens_that_others_held_up_do_not_make_pieces_small() -> None:
    pace = Pace()
    pace.learn(0, 10.0)
    pace.learn(20, 18.0)
    assert pace.tokens(256) == 20
    pace.learn(4, 60.0)  # the last of a prompt
    assert pace.tokens(256) == 16  # 15.2 tokens cost 7.4 ms in the mean, though those cost 50
    for _ in range(20):
        pace.learn(pace.tokens(256), 40.0)
    assert pace.tokens(256) <= 6  # all of them do, so it is what they cost


def test_many_steps_are_learned_at_once() -> None:
    for known in (False, True):
        one, many = Pace(), Pace()
        for pace in (one, many):
            if known:
                pace.learn(0, 40.0)
                pace.learn(64, 72.0)
        for step in range(7):
            one.learn(0, 9.0 + 0.5 * step)
        many.learn_plain(9.0, 0.5, 7)
        for pace in (one, many):
            pace.learn(10, 17.0)
        assert one.tokens(256) == many.tokens(256) not in (FEW, MIN)


def test_tokens_are_learned_at_once_to_the_last_bit() -> None:
    one_by_one, at_once = Pace(), Pace()
    took_ms = [8.3 + 0.1 * step for step in range(20)]
    for pace in (one_by_one, at_once):
        pace.learn(40, 26.0)
    for each_ms in took_ms:
        one_by_one.learn(0, each_ms)
    at_once.learn_tokens(took_ms)
    for pace in (one_by_one, at_once):
        pace.learn(7, 26.0)
    assert vars(at_once) == vars(one_by_one)


def test_only_prompts_that_no_step_holds_are_paced_and_only_beside_others() -> None:
    blocks = Blocks(16)
    blocks.grow(0, 100)
    pace = Pace()
    batch = Batch(blocks, step_tokens=64, pace=pace)
    pace.learn(0, 10.0)
    pace.learn(40, 26.0)  # so 20 tokens cost nearly what a step costs
    batch.add(Sequence(0, [1] * 300, 300, 400))
    (part,) = batch.plan(lambda blocks: False)
    assert part.tokens == 64  # alone
    batch.computed(part)
    batch.preempt_all()
    batch.remove(next(iter(batch.waiting)))

    batch.add(Sequence(1, [1] * 8, 8, 100))
    (part,) = batch.plan(lambda blocks: False)
    batch.computed(part)
    part.sequence.tokens.append(5)
    batch.add(Sequence(2, [2] * 40, 40, 50))
    batch.add(Sequence(3, [3] * 300, 300, 400))
    assert [each.tokens for each in batch.plan(lambda blocks: False)] == [1, 40, 20]


def test_a_brief_step_takes_as_much_of_all_prompts_together() -> None:
    blocks = Blocks(16)
    blocks.grow(0, 100)
    pace = Pace()
    batch = Batch(blocks, step_tokens=64, pace=pace)
    pace.learn(0, 10.0)
    pace.learn(40, 26.0)
    batch.brief = True
    for number in range(3):
        batch.add(Sequence(number, [number] * 15, 15, 30))
    parts = batch.plan(lambda blocks: False)
    assert [each.tokens for each in parts] == [15, 5]
    for part in parts:
        batch.computed(part)
    parts[0].sequence.tokens.append(1)
    assert [each.tokens for each in batch.plan(lambda blocks: False)] == [1, 10, 10]
    batch.brief = False
    assert [each.tokens for each in batch.plan(lambda blocks: False)] == [1, 10, 15]
