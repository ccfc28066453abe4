// Ranges of everything that residency operations take; outside them they refuse.
#pragma once

#include <cstdint>

namespace kvd::residency {

constexpr int64_t kPositionsMax = int64_t{1} << 20;  // tokens of a request
constexpr int64_t kSlotsMax = int64_t{1} << 18;      // rows of a hot buffer
constexpr int64_t kChosenMax = 4096;                 // positions that a query selects
constexpr int64_t kQueriesMax = 14;                  // queries of a request in a step
constexpr int64_t kTablesMax = 65536;

constexpr int32_t kAbsent = -1;
constexpr int32_t kPadding = -1;  // in a selection
// Winner code of padding: ~kNoWinner is a position that no request reaches.
constexpr int32_t kNoWinner = INT32_MIN;

}  // namespace kvd::residency
