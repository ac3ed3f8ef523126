// Threads that do one stage after the other together. They wait for each other a moment without sleeping, since stages
// are a few microseconds long, and then asleep: where more threads compute than there are cores, waiting must not take
// the core from those that are waited for.

#pragma once

#include <atomic>
#include <cstdint>
#include <omp.h>

namespace dormouse {

class Team {
 public:
  // `life(stage)` is run by each thread; stage(pieces, work) does work(piece) for all pieces, and returns when all are
  // done. All threads must ask for the same stages.
  template <typename Life>
  static void run(Life life) {
    Team team;
#pragma omp parallel
    {
      const int size = omp_get_num_threads();
      life([&](int64_t pieces, auto work) {
        for (;;) {
          const int64_t piece = team.next_.fetch_add(1, std::memory_order_relaxed);
          if (piece >= pieces) break;
          work(piece);
        }
        team.meet(size);
      });
    }
  }

 private:
  static constexpr int SPINS = 2000;  // some 20 us: about what it costs to sleep and to be woken

  void meet(int size) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      // In one order with the rest: notifying looks whether anybody waits, and a processor could do that before the
      // others see the new phase. Then one of them would fall asleep for good (libstdc++ of GCC 12).
      phase_.store(phase + 1, std::memory_order_seq_cst);
      phase_.notify_all();
      return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    while (phase_.load(std::memory_order_acquire) == phase) phase_.wait(phase, std::memory_order_acquire);
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace dormouse
