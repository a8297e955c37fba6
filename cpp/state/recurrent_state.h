// What a recurrent layer carries from row to row: a state, and the inputs by which rows change it.
//
// A row cannot be undone in a state, so a pass stores the inputs of a tree's rows, not their states. The next pass
// first applies the inputs of the rows that were committed meanwhile, in order, and then computes its tree from there.
// A prefill (a reading, here) is committed whole or not at all, so its passes store no inputs: they write the state
// after its rows beside the text's, which it replaces when the rows are committed.
#pragma once

#include <algorithm>
#include <cstdint>
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
    RecurrentState(size_t state_size, size_t input_size);

    // For a pass, in this order. It computes pending rows from `first` on, of a reading or else of a tree.
    void begin(int first, int num_rows, bool is_reading);
    // Reserves memory; if it throws, nothing has changed. inputs: where a reading's rows put their inputs.
    void reserve(float* inputs);
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
    void applied();

    void keep_states(const std::vector<int>& lengths, int most, int anchor) { kept_.ask(lengths, most, anchor); }
    void keep(int length, const std::vector<int32_t>& path, bool was_read);
    int reachable(int length) const { return length >= length_ ? length : kept_.reachable(length); }
    void cut(int length);
    void copy(const RecurrentState& from, int length);
    void stretch(int length, int longer) { length_ += longer - length; }
    std::vector<int32_t> shape() const;
    void add_pieces(int length, std::vector<Piece>& pieces);
    bool resume(int length, const std::vector<int32_t>& shape);
    // Does nothing: rows of the text have no memory of their own here.
    void release(int, int) {}
    size_t num_bytes(int length) const;

private:
    using Values = KeptStates::Values;
    using Kept = KeptStates::Kept;

    float* input(int row) const { return reinterpret_cast<float*>(inputs_.data()) + row * input_size_; }
    std::vector<Kept> states_to_keep(int length, int num_rows) const;
    void drop_reading();
    // Inputs of so many rows are about to be written. Throws std::bad_alloc.
    void touch(int rows);
    // Returns the memory of inputs that are no longer needed to the system, if it is large.
    void release_inputs();

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
