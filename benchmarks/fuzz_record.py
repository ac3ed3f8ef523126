"""What real programs send: functions run on `cuda:0` of a loopback node, and their frames kept.

Small programs, chosen so that together they use every command and every kind of operand of the stream. Records, and
changes nothing: `fuzz_mutate.py` does that.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import torch
from torch import nn

from dormouse.client_shim.commands import recorder
from dormouse.schemas import stream as wire

ROOT: Final = Path(__file__).resolve().parents[1]
ARENA_NBYTES: Final = 1 << 20


@dataclass(frozen=True)
class Recording:
    """One lease: the model as it was before, and the decoded frames."""

    name: str
    storages: dict[int, bytes]
    frames: list[list[Any]]


class Text(nn.Module):
    """A BERT-like encoder; also the step of a loop that generates."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        answer: torch.Tensor = self.head(self.layers(x))
        return answer


def _text() -> Any:
    return Text().eval()


def _bert(model: Any) -> Any:
    ids = torch.arange(8).view(1, 8).to("cuda")
    return model(ids).softmax(-1).topk(3)[1].tolist()


def _generate(model: Any) -> Any:
    ids = torch.tensor([[1, 2, 3]]).to("cuda")
    for _ in range(3):
        following = model(ids)[:, -1].argmax(-1)
        if int(following.item()) == 41:
            break
        ids = torch.cat([ids, following[:, None]], 1)
    return ids.cpu().tolist()


def _convnet() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    ).train()


def _images(model: Any) -> Any:
    """In training mode: the running statistics are written, and the model with them."""
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).view(2, 3, 8, 8).to("cuda")
    return model(images.contiguous(memory_format=torch.channels_last)).cpu().tolist()


def _table() -> Any:
    return {"table": torch.arange(24.0).view(4, 6), "kept": torch.zeros(5)}


def _dynamic(state: Any) -> Any:
    table = state["table"]
    chosen = table[table > 5]
    return [
        chosen.cpu(),
        table.nonzero().cpu(),
        torch.unique((table % 4).long(), return_counts=True)[1].cpu(),
        table.masked_select(table < 3).sum().item(),
        bool((table > 100).any()),
    ]


def _random(state: Any) -> Any:
    torch.cuda.manual_seed(11)
    own = torch.Generator(device="cuda")
    own.manual_seed(7)
    noise = torch.randn(4, 6, device="cuda") + torch.rand(4, 6, device="cuda", generator=own)
    saved = torch.cuda.get_rng_state()
    drawn = torch.nn.functional.dropout(noise, 0.5, training=True)
    torch.cuda.set_rng_state(saved)
    torch.randperm(6, device="cuda", generator=own)
    return (drawn + torch.normal(0.0, 1.0, (4, 6), device="cuda", generator=own)).sum().item()


def _in_place(state: Any) -> Any:
    table, kept = state["table"], state["kept"]
    table[1].add_(3)
    table.t()[2].copy_(table[:, 3])
    table[torch.tensor([0, 2]).to("cuda")] = 1.5
    kept.add_(torch.tensor(2.0)).mul_(kept.clone())
    spiral = torch.complex(table, table * 2).conj() * (1 + 2j)
    grown = torch.empty(0, device="cuda").resize_(3).fill_(4)
    torch.add(table, 1, out=(result := torch.empty(4, 6, device="cuda")))
    parts = torch.split(result, 2)
    views = torch.view_as_real(spiral.resolve_conj()).as_strided((4, 2), (2, 1))
    return [parts[1].cpu(), views.cpu(), grown.cpu(), spiral.imag.neg().cpu()]


def _transfers(state: Any) -> Any:
    large = torch.arange(20_000, dtype=torch.int64).to("cuda")
    small = [torch.full((k + 1,), float(k)).to("cuda") for k in range(3)]
    empty = torch.empty(100, device="cuda")
    empty[:] = 2.0
    memory = torch.cuda.memory_stats().get("active_bytes.all.current", 0)
    torch.cuda.mem_get_info()
    total = (large.double().mean() + torch.tensor(2.0) + sum(part.sum() for part in small)).item()
    del small
    torch.cuda.synchronize()
    state["made"] = torch.stack([empty, empty * 2]).to(torch.float64)
    back = (large + 1).cpu()
    return [memory, total, back[-1].item()]


PROGRAMS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "bert": (_text, _bert),
    "generate": (_text, _generate),
    "images": (_convnet, _images),
    "dynamic": (_table, _dynamic),
    "random": (_table, _random),
    "in-place": (_table, _in_place),
    "transfers": (_table, _transfers),
}


ROUNDS: Final = 7


