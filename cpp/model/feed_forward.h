// What is done to each row alone, the second half of a layer: a closed set of alternatives.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "model/weights.h"

namespace pystaged {

struct Dense {
    Linear gate;  // empty where there is none, or where it is a part of `up`
    Linear up, down;
};

// A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router chooses a few networks for each row, and may
// give another one to all rows.
struct Experts {
    Linear router;
    Vector bias;                  // of the scores that experts are chosen by, [experts], or none
    std::vector<Dense> each;      // [experts]
    std::optional<Dense> shared;  // the shared expert, or none,
    Linear shared_gate;           // and its gate, one number for a row, or none
    // Where that is a dense network beside the experts, norms of what the router and the experts read and of both
    // results, and factors of the experts' results, [experts].
    Norm router_norm, norm, post_norm, shared_post_norm;
    Vector factors;
};

using FeedForward = std::variant<Dense, Experts>;

}  // namespace pystaged
