#include "gate.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.hpp"

namespace kvd {
namespace {

constexpr uint64_t kStateBits = 8;

enum State : uint64_t { kStateClosed = 0, kStateFree = 1, kStateHeld = 2, kStateQuarantined = 3 };


int make_stop_fd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw OsError(errno, std::string("cannot make an eventfd: ") + std::strerror(errno));
  return fd;
}

uint64_t count_slots(const Region& page, uint64_t first_word, uint64_t stride) {
  page.require_open();
  if (stride < 8 || stride % 8 != 0 || first_word % 8 != 0) {
    throw std::invalid_argument("first_word " + std::to_string(first_word) + " and stride " +
                                std::to_string(stride) +
                                " must be multiples of 8, stride at least 8");
  }
  if (!page.holds(first_word, 8)) {
    throw std::invalid_argument("first_word " + std::to_string(first_word) +
                                " lies outside the page of " + std::to_string(page.size()) +
                                " bytes");
  }
  return (page.size() - first_word - 8) / stride + 1;
}

}  // namespace

OwnFd::OwnFd(int fd, const char* name) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ >= 0) return;
  const int code = errno;
  throw OsError(code, std::string(name) + " " + std::to_string(fd) +
                          " cannot be duplicated: " + std::strerror(code));
}

OwnFd::~OwnFd() { close(); }

void OwnFd::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

