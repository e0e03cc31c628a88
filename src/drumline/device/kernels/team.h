// A few threads that do one piece of work together and meet at barriers.
//
// A member that waits spins for some microseconds, as the others are usually about done, then
// lets others run, and sleeps between two pieces of work.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <immintrin.h>

namespace drumline {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    try {
      for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Run `work(id)` once on every member, the caller among them as 0. One caller at a time.
  void run(const std::function<void(int)>& work) {
    if (size_ == 1) return work(0);
    work_ = &work;
    ended_.store(0, std::memory_order_relaxed);
    begun_.fetch_add(1, std::memory_order_release);
    begun_.notify_all();
    work(0);
    for (int spins = 0; ended_.load(std::memory_order_acquire) != size_ - 1; spins++) relax(spins);
  }

  // Wait until every member is here. Inside `run` alone.
  void meet() {
    if (size_ == 1) return;
    const int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++) relax(spins);
  }

 private:
  static constexpr int kPauses = 2000;

  static void relax(int spins) {
    if (spins < kPauses)
      _mm_pause();
    else
      sched_yield();
  }

  void serve(int id) {
    for (uint32_t seen = 0;;) {
      uint32_t now;
      for (int spins = 0; (now = begun_.load(std::memory_order_acquire)) == seen; spins++) {
        if (spins < kPauses)
          _mm_pause();
        else
          begun_.wait(seen, std::memory_order_acquire);
      }
      seen = now;
      if (stopping_.load(std::memory_order_acquire)) return;
      (*work_)(id);
      ended_.fetch_add(1, std::memory_order_release);
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    begun_.fetch_add(1, std::memory_order_release);
    begun_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> begun_{0};
  alignas(64) std::atomic<int> ended_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace drumline
