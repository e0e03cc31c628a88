// A few threads that do one piece of work together and meet at barriers.
//
// A member that waits spins for some microseconds, as the others are usually about done, and then
// sleeps until it is woken. Where that was in vain, as other processes hold the cores, it spins for
// less time from then on: what it burns is kept from the one that all wait for.
#pragma once

#include <algorithm>
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
    for (int ended; (ended = ended_.load(std::memory_order_acquire)) != size_ - 1;) await(ended_, ended);
  }

  // Wait until every member is here. Inside `run` alone.
  void meet() {
    if (size_ == 1) return;
    const int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      // No plain store: one that stays behind the look for sleepers would leave them asleep.
      turn_.fetch_add(1, std::memory_order_seq_cst);
      turn_.notify_all();
      return;
    }
    await(turn_, turn);
  }

 private:
  static constexpr int kMostPauses = 2000;
  static constexpr int kLeastPauses = 30;

  // Wait until `value` is another than `seen`.
  template <class T>
  void await(const std::atomic<T>& value, T seen) {
    const int pauses = pauses_.load(std::memory_order_relaxed);
    for (int spins = 0; spins < pauses; spins++) {
      if (value.load(std::memory_order_acquire) != seen) {
        if (pauses < kMostPauses) pauses_.store(pauses + pauses / 16 + 1, std::memory_order_relaxed);
        return;
      }
      _mm_pause();
    }
    pauses_.store(std::max(kLeastPauses, pauses / 2), std::memory_order_relaxed);
    value.wait(seen, std::memory_order_acquire);
  }

  void serve(int id) {
    for (uint32_t seen = 0;; seen++) {
      // Between two pieces of work there may be nothing for long: that says nothing of the cores.
      for (int spins = 0; spins < kMostPauses && begun_.load(std::memory_order_acquire) == seen; spins++) _mm_pause();
      begun_.wait(seen, std::memory_order_acquire);
      if (stopping_.load(std::memory_order_acquire)) return;
      (*work_)(id);
      ended_.fetch_add(1, std::memory_order_release);
      ended_.notify_all();
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
  alignas(64) std::atomic<int> pauses_{kMostPauses};  // of a member that waits for another
  std::atomic<bool> stopping_{false};
};

}  // namespace drumline
