// A c10 CPU allocator that counts bytes, on threads that asked for it refuses more than a limit, and never hands one owner's bytes to
// another.
//
// Blocks come from mappings of our own, so that whatever a block held before is known: the kernel's zeros, or what the owner wrote
// who had it last. A block that is freed keeps that owner's number; the same owner gets it back as it is, any other gets zeros. So the
// price is paid when a block changes hands, and not for each allocation. It is tagged when it is given out: a block is written by
// nobody else, whoever holds the GPU when it is freed.
//
// Every live block is in a table: a block may be freed by any thread, and an operand can be checked to lie in a counted block. All
// threads are counted, because intra-op workers allocate workspaces for the device thread; only the device thread is refused, because
// an exception on any other thread would hit work that has nothing to do with the emulated GPU.

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t CHUNK = 32 << 20; // mapped at once, to cut smaller blocks from
constexpr size_t LARGE = 8 << 20; // blocks beyond have a mapping of their own
constexpr size_t GIVEN_BACK = 64 << 10; // smaller ones are never given back to the system: as many as ever were in use at once
constexpr size_t KEPT = 64 << 20; // most that is kept of the others while free; what malloc's trim threshold grows to
constexpr size_t LARGEST = size_t{1} << 46;
constexpr int CLASSES = 16 + 36 * 8;
constexpr uint32_t NOBODY = 0; // the kernel's zeros
constexpr size_t LOOKED_AT = 16; // free blocks among which one's own is looked for: a clear is dearer than this

struct Block {
  size_t nbytes;
  int size_class;
  uint32_t owner;
  bool counted;
};

struct Free {
  void* data;
  uint32_t owner;
};

std::mutex mutex; // of all containers and of the chunk
std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>(); // outlives every tensor at exit
std::vector<Free>* const kept = new std::vector<Free>[CLASSES]; // by size class, the newest last
size_t kept_nbytes = 0; // of those that are to be given back some time
char* chunk = nullptr;
size_t chunk_left = 0;
std::atomic<uint32_t> owner{NOBODY + 1};
std::atomic<int64_t> used{0};
std::atomic<int64_t> peak{0};
std::atomic<int64_t> limit{INT64_MAX};
thread_local bool limited = false;
thread_local int64_t refused = 0;
thread_local int64_t refused_beside = 0;

double mebibytes(int64_t nbytes) {
  return static_cast<double>(nbytes) / (1 << 20);
}

// Multiples of 64 up to 1 KiB, then eight classes for each power of two: at most an eighth is lost.
int class_of(size_t nbytes) {
  if (nbytes <= 1024) {
    return static_cast<int>((nbytes + 63) / 64) - 1;
  }
  int exponent = 63 - __builtin_clzll(nbytes - 1);
  return 16 + (exponent - 10) * 8 + static_cast<int>((nbytes - 1 - (size_t{1} << exponent)) >> (exponent - 3));
}

size_t class_nbytes(int size_class) {
  if (size_class < 16) {
    return static_cast<size_t>(size_class + 1) * 64;
  }
  int exponent = (size_class - 16) / 8 + 10;
  return (size_t{1} << exponent) + static_cast<size_t>((size_class - 16) % 8 + 1) * (size_t{1} << (exponent - 3));
}

char* mapping(size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "the host has no memory for ", size, " bytes of an emulated GPU's activations");
  return static_cast<char*>(data);
}

void* fresh(size_t size) {
  if (size > LARGE) {
    return mapping(size);
  }
  size_t alignment = size >= GIVEN_BACK ? PAGE : 64;
  size_t skipped = (alignment - reinterpret_cast<uintptr_t>(chunk) % alignment) % alignment;
  if (chunk_left < skipped + size) {
    chunk = mapping(CHUNK);
    chunk_left = CHUNK;
    skipped = 0;
  }
  void* data = chunk + skipped;
  chunk += skipped + size;
  chunk_left -= skipped + size;
  return data;
}

// What is kept of a size, with the owner whose bytes it has; one's own if it is among the newest.
bool take(int size_class, uint32_t wanted, Free& found) {
  std::vector<Free>& list = kept[size_class];
  if (list.empty()) {
    return false;
  }
  size_t chosen = list.size() - 1;
  for (size_t back = 0; back < LOOKED_AT && back < list.size(); ++back) {
    size_t each = list.size() - 1 - back;
    if (list[each].owner == wanted) {
      chosen = each;
      break;
    }
    if (list[each].owner != NOBODY) {
      chosen = each; // rather the oldest of the others: its owner may come back for the newer ones
    }
  }
  found = list[chosen];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(chosen));
  size_t size = class_nbytes(size_class);
  if (size >= GIVEN_BACK && found.owner != NOBODY) {
    kept_nbytes -= size;
  }
  return true;
}

