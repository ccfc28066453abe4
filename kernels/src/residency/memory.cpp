#include "memory.hpp"

#include <sys/mman.h>

#include <new>

namespace kvd::residency {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Random look-ups in many tables are bound by address translation, which huge pages make cheap. A
// small mapping stays with small pages: most of a huge one would be memory for nothing.
constexpr size_t kHugeFrom = 8 * kHugePage;

}  // namespace

Memory::Memory(size_t bytes) : data_(nullptr), size_(bytes) {
  const bool wants_huge = bytes >= kHugeFrom;
  const size_t spare = wants_huge ? kHugePage : 0;
  void* const found = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(found);
  if (wants_huge) {
    // Keep an aligned part of it, and give the ends back.
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
    if (before > 0) munmap(data_, before);
    data_ += before;
    if (before < spare) {
      constexpr size_t page = 4096;
      const size_t end = (bytes + page - 1) / page * page;
      munmap(data_ + end, spare - before);
    }
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  madvise(data_, bytes, MADV_DONTDUMP);
}

Memory::~Memory() { munmap(data_, size_); }

}  // namespace kvd::residency
