# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels for attention over the block table in Triton's language, which a GPU and Triton's interpreter run.

A program of `attend` has some tokens of one part of a step, and one key head with the ``GROUP`` query heads that share
it: ``ROWS`` rows, of which the last may be of no token. It reads keys and values ``COLUMNS`` at a time, by the offsets
of their blocks from one base, and keeps a running softmax in fp32.

Memory behind a sequence's end was never written, and may hold anything, NaN too: it is not read.

``memory`` is where some block lies, and ``layer`` counts from there: it may be negative.

A piece of no token and a token without a place are nothing: a step that is captured has room for more than there are.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

TABLES = ("blocks", "rows", "counts", "contexts", "starts")
"""They lie beside each other in one tensor, at any multiple of 8 bytes: a kernel for each way in which they are aligned
would be 32 kernels, of seconds each.
"""


@triton.jit(do_not_specialize=["places", "key_head", "key_token", "value_head", "value_token"])
def write(
    key,
    value,
    memory,
    places,
    layer: tl.int64,
    key_head,
    key_token,
    value_head,
    value_token,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and values of one token and head to their place; nothing of a row of no token, whose place is negative."""
    token, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(places + token)
    dims = tl.arange(0, WIDTH)
    inside = (dims < DIM) & (first >= 0)
    tile = BLOCK_TOKENS * DIM
    place = memory + first + layer + head * tile + dims
    tl.store(place, tl.load(key + head * key_head + token * key_token + dims, mask=inside), mask=inside)
    row = tl.load(value + head * value_head + token * value_token + dims, mask=inside)
    tl.store(place + KV_HEADS * tile, row, mask=inside)


@triton.jit(do_not_specialize=["query_head", "query_token", "key_head", "key_token", "cos_token", "sin_token"])
def rotate(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_head,
    query_token,
    key_head,
    key_token,
    cos_token,
    sin_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of one token, of queries or keys: its halves turned by the token's angles."""
    token, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    if head < HEADS:
        start = query + head * query_head + token * query_token
        to = query_out + (token * HEADS + head) * (2 * HALF)
    else:
        start = key + (head - HEADS) * key_head + token * key_token
        to = key_out + (token * KV_HEADS + head - HEADS) * (2 * HALF)
    low = tl.load(start + dims, mask=inside).to(tl.float32)
    high = tl.load(start + HALF + dims, mask=inside).to(tl.float32)
    angles, others = cos + token * cos_token + dims, sin + token * sin_token + dims
    found = low * tl.load(angles, mask=inside).to(tl.float32) - high * tl.load(others, mask=inside).to(tl.float32)
    tl.store(to + dims, found.to(query_out.dtype.element_ty), mask=inside)
    angles, others = angles + HALF, others + HALF
    found = high * tl.load(angles, mask=inside).to(tl.float32) + low * tl.load(others, mask=inside).to(tl.float32)
    tl.store(to + HALF + dims, found.to(query_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*TABLES, "query_head", "query_token", "window", "splits"])
def attend(
    query,
    out,
    memory,
    blocks,
    rows,
    counts,
    contexts,
    starts,
    layer: tl.int64,
    query_head,
    query_token,
    scale,
    cap,
    window,
    sums,
    tops,
    totals,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A share of a piece: see `tables.tiles` for the fields of a piece. ``SHARES``: number of shares of a piece.

    ``SPLIT``: so many programs as ``splits`` have a part of the context each. Their results are for `merge`: sums, the
    highest scores and the totals of weights. ``WIDE``: products of fp32; the interpreter has none of bf16.
    """
    piece, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    head, split = tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP  # of a share
    context = tl.load(contexts + piece).to(tl.int32)
    count = tl.load(counts + piece).to(tl.int32)
    before = share * TOKENS
    if before < count:
        first = context - count + before  # where its first token is in its sequence
        tokens = tl.minimum(count - before, TOKENS)
        row = tl.load(rows + piece) + before
        table = blocks + tl.load(starts + piece)
        lines = tl.arange(0, ROWS)
        dims = tl.arange(0, WIDTH)
        token = lines // GROUP
        heads = head * GROUP + lines % GROUP
        own = first + token
        inside = (token < tokens)[:, None] & (dims < DIM)[None, :]
        at = heads[:, None] * query_head + (row + token)[:, None] * query_token + dims[None, :]
        q = tl.load(query + at, mask=inside, other=0.0)

        begin = tl.where(window > 0, tl.maximum(first - window + 1, 0) // COLUMNS * COLUMNS, 0)
        end = first + tokens
        if SPLIT:
            length = tl.cdiv(tl.cdiv(end - begin, splits), COLUMNS) * COLUMNS
            begin += split * length
            end = tl.minimum(end, begin + length)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        base = memory + layer + head * (BLOCK_TOKENS * DIM)
        for start in range(begin, end, COLUMNS):
            seen = start + tl.arange(0, COLUMNS)
            there = seen < end
            block = tl.load(table + seen // BLOCK_TOKENS, mask=there, other=0)
            offset = tl.multiple_of(block, [16]) + seen % BLOCK_TOKENS * DIM  # so that it is read in wide words
            keys = tl.load(
                base + offset[None, :] + dims[:, None], mask=there[None, :] & (dims < DIM)[:, None], other=0.0
            )
            values = tl.load(
                base + KV_HEADS * BLOCK_TOKENS * DIM + offset[:, None] + dims[None, :],
                mask=there[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            if WIDE:
                score = tl.dot(q.to(tl.float32), keys.to(tl.float32), input_precision="ieee") * scale
            else:
                score = tl.dot(q, keys, input_precision="ieee") * scale
            if CAPPED:
                small = tl.exp(-2.0 * tl.abs(score) / cap)  # of tanh, which so cannot overflow
                bent = cap * (1.0 - small) / (1.0 + small)
                score = tl.where(score < 0, -bent, bent)
            sees = there[None, :] & (seen[None, :] <= own[:, None])
            sees = sees & ((window <= 0) | (seen[None, :] > own[:, None] - window))
            score = tl.where(sees, score * LOG2_E, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
            weight = tl.exp2(score - shift[:, None])
            shrink = tl.exp2(top - shift)
            total = total * shrink + tl.sum(weight, 1)
            weight = weight.to(values.dtype)
            if WIDE:
                part = tl.dot(weight.to(tl.float32), values.to(tl.float32), input_precision="ieee")
            else:
                part = tl.dot(weight, values, input_precision="ieee")
            mixed = mixed * shrink[:, None] + part
            top = higher

        if SPLIT:
            line = ((piece * KV_HEADS + head) * splits + split) * ROWS + lines
            tl.store(tops + line, top)
            tl.store(totals + line, total)
            tl.store(sums + line[:, None] * WIDTH + dims[None, :], mixed)
        else:
            mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            to = (row + token)[:, None] * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :]
            tl.store(out + to, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "counts", "splits"])
def merge(
    out,
    rows,
    counts,
    sums,
    tops,
    totals,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the results of the splits of one piece, a single token, and one key head to its output."""
    piece, head = tl.program_id(0), tl.program_id(1)
    if tl.load(counts + piece) > 0:
        GROUP: tl.constexpr = HEADS // KV_HEADS
        lines = tl.arange(0, ROWS)
        dims = tl.arange(0, WIDTH)
        base = (piece * KV_HEADS + head) * splits * ROWS + lines
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        for split in range(splits):
            highest = tl.maximum(highest, tl.load(tops + base + split * ROWS))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        for split in range(splits):
            line = base + split * ROWS
            shrink = tl.exp2(tl.load(tops + line) - shift)
            total += shrink * tl.load(totals + line)
            mixed += shrink[:, None] * tl.load(sums + line[:, None] * WIDTH + dims[None, :])
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        to = tl.load(rows + piece) * (HEADS * DIM) + (head * GROUP + lines)[:, None] * DIM + dims[None, :]
        inside = (lines < GROUP)[:, None] & (dims < DIM)[None, :]
        tl.store(out + to, mixed.to(out.dtype.element_ty), mask=inside)
