// Memory from the kernel, by whole huge pages where it can be, and moved from place to place without being copied.
//
// A granule is 2 MiB at a multiple of 2 MiB: one huge page, or one page table of 512 small pages. Either can be given
// another address by one change of the table above it, which is some hundred times cheaper than a new one, whose pages
// the kernel has to clear.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace retime {

constexpr size_t kGranule = 2 * 1024 * 1024;

inline size_t rounded_up(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

inline size_t page_bytes() {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

// Null where there is none: a limit of the process or of the machine.
inline char* map_pages(size_t nbytes, int protection = PROT_READ | PROT_WRITE) {
  void* start = mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
}

// Addresses without memory, from a multiple of a granule on.
inline char* reserve(size_t nbytes) {
  char* first = map_pages(nbytes + kGranule, PROT_NONE);
  if (first == nullptr) {
    return nullptr;
  }
  char* start = reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(first), kGranule));
  if (start > first) {
    munmap(first, start - first);
  }
  munmap(start + nbytes, first + kGranule - start);
  return start;
}

// Memory for reserved addresses; huge pages where the kernel has them. Not by a new mapping in the old one's place: for
// that the kernel does not ask RLIMIT_DATA.
inline bool populate(char* start, size_t nbytes) {
  if (mprotect(start, nbytes, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  madvise(start, nbytes, MADV_HUGEPAGE); // a kernel that has none says so, and gives small ones
  return true;
}

// A granule's memory at reserved addresses; its old addresses are nobody's then.
inline bool move_granule(char* from, char* to) {
  return mremap(from, kGranule, kGranule, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

} // namespace retime
