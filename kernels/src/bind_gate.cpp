// Python class GateWaiter; kvd_kernels.host adds statistics() to it.
#include <nanobind/nanobind.h>

#include <limits>

#include "convert.hpp"
#include "gate.hpp"

namespace kvd {
namespace {

constexpr auto kMaxInt = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxEpoch = (int64_t{1} << 56) - 1;

void construct(Gate* self, const Mapping& page, nb::handle event_fd, nb::handle hangup_fd,
               nb::handle first_word, nb::handle stride) {
  constexpr int64_t max_fd = std::numeric_limits<int>::max();
  const auto event = static_cast<int>(integer_within(event_fd, "event_fd", 0, max_fd));
  const auto hangup = static_cast<int>(integer_within(hangup_fd, "hangup_fd", 0, max_fd));
  const auto first = static_cast<uint64_t>(integer_within(first_word, "first_word", 0, kMaxInt));
  const auto step = static_cast<uint64_t>(integer_within(stride, "stride", 8, kMaxInt));
  new (self) Gate(page.region, event, hangup, first, step);
}

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kFree:
      return "free";
    case Outcome::kQuarantined:
      return "quarantined";
    case Outcome::kHangup:
      return "hangup";
    default:
      return "timeout";
  }
}

int64_t later(int64_t now, int64_t ns) { return ns > kMaxInt - now ? kMaxInt : now + ns; }

uint64_t slot_within(const Gate& gate, nb::handle slot) {
  const int64_t number = integer(slot, "slot");
  if (number >= 0 && static_cast<uint64_t>(number) < gate.slots()) {
    return static_cast<uint64_t>(number);
  }
  PyErr_Format(PyExc_IndexError, "slot %S lies outside the gate page of %llu slots", slot.ptr(),
               static_cast<unsigned long long>(gate.slots()));
  throw nb::python_error();
}

nb::tuple wait_free(Gate& self, nb::handle slot, nb::handle after_epoch, nb::handle timeout_ns,
                    nb::handle spin_ns) {
  const uint64_t index = slot_within(self, slot);
  const int64_t after = integer_within(after_epoch, "after_epoch", -1, kMaxEpoch);
  const int64_t timeout = integer_within(timeout_ns, "timeout_ns", 0, kMaxInt);
  const int64_t spin = integer_within(spin_ns, "spin_ns", 0, kMaxInt);
  WaitResult result = self.poll_word(index, after);
  if (result.outcome == Outcome::kNone) {
    const int64_t now = monotonic_ns();
    const int64_t deadline = later(now, timeout);
    const int64_t spin_until = later(now, spin);
    do {
      // A signal ended the sleep: its Python handler runs here and may raise.
      if (result.outcome == Outcome::kInterrupted && PyErr_CheckSignals() != 0) {
        throw nb::python_error();
      }
      const Unlocked unlocked;
      result = self.wait(index, after, deadline, spin_until);
    } while (result.outcome == Outcome::kInterrupted);
  }
  self.count(result);
  return nb::make_tuple(name_of(result.outcome), result.epoch);
}

constexpr const char* kClassDoc = R"(Sleeps on the words of a gate page until slots become free.

Slot s has its word, a native u64 `epoch << 8 | state`, at byte first_word + s * stride of the page.
Its one writer, in another process, stores the word with release order and then adds to the eventfd.
Thread-safe: any number of threads may wait at once, each for a slot of its own; one of them polls,
the others are woken by it.

Args:
    page: the gate page, mapped read-only. It cannot be closed before this object is.
    event_fd: eventfd that the writer adds to. Nobody else may read it.
    hangup_fd: connection to the writer; its end of file or hangup ends every wait. Data waiting on
        it is left alone.
    first_word: byte offset of slot 0's word, a multiple of 8.
    stride: bytes between words, a multiple of 8.

Both descriptors are duplicated: the caller may close its own, but the peer sees the connection end
only after close().

Raises:
    ValueError: the page is closed, or the words do not lie in it. Methods raise it in a forked
        child.
    OSError: a descriptor is not open.)";

constexpr const char* kWaitDoc =
    R"(Wait until the slot is free at an epoch greater than after_epoch.

Args:
    slot: index of the slot. IndexError when outside the page.
    after_epoch: last epoch acquired for this slot, -1 for none: the free word of that tenancy does
        not count.
    timeout_ns: longest wait, at least 0.
    spin_ns: how much of it to spin on the word before sleeping.

Returns (outcome, epoch), epoch being that of the last word seen:
    "free": the word says free and epoch > after_epoch.
    "quarantined": the word says quarantined and epoch >= after_epoch.
    "timeout": neither, in time.
    "hangup": the connection ended, or close() was called; from then on every wait ends so, even
        where the word says free. epoch is -1 when close() had been called before.

The interpreter lock is released unless the answer is there at once. A signal interrupts the polling
thread, so that Python's handlers run; other sleepers see it after their return.)";

}  // namespace

void bind_gate(nb::module_& module) {
  nb::class_<Gate>(module, "GateWaiter", kClassDoc)
      .def("__init__", construct, nb::arg("page"), nb::arg("event_fd"), nb::arg("hangup_fd"),
           nb::kw_only(), nb::arg("first_word") = 64, nb::arg("stride") = 64,
           nb::sig("def __init__(self, page: Mapping, event_fd: int, hangup_fd: int, *, "
                   "first_word: int = 64, stride: int = 64) -> None"))
      .def("wait_free", wait_free, nb::arg("slot"), nb::arg("after_epoch"), nb::arg("timeout_ns"),
           nb::kw_only(), nb::arg("spin_ns") = 50'000,
           nb::sig("def wait_free(self, slot: int, after_epoch: int, timeout_ns: int, *, "
                   "spin_ns: int = 50000) -> tuple[str, int]"),
           kWaitDoc)
      .def("close", &Gate::close, nb::call_guard<Unlocked>(),
           "End every wait with \"hangup\", wait until those threads have left, and let go of\n"
           "page and descriptors. Idempotent.")
      .def("hung_up", &Gate::hung_up,
           "Return whether the connection has ended or close() was called. Asks the descriptor.")
      .def("counters",
           [](const Gate& self) {
             const GateCounts now = self.counts();
             return nb::make_tuple(now.waits, now.spins, now.wakes, now.timeouts, now.hangups);
           },
           nb::sig("def counters(self) -> tuple[int, int, int, int, int]"),
           "Return (waits, spins, wakes, timeouts, hangups) so far; see host.GateStatistics.");
}

}  // namespace kvd
