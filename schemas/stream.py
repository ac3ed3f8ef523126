"""The command stream: commands from an instance to an executor, and the replies.

Dynamically typed and encoded with msgpack, because a command is a handful of small integers and a typed decoder would
cost more than the command. Everything here is checked by the interpreter that executes it; nothing is trusted because
it decoded.

Instance to executor, one message per frame::

    frame   = [serial, secret, number, defs, commands]
    serial, secret        the lease under which the frame is issued
    number                1, 2, 3, ... within the lease; acknowledged in order
    defs    = [[id, meta, id, meta, ...], [id, key, id, key, ...]]   those not yet sent on this connection
    meta    = [dtype, size, stride, offset, bits]      dtype by name ("float32"), lengths in elements,
                                                       bits 1: conjugated, 2: negated
    key     = [op, args, kwargs, outputs, default_dtype]
    commands = flat list:  code, operands..., code, operands...

Ids of definitions are chosen by the instance, are never reused, and mean the same on every connection. A tensor is
(storage id, meta id); views never appear, they are another meta on the same storage.

A key is an operation with everything that decides the shapes of its results::

    op      = "aten::add.Tensor" (the schema's name; overload "" is "aten::relu"), of a custom operator with the digest
              of its schema's text: "torchvision::nms@0f1e2d3c4b5a6978"
    args    = [literal, ...]     kwargs = [name, literal, name, literal, ...]
    literal = None | bool | int | float | str
            | [TENSOR, meta id]           operand: storage id
            | [SCALAR]                    operand: bool, int, float or [real, imaginary]; values that decide no shape
                                          are not in the key
            | [HOST, dtype, size]         operand: bytes of a small CPU tensor (mostly a zero-dimensional one)
            | [DTYPE, name] | [LAYOUT, name] | [FORMAT, name] | [DEVICE] | [GENERATOR, id] | [COMPLEX, re, im]
            | [LIST, [literal, ...]]
    outputs = None (ask: RESULT_META) | [[result, ...], [change, ...], listed]
    result  = [FRESH, meta id, slot]      in a new storage; results with one slot share it; slots count up from 0
            | [ALIAS, meta id, operand]   in the storage of that tensor operand (counted over TENSOR literals, in order)
            | [SAME, operand] | [NOTHING]
    change  = [operand, meta id]          the operand was given another shape (`out=` and `resize_`)

Executor to instance, one or several of these in a message, one after the other::

    [ACK, serial, number]                every command up to and including that frame has been executed (or poisoned)
    [VALUE, token, payload]              answer to a waiting command; see each of them
    [FAILED, token, kind, text, where, storage?]
                                         the first error since the lease began or since the last FAILED; raised by the
                                         waiting command. where = [frame number, index of the operation, op] or None;
                                         storage: the one that was not there, only if that is the error
    [STALLED, template, position]        the command there is not computed ahead; once it is validated, others may be
    [BUILT, digest, reason]              the graph is an operator now; or why it never will be
    [REFUSED, serial, reason, kind]      stale lease, protocol error, revoked: the lease is over for the instance; kind
                                         is "", or why others had to have its seat
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgpack

# A non-negative code is a key id: ``key, *operands, *fresh storage ids``. Negative codes are the control commands:
FREE: Final = -1  # n, id * n: the instance forgets these storages; unknown ids are passed over
UPLOAD: Final = -2  # storage, total_nbytes, offset, arena_offset, nbytes: arena -> storage, made on first mention
UPLOAD_INLINE: Final = -3  # storage, total_nbytes, offset, bytes: small uploads travel in the frame
DOWNLOAD: Final = -4  # token, storage, meta, arena_offset | -1; VALUE: contiguous bytes if -1, else nbytes in the arena
RESULT_META: Final = -5  # token, key, *operands, first_id; run, then VALUE: [results, changes, listed, n_fresh], below
END: Final = -6  # token, one of END_* below: end of lease; VALUE, if waited for: [version, error, poisoned], below
SYNC: Final = -7  # token; VALUE: None, once everything before has finished
SEED: Final = -8  # generator, seed; generator 0 is the default one; others come into being here
MEMORY: Final = -9  # token; VALUE: [activation_nbytes, peak_nbytes, free_nbytes]
CREATE: Final = -10  # storage, nbytes: a storage with unspecified content
FORGET_DEFS: Final = -11  # all definitions so far are void; the tables are empty again
RNG_GET: Final = -12  # token, generator; VALUE: bytes
RNG_SET: Final = -13  # generator, bytes
SET: Final = -14  # name, [value, ...]: a setting of numerics (schemas/numerics.py), for all leases from now on
TEMPLATE: Final = -15  # id, [word, ...]: commands that were sent before and may be again, see below
FOLLOW: Final = -16  # template, base, position, [storage, ...]: what comes is probably what it has from there on
VALIDATED: Final = -17  # position: run what the template that is followed has up to there
LEAVE: Final = -18  # it is followed no more
CHECK: Final = -19  # position, [command, ...]: VALIDATED, with the commands that these are: both ends compare
GRAPH: Final = -20  # digest, definition: operations that may become one, see below; BUILT says when

# With RESULT_META, results and changes hold whole metas in place of meta ids, FRESH has the storage's nbytes as a
# fourth field, and a result may also be [PLAIN, value]. The fresh storages got the ids first_id, first_id + 1, ... in
# the order of their slots.

# END answers, if it waits, with the manifest version after the write-back; the first error that nobody was told, as
# [kind, text, where, storage?] of FAILED, or None; and [[kind, text, where, storage?, [ids]], ...]: storages that the
# instance has not freed and that have no value, by the error that they raise. They are not in the manifest.

# A template holds operations and FREEs. Numbers of storages are absolute; from 0 down to OLD they are relative, base +
# RELATIVE + number; and OLD - n is the nth storage of those that FOLLOW lists, which the lease had before. It is a
# definition: its id is never reused, and FORGET_DEFS makes it void. Commands behind VALIDATED may be computed ahead,
# but nobody can tell: other commands may come between, and run in the order of the stream.
RELATIVE: Final = 1 << 40
OLD: Final = -(1 << 42)

# A graph is what `torch.compile` has captured: [[meta, ...], [node, ...], [value, ...]], packed: the geometries of its
# inputs, its nodes, and which values are its outputs. Values are numbered: inputs first, then what nodes return.
#
#     node = [op, args, kwargs, default_dtype, [meta, ...]]     as in a key; [TENSOR, value]; no other operands
#
# The digest is that of the packed bytes. Once it is BUILT, "dormouse::graph_<digest>" is a custom operator.

TENSOR: Final = 0
SCALAR: Final = 1
HOST: Final = 2
DTYPE: Final = 3
LAYOUT: Final = 4
FORMAT: Final = 5
DEVICE: Final = 6
GENERATOR: Final = 7
COMPLEX: Final = 8
LIST: Final = 9

FRESH: Final = 0
ALIAS: Final = 1
SAME: Final = 2
NOTHING: Final = 3
PLAIN: Final = 4

END_ACK, END_WAIT, END_QUIET = 0, 1, 2  # drop what was made and say ACK; keep it and answer; drop it and say nothing

# Replies.
ACK: Final = 0
VALUE: Final = 1
FAILED: Final = 2
REFUSED: Final = 3
STALLED: Final = 4
BUILT: Final = 5

SEAT_LOST: Final = "seat_lost"
"""Kind of a REFUSED: others needed the GPU's memory, and what the lease had made has no place."""

