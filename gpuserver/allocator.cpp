// A c10 CPU allocator that counts bytes and, on threads that asked for it, refuses more than a limit.
//
// It takes its memory from c10::alloc_cpu, so that alignment and huge pages stay torch's own, and keeps every live block in a table:
// a block may be freed by any thread, and an operand can be checked to lie in a counted block. All threads are counted, because
// intra-op workers allocate workspaces for the device thread; only the device thread is refused, because an exception on any other
// thread would hit work that has nothing to do with the emulated GPU.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

namespace {

std::mutex mutex;
std::unordered_map<void*, size_t>& blocks = *new std::unordered_map<void*, size_t>(); // outlives every tensor at exit
std::atomic<int64_t> used{0};
std::atomic<int64_t> peak{0};
std::atomic<int64_t> limit{INT64_MAX};
thread_local bool limited = false;

double mebibytes(int64_t nbytes) {
  return static_cast<double>(nbytes) / (1 << 20);
}

void count(void* data, size_t size) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    blocks.emplace(data, size);
  }
  int64_t nbytes = static_cast<int64_t>(size);
  int64_t now = used.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto block = blocks.find(data);
    if (block != blocks.end()) {
      used.fetch_sub(static_cast<int64_t>(block->second), std::memory_order_relaxed);
      blocks.erase(block);
    }
  }
  c10::free_cpu(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (limited) {
      int64_t most = limit.load(std::memory_order_relaxed);
      int64_t now = used.load(std::memory_order_relaxed);
      // Compared without adding, so that an absurd size cannot wrap around.
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          nbytes <= static_cast<size_t>(most > now ? most - now : 0),
          "CUDA out of memory. Tried to allocate ",
          mebibytes(static_cast<int64_t>(nbytes)),
          " MiB, but of the ",
          mebibytes(most),
          " MiB that the models in this emulated GPU leave for activations, ",
          mebibytes(now),
          " MiB are in use. Use smaller batches, or raise gpu.memory in the node's configuration.");
    }
    void* data = c10::alloc_cpu(nbytes);
    if (data != nullptr) {
      count(data, nbytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    default_copy_data(destination, source, nbytes);
  }
};

CountingAllocator allocator;

} // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Blocks that the previous allocator gave out keep its deleter and are never counted.
EXPORT void dormouse_install() {
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, 100);
}

EXPORT void dormouse_limit_this_thread(int on) {
  limited = on != 0;
}

EXPORT void dormouse_set_limit(int64_t nbytes) {
  limit.store(nbytes, std::memory_order_relaxed);
}

// Whether [data, +nbytes) begins a live block and lies inside it.
EXPORT int dormouse_contains(void* data, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex);
  auto block = blocks.find(data);
  return block != blocks.end() && nbytes >= 0 && static_cast<size_t>(nbytes) <= block->second;
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
