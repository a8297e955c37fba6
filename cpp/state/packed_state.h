// The state of a text on the CPU: a LayerState for each mixer of each layer, the alternative that it needs.
#pragma once

#include <variant>
#include <vector>

#include "model/model.h"
#include "state/kept_cells.h"
#include "state/kv_cache.h"
#include "state/recurrent_state.h"

namespace pystaged {

// Of attention: keys and values, a cell for each row; a layer with a window gives up those that no later row sees.
struct KvState : KeptCells {
    KvState(const Model& model, int layer, int num_cells);

    void keep(int length, const std::vector<int32_t>& path, bool was_read);
    void copy(const KvState& from, int length);
    void stretch(int length, int longer);
    void add_pieces(int length, std::vector<Piece>& pieces);
    // Returns the memory of rows [first, last), which the text has dropped, to the system.
    void release(int first, int last) { cache.release(first, last); }
    size_t num_bytes(int length) const { return cache.cell_bytes() * count(length); }

    KvCache cache;
};

using LayerState = std::variant<KvState, RecurrentState>;

class PackedState : public TextState {
public:
    PackedState(const Model& model, int num_rows, int context);

    int room() const override { return room_; }
    void keep(int length, const std::vector<int32_t>& path, bool was_read) override;
    void keep_states(const std::vector<int>& lengths, int most, int anchor) override;
    int reachable(int length) const override;
    // Returns memory to the system if it is large.
    int cut(int length) override;
    int copy(const TextState& from, int length) override;
    void stretch(int length, int longer) override;
    std::vector<int32_t> shape() const override;
    std::vector<Piece> pieces(int length) override;
    void resume(int length, const std::vector<int32_t>& shape) override;
    size_t num_bytes(int length) const override;

    // All pending rows of the next pass, from `first` on, of a reading or else of a tree. Returns where the one before
    // each of them is to be written.
    int32_t* begin(int num_committed, int first, int num_rows, bool is_reading);
    // The pending row that is `back` rows before a pending one, or -1 - i for the committed row i rows before the last.
    int ancestor(int row, int back) const;
    const std::vector<int32_t>& parents() const { return parents_; }
    // Of a layer that has one, or attends to another one's.
    KvState& kv(int layer) { return std::get<KvState>(layers_[kv_at_[layer]]); }
    RecurrentState& recurrent(int layer) { return std::get<RecurrentState>(layers_[recurrent_at_[layer]]); }
    // Of rotary positions, in layers without a window and with one.
    const std::vector<double>& frequencies(bool windowed) const {
        return windowed ? windowed_frequencies_ : frequencies_;
    }

private:
    // Calls act(state, index) for every layer, by so many threads.
    template <class Act>
    void for_each_layer(int num_threads, const Act& act);
    // Calls act(state) for every state of that kind.
    template <class State, class Act>
    void for_each(const Act& act) {
        for (LayerState& layer : layers_) {
            if (auto* state = std::get_if<State>(&layer)) {
                act(*state);
            }
        }
    }
    // Rows before `end` are about to be written. Throws std::bad_alloc.
    void touch(int end);

    const Model& model_;
    int room_;
    std::vector<LayerState> layers_;
    std::vector<int> kv_at_, recurrent_at_;  // by layer, where in layers_
    int touched_ = 0;                        // rows that may have memory
    int committed_ = 0;                      // rows that may be written
    std::vector<int32_t> parents_;           // of pending rows
    std::vector<double> frequencies_, windowed_frequencies_;
};

}  // namespace pystaged
