// Python class CopyQueue.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <memory>
#include <utility>

#include "bind_spans.hpp"
#include "copy_queue.hpp"

namespace kvd {
namespace {

constexpr const char* kQueueDoc =
    R"(Copies that run one after another in a native thread, in the order of `submit`.

Between two of them nothing waits for the interpreter lock. Methods may be called from any thread;
none but `finish`, `wait` and `close` waits. Who submits finishes or cancels: until then the queue
keeps what the copy borrows. In a forked child all but `close` raise ValueError. Defined by
reference.py::CopyQueue.)";

constexpr const char* kSubmitDoc =
    R"(Queue a copy as of copy_spans, or as of copy_sums with counts and sums; return its ticket.

The shifts are bytes that are added to each dst_offset (not to NOT_COPIED) and src_offset. spans,
counts and what sums continue from are copied here; sums is borrowed until `finish` has
written it, and a copy that fails leaves it as it is. Mappings, ranges and counts are looked at when
the copy's turn comes: what is wrong with them, `finish` raises.

Raises: ValueError when the queue is closed, the kernel does not run on this CPU, lists are no whole
rows, sums is read-only or of another length than counts, or threads is out of range; TypeError for
lists that are no buffers of such words; RuntimeError when no thread can be had.)";

constexpr const char* kFinishDoc =
    R"(Wait until the copy of a ticket has ended; return the bytes moved. Once for each ticket.

Raises: IndexError, ValueError as copy_spans and copy_sums; ValueError for a ticket that is none,
or of a copy that `close` dropped.)";

constexpr const char* kCancelDoc =
    R"(Drop a copy that has not begun; return whether it was dropped: if so its ticket is void.)";

constexpr const char* kWaitDoc =
    R"(Wait until a copy has ended, or `rouse` was called, since the value `seen` was returned.

seen: 0 at first. Returns at once where there was such news, and when the queue is closed.)";

// Owns what copies borrow of Python: it is given back under the interpreter lock, by whoever
// finishes or cancels a copy, or drops the queue. The thread that copies touches none of it.
class PyCopyQueue {
 public:
  ~PyCopyQueue() {
    if (!queue_->in_own_process()) {
      static_cast<void>(queue_.release());
      return;
    }
    const Unlocked unlocked;
    queue_.reset();
  }

  uint64_t submit(const Mapping& dst, const Mapping& src, nb::handle spans, nb::handle counts,
                  nb::handle sums, const std::string& kernel, nb::handle threads, int64_t dst_shift,
                  int64_t src_shift);
  uint64_t finish(uint64_t ticket);
  bool cancel(uint64_t ticket);
  uint64_t wait(uint64_t seen);
  void rouse() { queue_->rouse(); }
  void close();

 private:
  std::map<uint64_t, std::unique_ptr<Groups>> groups_;  // under the interpreter lock
  std::unique_ptr<CopyQueue> queue_ = std::make_unique<CopyQueue>();
};

uint64_t PyCopyQueue::submit(const Mapping& dst, const Mapping& src, nb::handle spans,
                             nb::handle counts, nb::handle sums, const std::string& kernel,
                             nb::handle threads, int64_t dst_shift, int64_t src_shift) {
  const size_t team = team_size(threads);
  const CopyKernel kernels = find_copy_kernel(kernel);
  const Bytes bytes(spans, "spans");
  require_rows(bytes, 3, kTriples);
  if (counts.is_none() != sums.is_none()) throw nb::type_error("give both counts and sums or none");
  std::vector<Span> moved = private_copy<Span>(bytes);
  for (Span& span : moved) {
    // What lies beyond both ends of the address space is outside any mapping.
    if (span.dst != kNotCopied) span.dst += static_cast<uint64_t>(dst_shift);
    span.src += static_cast<uint64_t>(src_shift);
  }
  auto own = std::make_shared<const std::vector<Span>>(std::move(moved));
  const auto to = dst.region, from = src.region;
  if (counts.is_none()) {
    return queue_->submit([=](CopyTeam& helpers) {
      return run_copy(to, from, *own, kernels.copy, helpers, team);
    });
  }
  auto groups = std::make_unique<Groups>(counts, sums);
  const uint64_t ticket = queue_->submit([=, group_sums = groups->own](CopyTeam& helpers) {
    return run_copy(to, from, *own, *group_sums, kernels.copy_sum, helpers, team);
  });
  groups_.emplace(ticket, std::move(groups));
  return ticket;
}

uint64_t PyCopyQueue::finish(uint64_t ticket) {
  CopyQueue::Taken taken = queue_->take(ticket);
  const auto lent = groups_.extract(ticket);  // with the ticket: another thread gets neither
  const Groups* groups = lent.empty() ? nullptr : lent.mapped().get();
  uint64_t total = 0;
  {
    const Unlocked unlocked;
    const auto given_up = std::move(taken);  // unmapping what only the copy held may take long
    total = queue_->outcome(given_up);
  }
  if (groups != nullptr) groups->store();
  return total;
}

bool PyCopyQueue::cancel(uint64_t ticket) {
  if (!queue_->cancel(ticket)) return false;
  groups_.erase(ticket);
  return true;
}

uint64_t PyCopyQueue::wait(uint64_t seen) {
  const Unlocked unlocked;
  return queue_->wait(seen);
}

void PyCopyQueue::close() {
  const Unlocked unlocked;
  queue_->close();
}

}  // namespace

void bind_queue(nb::module_& module) {
  nb::class_<PyCopyQueue>(module, "CopyQueue", kQueueDoc)
      .def(nb::init<>())
      .def("submit", &PyCopyQueue::submit, nb::arg("dst"), nb::arg("src"), nb::arg("spans"),
           nb::arg("counts").none() = nb::none(), nb::arg("sums").none() = nb::none(),
           nb::kw_only(), nb::arg("kernel") = "auto", nb::arg("threads") = 1,
           nb::arg("dst_shift") = 0, nb::arg("src_shift") = 0,
           nb::sig("def submit(self, dst: Mapping, src: Mapping, spans: Buffer, "
                   "counts: Buffer | None = None, sums: Buffer | None = None, *, "
                   "kernel: str = \"auto\", threads: int = 1, dst_shift: int = 0, "
                   "src_shift: int = 0) -> int"),
           kSubmitDoc)
      .def("finish", &PyCopyQueue::finish, nb::arg("ticket"), kFinishDoc)
      .def("cancel", &PyCopyQueue::cancel, nb::arg("ticket"), kCancelDoc)
      .def("wait", &PyCopyQueue::wait, nb::arg("seen"), kWaitDoc)
      .def("rouse", &PyCopyQueue::rouse, "Let `wait` return.")
      .def("close", &PyCopyQueue::close,
           "Wait for the copy that runs, drop those that have not begun, end the thread. "
           "Idempotent.");
}

}  // namespace kvd
