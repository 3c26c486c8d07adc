// Sums over the processes of one machine, in memory that all of them have mapped.
//
// A tensor is summed in blocks. Of each block every rank owns one chunk: it adds up what the ranks brought for that
// chunk, in the order of the ranks, so that neither arrival nor chunking shows in the result. Only chunks that others
// own are written to shared memory, into a ring of a few blocks, which stays in the processors' caches however large
// the tensor is. A rank is ahead of the others by that ring at most; who has to wait sleeps in the kernel (futex).

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kLine = 64;
constexpr int kRing = 4;
constexpr int kSpins = 200;
constexpr int kTurns = 100000;
constexpr int64_t kLookAfterMs = 50;
constexpr int64_t kPartial = 2048;  // elements whose partial sums lie in the first-level cache

enum Outcome { kDone = 0, kEnded = 1, kLate = 2, kStopped = 3, kFailed = 4, kUneven = 5 };

// What a rank brings to a sum, for errors: how many elements, of which type, and whose (-1: the sum of all).
struct Brings {
  int64_t rank, count, dtype, root;

  bool same(const Brings& other) const { return count == other.count && dtype == other.dtype && root == other.root; }
};

// Where all ranks look when they wait: 0; the rank on which all fail, counted from 1; or that two differ.
struct alignas(kLine) Failure {
  static constexpr int32_t kBeingWritten = -1, kDiffer = -2;
  std::atomic<int32_t> what;
  alignas(kLine) Brings two[2];
};

// How many blocks a rank has brought, summed or taken; whoever waits for the next one sleeps on the word.
struct alignas(kLine) Count {
  std::atomic<uint32_t> blocks;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kLine) RankCounts {
  Count brought;
  Count summed;
  Count taken;
  alignas(kLine) Brings brings[kRing];  // of each block that it brought
};

// Where the time of a sum goes; what a phase waits for other ranks is in kWaiting instead.
enum Phase { kBringing = 0, kAdding = 1, kTaking = 2, kWaiting = 3 };

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

int64_t now_ms() { return now_ns() / 1000000; }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

bool reached(uint32_t blocks, uint32_t wanted) { return static_cast<int32_t>(blocks - wanted) >= 0; }

class Sums {
 public:
  Sums(void* memory, int64_t bytes, int rank, int ranks, int64_t chunk_bytes, const int* processes)
      : memory_(static_cast<char*>(memory)),
        bytes_(bytes),
        rank_(rank),
        ranks_(ranks),
        chunk_bytes_(chunk_bytes),
        processes_(processes, processes + ranks) {}

  ~Sums() { munmap(memory_, bytes_); }

  template <typename T, typename Sum>
  Outcome run(T* values, int64_t count, int dtype, double scale, int root, int64_t timeout_ms, int* who) {
    const int64_t most = ranks_ * (chunk_bytes_ / static_cast<int64_t>(sizeof(T)));
    const int64_t blocks = (count + most - 1) / most;
    timeout_ms_ = timeout_ms;
    who_ = who;
    mine_ = {rank_, count, dtype, root};
    if (const Outcome failed = failed_so_far(); failed != kDone) return failed;
    for (int64_t step = 0; step < blocks + 2; ++step) {
      Outcome outcome = kDone;
      if (step < blocks) {
        outcome = timed(kBringing, [&] {
          return bring<T, Sum>(part(values, count, most, step), next_ + step, scale, root);
        });
      }
      if (outcome == kDone && step >= 1 && step <= blocks) {
        outcome = timed(kAdding, [&] {
          return sum<T, Sum>(part(values, count, most, step - 1), next_ + step - 1, scale, root);
        });
      }
      if (outcome == kDone && step >= 2) {
        outcome = timed(kTaking, [&] { return take(part(values, count, most, step - 2), next_ + step - 2); });
      }
      if (outcome != kDone) return outcome;
    }
    next_ += static_cast<uint32_t>(blocks);
    return kDone;
  }

  void time_into(int64_t* nanoseconds) { nanoseconds_ = nanoseconds; }