MAX_FRAME_NBYTES: Final = 1 << 20
"""Larger frames are refused by the socket; bulk bytes go through the arena."""

INLINE_NBYTES: Final = 4096
"""Uploads and downloads up to this size travel in the message: cheaper than a trip through the arena."""

FRAME_COMMANDS: Final = 64
"""Commands after which a frame leaves even if nobody waits: keeps the executor fed at about one frame per half
millisecond.
"""

WINDOW_FRAMES: Final = 16
"""Frames that may be unacknowledged; a client that ignores its credit is ended by the executor."""

MAX_DEFS: Final = 65536
"""Bound on metas and on keys per connection; the instance forgets them all before it is reached."""

RUNNING_STATISTICS: Final = ("running_mean", "running_var")
UPDATES_STATISTICS: Final = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": "",
    "aten::batch_norm_gather_stats": "",
    "aten::batch_norm_gather_stats_with_counts": "",
}
"""Operations that write their running statistics though their schemas do not say so: if the named argument is true, or
always. Both ends must know, else the update is lost or reaches whoever shares those bytes."""

MAX_TEMPLATES: Final = 256
MAX_TEMPLATE_WORDS: Final = 1 << 14
MAX_TEMPLATES_WORDS: Final = 1 << 18
MAX_STALLS: Final = 16
MAX_FOLLOWED_WORDS: Final = 1 << 16
"""Bounds on templates per connection, on the numbers in one, and in all; on STALLED for one; and on the numbers that
the FOLLOW and VALIDATED of a frame stand for."""

MAX_GRAPHS: Final = 64
MAX_GRAPH_NBYTES: Final = 1 << 18
MAX_GRAPH_NODES: Final = 1 << 13
"""Bounds on the graphs of a connection, and on the definition and the operations of one."""

GRAPH_SCHEMA: Final = "dormouse::graph_{}(Tensor[] inputs) -> Tensor[]"
"""Of the operator, by the graph's digest."""

MAX_GENERATORS: Final = 64
"""Bound on `torch.Generator(device="cuda")` objects per instance."""


def digest(schema: str) -> str:
    """The digest of an operator's schema: both ends must have the same."""
    return hashlib.blake2b(schema.encode(), digest_size=8).hexdigest()


def graph_digest(definition: bytes) -> str:
    return hashlib.blake2b(definition, digest_size=16).hexdigest()


def replies(message: bytes) -> Iterator[list[Any]]:
    """The replies in a message of an executor."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(1, len(message)))
    unpacker.feed(message)
    return iter(unpacker)
