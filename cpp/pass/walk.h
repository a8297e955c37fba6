// The order in which a recurrent layer computes the rows of a tree. Each row updates a copy of the state; where
// branches part, another copy is made.
#pragma once

#include <functional>
#include <vector>

namespace pystaged {

struct WalkStep {
    int row;       // pending
    int from, to;  // its parent's copy, and its own; copy 0 holds the state of the committed rows
};

struct Walk {
    std::vector<WalkStep> steps;
    int num_copies = 1;
};

// Visits all `rows`, which rise, and their ancestors: depth first, small branches first, so that copies are
// few. parent(row) is the pending row before, or -1.
Walk make_walk(const std::vector<int>& rows, const std::function<int(int)>& parent);

}  // namespace pystaged
