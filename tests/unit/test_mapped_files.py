"""Uploads by file identity: a real stream and its links, against a small store that speaks the store's messages and
reads the files that it is offered."""

import asyncio
import contextlib
import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from dormouse.client_shim.node import mapped_files
from dormouse.client_shim.node.mapped_files import MAX_FILES, MIN_NBYTES
from dormouse.client_shim.node.node_backend import MAX_UNANSWERED, SMALL_NBYTES, NodeBackend
from dormouse.client_shim.stream.failures import StoreRefused
from dormouse.client_shim.stream.remote_storage import RemoteStorage, freed
from dormouse.client_shim.stream.stream import Stream
from dormouse.core.links.fds import Listener, PacketSocket
from dormouse.core.links.link import Link
from dormouse.schemas import messages as m

ARENA_NBYTES = 1 << 20
NBYTES = 3 * MIN_NBYTES + 12345  # of a test's file
CUDA = "cuda"


class SmallStore:
    """The store's ends of an instance's ``store`` link and ``files`` socket, on a thread with a loop."""

    def __init__(self, directory: str, listens: bool = True) -> None:
        self.arena = memoryview(bytearray(ARENA_NBYTES))
        self.contents: dict[int, bytearray] = {}  # by storage
        self.ranges: list[m.StoreFile] = []
        self.offered: list[int] = []  # files
        self.uploads = 0
        self.freed: list[int] = []
        self.refuses = False
        self.silent = False
        self.before_read: Callable[[], None] = lambda: None
        self.full = False  # it has no room for what is uploaded
        self._fds: dict[int, int] = {}  # by file
        self._directory = directory
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listens)))
        self._thread.start()
        self._ready.wait()

    async def _serve(self, listens: bool) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._link: Link[m.InstanceToStore, m.StoreToInstance] = Link(
            f"{self._directory}/store", bind=True, incoming=m.InstanceToStore, on_message=self._hear
        )
        self._sockets: list[PacketSocket[m.FileOffer, m.FileAnswer]] = []
        self._listener: Listener[m.FileOffer, m.FileAnswer] | None = None
        if listens:
            self._listen()
        self._ready.set()
        await self._over.wait()
        if self._listener is not None:
            self._listener.close()
        for socket in self._sockets:
            socket.close()
        self._link.close()

    def _listen(self) -> None:
        self._listener = Listener(f"{self._directory}/files", m.FileOffer, self._connected)

    def listen(self) -> None:
        """Bind the socket, later than the instance has come up."""
        done = threading.Event()

        def listen() -> None:
            self._listen()
            done.set()

        self._loop.call_soon_threadsafe(listen)
        done.wait()

    def _connected(self, socket: PacketSocket[m.FileOffer, m.FileAnswer]) -> None:
        self._sockets.append(socket)
        socket.serve(lambda offer, fds: self._offered(socket, offer, fds), lambda: self._sockets.remove(socket))

    def _offered(self, socket: PacketSocket[m.FileOffer, m.FileAnswer], offer: m.FileOffer, fds: list[int]) -> None:
        self.offered.append(offer.file)
        if self.refuses or self.silent:
            os.close(fds[0])
            if self.refuses:
                socket.send(m.FileRefused(file=offer.file, text="no"))
            return
        self._fds[offer.file] = fds[0]
        socket.send(m.FileTaken(file=offer.file))

    def _hear(self, message: m.InstanceToStore) -> None:
        answer: m.StoreToInstance = m.Uploaded()
        match message:
            case m.StoreUpload():
                self.uploads += 1
                data: Any = self.arena[message.arena_offset :][: message.nbytes]
                if self.full:
                    answer = m.StoreFailed(text=f"no room for {message.nbytes} bytes")
                else:
                    self._put(message, data)
            case m.StoreFile():
                self.ranges.append(message)
                self.before_read()
                data = os.pread(self._fds[message.file], message.nbytes, message.file_offset)
                if len(data) < message.nbytes:
                    answer = m.StoreFailed(text="the file has become shorter")
                else:
                    self._put(message, data)
            case m.StoreFree():
                self.freed += message.storages
                return
            case m.Commit():
                answer = m.Committed(version=1, nbytes=0)
        self._link.send(answer)

    def _put(self, message: m.StoreUpload | m.StoreFile, data: Any) -> None:
        content = self.contents.setdefault(message.storage, bytearray(message.total_nbytes))
        content[message.offset : message.offset + message.nbytes] = data

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        for fd in self._fds.values():
            os.close(fd)