// Everything that is kept goes back to the system: old sizes must not crowd out the ones that are in use now.
void give_back() {
  for (int size_class = class_of(GIVEN_BACK); size_class < CLASSES; ++size_class) {
    size_t size = class_nbytes(size_class);
    std::vector<Free>& list = kept[size_class];
    for (Free& each : list) {
      if (size > LARGE) {
        munmap(each.data, size);
      } else if (each.owner != NOBODY && madvise(each.data, size, MADV_DONTNEED) == 0) {
        each.owner = NOBODY;
      }
    }
    if (size > LARGE) {
      list.clear();
    }
  }
  kept_nbytes = 0;
}

void keep(void* data, const Block& block) {
  size_t size = class_nbytes(block.size_class);
  if (size > KEPT) {
    munmap(data, size);
    return;
  }
  if (size >= GIVEN_BACK) {
    if (kept_nbytes + size > KEPT) {
      give_back();
    }
    kept_nbytes += size;
  }
  kept[block.size_class].push_back({data, block.owner});
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find(data);
  if (found != blocks.end()) {
    if (found->second.counted) {
      used.fetch_sub(static_cast<int64_t>(found->second.nbytes), std::memory_order_relaxed);
    }
    keep(data, found->second);
    blocks.erase(found);
  }
}

void* take_block(size_t nbytes) {
  TORCH_CHECK(nbytes <= LARGEST, "no host has memory for ", nbytes, " bytes");
  int size_class = class_of(nbytes);
  uint32_t mine = owner.load(std::memory_order_relaxed);
  Free found{nullptr, NOBODY};
  int64_t now = 0;
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (!take(size_class, mine, found)) {
      found.data = fresh(class_nbytes(size_class));
    }
    blocks.emplace(found.data, Block{nbytes, size_class, mine, true});
    now = used.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed) + static_cast<int64_t>(nbytes);
  }
  if (found.owner != mine && found.owner != NOBODY) {
    std::memset(found.data, 0, class_nbytes(size_class)); // all of it: the next request for this block may be for more
  }
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
  return found.data;
}

struct OwnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (limited) {
      int64_t most = limit.load(std::memory_order_relaxed);
      int64_t now = used.load(std::memory_order_relaxed);
      // Compared without adding, so that an absurd size cannot wrap around.
      if (nbytes > static_cast<size_t>(most > now ? most - now : 0)) {
        refused = nbytes > LARGEST ? static_cast<int64_t>(LARGEST) : static_cast<int64_t>(nbytes);
        refused_beside = now;
        TORCH_CHECK_WITH(
            OutOfMemoryError,
            false,
            "CUDA out of memory. Tried to allocate ",
            mebibytes(static_cast<int64_t>(nbytes)),
            " MiB; of the ",
            mebibytes(most),
            " MiB beside models, ",
            mebibytes(now),
            " MiB are in use. Load less, use smaller batches, or raise [gpu] memory in the node file.");
      }
    }
    void* data = nbytes == 0 ? nullptr : take_block(nbytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    default_copy_data(destination, source, nbytes);
  }
};

OwnedAllocator allocator;

} // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// A device counts from its own beginning: blocks that the previous allocator gave out keep its deleter and are never counted, and
// what an earlier device of this process left is not counted any more.
EXPORT void dormouse_install() {
  {
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& [data, block] : blocks) {
      block.counted = false;
    }
    used.store(0, std::memory_order_relaxed);
    peak.store(0, std::memory_order_relaxed);
  }
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, 100);
}

// Blocks that are given out from now on are this owner's; numbers begin with 1.
EXPORT void dormouse_set_owner(uint32_t number) {
  owner.store(number, std::memory_order_relaxed);
}

EXPORT void dormouse_limit_this_thread(int on) {
  limited = on != 0;
}

EXPORT void dormouse_set_limit(int64_t nbytes) {
  limit.store(nbytes, std::memory_order_relaxed);
}

// How much the calling thread was refused since the last call, and for the other question what was in use at that moment.
EXPORT int64_t dormouse_refused(int beside) {
  return std::exchange(beside ? refused_beside : refused, 0);
}

// Whether [data, +nbytes) begins a live block and lies inside it.
EXPORT int dormouse_contains(void* data, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex);
  auto block = blocks.find(data);
  return block != blocks.end() && nbytes >= 0 && static_cast<size_t>(nbytes) <= block->second.nbytes;
}

EXPORT int64_t dormouse_used() {
  return used.load(std::memory_order_relaxed);
}

EXPORT int64_t dormouse_peak() {
  return peak.load(std::memory_order_relaxed);
}

EXPORT void dormouse_reset_peak() {
  peak.store(used.load(std::memory_order_relaxed), std::memory_order_relaxed);
}
}
