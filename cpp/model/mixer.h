// What mixes a row with the rows before it, the first half of a layer: a closed set of alternatives.
#pragma once

#include <variant>
#include <vector>

#include "model/weights.h"

namespace pystaged {

// When packed, the matrices that multiply the same row are joined into one if their types allow it.
struct Attention {
    Norm q_norm, k_norm;
    std::vector<Linear> qkv;
    size_t q_at = 0, k_at = 0, v_at = 0, qkv_stride = 0;  // where rows of `qkv`'s products, packed, have their parts
    Linear output;

    // Calls act(linear) for each matrix.
    template <class Act>
    void for_each(const Act& act) const {
        for (const Linear& linear : qkv) {
            act(linear);
        }
        act(output);
    }
};

using Mixer = std::variant<Attention>;

}  // namespace pystaged
