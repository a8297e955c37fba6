// The order in which a recurrent layer computes the rows of a tree. Each row updates a copy of the state; where
// branches part, another copy is made.
#pragma once

#include <cstdint>
#include <vector>

namespace pystaged {

struct WalkStep {
    int row;       // pending
    int from, to;  // its parent's copy, and its own; copy 0 holds the state of the committed rows
};

struct Walk {
    std::vector<WalkStep> steps;
    int num_copies = 1;

    // Visits all pending rows from `first` on and their ancestors: depth first, small branches first, so that copies
    // are few. parents[row] is the pending row before; what is below `base` counts as committed.
    void make(const std::vector<int32_t>& parents, int first, int base);

private:
    std::vector<int> sizes_, children_, begins_;
    std::vector<WalkStep> open_;
};

}  // namespace pystaged