  void stop() {
    stopped_ = true;
    wake_all();
  }

  void fail() {
    failure().what.store(rank_ + 1);
    wake_all();
  }

  const Brings* two_that_differ() { return failure().two; }

 private:
  template <typename T>
  struct Part {
    T* values;
    int64_t count;
    int64_t chunk;  // elements each rank owns, the last ones fewer

    T* begin(int rank) const { return values + std::min(count, rank * chunk); }
    int64_t size(int rank) const { return std::min(count, (rank + 1) * chunk) - std::min(count, rank * chunk); }
  };

  template <typename T>
  Part<T> part(T* values, int64_t count, int64_t most, int64_t block) const {
    const int64_t left = std::min(most, count - block * most);
    const int64_t line = kLine / static_cast<int64_t>(sizeof(T));
    const int64_t chunk = ((left + ranks_ - 1) / ranks_ + line - 1) / line * line;
    return {values + block * most, left, chunk};
  }

  template <typename T, typename Sum>
  Outcome bring(const Part<T>& values, uint32_t block, double scale, int root) {
    for (int other = 0; other < ranks_; ++other) {
      const Outcome outcome = wait(counts(other).summed, block + 1 - kRing, other);
      if (outcome != kDone) return outcome;
    }
    if (root < 0 || root == rank_) {
      for (int owner = 0; owner < ranks_; ++owner) {
        if (owner == rank_) continue;
        copy<T, Sum>(static_cast<T*>(brought(rank_, block, owner)), values.begin(owner), values.size(owner), scale);
      }
    }
    counts(rank_).brings[block % kRing] = mine_;
    publish(counts(rank_).brought, block + 1);
    return kDone;
  }

  template <typename T, typename Sum>
  Outcome sum(const Part<T>& values, uint32_t block, double scale, int root) {
    std::vector<const T*> of_rank;
    for (int other = 0; other < ranks_; ++other) {
      Outcome outcome = wait(counts(other).taken, block + 1 - kRing, other);
      if (outcome == kDone) outcome = wait(counts(other).brought, block + 1, other);
      if (outcome != kDone) return outcome;
      if (const Brings& theirs = counts(other).brings[block % kRing]; !theirs.same(mine_)) return differ(theirs);
      if (root >= 0 && root != other) continue;
      of_rank.push_back(other == rank_ ? values.begin(rank_) : static_cast<T*>(brought(other, block, rank_)));
    }
    if (scale != 1) copy<T, Sum>(values.begin(rank_), values.begin(rank_), values.size(rank_), scale);
    add<T, Sum>(of_rank, values.begin(rank_), static_cast<T*>(summed(rank_, block)), values.size(rank_));
    publish(counts(rank_).summed, block + 1);
    return kDone;
  }

