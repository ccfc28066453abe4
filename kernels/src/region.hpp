// One shared mapping of a file descriptor, and everyone who may still touch it.
//
// Two kinds of users keep a region mapped:
//   pins    memory lent out for an unknown time (exported views, gate waiters). close() refuses.
//   leases  operations in flight that run without the interpreter lock. close() waits for them.
//
// Locking: operations that keep the interpreter lock need neither, because begin_close() also runs
// under it: whoever saw open() finishes before the mapping can go. Everything else takes a Lease,
// with the interpreter lock or without it.
//
// Fork: the mapping is MADV_DONTFORK, so it does not exist in a child, whose address space may hold
// something else there. ForkMark tells the two apart without a system call per operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "sync.hpp"

namespace kvd {

// A private page that reads 1 here and 0 in every forked child (MADV_WIPEONFORK).
class ForkMark {
 public:
  ForkMark();
  ~ForkMark();
  ForkMark(const ForkMark&) = delete;
  ForkMark& operator=(const ForkMark&) = delete;
  bool same_process() const noexcept { return *page_ != 0; }

 private:
  volatile uint8_t* page_;
};

class Region {
 public:
  // Maps [offset, offset + length) of fd. Throws std::invalid_argument for a file that is too
  // short or a misaligned offset, OsError when the system refuses.
  Region(int fd, uint64_t length, bool writable, uint64_t offset);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint64_t size() const noexcept { return size_; }
  bool writable() const noexcept { return writable_; }
  bool open() const noexcept {
    return !closing_.load(std::memory_order_relaxed) && mark_.same_process();
  }
  uint8_t* data() const noexcept { return data_; }

  // True when [offset, offset + length) lies inside; no sum is formed, so nothing can overflow.
  bool holds(uint64_t offset, uint64_t length) const noexcept {
    return length <= size_ && offset <= size_ - length;
  }
  bool same_process() const noexcept { return mark_.same_process(); }
  // Two mappings of one file can overlap although their addresses do not.
  bool same_file(const Region& other) const noexcept {
    return device_ == other.device_ && inode_ == other.inode_;
  }
  uint64_t file_offset() const noexcept { return file_offset_; }

  void require_open() const;      // std::invalid_argument
  void require_writable() const;  // std::invalid_argument

  void pin();  // std::invalid_argument when closed
  void unpin() noexcept;

  void begin_close();  // under the interpreter lock; StillViewed leaves everything as it was
  void finish_close() noexcept;

  // Makes every page of the range resident and mapped; contents are kept. Returns the way used,
  // "madvise" or "touch". Throws OsError where a page cannot be had.
  const char* populate(uint64_t offset, uint64_t length, bool use_madvise) const;
  // KernelPageSize of this mapping in KiB, from /proc/self/smaps.
  uint64_t kernel_page_kb() const;

 private:
  friend class Lease;
  void unmap() noexcept;

  uint8_t* data_ = nullptr;
  uint64_t size_;
  uint64_t mapped_ = 0;  // size_ rounded up to the page size of the file
  uint64_t page_ = 0;
  uint64_t file_offset_;
  uint64_t device_ = 0;
  uint64_t inode_ = 0;
  bool writable_;
  ForkMark mark_;
  std::atomic<bool> closing_{false};
  std::mutex mutex_;
  Condition idle_;
  uint64_t pins_ = 0;
  uint64_t leases_ = 0;
};

// Keeps a region mapped while an operation runs without the interpreter lock.
class Lease {
 public:
  explicit Lease(std::shared_ptr<Region> region);  // std::invalid_argument when closed
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

}  // namespace kvd
