// Large CPU tensors from memory that is used again: what is freed stays, up to a limit, and leaves the process beyond it.
//
// The C library does one or the other: it maps large blocks anew each time, and the kernel clears every page again, or
// keeps them in a heap that grows by a third and more over what is alive, because small objects come to lie between
// large ones. Here only tensors share mappings, so live and free bytes together stay below a limit: a plan's peak
// (moDNN, section 3.3, asks for a pool of its own), or a little more than the most that was alive. What is free but in
// pieces that are too small is moved together, granule by granule, and neither copied nor cleared.

#include "free_ranges.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using retime::FreeRanges;
using retime::kGranule;
using retime::map_pages;
using retime::move_granule;
using retime::page_bytes;
using retime::populate;
using retime::reserve;
using retime::rounded_up;

constexpr size_t kSmallest = 16 * 1024; // smaller blocks come from the C library
constexpr size_t kLargest = size_t{1} << 47; // no process has so many addresses: torch's own allocator refuses more
constexpr int64_t kSpare = 2 * kGranule; // beyond a limit that follows what is alive, for what is rounded to granules

struct Counts {
  int64_t live, free, peak_live, peak_reserved, mapped, moved, reused;
};

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes < kSmallest || nbytes > kLargest || !on_.load(std::memory_order_relaxed)) {
      return c10::GetDefaultCPUAllocator()->allocate(nbytes);
    }
    void* block = take(nbytes);
    return {block, block, &give, c10::Device(c10::DeviceType::CPU)};
  }

  // oneDNN's scratch comes through this door: without it, it could not be allocated at all.
  c10::DeleterFnPtr raw_deleter() const override { return &give; }

  void copy_data(void* dest, const void* source, size_t nbytes) const override {
    default_copy_data(dest, source, nbytes);
  }

  void turn(bool on) { on_.store(on, std::memory_order_relaxed); }

  // Live and free bytes together stay below `limit`, or below `slack` times the most that was alive.
  void set_limit(int64_t limit, double slack) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    slack_ = slack;
    shrink(counts_.live);
  }

  // The most that was alive is that of this window and the one before: what nobody needs any more leaves at last.
  void begin_window() {
    std::lock_guard<std::mutex> guard(mutex_);
    most_live_before_ = most_live_;
    most_live_ = counts_.live;
    shrink(counts_.live);
  }

  void forget_most() {
    std::lock_guard<std::mutex> guard(mutex_);
    most_live_ = counts_.live;
    most_live_before_ = 0;
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.peak_live = counts_.live;
    counts_.peak_reserved = counts_.live + free_.bytes();
  }

  Counts counts() {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.free = free_.bytes();
    return counts_;
  }

  int64_t size_of(void* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = live_.find(block);
    return found == live_.end() ? 0 : static_cast<int64_t>(found->second);
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void give(void* block);

  void* take(size_t nbytes) {
    const size_t size = rounded_up(nbytes, page_bytes());
    std::lock_guard<std::mutex> guard(mutex_);
    const int64_t most_live = most_live_;
    most_live_ = std::max(most_live, counts_.live + static_cast<int64_t>(size));
    char* block = nullptr;
    try {
      if ((block = from_free(size)) != nullptr) {
        counts_.reused += size;
      } else if ((block = assembled(size)) == nullptr) {
        block = mapped(size);
      }
      live_[block] = size;
    } catch (...) {
      most_live_ = most_live;
      if (block != nullptr) {
        munmap(block, size);
      }
      throw;
    }
    counts_.live += size;
    counts_.peak_live = std::max(counts_.peak_live, counts_.live);
    counts_.peak_reserved = std::max(counts_.peak_reserved, counts_.live + free_.bytes());
    c10::profiledCPUMemoryReporter().New(block, size);
    return block;
  }

  char* from_free(size_t size) {
    if (char* block = free_.last_freed(size)) {
      return block;
    }
    free_.merge();
    return free_.best_fit(size);
  }

  // A block of whole granules, whose rest is free: new ones while the limit has room, else free ones that are moved
  // together, and new memory for what they lack. Null if it cannot be, with nothing lost but addresses.
  char* assembled(size_t size) {
    const size_t length = rounded_up(size, kGranule);
    const bool room = counts_.live + free_.bytes() + static_cast<int64_t>(length) <= limit();
    std::vector<char*> granules;
    granules.reserve(std::min(length, static_cast<size_t>(free_.bytes())) / kGranule);
    while (!room && granules.size() < length / kGranule) {
      char* granule = free_.take_granule();
      if (granule == nullptr) {
        break;
      }
      granules.push_back(granule);
    }
    const size_t moved = granules.size() * kGranule;
    if (!room && moved == 0) {
      return nullptr;
    }
    const size_t end = room || moved == length ? length : size;
    if (end == size) {
      shrink(counts_.live + static_cast<int64_t>(size));
    }
    char* block = reserve(length);
    size_t done = 0;
    while (block != nullptr && done < granules.size() && move_granule(granules[done], block + done * kGranule)) {
      ++done;
    }
    if (block == nullptr || done < granules.size() || (moved < end && !populate(block + moved, end - moved))) {
      undo(block, length, granules, done);
      return nullptr;
    }
    if (end < length) {
      munmap(block + end, length - end);
    } else if (end > size) {
      free_.add(block + size, end - size);
    }
    counts_.moved += moved;
    counts_.mapped += end - moved;
    return block;
  }

  // The first `done` granules are at `block` already. The next one could not be moved, and goes back, as it could not be
  // the next time either; its new addresses are left alone, since by now they could be another thread's.
  void undo(char* block, size_t length, const std::vector<char*>& granules, size_t done) {
    for (size_t i = 0; i < granules.size(); ++i) {
      if (block != nullptr && i == done) {
        munmap(granules[i], kGranule);
      } else {
        free_.add(i < done ? block + i * kGranule : granules[i], kGranule);
      }
    }
    const size_t touched = (done + (done < granules.size() ? 1 : 0)) * kGranule;
    if (block != nullptr && touched < length) {
      munmap(block + touched, length - touched);
    }
  }

  char* mapped(size_t size) {
    shrink(counts_.live + static_cast<int64_t>(size));
    char* block = map_pages(size);
    if (block == nullptr) { // a limit of the process or the machine: give everything back and ask again
      free_.release(free_.bytes());
      malloc_trim(0);
      block = map_pages(size);
    }
    // The wording is the one by which Lightning and Accelerate know that a CPU's memory has run out.
    TORCH_CHECK(
        block != nullptr,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
        size,
        " bytes while retime's pool held ",
        counts_.live,
        " bytes of live tensors");
    counts_.mapped += size;
    return block;
  }

  // Give back free memory until so many live bytes and what is free stay below the limit.
  void shrink(int64_t live) { free_.release(live + free_.bytes() - limit()); }

  int64_t limit() const {
    if (slack_ <= 0) {
      return limit_;
    }
    const int64_t most = std::max(most_live_, most_live_before_);
    return static_cast<int64_t>(slack_ * static_cast<double>(most)) + kSpare;
  }

  // Whether the block was one of the pool's.
  bool put(void* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = live_.find(block);
    if (found == live_.end()) {
      return false;
    }
    const size_t size = found->second;
    live_.erase(found);
    counts_.live -= static_cast<int64_t>(size);
    c10::profiledCPUMemoryReporter().Delete(block); // while nobody else can get this address
    free_.wait(static_cast<char*>(block), size);
    if (counts_.live + free_.bytes() > limit()) {
      shrink(counts_.live);
    }
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  FreeRanges free_;
  Counts counts_{};
  int64_t limit_ = 0;
  double slack_ = 0;
  int64_t most_live_ = 0; // since the last call of `begin_window`
  int64_t most_live_before_ = 0;
  std::atomic<bool> on_{false};
};

Pool* pool() { // never destroyed: tensors may outlive everything else
  static Pool* one = [] {
    pthread_atfork([] { pool()->lock(); }, [] { pool()->unlock(); }, [] { pool()->unlock(); });
    return new Pool();
  }();
  return one;
}

void Pool::give(void* block) {
  if (!pool()->put(block)) {
    c10::GetDefaultCPUAllocator()->raw_deallocate(block);
  }
}

} // namespace

extern "C" {

// Whether tensors come from the pool now: another library's allocator may have a higher priority.
bool retime_pool_install() {
  pool()->forget_most();
  pool()->turn(true);
  c10::SetCPUAllocator(pool());
  if (c10::GetCPUAllocator() == pool()) {
    return true;
  }
  pool()->turn(false);
  return false;
}

// The allocator stays and hands everything on: oneDNN frees its blocks through whatever allocator is there by then.
void retime_pool_remove() {
  pool()->turn(false);
  pool()->set_limit(0, 0);
}

void retime_pool_limit(int64_t nbytes) { pool()->set_limit(nbytes, 0); }

void retime_pool_follow(double slack) { pool()->set_limit(0, slack); }

void retime_pool_begin_window() { pool()->begin_window(); }

void retime_pool_reset_peaks() { pool()->reset_peaks(); }

int64_t retime_pool_size_of(void* block) { return pool()->size_of(block); }

void retime_pool_counts(int64_t* counts) {
  const Counts now = pool()->counts();
  const int64_t all[] = {now.live, now.free, now.peak_live, now.peak_reserved, now.mapped, now.moved, now.reused};
  std::copy(std::begin(all), std::end(all), counts);
}

} // extern "C"
