// What is done to each row alone, the second half of a layer: a closed set of alternatives.
#pragma once

#include <variant>

#include "model/weights.h"

namespace pystaged {

struct Dense {
    Linear gate;  // empty where there is none, or where it is a part of `up`
    Linear up, down;

    // Calls act(linear) for each matrix.
    template <class Act>
    void for_each(const Act& act) const {
        act(gate);
        act(up);
        act(down);
    }
};

using FeedForward = std::variant<Dense>;

}  // namespace pystaged
