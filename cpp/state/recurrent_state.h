// What a recurrent layer carries from row to row: a state, and the inputs by which rows change it.
//
// A row cannot be undone in a state, so a pass stores the inputs of a tree's rows, not their states. The next pass
// first applies the inputs of the rows that were committed meanwhile, in order, and then computes its tree from there.
// A prefill (a reading, here) is committed whole or not at all, so its passes store no inputs: they write the state
// after its rows beside the text's, which it replaces when the rows are committed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "model/hyperparameters.h"
#include "state/kept_states.h"
#include "state/text_state.h"

namespace pystaged {

class RecurrentState {
public:
    // States that a file may keep of a text.
    static constexpr int kMostKept = 64;

    // A state to compute: after how many rows, and where to write it.
    struct Stop {
        int rows;
        float* state;
    };

    // Sizes in floats: of a state, which is zero before a text, and of a row's inputs.
    RecurrentState(size_t state_size, size_t input_size)
        : state_size_(state_size),
          input_size_(input_size),
          inputs_(Memory::reserve(2 * RecurrentSizes::kMostPending * input_size * sizeof(float))) {}

    // For a pass, in this order. It computes pending rows from `first` on, of a reading or else of a tree.
    void begin(int first, int num_rows, bool is_reading) {
        first_ = is_reading ? first : 0;
        num_reading_ = is_reading ? num_rows : 0;
        if (first_ == 0) {
            drop_reading();
        }
        if (!is_reading) {
            touch(first_pending_ + first + num_rows);
        }
    }
    // Reserves memory; if it throws, nothing has changed. inputs: where a reading's rows put their inputs.
    void reserve(float* inputs) {
        const auto is_shared = [](const std::shared_ptr<Values>& state) { return state.use_count() > 1; };
        next_.reset();
        if (!state_) {
            state_ = std::make_shared<Values>(state_size_);
        }
        passed_ = states_to_keep(length_, num_unapplied_);
        stops_.clear();
        for (const Kept& state : passed_) {
            stops_.push_back({state.length - length_, state.state->data()});
        }
        next_ = num_unapplied_ > 0 && is_shared(state_) ? std::make_shared<Values>(state_size_) : state_;
        if (num_unapplied_ > 0) {
            stops_.push_back({num_unapplied_, next_->data()});
        }
        reading_stops_.clear();
        if (num_reading_ == 0) {
            return;
        }
        const int begin = length_ + num_unapplied_ + first_;
        next_ahead_.reset();
        std::vector<Kept> found = states_to_keep(begin, num_reading_);
        for (const Kept& state : found) {
            reading_stops_.push_back({state.length - begin, state.state->data()});
        }
        read_.reserve(read_.size() + found.size() + 1);
        next_ahead_ = ahead_ && !is_shared(ahead_) ? ahead_ : std::make_shared<Values>(state_size_);
        reading_stops_.push_back({num_reading_, next_ahead_->data()});
        read_.insert(read_.end(), found.begin(), found.end());
        if (kept_.is_asked(begin + num_reading_)) {
            read_.push_back({begin + num_reading_, next_ahead_});
        }
        reading_inputs_ = inputs;
    }
    // Rows of the pass that are of a reading.
    int num_reading() const { return num_reading_; }
    // The first row that base() does not include: 0, or of a reading the first of the pass.
    int first() const { return first_; }
    // The state after the applied rows; and the one before the pass's rows, which may be in the same place.
    const float* state() const { return state_->data(); }
    const float* base() const { return first_ > 0 ? ahead_->data() : next_->data(); }
    int num_unapplied() const { return num_unapplied_; }
    // States to compute from state(), in order, the last after all committed rows; none if all are applied.
    const std::vector<Stop>& stops() const { return stops_; }
    // States to compute from base(), after rows of the pass, the last after all of them; none unless it is of a
    // reading. They may be in the place of base().
    const std::vector<Stop>& reading_stops() const { return reading_stops_; }
    // Inputs of the committed rows that are not applied yet, then of pending rows.
    float* unapplied(int row) { return input(row); }
    float* pending(int row) {
        return num_reading_ > 0 ? reading_inputs_ + (row - first_) * input_size_ : input(first_pending_ + row);
    }
    // The states in both stops are computed.
    void applied() {
        state_ = std::move(next_);
        length_ += num_unapplied_;
        num_unapplied_ = 0;
        for (const Kept& state : passed_) {
            kept_.keep(state);
        }
        passed_.clear();
        if (length_ > 0 && kept_.is_asked(length_)) {
            kept_.keep({length_, state_});
        }
        if (num_reading_ > 0) {
            ahead_ = std::move(next_ahead_);
        }
    }

