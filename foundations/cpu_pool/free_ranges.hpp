// Free memory of the pool: blocks that wait as they are for the next request of their size, and ranges.
//
// A training step asks for the same sizes again and again, so the block that was freed last is the best one for its
// size: its bytes may still be in a cache. Only when no block of a size waits, all that wait are merged with their
// neighbours and cut anew.

#pragma once

#include "mappings.hpp"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace retime {

class FreeRanges {
 public:
  int64_t bytes() const { return bytes_; }

  // Let a block wait for its size. Where there is no room to remember it by, its memory goes back.
  void wait(char* block, size_t size) {
    try {
      waiting_[size].push_back(block);
      bytes_ += static_cast<int64_t>(size);
      some_wait_ = true;
    } catch (const std::bad_alloc&) {
      munmap(block, size);
    }
  }

  // The block of this size that was freed last; null if none waits.
  char* last_freed(size_t size) {
    auto found = waiting_.find(size);
    if (found == waiting_.end() || found->second.empty()) {
      return nullptr;
    }
    char* block = found->second.back();
    found->second.pop_back();
    bytes_ -= static_cast<int64_t>(size);
    return block;
  }

  // Join all that wait with what is free beside them.
  void merge() {
    if (!some_wait_) {
      return;
    }
    for (auto& [size, blocks] : waiting_) {
      for (char* block : blocks) {
        bytes_ -= static_cast<int64_t>(size);
        add(block, size);
      }
    }
    waiting_.clear();
    some_wait_ = false;
  }

  // The smallest range that is large enough; what it has more stays. Null if there is none.
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

  // A whole granule out of the smallest range that has one; null if none has.
  char* take_granule() {
    for (auto range = by_size_.lower_bound({kGranule, nullptr}); range != by_size_.end(); ++range) {
      auto [length, start] = *range;
      char* granule = first_granule(start);
      if (granule + kGranule <= start + length) {
        forget(start, length);
        keep(start, granule - start);
        keep(granule + kGranule, start + length - granule - kGranule);
        return granule;
      }
    }
    return nullptr;
  }

  // Join a range with what is free beside it.
  void add(char* start, size_t length) {
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

  // Give back so many bytes, rounded up to pages, or all there is. First ranges without a whole granule, then whole
  // granules: a piece of a huge page gives nothing back until the rest of it is gone too.
  void release(int64_t nbytes) {
    if (nbytes <= 0) {
      return;
    }
    merge();
    size_t wanted = rounded_up(static_cast<size_t>(nbytes), page_bytes());
    for (auto range = by_size_.begin(); wanted > 0 && range != by_size_.end();) {
      auto [length, start] = *range++;
      if (length >= 2 * kGranule) {
        break;
      }
      if (first_granule(start) + kGranule > start + length && !cut(start, length, wanted)) {
        return;
      }
    }
    while (wanted >= kGranule) {
      char* granule = take_granule();
      if (granule == nullptr) {
        break;
      }
      if (munmap(granule, kGranule) != 0) {
        add(granule, kGranule);
        return;
      }
      wanted -= kGranule;
    }
    while (wanted > 0 && !by_size_.empty()) {
      auto [length, start] = *by_size_.begin();
      if (!cut(start, length, wanted)) {
        return;
      }
    }
  }

 private:
  static char* first_granule(char* start) {
    return reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(start), kGranule));
  }

  // Give back the first bytes of a range, as many as are wanted. False where the kernel refuses: cutting a mapping in
  // two can take one more of them than it allows.
  bool cut(char* start, size_t length, size_t& wanted) {
    const size_t gone = length < wanted ? length : wanted;
    forget(start, length);
    if (munmap(start, gone) != 0) {
      keep(start, length);
      return false;
    }
    keep(start + gone, length - gone);
    wanted -= gone;
    return true;
  }

  void keep(char* start, size_t length) {
    if (length == 0) {
      return;
    }
    try {
      by_place_[start] = length;
      by_size_.insert({length, start});
    } catch (const std::bad_alloc&) { // no room to remember it by
      by_place_.erase(start);
      munmap(start, length);
      return;
    }
    bytes_ += static_cast<int64_t>(length);
  }

  void forget(char* start, size_t length) {
    by_place_.erase(start);
    by_size_.erase({length, start});
    bytes_ -= static_cast<int64_t>(length);
  }

  std::unordered_map<size_t, std::vector<char*>> waiting_; // the last freed of each size last
  bool some_wait_ = false;
  std::map<char*, size_t> by_place_;
  std::set<std::pair<size_t, char*>> by_size_;
  int64_t bytes_ = 0;
};

} // namespace retime