  template <typename T>
  Outcome take(const Part<T>& values, uint32_t block) {
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      const Outcome outcome = wait(counts(other).summed, block + 1, other);
      if (outcome != kDone) return outcome;
      std::memcpy(values.begin(other), summed(other, block), values.size(other) * sizeof(T));
    }
    publish(counts(rank_).taken, block + 1);
    return kDone;
  }

  // Each element times `scale`, rounded as a tensor of this type that is scaled before it is summed.
  template <typename T, typename Sum>
  static void copy(T* into, const T* values, int64_t count, double scale) {
    if (scale == 1) {
      std::memcpy(into, values, count * sizeof(T));
      return;
    }
    const Sum factor = static_cast<Sum>(scale);
    for (int64_t i = 0; i < count; ++i) into[i] = static_cast<T>(static_cast<Sum>(values[i]) * factor);
  }

  // Element by element, in the order of the ranks; `mine` is also one of the summands.
  template <typename T, typename Sum>
  static void add(const std::vector<const T*>& of_rank, T* mine, T* shared, int64_t count) {
    if (std::is_same_v<T, Sum> && of_rank.size() == 2) {
      const T *first = of_rank[0], *second = of_rank[1];
      for (int64_t i = 0; i < count; ++i) shared[i] = first[i] + second[i];
    } else if (of_rank.size() == 1) {
      std::memcpy(shared, of_rank[0], count * sizeof(T));
    } else {
      Sum partial[kPartial];
      for (int64_t begin = 0; begin < count; begin += kPartial) {
        const int64_t size = std::min(kPartial, count - begin);
        const T* first = of_rank[0] + begin;
        for (int64_t i = 0; i < size; ++i) partial[i] = static_cast<Sum>(first[i]);
        for (size_t next = 1; next < of_rank.size(); ++next) {
          const T* values = of_rank[next] + begin;
          for (int64_t i = 0; i < size; ++i) partial[i] += static_cast<Sum>(values[i]);
        }
        for (int64_t i = 0; i < size; ++i) shared[begin + i] = static_cast<T>(partial[i]);
      }
    }
    std::memcpy(mine, shared, count * sizeof(T));
  }

  Outcome wait(Count& count, uint32_t wanted, int rank) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (reached(count.blocks.load(std::memory_order_acquire), wanted)) return kDone;
    }
    return timed(kWaiting, [&] { return sleep(count, wanted, rank); });
  }

  // The clock is asked only where somebody wants to know.
  template <typename Act>
  Outcome timed(Phase phase, Act act) {
    if (nanoseconds_ == nullptr) return act();
    const int64_t began = now_ns(), waited = nanoseconds_[kWaiting];
    const Outcome outcome = act();
    nanoseconds_[phase] += now_ns() - began - (nanoseconds_[kWaiting] - waited);
    return outcome;
  }

  Outcome sleep(Count& count, uint32_t wanted, int rank) {
    const int64_t until = now_ms() + timeout_ms_;
    while (true) {
      if (stopped_) return kStopped;
      if (const Outcome failed = failed_so_far(); failed != kDone) return failed;
      count.sleepers.fetch_add(1);
      const uint32_t seen = count.blocks.load();
      if (!reached(seen, wanted)) {
        const timespec look{kLookAfterMs / 1000, kLookAfterMs % 1000 * 1000000};
        futex(&count.blocks, FUTEX_WAIT, seen, &look);
      }
      count.sleepers.fetch_sub(1);
      if (reached(count.blocks.load(std::memory_order_acquire), wanted)) return kDone;
      const bool ended = has_ended(rank);
      if (reached(count.blocks.load(std::memory_order_acquire), wanted)) return kDone;  // the last that it did
      if (ended) {
        const Outcome failed = failed_so_far();  // it may have said so first
        return failed == kDone ? fail(kEnded, rank) : failed;
      }
      if (now_ms() > until) return fail(kLate, rank);
    }
  }

  Outcome failed_so_far() {
    const int32_t what = failure().what.load();
    if (what == Failure::kDiffer) return kUneven;
    return what > 0 ? tell(kFailed, what - 1) : kDone;
  }

  Outcome fail(Outcome outcome, int rank) {
    failure().what.store(rank + 1);
    wake_all();
    return tell(outcome, rank);
  }

  // All ranks then say the same, the first that was seen.
  Outcome differ(const Brings& theirs) {
    int32_t what = 0;
    if (failure().what.compare_exchange_strong(what, Failure::kBeingWritten)) {
      failure().two[mine_.rank > theirs.rank] = mine_;
      failure().two[mine_.rank < theirs.rank] = theirs;
      failure().what.store(Failure::kDiffer);
      wake_all();
    }
    for (int turn = 0; turn < kTurns && failure().what.load() == Failure::kBeingWritten; ++turn) sched_yield();
    const Outcome failed = failed_so_far();
    return failed == kDone ? kUneven : failed;  // who was writing has ended
  }

  Outcome tell(Outcome outcome, int rank) {
    *who_ = rank;
    return outcome;
  }

  // A process that ended makes its descriptor readable, also while its parent has not asked for its status.
  bool has_ended(int rank) {
    if (rank == rank_ || processes_[rank] < 0) return false;
    pollfd process{processes_[rank], POLLIN, 0};
    return poll(&process, 1, 0) > 0;
  }

  static void publish(Count& count, uint32_t blocks) {
    count.blocks.store(blocks);
    if (count.sleepers.load() > 0) futex(&count.blocks, FUTEX_WAKE, INT_MAX, nullptr);
  }

  void wake_all() {
    for (int rank = 0; rank < ranks_; ++rank) {
      for (Count* count : {&counts(rank).brought, &counts(rank).summed, &counts(rank).taken}) {
        futex(&count->blocks, FUTEX_WAKE, INT_MAX, nullptr);
      }
    }
  }

  Failure& failure() { return *reinterpret_cast<Failure*>(memory_); }
  RankCounts& counts(int rank) { return reinterpret_cast<RankCounts*>(memory_ + sizeof(Failure))[rank]; }
  char* ring() { return memory_ + sizeof(Failure) + ranks_ * static_cast<int64_t>(sizeof(RankCounts)); }

  void* brought(int rank, uint32_t block, int owner) {
    return ring() + ((rank * kRing + block % kRing) * (ranks_ + 1) + owner) * chunk_bytes_;
  }
  void* summed(int rank, uint32_t block) { return brought(rank, block, ranks_); }

  char* memory_;
  int64_t bytes_;
  int rank_, ranks_;
  int64_t chunk_bytes_;
  std::vector<int> processes_;
  uint32_t next_ = 0;
  int64_t* nanoseconds_ = nullptr;  // one for each phase
  int64_t timeout_ms_ = 0;
  int* who_ = nullptr;
  Brings mine_{};
  std::atomic<bool> stopped_{false};
};