    void keep_states(const std::vector<int>& lengths, int most, int anchor) { kept_.ask(lengths, most, anchor); }
    void keep(int length, const std::vector<int32_t>& path, bool was_read) {
        if (was_read) {
            state_ = std::move(ahead_);
            length_ = length + static_cast<int>(path.size());
            for (const Kept& state : read_) {
                kept_.keep(state);
            }
        }
        drop_reading();
        // Inputs only move towards the front, so going along the path never overwrites those that are still to move.
        for (size_t i = 0; !was_read && i < path.size(); ++i, ++num_unapplied_) {
            if (first_pending_ + path[i] != num_unapplied_) {
                std::memmove(input(num_unapplied_), input(first_pending_ + path[i]), input_size_ * sizeof(float));
            }
        }
        first_pending_ = num_unapplied_;
        release_inputs();
    }
    int reachable(int length) const { return length >= length_ ? length : kept_.reachable(length); }
    void cut(int length) {
        kept_.cut(length);
        next_.reset();
        drop_reading();
        if (length >= length_) {
            num_unapplied_ = length - length_;
        } else {
            state_ = length > 0 ? kept_.all().back().state : nullptr;
            length_ = length;
            num_unapplied_ = 0;
        }
        first_pending_ = num_unapplied_;
        release_inputs();
    }
    void copy(const RecurrentState& from, int length) {
        state_ = from.state_;
        length_ = from.length_;
        kept_.set(from.kept_.all());
        cut(length);
        touch(num_unapplied_);
        std::memcpy(inputs_.data(), from.inputs_.data(), num_unapplied_ * input_size_ * sizeof(float));
    }
    void stretch(int length, int longer) { length_ += longer - length; }
    // The applied rows, then the lengths of states that are kept.
    std::vector<int32_t> shape() const {
        std::vector<int32_t> shape = {length_};
        for (const Kept& kept : kept_.all()) {
            shape.push_back(kept.length);
        }
        return shape;
    }
    void add_pieces(int, std::vector<Piece>& pieces) {
        if (length_ > 0) {
            pieces.push_back({state_->data(), state_size_ * sizeof(float)});
        }
        for (const Kept& kept : kept_.all()) {
            pieces.push_back({kept.state->data(), state_size_ * sizeof(float)});
        }
        pieces.push_back({inputs_.data(), num_unapplied_ * input_size_ * sizeof(float)});
    }
    bool resume(int length, const std::vector<int32_t>& shape) {
        if (shape.empty() || shape.size() > kMostKept || shape[0] < 0 || shape[0] > length ||
            length - shape[0] > RecurrentSizes::kMostPending) {
            return false;
        }
        for (size_t i = 1; i < shape.size(); ++i) {
            if (shape[i] <= (i == 1 ? 0 : shape[i - 1]) || shape[i] > shape[0]) {
                return false;
            }
        }
        length_ = shape[0];
        state_ = length_ > 0 ? std::make_shared<Values>(state_size_) : nullptr;
        std::vector<Kept> kept;
        for (size_t i = 1; i < shape.size(); ++i) {
            kept.push_back({shape[i], std::make_shared<Values>(state_size_)});
        }
        kept_.set(std::move(kept));
        num_unapplied_ = first_pending_ = length - length_;
        touch(num_unapplied_);
        return true;
    }
    // Does nothing: rows of the text have no memory of their own here.
    void release(int, int) {}
    size_t num_bytes(int length) const {
        if (length == 0) {
            return 0;
        }
        const auto& kept = kept_.all();
        const bool is_kept = !kept.empty() && kept.back().state == state_;
        const size_t states = kept.size() + (is_kept ? 0 : 1) + (ahead_ ? 1 : 0);
        return (states * state_size_ + touched_ * input_size_) * sizeof(float);
    }

private:
    using Values = KeptStates::Values;
    using Kept = KeptStates::Kept;

    float* input(int row) const { return reinterpret_cast<float*>(inputs_.data()) + row * input_size_; }
    // Memory for the states that are asked for between `length` and `num_rows` later.
    std::vector<Kept> states_to_keep(int length, int num_rows) const {
        std::vector<Kept> found;
        for (const int wanted : kept_.asked()) {
            if (wanted > length && wanted < length + num_rows) {
                found.push_back({wanted, std::make_shared<Values>(state_size_)});
            }
        }
        return found;
    }
    void drop_reading() {
        ahead_.reset();
        next_ahead_.reset();
        read_.clear();
    }
    // Inputs of so many rows are about to be written. Throws std::bad_alloc.
    void touch(int rows) {
        if (rows > touched_) {
            inputs_.commit(touched_ * input_size_ * sizeof(float), rows * input_size_ * sizeof(float));
            touched_ = rows;
        }
    }
    // Returns the memory of inputs that are no longer needed to the system, if it is large.
    void release_inputs() {
        const int needed = std::max(num_unapplied_, RecurrentSizes::kFewRows);
        if (touched_ > needed) {
            inputs_.release(needed * input_size_ * sizeof(float), touched_ * input_size_ * sizeof(float));
            touched_ = needed;
        }
    }

    size_t state_size_, input_size_;
    int length_ = 0;                 // rows that state_ includes
    std::shared_ptr<Values> state_;  // none for zeros
    std::shared_ptr<Values> next_;   // of a pass
    std::vector<Kept> passed_;       // of a pass, on the way to next_
    std::vector<Stop> stops_, reading_stops_;
    Memory inputs_;  // [rows][input_size]
    int num_unapplied_ = 0, first_pending_ = 0;
    int touched_ = 0;  // rows whose inputs may have memory
    // Of a reading that is not committed yet: its rows in this pass, the state after them, and states to keep then.
    int first_ = 0, num_reading_ = 0;
    float* reading_inputs_ = nullptr;
    std::shared_ptr<Values> ahead_, next_ahead_;
    std::vector<Kept> read_;
    KeptStates kept_;
};

}  // namespace pystaged
