// The order in which what rows leave behind is made along a tree, a copy of it for each row at which branches part.
#pragma once

#include <functional>
#include <vector>

namespace pystaged {

struct WalkStep {
    int row;       // pending
    int from, to;  // the copy that its parent left, and its own; copy 0 is that of the committed rows
};

struct Walk {
    std::vector<WalkStep> steps;
    int num_copies = 1;
};

// Through all `rows`, which rise, and those that they follow: depth first, small branches first, so that copies are
// few. parent(row) is the pending row before, or -1.
Walk make_walk(const std::vector<int>& rows, const std::function<int(int)>& parent);

}  // namespace pystaged
