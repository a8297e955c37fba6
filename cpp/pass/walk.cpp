#include "pass/walk.h"

#include <algorithm>

namespace pystaged {

Walk make_walk(const std::vector<int>& rows, const std::function<int(int)>& parent) {
    Walk walk;
    if (rows.empty()) {
        return walk;
    }
    // Of row i, and the committed rows in front: rows behind it that are to be walked, itself included, and its
    // children.
    const int count = rows.back() + 1;
    std::vector<int> sizes(count + 1);
    std::vector<std::vector<int>> children(count + 1);
    for (const int row : rows) {
        sizes[row + 1] = 1;
    }
    for (int row = count - 1; row >= 0; --row) {
        if (sizes[row + 1] > 0) {
            children[parent(row) + 1].push_back(row);
            sizes[parent(row) + 1] += sizes[row + 1];
        }
    }
    for (std::vector<int>& its : children) {
        std::sort(its.begin(), its.end(),
                  [&](int a, int b) { return sizes[a + 1] != sizes[b + 1] ? sizes[a + 1] < sizes[b + 1] : a < b; });
    }
    // A stack, because a chain may be longer than calls may nest. The last child takes the place of its parent.
    std::vector<WalkStep> open;
    const auto push_children = [&](int row, int copy) {
        const std::vector<int>& its = children[row + 1];
        for (size_t i = its.size(); i-- > 0;) {
            open.push_back({its[i], copy, i + 1 == its.size() ? copy : copy + 1});
        }
    };
    push_children(-1, 0);
    while (!open.empty()) {
        const WalkStep step = open.back();
        open.pop_back();
        walk.steps.push_back(step);
        walk.num_copies = std::max(walk.num_copies, step.to + 1);
        push_children(step.row, step.to);
    }
    return walk;
}

}  // namespace pystaged
