// Memory for the values of a pass: taken piece by piece, given back in turn, and kept for the next pass.
// Each Workspace has one, which keeps its largest size until the last session of the model is closed.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "machine/memory.h"

namespace pystaged {

class Arena {
public:
    // How much was taken at some time.
    struct Mark {
        size_t block = 0, used = 0;
    };

    // Not initialized.
    float* take(int rows, size_t stride) { return take<float>(rows * stride); }
    // Destructors are not called.
    template <class T>
    T* take(size_t count) {
        T* const first = reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
        std::uninitialized_default_construct_n(first, count);
        return first;
    }
    Mark mark() const { return mark_; }
    // Gives back what was taken since then.
    void reset(Mark mark) { mark_ = mark; }
    // Gives back all, and makes one block of several, so that the next pass like this one allocates nothing.
    void clear() {
        if (blocks_.size() > 1) {
            size_t bytes = 0;
            for (const Lines<uint8_t>& block : blocks_) {
                bytes += block.size();
            }
            blocks_.clear();
            blocks_.emplace_back(bytes);
        }
        mark_ = {};
    }

private:
    uint8_t* take_bytes(size_t bytes) {
        bytes = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
        while (mark_.block < blocks_.size() && blocks_[mark_.block].size() - mark_.used < bytes) {
            mark_ = {mark_.block + 1, 0};
        }
        if (mark_.block == blocks_.size()) {
            blocks_.emplace_back(std::max(bytes, kLeastBytes));
        }
        mark_.used += bytes;
        return blocks_[mark_.block].data() + mark_.used - bytes;
    }

    static constexpr size_t kLeastBytes = 1 << 20;

    std::vector<Lines<uint8_t>> blocks_;
    Mark mark_;  // where the next piece is taken
};

}  // namespace pystaged
