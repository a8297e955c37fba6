// The order in which a recurrent layer computes the rows of a tree. Each row updates a copy of the state; where
// branches part, another copy is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <tuple>
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
    void make(const std::vector<int32_t>& parents, int first, int base) {
        const int count = static_cast<int>(parents.size());
        const auto parent = [&](int row) { return parents[row] < base ? -1 : parents[row]; };
        // Of row i, and the committed rows in front: rows behind it that are to be walked, itself included; and where
        // its children begin.
        sizes_.assign(count + 1, 0);
        begins_.assign(count + 2, 0);
        std::fill(sizes_.begin() + first + 1, sizes_.end(), 1);
        children_.clear();
        for (int row = count - 1; row >= 0; --row) {
            if (sizes_[row + 1] > 0) {
                children_.push_back(row);
                sizes_[parent(row) + 1] += sizes_[row + 1];
                ++begins_[parent(row) + 2];
            }
        }
        std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
        const auto key = [&](int row) { return std::tuple(parent(row), sizes_[row + 1], row); };
        std::sort(children_.begin(), children_.end(), [&](int a, int b) { return key(a) < key(b); });
        steps.clear();
        num_copies = 1;
        // A stack, because a chain may be longer than calls may nest. The last child takes the place of its parent.
        const auto push_children = [&](int row, int copy) {
            for (int i = begins_[row + 2]; i-- > begins_[row + 1];) {
                open_.push_back({children_[i], copy, i + 1 == begins_[row + 2] ? copy : copy + 1});
            }
        };
        push_children(-1, 0);
        while (!open_.empty()) {
            const WalkStep step = open_.back();
            open_.pop_back();
            steps.push_back(step);
            num_copies = std::max(num_copies, step.to + 1);
            push_children(step.row, step.to);
        }
    }

private:
    std::vector<int> sizes_, children_, begins_;
    std::vector<WalkStep> open_;
};

}  // namespace pystaged
