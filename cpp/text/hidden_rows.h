// Hidden states of rows: what one model's pass keeps of its residual stream, for another model, such as a draft.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "machine/memory.h"

namespace pystaged {

struct HiddenRows {
    size_t width = 0;                                // numbers of a row
    std::vector<std::shared_ptr<const float>> rows;  // [width] each; rows of one pass share its memory
    bool of_draft = false;                           // computed by a draft that reads hidden states

    // The same in memory of their own, which no others keep.
    HiddenRows copied() const {
        const auto made = make(rows.size(), width);
        for (size_t i = 0; i < rows.size(); ++i) {
            std::copy_n(rows[i].get(), width, made[i].get());
        }
        return {width, {made.begin(), made.end()}, of_draft};
    }

    // Zeros in memory of their own, and where each of them begins.
    static std::vector<std::shared_ptr<float>> make(size_t count, size_t width) {
        const auto memory = std::make_shared<Lines<float>>(count * width);
        std::vector<std::shared_ptr<float>> rows(count);
        for (size_t i = 0; i < count; ++i) {
            rows[i] = {memory, memory->data() + i * width};
        }
        return rows;
    }

    // Side by side, [rows][width].
    std::vector<float> values() const {
        std::vector<float> result(rows.size() * width);
        for (size_t i = 0; i < rows.size(); ++i) {
            std::copy_n(rows[i].get(), width, result.data() + i * width);
        }
        return result;
    }
};

}  // namespace pystaged
