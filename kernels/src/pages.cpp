// Making pages of a region resident, and asking the kernel what kind of pages they are.
//
// No page is ever touched by an instruction of this process while it may be missing: a page that
// cannot be had would then be a SIGBUS. Both ways below let the kernel take the fault inside a
// system call, which reports it:
//   madvise  MADV_POPULATE_WRITE (POPULATE_READ on a read-only mapping), Linux 5.14.
//   touch    process_vm_readv of one byte of every page of ourselves. A read fault on a shared file
//            mapping allocates the page in the file and maps it (writable where the mapping is), so
//            contents are kept without any store that could race with a writer.
#include <limits.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "errors.hpp"
#include "region.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvd {
namespace {

constexpr uint64_t kStep = uint64_t{64} << 20;  // bounds the time one system call holds mmap_lock

[[noreturn]] void throw_populate(int code, uint64_t done) {
  const bool forbidden = code == ENOSYS || code == EPERM;
  const char* remedy =
      forbidden ? "allow process_vm_readv in the sandbox, or run Linux 5.14 or later"
                : "free memory or huge pages, and check that the file was not truncated";
  // EFAULT stands for a fault that would be SIGBUS: no memory left, or past the end of the file.
  throw OsError(code == EFAULT ? ENOMEM : code,
                std::string("cannot make the mapping resident after ") + std::to_string(done) +
                    " bytes (" + std::strerror(code) + "): " + remedy);
}

// False when the kernel does not know the advice; nothing is populated then.
bool populate_by_madvise(uint8_t* begin, uint64_t length, bool writable) {
  const int advice = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  for (uint64_t done = 0; done < length;) {
    const uint64_t step = std::min(kStep, length - done);
    if (madvise(begin + done, step, advice) == 0) {
      done += step;
    } else if (errno == EINVAL && done == 0) {
      return false;
    } else if (errno != EINTR && errno != EAGAIN) {
      throw_populate(errno, done);
    }
  }
  return true;
}

void populate_by_touch(uint8_t* begin, uint64_t length, uint64_t page) {
  std::array<uint8_t, IOV_MAX> bytes{};
  std::array<iovec, IOV_MAX> remote{};
  for (uint64_t done = 0; done < length;) {
    const uint64_t pages = std::min<uint64_t>(IOV_MAX, (length - done + page - 1) / page);
    for (uint64_t i = 0; i < pages; ++i) remote[i] = {begin + done + i * page, 1};
    const iovec local{bytes.data(), pages};
    const ssize_t got = process_vm_readv(getpid(), &local, 1, remote.data(), pages, 0);
    if (got > 0) {
      done += static_cast<uint64_t>(got) * page;  // a short count stops before the bad page
    } else if (got == 0 || errno != EINTR) {
      throw_populate(got == 0 ? EFAULT : errno, done);
    }
  }
}

}  // namespace

const char* Region::populate(uint64_t offset, uint64_t length, bool use_madvise) const {
  if (length == 0) return use_madvise ? "madvise" : "touch";
  const uint64_t begin = offset / page_ * page_;
  const uint64_t end = (offset + length + page_ - 1) / page_ * page_;
  if (use_madvise && populate_by_madvise(data_ + begin, end - begin, writable_)) return "madvise";
  populate_by_touch(data_ + begin, end - begin, page_);
  return "touch";
}

uint64_t Region::kernel_page_kb() const {
  std::ifstream smaps("/proc/self/smaps");
  if (!smaps) throw OsError(ENOENT, "cannot read /proc/self/smaps: mount /proc");
  const auto wanted = reinterpret_cast<uintptr_t>(data_);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t low = 0;
    uintptr_t high = 0;
    uint64_t kib = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &low, &high) == 2) {
      inside = low <= wanted && wanted < high;
    } else if (inside && std::sscanf(line.c_str(), "KernelPageSize: %" SCNu64, &kib) == 1) {
      return kib;
    }
  }
  throw OsError(ENOENT, "/proc/self/smaps has no KernelPageSize for this mapping");
}

}  // namespace kvd
