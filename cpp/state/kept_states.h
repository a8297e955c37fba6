// Earlier states of a text that it can be rewound to.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "machine/memory.h"

namespace pystaged {

class KeptStates {
public:
    using Values = Lines<float>;
    // Shared by texts with the same beginning, so nobody writes to it.
    struct Kept {
        int length;
        std::shared_ptr<Values> state;
    };

    // As TextState::keep_states() has it.
    void ask(const std::vector<int>& lengths, int most, int anchor) {
        kept_.reserve(kept_.size() + lengths.size());
        asked_ = lengths;
        most_ = most;
        anchor_ = anchor;
    }
    const std::vector<int>& asked() const { return asked_; }
    bool is_asked(int length) const { return std::binary_search(asked_.begin(), asked_.end(), length); }
    // If there are too many, drops the one with the least distance from the one before it, relative to that one's
    // distance from the end: states are denser near the end. The anchor stays if there is room for it and the last one.
    void keep(const Kept& state) {
        if (!kept_.empty() && kept_.back().length >= state.length) {
            return;
        }
        kept_.push_back(state);
        while (static_cast<int>(kept_.size()) > most_) {
            const auto gap = [&](size_t i) {
                const int before = i == 0 ? 0 : kept_[i - 1].length;
                return double(kept_[i].length - before) / (state.length - before);
            };
            size_t least = kept_.size() > 2 && kept_[0].length == anchor_ ? 1 : 0;
            for (size_t i = least + 1; i + 1 < kept_.size(); ++i) {
                least = kept_[i].length != anchor_ && gap(i) < gap(least) ? i : least;
            }
            kept_.erase(kept_.begin() + least);
        }
    }
    // The largest length, at most `length`, with a kept state; 0 for none.
    int reachable(int length) const {
        const auto next = std::ranges::upper_bound(kept_, length, {}, &Kept::length);
        return next == kept_.begin() ? 0 : std::prev(next)->length;
    }
    // The state after exactly `length` rows, or null.
    const Values* at(int length) const {
        const auto found = std::ranges::find(kept_, length, &Kept::length);
        return found == kept_.end() ? nullptr : found->state.get();
    }
    void cut(int length) {
        std::erase_if(kept_, [&](const Kept& kept) { return kept.length > length; });
    }
    const std::vector<Kept>& all() const { return kept_; }
    // Replaces all kept states, by another text's or those of a file.
    void set(std::vector<Kept> kept) { kept_ = std::move(kept); }

private:
    std::vector<int> asked_;
    int most_ = 0, anchor_ = -1;
    std::vector<Kept> kept_;  // of rising length
};

}  // namespace pystaged
