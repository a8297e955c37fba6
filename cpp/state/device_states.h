// Bookkeeping of a text's recurrent layers on a device: which of two buffers holds the state, and where the inputs of
// rows are that this state does not include. The buffers themselves are elsewhere.
//
// A pass over a tree, which is a chain, applies the rows committed since the last one, writes the state after them to
// the other buffer, and goes on without writing: nothing is lost if it fails or its rows are not committed. A prefill
// (a reading, here) is committed whole or not at all: its passes write the state after all their rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "state/kept_states.h"

namespace pystaged {

class DeviceStates {
public:
    // A pass goes on from the state `from`, over rows whose inputs are in `earlier`, then over its own, whose inputs go
    // to `own`, or of a reading nowhere. The state after the first `num_applied` of all these rows goes to `to`.
    struct Plan {
        int32_t from = 0;
        std::vector<int32_t> earlier;
        std::vector<int64_t> own;
        int num_applied = 0;
        int64_t to = 0;
    };

    explicit DeviceStates(int most_pending) : places_(2 * most_pending) {
        std::iota(places_.begin(), places_.end(), 0);
    }

    // Of pending rows from `first` on, of a reading or else of a chain behind `path`, which is one of pending rows.
    Plan plan(int first, int num_rows, const std::vector<int32_t>& path, bool is_reading) const {
        Plan plan{state_, {}, {}, 0, 1 - state_};
        if (is_reading && first > 0) {
            plan.from = 1 - state_;
            plan.num_applied = num_rows;
            return plan;
        }
        const auto pending = places_.begin() + num_unapplied_;
        plan.earlier.assign(places_.begin(), pending);
        plan.num_applied = num_unapplied_;
        if (is_reading) {
            plan.num_applied += num_rows;
            return plan;
        }
        for (const int32_t row : path) {
            plan.earlier.push_back(pending[row]);
        }
        plan.own.assign(pending + first, pending + first + num_rows);
        return plan;
    }
    // Such a pass was computed, of a tree.
    void applied() {
        if (num_unapplied_ > 0) {
            std::rotate(places_.begin(), places_.begin() + num_unapplied_, places_.end());
            state_ = 1 - state_;
            length_ += num_unapplied_;
            num_unapplied_ = 0;
        }
    }
    // A reading begins, or the state after some of its rows is computed, which is kept if the reading is.
    void begin_reading() { read_.clear(); }
    void has_read(const KeptStates::Kept& state) { read_.push_back(state); }

    void keep(int length, const std::vector<int32_t>& path, bool was_read) {
        if (was_read) {
            go_to(1 - state_, length + static_cast<int>(path.size()));
            for (const KeptStates::Kept& state : read_) {
                kept_.keep(state);
            }
            return;
        }
        const auto pending = places_.begin() + num_unapplied_;
        for (size_t i = 0; i < path.size(); ++i) {
            std::swap(pending[path[i]], pending[i]);
        }
        num_unapplied_ += static_cast<int>(path.size());
    }
    KeptStates& kept() { return kept_; }
    const KeptStates& kept() const { return kept_; }
    int state() const { return state_; }
    int length() const { return length_; }
    int reachable(int length) const { return length >= length_ ? length : kept_.reachable(length); }
    // For a length that the state does not go beyond, and for one where another state is now.
    void cut(int length) {
        kept_.cut(length);
        num_unapplied_ = length - length_;
    }
    void go_to(int state, int length) {
        state_ = state;
        length_ = length;
        num_unapplied_ = 0;
    }
    // As another text has it; but its state is here in the place 0.
    void copy(const DeviceStates& from) {
        kept_.copy(from.kept_);
        places_ = from.places_;
        go_to(0, from.length_);
    }
    void stretch(int more) { length_ += more; }

private:
    int32_t state_ = 0;            // which of the two is the text's
    int length_ = 0;               // rows that it includes
    int num_unapplied_ = 0;        // committed rows behind them
    std::vector<int32_t> places_;  // of their inputs, then those of pending rows, then free ones
    KeptStates kept_;
    std::vector<KeptStates::Kept> read_;  // of a reading that is not committed yet
};

}  // namespace pystaged
