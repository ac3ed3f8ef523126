"""Which file lies at an address: real mappings of real files, asked by the kernel's question and by its text."""

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dormouse.client_shim.node.mappings import Mapped, Mappings

PAGE = mmap.PAGESIZE
PAGES = 16
PRIVATE, SHARED, ANONYMOUS, FIXED = mmap.MAP_PRIVATE, mmap.MAP_SHARED, mmap.MAP_ANONYMOUS, 0x10
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _name in ("munmap", "mprotect", "madvise"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][: 2 if _name == "munmap" else 3]


class Memory:
    """Addresses of this process that a test maps as it likes."""

    def __init__(self) -> None:
        self.address = int(_libc.mmap(None, PAGES * PAGE, 0, PRIVATE | ANONYMOUS, -1, 0))

    def map(
        self, path: Path | None, page: int = 0, pages: int = PAGES, *, flags: int = PRIVATE, offset: int = 0
    ) -> int:
        """Map ``pages`` pages of a file (None: of nothing) from page ``page`` on; the address."""
        fd = -1 if path is None else os.open(path, os.O_RDWR)
        protection, flags = READ | WRITE, flags | FIXED | (ANONYMOUS if path is None else 0)
        address = self.address + page * PAGE
        assert _libc.mmap(address, pages * PAGE, protection, flags, fd, offset * PAGE) == address
        if path is not None:
            os.close(fd)
        return address

    def protect(self, page: int, pages: int, protection: int) -> None:
        assert _libc.mprotect(self.address + page * PAGE, pages * PAGE, protection) == 0

    def close(self) -> None:
        _libc.munmap(self.address, PAGES * PAGE)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture(params=["query", "text"])
def mappings(request: pytest.FixtureRequest) -> Iterator[Mappings]:
    mappings = Mappings()
    if request.param == "text":
        mappings._has_query = False  # as before Linux 6.11
    yield mappings
    mappings.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "weights")


def make(path: Path, pages: int = PAGES) -> Path:
    path.write_bytes(os.urandom(pages * PAGE))
    return path


def check(found: Mapped | None, path: Path, address: int, nbytes: int) -> None:
    """What was found is this file, and says what the memory says."""
    assert found is not None
    assert os.fsdecode(found.path) == str(path)
    assert path.read_bytes()[found.offset : found.offset + nbytes] == ctypes.string_at(address, nbytes)


@pytest.mark.parametrize(("first", "nbytes"), [(0, PAGES * PAGE), (3, 1), (100, PAGE), (PAGE - 1, 5 * PAGE + 2)])
@pytest.mark.parametrize("touched", [False, True])
def test_what_nobody_has_written_is_the_files(
    mappings: Mappings, memory: Memory, file: Path, first: int, nbytes: int, touched: bool
) -> None:
    address = memory.map(file, pages=PAGES - 4, offset=4) + first
    nbytes = min(nbytes, (PAGES - 4) * PAGE)
    if touched:
        ctypes.string_at(address, nbytes)
    check(mappings.file_at(address, nbytes), file, address, nbytes)


def test_a_written_page_is_not_the_files_and_its_neighbours_are(mappings: Mappings, memory: Memory, file: Path) -> None:
    address = memory.map(file)
    ctypes.memset(address + 5 * PAGE + 7, 1, 1)
    before, after = (address, 5 * PAGE), (address + 6 * PAGE, 10 * PAGE)
    for start, nbytes in (before, after):
        check(mappings.file_at(start, nbytes), file, start, nbytes)
    assert mappings.file_at(address, PAGES * PAGE) is None
    # Pages at the ends count as a whole, wherever in them was written.
    assert mappings.file_at(address, 5 * PAGE + 1) is None
    assert mappings.file_at(address + 6 * PAGE - 1, 10) is None
    assert mappings.file_at(address + 5 * PAGE + 100, 10) is None


def test_a_write_that_is_undone_still_counts_and_one_that_is_dropped_does_not(
    mappings: Mappings, memory: Memory, file: Path
) -> None:
    address = memory.map(file)
    ctypes.memmove(address, ctypes.string_at(address, 1), 1)
    assert mappings.file_at(address, PAGE) is None
    _libc.madvise(address, PAGE, DONTNEED)
    check(mappings.file_at(address, PAGE), file, address, PAGE)


def test_only_files_count(mappings: Mappings, memory: Memory) -> None:
    address = memory.map(None)
    ctypes.memset(address, 1, PAGES * PAGE)
    assert mappings.file_at(address, PAGE) is None
    assert mappings.file_at(ctypes.addressof(ctypes.create_string_buffer(PAGE)), PAGE) is None
    assert mappings.file_at(0, PAGE) is None
    assert mappings.file_at(address, 0) is None


