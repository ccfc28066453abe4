#include "region.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

namespace kvd {
namespace {

constexpr auto kHugetlbMagic = 0x958458f6U;

std::string reason(int code) { return std::string(": ") + std::strerror(code); }

uint64_t base_page() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

// Page size the file is made of: a hugetlb file must be mapped and unmapped in whole huge pages.
uint64_t file_page(int fd) {
  struct statfs info;
  if (fstatfs(fd, &info) != 0) return base_page();
  return static_cast<uint32_t>(info.f_type) == kHugetlbMagic
             ? static_cast<uint64_t>(info.f_bsize)
             : base_page();
}

}  // namespace

ForkMark::ForkMark() {
  void* page =
      mmap(nullptr, base_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw OsError(errno, "cannot map the fork mark" + reason(errno));
  if (madvise(page, base_page(), MADV_WIPEONFORK) != 0) {
    const int code = errno;
    munmap(page, base_page());
    throw OsError(code, "MADV_WIPEONFORK failed (Linux 4.14 or later is needed)" + reason(code));
  }
  page_ = static_cast<volatile uint8_t*>(page);
  *page_ = 1;
}

ForkMark::~ForkMark() { munmap(const_cast<uint8_t*>(page_), base_page()); }

Region::Region(int fd, uint64_t length, bool writable, uint64_t offset)
    : size_(length), file_offset_(offset), writable_(writable) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    throw OsError(errno, "cannot read the size of fd " + std::to_string(fd) + reason(errno));
  }
  const auto file_size = static_cast<uint64_t>(info.st_size);
  // A mapping past the end of its file kills the process with SIGBUS at the first touch.
  if (length > file_size || offset > file_size - length) {
    throw std::invalid_argument(
        "fd " + std::to_string(fd) + " has " + std::to_string(file_size) + " bytes, but offset " +
        std::to_string(offset) + " and length " + std::to_string(length) +
        " need more: pass the size the file was made with, or refuse the file");
  }
  page_ = file_page(fd);
  if (offset % page_ != 0) {
    throw std::invalid_argument("offset " + std::to_string(offset) +
                                " must be a multiple of the page size " + std::to_string(page_));
  }
  device_ = static_cast<uint64_t>(info.st_dev);
  inode_ = static_cast<uint64_t>(info.st_ino);
  mapped_ = (length + page_ - 1) / page_ * page_;
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address =
      mmap(nullptr, mapped_, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    throw OsError(errno, "cannot map " + std::to_string(length) + " bytes of fd " +
                             std::to_string(fd) + (writable ? " for writing" : " for reading") +
                             reason(errno));
  }
  data_ = static_cast<uint8_t*>(address);
  // Best effort: a kernel without them only costs larger core files and copied page tables.
  madvise(data_, mapped_, MADV_DONTDUMP);
  madvise(data_, mapped_, MADV_DONTFORK);
}

Region::~Region() { unmap(); }

void Region::unmap() noexcept {
  // In a forked child these addresses belong to somebody else.
  if (data_ != nullptr && mark_.same_process()) munmap(data_, mapped_);
  data_ = nullptr;
}

void Region::require_open() const {
  if (open()) return;
  if (!mark_.same_process()) {
    throw std::invalid_argument("the mapping belongs to the parent process: map the fd again here");
  }
  throw std::invalid_argument("the mapping is closed: map the fd again");
}

void Region::require_writable() const {
  if (!writable_) {
    throw std::invalid_argument("the mapping is read-only: map the fd with writable=True");
  }
}

void Region::pin() {
  require_open();
  const std::lock_guard lock(mutex_);
  ++pins_;
}

void Region::unpin() noexcept {
  if (!mark_.same_process()) return;  // another thread may have held the lock at the fork
  const std::lock_guard lock(mutex_);
  --pins_;
}

void Region::begin_close() {
  if (!open()) return;
  const std::lock_guard lock(mutex_);
  if (pins_ != 0) {
    throw StillViewed("the mapping has " + std::to_string(pins_) +
                      " live views or gate waiters: release them, then close");
  }
  closing_.store(true, std::memory_order_relaxed);
}

void Region::finish_close() noexcept {
  if (!mark_.same_process()) return;
  std::unique_lock lock(mutex_);
  while (leases_ != 0) idle_.wait(lock);
  unmap();
}

Lease::Lease(std::shared_ptr<Region> region) : region_(std::move(region)) {
  region_->require_open();  // in a forked child, another thread may have held the lock at the fork
  const std::lock_guard lock(region_->mutex_);
  region_->require_open();  // begin_close() holds the lock, too: from here on the mapping stays
  ++region_->leases_;
}

Lease::~Lease() {
  const std::lock_guard lock(region_->mutex_);
  if (--region_->leases_ == 0) region_->idle_.notify_all();
}

}  // namespace kvd