class Instance:
    """A stream without PyTorch's device around it."""

    def __init__(self, directory: str, store: SmallStore) -> None:
        self.store = store
        self.backend = NodeBackend(directory, store.arena)
        self.backend.may_acquire = False  # as outside of load(): there is no router that hears how far that has come
        self.stream = Stream(self.backend)

    def upload(self, tensor: torch.Tensor) -> bytes:
        """What the store has of a storage with this tensor's bytes."""
        storage = self.uploaded(tensor)
        self.backend.store_settle()
        return bytes(self.store.contents[storage.id])

    def uploaded(self, tensor: torch.Tensor) -> RemoteStorage:
        storage = RemoteStorage(tensor.nbytes)
        self.stream.upload(storage, 0, tensor.data_ptr(), tensor.nbytes)
        return storage

    def close(self) -> None:
        self.backend._files.close()
        self.backend.store._link.close()
        self.backend.router.link.close()


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="dm") as path:  # short: socket paths end at 107 bytes
        yield path


@pytest.fixture
def store(directory: str) -> Iterator[SmallStore]:
    store = SmallStore(directory)
    yield store
    store.close()


@pytest.fixture
def instance(directory: str, store: SmallStore) -> Iterator[Instance]:
    instance = Instance(directory, store)
    yield instance
    instance.close()
    gc.collect()
    freed.clear()  # nobody will read of them


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "weights")


def make(path: Path, nbytes: int = NBYTES) -> Path:
    path.write_bytes(os.urandom(nbytes))
    return path