def test_an_address_is_asked_about_afresh(mappings: Mappings, memory: Memory, file: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other")
    address = memory.map(file)
    check(mappings.file_at(address, PAGE), file, address, PAGE)
    memory.map(other)
    check(mappings.file_at(address, PAGE), other, address, PAGE)
    memory.map(None)
    assert mappings.file_at(address, PAGE) is None


def test_several_mappings_are_one_run_only_if_the_file_goes_on(
    mappings: Mappings, memory: Memory, file: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")
    address = memory.map(file)
    memory.map(file, page=4, pages=4, offset=4, flags=SHARED)  # another kind of mapping of the same bytes
    memory.protect(4, 4, READ)
    memory.map(other, page=8, pages=4, offset=8)
    memory.map(file, page=12, pages=4, offset=11)
    check(mappings.file_at(address + 9, 8 * PAGE - 9), file, address + 9, 8 * PAGE - 9)
    assert mappings.file_at(address, 8 * PAGE + 1) is None
    memory.map(file, page=8, pages=4, offset=8)
    check(mappings.file_at(address, 12 * PAGE), file, address, 12 * PAGE)
    assert mappings.file_at(address, 12 * PAGE + 1) is None
    memory.map(file, page=12, pages=4, offset=12)
    check(mappings.file_at(address, 16 * PAGE), file, address, 16 * PAGE)
    assert mappings.file_at(address, 16 * PAGE + 1) is None


def test_a_change_of_protection_is_no_change_of_bytes(mappings: Mappings, memory: Memory, file: Path) -> None:
    address = memory.map(file)
    memory.protect(3, 2, READ)
    check(mappings.file_at(address, 6 * PAGE), file, address, 6 * PAGE)
    memory.protect(3, 2, 0)
    assert mappings.file_at(address, 6 * PAGE) is None
    check(mappings.file_at(address, 3 * PAGE), file, address, 3 * PAGE)


def test_a_run_of_very_many_mappings_is_given_up(mappings: Mappings, tmp_path: Path) -> None:
    path = make(tmp_path / "large", 130)
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 130 * PAGE, flags=PRIVATE) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        for page in range(1, 130, 2):
            _libc.mprotect(address + page * PAGE, PAGE, READ)
        assert mappings.file_at(address, 130 * PAGE) is None
        check(mappings.file_at(address, 60 * PAGE), path, address, 60 * PAGE)


def test_shared_mappings_count_if_they_cannot_be_written(mappings: Mappings, memory: Memory, file: Path) -> None:
    address = memory.map(file, flags=SHARED)
    assert mappings.file_at(address, PAGE) is None
    memory.protect(0, PAGES, READ)
    check(mappings.file_at(address, PAGE), file, address, PAGE)


def test_a_change_of_the_file_is_the_files(mappings: Mappings, memory: Memory, file: Path) -> None:
    address = memory.map(file)
    ctypes.string_at(address, 2 * PAGE)
    with file.open("r+b") as opened:
        opened.write(b"changed")
    check(mappings.file_at(address, 2 * PAGE), file, address, 2 * PAGE)


def test_memory_without_a_name_has_a_path_that_leads_nowhere(mappings: Mappings, memory: Memory) -> None:
    fd = os.memfd_create("weights")
    os.truncate(fd, PAGES * PAGE)
    address = memory.map(Path(f"/proc/self/fd/{fd}"))
    found = mappings.file_at(address, PAGE)
    os.close(fd)
    assert found is not None
    assert not os.path.exists(found.path)


def test_identity_is_that_of_the_mapped_file(mappings: Mappings, memory: Memory, file: Path, tmp_path: Path) -> None:
    found = mappings.file_at(memory.map(file), PAGE)
    assert found is not None
    for path, same in ((file, True), (make(tmp_path / "other"), False)):
        with path.open("rb") as opened:
            assert (mappings.identity_of(opened.fileno()) == found.identity) is same
    empty = tmp_path / "empty"
    empty.touch()
    with empty.open("rb") as opened:
        assert mappings.identity_of(opened.fileno()) is None


def in_a_child(what: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if what() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_asks_for_itself(mappings: Mappings, memory: Memory, file: Path) -> None:
    address = memory.map(file)

    def child() -> bool:
        stale = mappings.file_at(address, PAGE)
        ctypes.memset(address, 1, 1)
        own = Mappings()
        return stale is None and own.file_at(address, PAGE) is None and own.file_at(address + PAGE, PAGE) is not None

    assert in_a_child(child)
    check(mappings.file_at(address, PAGES * PAGE), file, address, PAGES * PAGE)
    # What was copied before the fork stays a copy on both sides, although both have the same page.
    ctypes.memset(address, 1, 1)
    assert in_a_child(lambda: Mappings().file_at(address, PAGE) is None)
    assert mappings.file_at(address, PAGE) is None


def test_descriptors_that_are_no_longer_ours_give_no_answer(memory: Memory, file: Path) -> None:
    address = memory.map(file)
    mappings = Mappings()
    null = os.open("/dev/null", os.O_RDONLY)
    for fd in (mappings._maps_fd, mappings._page_table_fd):
        os.dup2(null, fd)  # as user code does that closes what it does not know
    assert mappings.file_at(address, PAGE) is None
    os.close(null)
    mappings.close()


@pytest.mark.skipif(
    tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) < (6, 11), reason="needs Linux 6.11"
)
def test_a_new_kernel_is_asked_for_one_mapping(memory: Memory, file: Path) -> None:
    mappings = Mappings()
    assert mappings.file_at(memory.map(file), PAGE) is not None
    assert mappings._has_query
    mappings.close()