int64_t bytes_for(int ranks, int64_t chunk_bytes) {
  return static_cast<int64_t>(sizeof(Failure)) + ranks * static_cast<int64_t>(sizeof(RankCounts)) + ranks * kRing * (ranks + 1) * chunk_bytes;
}

}  // namespace

extern "C" {

int64_t retime_sums_bytes(int ranks, int64_t chunk_bytes) { return bytes_for(ranks, chunk_bytes); }

// `processes`: a descriptor (pidfd_open) of each rank's process, or -1. Null where the memory cannot be mapped.
void* retime_sums_open(int file, int rank, int ranks, int64_t chunk_bytes, const int* processes) {
  const int64_t bytes = bytes_for(ranks, chunk_bytes);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, bytes, MADV_DONTFORK);  // no child of this rank is one of the ranks
  return new Sums(memory, bytes, rank, ranks, chunk_bytes, processes);
}

// Replaces `values` by the ranks' sum of them, each times `scale`, or, with a root, by that rank's. `who` is the rank that was waited for.
int retime_sums_run(void* sums, void* values, int64_t count, int dtype, double scale, int root, int64_t timeout_ms,
                    int* who) {
  auto* here = static_cast<Sums*>(sums);
  switch (dtype) {
    case 0: return here->run<float, float>(static_cast<float*>(values), count, dtype, scale, root, timeout_ms, who);
    case 1: return here->run<double, double>(static_cast<double*>(values), count, dtype, scale, root, timeout_ms, who);
    case 2: return here->run<c10::Half, float>(static_cast<c10::Half*>(values), count, dtype, scale, root, timeout_ms, who);
    default: return here->run<c10::BFloat16, float>(static_cast<c10::BFloat16*>(values), count, dtype, scale, root, timeout_ms, who);
  }
}

// Add the nanoseconds of each phase of the sums from here on to these four; null: no longer.
void retime_sums_time(void* sums, int64_t* nanoseconds) { static_cast<Sums*>(sums)->time_into(nanoseconds); }

// Behind kUneven: rank, elements, type and root of two ranks that differ, eight numbers.
void retime_sums_differ(void* sums, int64_t* two) {
  std::memcpy(two, static_cast<Sums*>(sums)->two_that_differ(), 2 * sizeof(Brings));
}

void retime_sums_stop(void* sums) { static_cast<Sums*>(sums)->stop(); }
void retime_sums_fail(void* sums) { static_cast<Sums*>(sums)->fail(); }
void retime_sums_close(void* sums) { delete static_cast<Sums*>(sums); }

}  // extern "C"