// Counts a thread in and out, so that close() can tell when nobody touches page and descriptors.
class Gate::Visit {
 public:
  explicit Visit(Gate& gate) : gate_(gate) { gate_.visitors_.fetch_add(1); }
  ~Visit() {
    // Both sequentially consistent: either this sees closing_, or close() saw no visitor.
    if (gate_.visitors_.fetch_sub(1) != 1 || !gate_.closing_.load()) return;
    const std::lock_guard lock(gate_.mutex_);
    gate_.empty_.notify_all();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  Gate& gate_;
};

Gate::Gate(std::shared_ptr<Region> page, int event_fd, int hangup_fd, uint64_t first_word,
           uint64_t stride)
    : page_(std::move(page)),
      slots_(count_slots(*page_, first_word, stride)),
      words_(page_->data() + first_word),
      stride_(stride),
      event_(event_fd, "event_fd"),
      hangup_(hangup_fd, "hangup_fd"),
      stop_(make_stop_fd()) {
  page_->pin();
}

Gate::~Gate() { close(); }

WaitResult Gate::check(uint64_t slot, int64_t after_epoch) const noexcept {
  const auto* address = reinterpret_cast<const uint64_t*>(words_ + slot * stride_);
  const uint64_t word = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  const auto epoch = static_cast<int64_t>(word >> kStateBits);
  const uint64_t state = word & ((1U << kStateBits) - 1);
  if (hung_up_.load(std::memory_order_relaxed)) return {Outcome::kHangup, epoch};
  if (state == kStateFree && epoch > after_epoch) return {Outcome::kFree, epoch};
  if (state == kStateQuarantined && epoch >= after_epoch) return {Outcome::kQuarantined, epoch};
  return {Outcome::kNone, epoch};
}

void Gate::require_own_process() const {
  if (page_->same_process()) return;
  throw std::invalid_argument("the waiter belongs to the parent process: make one here");
}

WaitResult Gate::poll_word(uint64_t slot, int64_t after_epoch) {
  require_own_process();
  const Visit visit(*this);
  // The page may be unmapped once close() ended.
  if (closing_.load()) return {Outcome::kHangup, -1};
  return check(slot, after_epoch);
}

WaitResult Gate::spin(uint64_t slot, int64_t after_epoch, int64_t until_ns) noexcept {
  constexpr int kChecksPerClock = 16;   // a clock read costs about as much as this many checks
  constexpr int kClocksPerYield = 32;   // the writer may need this very core
  for (int clocks = 1; monotonic_ns() < until_ns; ++clocks) {
    for (int i = 0; i < kChecksPerClock; ++i) {
      const WaitResult result = check(slot, after_epoch);
      if (result.outcome != Outcome::kNone) return result;
      pause_cpu();
    }
    if (clocks % kClocksPerYield == 0) sched_yield();
  }
  return {Outcome::kNone, 0};
}

WaitResult Gate::wait(uint64_t slot, int64_t after_epoch, int64_t deadline_ns,
                      int64_t spin_until_ns) {
  const Visit visit(*this);
  if (closing_.load()) return {Outcome::kHangup, -1};
  const WaitResult spun = spin(slot, after_epoch, std::min(spin_until_ns, deadline_ns));
  if (spun.outcome != Outcome::kNone) {
    spins_.fetch_add(1, std::memory_order_relaxed);
    return spun;
  }
  return sleep(slot, after_epoch, deadline_ns);
}

WaitResult Gate::sleep(uint64_t slot, int64_t after_epoch, int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  WaitResult result = check(slot, after_epoch);
  while (result.outcome == Outcome::kNone) {
    if (monotonic_ns() >= deadline_ns) {
      result.outcome = Outcome::kTimeout;
      break;
    }
    if (led_) {
      ++sleeping_;
      followers_.wait(lock, deadline_ns);
      --sleeping_;
    } else if (!lead(lock, deadline_ns)) {
      result.outcome = Outcome::kInterrupted;
      break;
    }
    result = check(slot, after_epoch);
  }
  if (!led_ && sleeping_ > 0) followers_.notify_one();
  return result;
}

bool Gate::lead(std::unique_lock<std::mutex>& lock, int64_t deadline_ns) {
  led_ = true;
  lock.unlock();
  // Only RDHUP is asked of the connection: data waiting on it belongs to somebody else.
  pollfd fds[] = {
      {event_.get(), POLLIN, 0}, {hangup_.get(), POLLRDHUP, 0}, {stop_.get(), POLLIN, 0}};
  const timespec left = to_timespec(std::max<int64_t>(0, deadline_ns - monotonic_ns()));
  const int ready = ppoll(fds, 3, deadline_ns == kForever ? nullptr : &left, nullptr);
  const bool interrupted = ready < 0;
  const bool event = !interrupted && (fds[0].revents & POLLIN) != 0;
  // An eventfd never reports anything but POLLIN here: another descriptor's error is an end, too.
  const bool broken = (fds[0].revents & ~POLLIN) != 0;
  const bool hangup = !interrupted && (broken || fds[1].revents != 0 || fds[2].revents != 0);
  if (event) consume_event();
  lock.lock();
  led_ = false;
  if (hangup) hung_up_.store(true, std::memory_order_relaxed);
  if ((event || hangup) && sleeping_ > 0) followers_.notify_all();
  return !interrupted;
}

void Gate::consume_event() noexcept {
  uint64_t count = 0;
  iovec piece{&count, sizeof count};
  // Never blocks, even on a blocking eventfd that somebody else emptied in between.
  ssize_t got = preadv2(event_.get(), &piece, 1, -1, RWF_NOWAIT);
  if (got < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
    got = read(event_.get(), &count, sizeof count);
  }
  if (got == sizeof count) wakes_.fetch_add(1, std::memory_order_relaxed);
}

void Gate::count(const WaitResult& result) noexcept {
  waits_.fetch_add(1, std::memory_order_relaxed);
  if (result.outcome == Outcome::kTimeout) timeouts_.fetch_add(1, std::memory_order_relaxed);
  if (result.outcome == Outcome::kHangup) hangups_.fetch_add(1, std::memory_order_relaxed);
}

GateCounts Gate::counts() const noexcept {
  return {waits_.load(), spins_.load(), wakes_.load(), timeouts_.load(), hangups_.load()};
}

bool Gate::hung_up() {
  require_own_process();
  const Visit visit(*this);
  if (hung_up_.load() || closing_.load()) return true;
  pollfd fd{hangup_.get(), POLLRDHUP, 0};
  if (poll(&fd, 1, 0) > 0) hung_up_.store(true);
  return hung_up_.load();
}

void Gate::close() noexcept {
  if (!page_->same_process()) return;  // a thread of the parent may have held the mutex at the fork
  std::unique_lock lock(mutex_);
  hung_up_.store(true);
  closing_.store(true);
  followers_.notify_all();
  if (!closed_) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof one);
  }
  while (visitors_.load() != 0) empty_.wait(lock, kForever);
  if (closed_) return;
  closed_ = true;
  page_->unpin();
  event_.close();
  hangup_.close();
  stop_.close();
}

}  // namespace kvd
