"""Cuts a step's rows into those of adapters that have parameters of their own, and all others.

A module, or a whole layer, computes each group as if it were a step of its own. A row does not depend on the other rows
of its step, so this changes nothing but the time.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.low_rank import AdapterRows
from dormouse.gpuserver.runtime.tables import StepTables

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Those of a group, of a tensor that has one for each of the step's."""


def rows_of(attention: BlockAttention) -> AdapterRows | None:
    """Of the step that is under way."""
    return None if attention.step is None else attention.step.adapters


def concerned(attention: BlockAttention, own: Collection[int]) -> frozenset[int]:
    """Those of these adapters that have rows in the step."""
    if not own or (rows := rows_of(attention)) is None:
        return frozenset()
    return rows.numbers.intersection(own)


def by_group(
    attention: BlockAttention, own: frozenset[int], head: bool, axis: int, compute: Callable[[int, Rows], torch.Tensor]
) -> torch.Tensor:
    """All rows, by ``compute(number, rows)`` for each of ``own``, and with NO_ADAPTER for all others. ``axis`` has the
    rows; ``head``: they are those that want logits only.
    """
    step = attention.step
    assert step is not None
    assert step.adapters is not None
    out: torch.Tensor | None = None
    for number in (*sorted(own), NO_ADAPTER):
        numbers = step.numbers - own if number == NO_ADAPTER else frozenset([number])
        at = step.adapters.at(numbers, head)
        if not len(at):
            continue
        attention.step = _only(attention, step, numbers)
        try:
            found = compute(number, lambda given, at=at: given.index_select(axis, at))  # type: ignore[misc]
        finally:
            attention.step = step
        if out is None:
            shape = list(found.shape)
            shape[axis] = len(step.adapters.of(head))
            out = found.new_empty(shape)
        out.index_copy_(axis, at, found)
    assert out is not None
    return out


def _only(attention: BlockAttention, step: StepTables, numbers: frozenset[int]) -> StepTables:
    """As if the others were not in the step."""
    if (known := step.groups.get(numbers)) is not None:
        return known
    rows, parts, row = step.adapters, [], 0
    assert rows is not None
    for part in step.parts:
        if part.adapter in numbers:
            parts.append(replace(part, row=row))
            row += part.tokens
    columns = attention.backend.columns(parts)
    made = step.groups[numbers] = StepTables(parts, attention.layout, attention.memory.device, columns)
    if named := numbers - {NO_ADAPTER}:
        made.adapters = rows.only(numbers, named)
    return made