def mapped(path: Path, shared: bool = False) -> torch.Tensor:
    """A file as `torch.load(mmap=True)` and safetensors map it."""
    size = path.stat().st_size
    storage: Any = torch.UntypedStorage.from_file(str(path), shared, size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def content(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def test_unmodified_bytes_of_a_file_are_read_by_the_store(instance: Instance, store: SmallStore, file: Path) -> None:
    tensor = mapped(file)
    assert instance.upload(tensor) == file.read_bytes()
    part = tensor[4097:]
    assert instance.upload(part) == file.read_bytes()[4097:]
    assert (store.uploads, len(store.offered)) == (0, 1)
    assert [(said.file_offset, said.nbytes) for said in store.ranges] == [(0, NBYTES), (4097, NBYTES - 4097)]
    assert (instance.stream.bulk.file_nbytes, instance.stream.bulk.uploaded_nbytes) == (2 * NBYTES - 4097, 0)


def test_a_part_of_a_storage_comes_from_a_file_and_the_rest_does_not(
    instance: Instance, store: SmallStore, file: Path
) -> None:
    tensor, storage = mapped(file), RemoteStorage(NBYTES + 100)
    start = torch.full((100,), 7, dtype=torch.uint8)
    instance.stream.upload(storage, 0, start.data_ptr(), 100)
    instance.stream.upload(storage, 100, tensor.data_ptr(), NBYTES)
    assert bytes(store.contents[storage.id]) == bytes([7] * 100) + file.read_bytes()
    assert (store.uploads, len(store.ranges)) == (1, 1)


def test_written_bytes_are_sent(instance: Instance, store: SmallStore, file: Path) -> None:
    tensor = mapped(file)
    tensor[NBYTES // 2] += 1
    assert instance.upload(tensor) == content(tensor) != file.read_bytes()
    assert store.offered == []
    assert instance.stream.bulk.uploaded_nbytes == NBYTES


def test_small_runs_are_sent(instance: Instance, store: SmallStore, file: Path) -> None:
    tensor = mapped(file)[: MIN_NBYTES - 1]
    assert instance.upload(tensor) == content(tensor)
    assert store.offered == []


def test_a_mapping_in_the_place_of_another_is_not_taken_for_it(
    instance: Instance, store: SmallStore, file: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")
    for path in (file, other, file):
        tensor = mapped(path)  # the kernel gives the same address again and again
        assert instance.upload(tensor) == path.read_bytes()
        del tensor
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    assert instance.upload(tensor) == bytes(NBYTES)
    assert (len(store.offered), len(store.ranges)) == (2, 3)


@pytest.mark.parametrize("how", ["deleted", "replaced", "replaced by a pipe", "memfd", "shared and writable"])
def test_files_that_cannot_be_named_are_sent(
    instance: Instance, store: SmallStore, file: Path, tmp_path: Path, how: str
) -> None:
    expected = file.read_bytes()
    if how == "memfd":
        fd = os.memfd_create("weights")
        os.write(fd, expected)
        tensor = mapped(Path(f"/proc/self/fd/{fd}"))
        os.close(fd)
    else:
        tensor = mapped(file, shared=how.startswith("shared"))
    if how == "deleted":
        file.unlink()
    elif how == "replaced":
        make(tmp_path / "other").rename(file)
    elif how == "replaced by a pipe":
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").rename(file)
    assert instance.upload(tensor) == expected
    assert (len(store.offered), len(store.ranges)) == (0, 0)


def test_a_file_on_tmpfs_is_a_file(instance: Instance, store: SmallStore) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = make(Path(folder, "weights"))
        assert instance.upload(mapped(path)) == path.read_bytes()
    assert len(store.ranges) == 1


def test_a_changed_file_is_offered_again(instance: Instance, store: SmallStore, file: Path) -> None:
    tensor = mapped(file)
    before = instance.upload(tensor)
    with file.open("r+b") as opened:
        opened.write(b"changed")
    os.utime(file, ns=(1, 1))
    after = instance.upload(tensor)
    assert after == file.read_bytes() == b"changed" + before[7:]
    assert store.offered == [1, 2]


def test_a_refused_file_is_not_offered_again(instance: Instance, store: SmallStore, file: Path) -> None:
    store.refuses = True
    tensor = mapped(file)
    for _ in range(2):
        assert instance.upload(tensor) == content(tensor)
    assert (store.offered, store.ranges) == ([1], [])


def test_a_store_that_listens_late_is_found(directory: str, file: Path) -> None:
    store = SmallStore(directory, listens=False)
    instance = Instance(directory, store)
    try:
        assert instance.upload(mapped(file)) == file.read_bytes()
        assert store.ranges == []
        store.listen()
        assert instance.upload(mapped(file)) == file.read_bytes()
        assert len(store.ranges) == 1
    finally:
        instance.close()
        store.close()


def test_a_store_that_does_not_answer_offers_gets_bytes(
    instance: Instance, store: SmallStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "OFFER_S", 0.1)
    store.silent = True
    tensor = mapped(file)
    for _ in range(2):
        assert instance.upload(tensor) == content(tensor)
    assert store.offered == [1], "it is asked once"


def test_what_the_store_cannot_read_is_sent(instance: Instance, store: SmallStore, file: Path) -> None:
    tensor = mapped(file)
    instance.upload(tensor)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, store._fds[1])  # it has lost the file, which itself is well
    os.close(null)
    for _ in range(2):
        assert instance.upload(tensor) == file.read_bytes()
    assert len(store.ranges) == 2
    assert store.uploads > 0


def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(
    instance: Instance, store: SmallStore, file: Path
) -> None:
    tensor = mapped(file)
    store.before_read = lambda: os.truncate(file, 4096)
    with pytest.raises(StoreRefused, match="shorter"):
        instance.upload(tensor)
    store.before_read = lambda: None
    assert instance.upload(mapped(make(file))) == file.read_bytes()


def test_the_oldest_of_many_files_is_forgotten(instance: Instance, store: SmallStore, tmp_path: Path) -> None:
    paths = [make(tmp_path / str(number), MIN_NBYTES) for number in range(MAX_FILES + 1)]
    tensors = [mapped(path) for path in paths]
    for tensor in (*tensors, tensors[1], tensors[0]):
        instance.upload(tensor)
    assert len(store.offered) == MAX_FILES + 2
    assert store.uploads == 0


def opened_below(folder: Path) -> list[str]:
    """Files that descriptors of this process lead to; others are of threads that open and close theirs as they like."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(f"{folder}/"))


def test_no_descriptors_stay_open(instance: Instance, store: SmallStore, file: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other")
    for path in (file, other):
        instance.upload(mapped(path))
    store.refuses = True
    instance.upload(mapped(make(tmp_path / "third")))
    assert opened_below(tmp_path) == sorted([str(file), str(other)]), "the store's"


# --- how files reach cuda:0: a stream as a function sees it


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    state = {"large": torch.randn(600, 1000), "small": torch.randn(10), "half": torch.randn(1 << 20).half()}
    safetensors.torch.save_file(state, path)
    return state


LARGE_NBYTES = 600 * 1000 * 4 + (2 << 20)


@pytest.mark.parametrize("how", ["load_file", "to", "safe_open", "safe_open number", "torch.load", "cuda in file"])
def test_checkpoints_come_from_their_file(loopback: Any, tmp_path: Path, how: str) -> None:
    path = tmp_path / "model"
    state = _checkpoint(path)
    match how:
        case "load_file":
            found = safetensors.torch.load_file(path, device=CUDA)
        case "to":
            found = {name: value.to(CUDA) for name, value in safetensors.torch.load_file(path).items()}
        case "torch.load" | "cuda in file":
            torch.save({name: value.to(CUDA) for name, value in state.items()} if how[0] == "c" else state, path)
            loopback.end_lease()
            loopback.stream.bulk.uploaded_nbytes = 0
            # An archive's parts begin at multiples of 64 bytes, in the midst of pages.
            found = torch.load(path, mmap=True, map_location=CUDA if how[0] == "t" else None)
        case _:
            with safetensors.safe_open(path, "pt", device=0 if how.endswith("number") else CUDA) as opened:
                found = {name: opened.get_tensor(name) for name in state}
    assert all(value.is_cuda for value in found.values())
    assert loopback.stream.bulk.file_nbytes == LARGE_NBYTES
    assert loopback.stream.bulk.uploaded_nbytes < 100
    for name, value in state.items():
        assert torch.equal(found[name].cpu(), value)


def test_slices_and_other_types(loopback: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    state = _checkpoint(path)
    with safetensors.safe_open(path, "pt", device=CUDA) as opened:
        rows = opened.get_slice("large")[100:500]
        assert loopback.stream.bulk.file_nbytes == 400 * 1000 * 4
        columns = opened.get_slice("large")[:, :500]
    double = safetensors.torch.load_file(path)["large"].to(CUDA, torch.float64)
    assert loopback.stream.bulk.file_nbytes == 400 * 1000 * 4, "a copy with other bytes is no file's"
    assert torch.equal(rows.cpu(), state["large"][100:500])
    assert torch.equal(columns.cpu(), state["large"][:, :500])
    assert torch.equal(double.cpu(), state["large"].double())


@pytest.mark.filterwarnings("ignore")  # the library's own deprecations are not ours to fail on
def test_from_pretrained_of_a_folder(loopback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig, BertForMaskedLM

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else its progress bars leave a thread
    config = BertConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=2560, vocab_size=4000
    )
    torch.manual_seed(0)
    original: Any = BertForMaskedLM(config)
    original.eval()
    original.save_pretrained(tmp_path)
    model: Any = BertForMaskedLM.from_pretrained(tmp_path)
    model.eval().to(CUDA)
    large = {value.data_ptr(): value.nbytes for value in original.parameters() if value.nbytes >= MIN_NBYTES}
    assert len(large) == 3
    assert loopback.stream.bulk.file_nbytes == sum(large.values())
    assert loopback.stream.bulk.uploaded_nbytes < sum(value.nbytes for value in original.parameters())
    tied = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert tied[0].untyped_storage() == tied[1].untyped_storage()
    ids = torch.tensor([[1, 5, 3]])
    expected = original(ids).logits
    torch.testing.assert_close(model(ids.to(CUDA)).logits.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_arrays_in_files(loopback: Any, tmp_path: Path) -> None:
    import numpy as np

    values = np.random.default_rng(0).random((1000, 400), dtype=np.float32)
    np.save(tmp_path / "array.npy", values)
    array = np.load(tmp_path / "array.npy", mmap_mode="c")
    found = torch.from_numpy(array).to(CUDA)
    assert loopback.stream.bulk.file_nbytes == values.nbytes
    array[3, 4] = 5
    changed = torch.from_numpy(array).to(CUDA)
    assert loopback.stream.bulk.file_nbytes == values.nbytes
    assert torch.equal(found.cpu(), torch.from_numpy(values))
    assert changed[3, 4].item() == 5


# --- what is small is uploaded without waiting for each answer


@pytest.mark.parametrize(("nbytes", "together"), [(0, MAX_UNANSWERED), (64, MAX_UNANSWERED), (SMALL_NBYTES, 16)])
def test_small_uploads_are_waited_for_together(
    instance: Instance, store: SmallStore, nbytes: int, together: int
) -> None:
    """At most as many as have room in the arena; what lies there stays as it is until the store has had it."""
    kept, counts = [], []
    for number in range(5 * MAX_UNANSWERED):
        tensor = torch.full((nbytes,), number, dtype=torch.uint8)
        kept.append(instance.uploaded(tensor))
        tensor.fill_(255)
        counts.append(instance.backend.store.unanswered)
    assert max(counts) == min(together, MAX_UNANSWERED - 1)
    assert instance.stream.commit() == 1
    assert [store.contents[each.id] for each in kept] == [bytes([number]) * nbytes for number in range(len(kept))]
    assert instance.backend.store.unanswered == 0


def test_a_large_upload_is_waited_for_and_all_before_it(instance: Instance, store: SmallStore) -> None:
    small, large = (instance.uploaded(torch.ones(each, dtype=torch.uint8)) for each in (9, SMALL_NBYTES + 1))
    assert instance.backend.store.unanswered == 0
    assert [len(store.contents[each.id]) for each in (small, large)] == [9, SMALL_NBYTES + 1]


def test_what_the_store_refuses_late_is_in_no_version(instance: Instance, store: SmallStore) -> None:
    """Who waits next is told; and each commit, as long as the program has what has no value."""
    store.full = True
    data = torch.ones(9, dtype=torch.uint8)
    lost = [instance.uploaded(data) for _ in range(MAX_UNANSWERED - 1)]
    with pytest.raises(StoreRefused, match="no room for 9 bytes"):
        instance.uploaded(data)
    store.full = False
    assert instance.upload(data) == content(data), "the answers are each their upload's"
    with pytest.raises(StoreRefused, match="no room for 9 bytes"):
        instance.stream.commit()
    lost.clear()
    gc.collect()
    assert instance.stream.commit() == 1
    assert len(store.freed) == MAX_UNANSWERED + 1


def test_what_has_died_before_it_is_refused_is_no_reason_later(instance: Instance, store: SmallStore) -> None:
    store.full = True
    data = torch.ones(9, dtype=torch.uint8)
    instance.backend.store_free([instance.uploaded(data).id])
    with pytest.raises(StoreRefused, match="no room for 9 bytes"):
        instance.stream.commit()
    assert instance.stream.commit() == 1
