// Which cells of a text the layers with a window keep.
//
// Two windows are kept, each with at least kSlack cells before it: that of the next row, and that of the first row
// after the last prompt. All other cells are given up. So a text can go back to the end of its prompt, for another
// answer, and up to kSlack positions before that or before its own end, for another prompt with the same beginning.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pystaged {

class KeptCells {
public:
    // As many as a pass reads, so that a text which waits while another one reads what both begin with can still copy
    // that.
    static constexpr int kSlack = 256;

    // `window` positions, the row's own included; 0 keeps all cells.
    explicit KeptCells(int window) : window_(window) {}

    // The most cells that a text has, if passes of kSlack rows at most read it.
    static int64_t most(int window) { return 2 * (int64_t(window) + kSlack + kStep) + kSlack; }

    // Kept are [read_first(), read_end()), perhaps none, and from first() on.
    int read_first() const { return read_first_; }
    int read_end() const { return read_end_; }
    int first() const { return first_; }
    int count(int length) const { return read_end_ - read_first_ + length - first_; }

    // The longest beginning of the text, of `length` positions at most, that rows can go on from.
    int reachable(int length) const {
        if (is_enough(first_, length)) {
            return length;
        }
        const int end = std::min(length, read_end_);
        return is_enough(read_first_, end) ? end : 0;
    }

    // The text has grown to `length` positions, by what was read or else written. Returns whether cells between
    // read_end() and first() were given up.
    bool grow(int length, bool was_read) {
        const int begin = std::max(0, length - window_ - kSlack) / kStep * kStep;
        if (window_ == 0) {
            return false;
        }
        if (was_read) {
            const bool changes = read_end_ > 0 || begin > first_;
            read_first_ = read_end_ = 0;
            read_to_ = length;
            first_ = std::max(first_, begin);
            return changes;
        }
        // The window of what was read stays whole until the other window lies beyond it.
        if (begin <= std::max(first_, read_to_)) {
            return false;
        }
        if (first_ < read_to_) {
            read_first_ = first_;
            read_end_ = read_to_;
        }
        first_ = begin;
        return true;
    }

    // The text goes on from its first `length` positions, which are reachable.
    void cut(int length) {
        if (!is_enough(first_, length)) {
            first_ = length > 0 ? read_first_ : 0;
            read_first_ = read_end_ = 0;
        }
        read_to_ = std::min(read_to_, length);
    }

    // All that it knows of a text, for a file.
    std::vector<int32_t> shape() const { return {read_first_, read_end_, first_, read_to_}; }
    // Of a text of `length` positions. Returns whether there is such a shape.
    bool resume(int length, const std::vector<int32_t>& shape) {
        if (shape.size() != 4 || shape[0] < 0 || shape[1] < shape[0] || shape[2] < shape[1] || shape[2] > length ||
            shape[3] < 0 || shape[3] > length || shape[2] % kStep != 0 || shape[0] % kStep != 0 ||
            (window_ == 0 && shape != std::vector<int32_t>{0, 0, 0, 0})) {
            return false;
        }
        read_first_ = shape[0], read_end_ = shape[1], first_ = shape[2], read_to_ = shape[3];
        return true;
    }

private:
    // First positions are multiples of it, so that memory is seldom given back, and in whole pages.
    static constexpr int kStep = 64;

    // Whether a row at `length` sees none before `first`.
    bool is_enough(int first, int length) const { return first == 0 || length - first >= window_ - 1; }

    int window_;
    int read_first_ = 0, read_end_ = 0, first_ = 0;
    int read_to_ = 0;  // where the last reading ended
};

}  // namespace pystaged
