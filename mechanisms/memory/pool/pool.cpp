// Large CPU tensors from mappings that are used again: freed pages stay, up to a limit, and leave the process beyond it.
//
// The C library does one or the other: it maps large blocks anew each time, and the kernel clears every page again, or
// keeps them in a heap that grows by a third and more over what is alive, because small objects come to lie between
// large ones. Here only tensors share mappings, so live and kept bytes together stay below a limit that is a plan's
// peak (moDNN, section 3.3: a pool of its own, blocks found by best fit, neighbours merged).

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kSmallest = 16 * 1024; // smaller blocks come from the C library

struct Counts {
  int64_t live, kept, peak_live, peak_held, mapped, reused;
};

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes < kSmallest || !on_.load(std::memory_order_relaxed)) {
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

  void set_limit(int64_t limit) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    shrink(counts_.live);
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.peak_live = counts_.live;
    counts_.peak_held = counts_.live + counts_.kept;
    counts_.mapped = counts_.reused = 0;
  }

  Counts counts() {
    std::lock_guard<std::mutex> guard(mutex_);
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
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (nbytes + page - 1) / page * page;
    std::lock_guard<std::mutex> guard(mutex_);
    char* block = best_fit(size);
    const bool mapped = block == nullptr;
    if (mapped) {
      block = map(size);
    }
    try {
      live_[block] = size;
    } catch (...) {
      munmap(block, size);
      throw;
    }
    (mapped ? counts_.mapped : counts_.reused) += size;
    counts_.live += size;
    counts_.peak_live = std::max(counts_.peak_live, counts_.live);
    counts_.peak_held = std::max(counts_.peak_held, counts_.live + counts_.kept);
    c10::profiledCPUMemoryReporter().New(block, size);
    return block;
  }

  // The smallest kept range that is large enough; what it has more stays kept.
  char* best_fit(size_t size) {
    auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end()) {
      return nullptr;
    }
    auto [length, start] = *found;
    forget(start, length);
    if (length > size) {
      keep(start + size, length - size);
    }
    return start;
  }

  char* map(size_t size) {
    shrink(counts_.live + static_cast<int64_t>(size));
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) { // a limit of the process or the machine: give everything back and ask again
      release(counts_.kept);
      malloc_trim(0);
      block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    // The wording is the one by which Lightning and Accelerate know that a CPU's memory has run out.
    TORCH_CHECK(
        block != MAP_FAILED,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
        size,
        " bytes while retime's pool held ",
        counts_.live,
        " bytes of live tensors");
    return static_cast<char*>(block);
  }

  // Give back kept ranges until so many live bytes and what is kept stay below the limit.
  void shrink(int64_t live) { release(live + counts_.kept - limit_); }

  // Smallest ranges first: they are the least likely to be used again.
  void release(int64_t nbytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    while (nbytes > 0 && !by_size_.empty()) {
      auto [length, start] = *by_size_.begin();
      forget(start, length);
      const size_t wanted = static_cast<size_t>((nbytes + page - 1) / page * page);
      const size_t gone = std::min(length, wanted);
      if (munmap(start, gone) != 0) { // cutting a mapping in two takes one more of them than the system allows
        keep(start, length);
        return;
      }
      if (gone < length) {
        keep(start + gone, length - gone);
      }
      nbytes -= static_cast<int64_t>(gone);
    }
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
    c10::profiledCPUMemoryReporter().Delete(block);  // while nobody else can get this address
    merge(static_cast<char*>(block), size);
    shrink(counts_.live);
    return true;
  }

  void merge(char* start, size_t length) {
    auto next = by_place_.lower_bound(start);
    if (next != by_place_.end() && next->first == start + length) {
      auto [place, more] = *next;
      forget(place, more);
      length += more;
    }
    auto after = by_place_.lower_bound(start);
    if (after != by_place_.begin()) {
      auto [place, before] = *std::prev(after);
      if (place + before == start) {
        forget(place, before);
        start = place;
        length += before;
      }
    }
    keep(start, length);
  }

  void keep(char* start, size_t length) {
    try {
      by_place_[start] = length;
      by_size_.insert({length, start});
    } catch (const std::bad_alloc&) { // no room to remember it by
      by_place_.erase(start);
      munmap(start, length);
      return;
    }
    counts_.kept += static_cast<int64_t>(length);
  }

  void forget(char* start, size_t length) {
    by_place_.erase(start);
    by_size_.erase({length, start});
    counts_.kept -= static_cast<int64_t>(length);
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  std::map<char*, size_t> by_place_;
  std::set<std::pair<size_t, char*>> by_size_;
  Counts counts_{};
  int64_t limit_ = 0;
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
  pool()->set_limit(0);
}

void retime_pool_limit(int64_t nbytes) { pool()->set_limit(nbytes); }

void retime_pool_reset_peaks() { pool()->reset_peaks(); }

int64_t retime_pool_size_of(void* block) { return pool()->size_of(block); }

void retime_pool_counts(int64_t* counts) {
  const Counts now = pool()->counts();
  const int64_t all[] = {now.live, now.kept, now.peak_live, now.peak_held, now.mapped, now.reused};
  std::copy(std::begin(all), std::end(all), counts);
}

} // extern "C"