def loopback() -> Any:
    """tests/loopback.py, wherever this is run from."""
    name = "dormouse_tests_loopback"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "loopback.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def record(name: str) -> Recording:
    """Load a program, then run one request of it: the same several times, so that some of it is followed."""
    make, handle = PROGRAMS[name]
    torch.manual_seed(3)
    with torch.no_grad():
        state = make()
        followed = recorder.TemplateSettings(seen=1, least_words=8)
        world = loopback().LoopbackWorld(arena_nbytes=ARENA_NBYTES, templates=followed)
        try:
            if isinstance(state, nn.Module):
                state.to("cuda")
            else:
                state = {key: value.to("cuda") for key, value in state.items()}
            world.end_lease()
            storages = {number: bytes(content) for number, content in world.node.store.items()}
            executor = world.node.executors[0]
            executor.keep_frames = True
            world.begin_lease()
            for _ in range(ROUNDS):
                handle(state)
            world.end_lease()
            frames = [msgpack.unpackb(frame) for frame in executor.frames]
            del state
        finally:
            world.close()
    return Recording(name, storages, frames)


def by_hand() -> Recording:
    """What honest programs send too seldom to wait for: definitions that are forgotten, odd literals, an END that keeps
    nothing.
    """
    meta = ["float32", [4], [1], 0, 0]
    plus: list[Any] = [
        "aten::add.Tensor",
        [[wire.TENSOR, 0], [wire.HOST, "float32", []]],
        ["alpha", [wire.SCALAR]],
        [[[wire.FRESH, 0, 0]], [], False],
        "float32",
    ]
    like: list[Any] = [
        "aten::empty_like",
        [[wire.TENSOR, 0]],
        [
            *("dtype", [wire.DTYPE, "float32"], "layout", [wire.LAYOUT, "strided"]),
            *("device", [wire.DEVICE], "memory_format", [wire.FORMAT, "contiguous_format"]),
        ],
        [[[wire.FRESH, 0, 0]], [], False],
        "float32",
    ]
    batch: list[Any] = [
        "aten::native_batch_norm",
        [[wire.TENSOR, 1], None, None, None, None, True, 0.1, 1e-5],
        [],
        [[[wire.FRESH, 1, 0], [wire.FRESH, 2, 1], [wire.FRESH, 2, 2]], [], True],
        "float32",
    ]
    times: list[Any] = [
        "aten::mul.Scalar",
        [[wire.TENSOR, 3], [wire.COMPLEX, 0.5, 2.0]],
        [],
        [[[wire.FRESH, 3, 0]], [], False],
        "float32",
    ]
    noise: list[Any] = [
        "aten::rand.generator",
        [[wire.LIST, [4]]],
        ["generator", [wire.GENERATOR, 3]],
        [[[wire.FRESH, 0, 0]], [], False],
        "float64",
    ]
    asked: list[Any] = ["aten::nonzero", [[wire.TENSOR, 0]], [], None, "float32"]
    metas = [0, meta, 1, ["float32", [1, 1, 4], [4, 4, 1], 0, 0], 2, ["float32", [1], [1], 0, 0]]
    metas += [3, ["complex64", [2], [1], 0, 1]]
    one = b"\0\0\x80\x3f"
    keys = [0, plus, 1, like, 2, batch, 3, times, 4, noise, 5, asked]
    first = [wire.UPLOAD_INLINE, 100, 16, 0, one * 4, wire.SEED, 3, 5, 0, 100, one, 2, 101, 1, 101, 102]
    first += [2, 100, 103, 104, 105, 3, 100, 106, 4, 107, wire.RESULT_META, 50, 5, 101, 108, wire.FREE, 2, 102, 999]
    second = [wire.CREATE, 110, 64, wire.UPLOAD, 110, 64, 16, 0, 32, wire.DOWNLOAD, 51, 110, 0, -1]
    second += [wire.DOWNLOAD, 52, 101, 0, 64, wire.RNG_GET, 53, 3, wire.MEMORY, 54, wire.SYNC, 55]
    third = [wire.FORGET_DEFS]
    fourth = [0, 101, one, 0.5, 120, wire.RNG_SET, 0, bytes(5056), wire.SET, "cudnn_benchmark", [True], wire.END, 56, 0]
    frames: list[list[Any]] = [[metas, keys, first], [[], [], second], [[], [], third], [[0, meta], [0, plus], fourth]]
    return Recording(
        "by-hand", {}, [[1, 1, n + 1, [metas, keys], commands] for n, (metas, keys, commands) in enumerate(frames)]
    )


def record_all() -> list[Recording]:
    return [*(record(name) for name in PROGRAMS), by_hand()]
