// What a recurrent layer carries from row to row: a state, and the inputs by which rows change it.
//
// A row cannot be undone in a state, so a pass stores the inputs of its pending rows, not their states. The next pass
// first applies the inputs of the rows that were committed meanwhile, in order, and then computes its tree from there.
// For texts that are rewound, states at the ends of readings and kBeforeEnd rows before them are kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"

namespace pystaged {

class RecurrentState {
public:
    // Pending rows at most; a reading of more commits them in pieces.
    static constexpr int kMostPending = 512;
    // States that are kept besides the one in use.
    static constexpr int kMostKept = 4;
    // Rows whose inputs keep their memory from pass to pass: those of a usual tree.
    static constexpr int kFewRows = 64;
    // A state is kept so many rows before the end of a reading, too: the next prompt of a chat may differ from this one
    // in the last tokens, which begin an answer.
    static constexpr int kBeforeEnd = 16;

    // The state after the first `rows` of the rows that are not applied yet, and where to write it.
    struct Stop {
        int rows;
        float* state;
    };

    // In floats: a state, which is of zeros before a text, and the inputs of a row.
    RecurrentState(size_t state_size, size_t input_size);

    // The inputs of the first `num_pending` pending rows are about to be written.
    void touch(int num_pending) { touched_ = std::max(touched_, first_pending_ + num_pending); }
    // For a pass, in this order. Reserves its memory; if it throws, nothing has changed.
    void reserve();
    // The state after the applied rows, and where to write the one after all committed rows; may be the same place.
    const float* state() const { return state_->data(); }
    float* next_state() { return next_->data(); }
    int num_unapplied() const { return num_unapplied_; }
    // States to compute, in order, the last after all committed rows; none if all are applied.
    const std::vector<Stop>& stops() const { return stops_; }
    // Inputs of the committed rows that are not applied yet, then of pending rows.
    float* unapplied(int row) { return input(row); }
    float* pending(int row) { return input(first_pending_ + row); }
    // The states in stops() are computed.
    void applied();

    void keep(int length, const std::vector<int32_t>& path, bool was_read);
    int reachable(int length) const;
    void cut(int length);
    void copy(const RecurrentState& from, int length);
    void stretch(int length, int longer);
    // Rows of the text have no memory of their own here.
    void release(int, int) {}
    size_t num_bytes(int length) const;

private:
    using Values = Lines<float>;
    struct Kept {
        int length;
        std::shared_ptr<Values> state;
    };

    float* input(int row) const { return reinterpret_cast<float*>(inputs_.data()) + row * input_size_; }
    void keep_state(int length, const std::shared_ptr<Values>& state);
    // Gives the memory of many rows' inputs that are needed no more back to the system.
    void release_inputs();

    size_t state_size_, input_size_;
    int length_ = 0;                         // rows that state_ includes
    std::shared_ptr<Values> state_;          // none for zeros; others may share it, who must not see it change
    std::shared_ptr<Values> next_, before_;  // of a pass
    std::vector<Stop> stops_;
    Memory inputs_;  // [rows][input_size]
    int num_unapplied_ = 0, first_pending_ = 0;
    int touched_ = 0;         // rows whose inputs may have memory
    int read_to_ = 0;         // where the last reading ended
    std::vector<Kept> kept_;  // of rising length
};

}  // namespace pystaged
