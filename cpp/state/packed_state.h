// The state of a text on the CPU: a LayerState for each mixer of each layer, the alternative that it needs.
#pragma once

#include <algorithm>
#include <variant>
#include <vector>

#include "machine/pool.h"
#include "model/model.h"
#include "state/kept_cells.h"
#include "state/kv_cache.h"
#include "state/recurrent_state.h"

namespace pystaged {

// Of attention: keys and values, a cell for each row; a layer with a window gives up those that no later row sees.
struct KvState : KeptCells {
    KvState(const Model& model, int layer, int num_cells)
        : KeptCells(model.numbers().layers[layer].windowed ? model.numbers().window : 0),
          cache(model.kv_type(), model.numbers().layers[layer].num_kv_heads, model.numbers().layers[layer].head_dim,
                num_cells, model.numbers().layers[layer].value_dim) {}

    void keep(int length, const std::vector<int32_t>& path, bool was_read) {
        // Rows only move towards the front, so going along the path never overwrites one that is still to move.
        const int num_rows = static_cast<int>(path.size());
        for (int i = 0; i < num_rows; ++i) {
            if (path[i] != i) {
                cache.move(length + path[i], length + i);
            }
        }
        if (grow(length + num_rows, was_read)) {
            cache.release(read_end(), first());
        }
    }
    void copy(const KvState& from, int length) {
        KeptCells::operator=(from);
        cut(length);
        cache.copy(from.cache, read_first(), read_end());
        cache.copy(from.cache, first(), length);
    }
    void stretch(int length, int longer) {
        // Copies, because memory that nobody has written to is not there, and takes no time to read.
        for (int cell = length; cell < longer; ++cell) {
            cache.move(length - 1, cell);
        }
        if (grow(longer, false)) {
            cache.release(read_end(), first());
        }
    }
    void add_pieces(int length, std::vector<Piece>& pieces) {
        cache.add_pieces(read_first(), read_end(), pieces);
        cache.add_pieces(first(), length, pieces);
    }
    // Returns the memory of rows [first, last), which the text has dropped, to the system.
    void release(int first, int last) { cache.release(first, last); }
    size_t num_bytes(int length) const { return cache.cell_bytes() * count(length); }

    KvCache cache;
};

using LayerState = std::variant<KvState, RecurrentState>;

class PackedState : public TextState {
public:
    PackedState(const Model& model, int num_rows, int context) : model_(model), room_(padded(num_rows, kLanes)) {
        const Hyperparameters& h = model.numbers();
        kv_at_.resize(h.num_layers);
        recurrent_at_.resize(h.num_layers);
        for (int layer = 0; layer < h.num_layers; ++layer) {
            for (const MixerKind mixer : h.layers[layer].mixers) {
                if (mixer == MixerKind::attention && h.layers[layer].stores(layer)) {
                    kv_at_[layer] = static_cast<int>(layers_.size());
                    layers_.emplace_back(std::in_place_type<KvState>, model, layer, num_rows);
                } else if (mixer == MixerKind::attention) {
                    kv_at_[layer] = h.layers[layer].lent ? -1 : kv_at_[h.layers[layer].cells_of];
                } else {
                    recurrent_at_[layer] = static_cast<int>(layers_.size());
                    const RecurrentSizes sizes = h.recurrent_sizes(layer);
                    layers_.emplace_back(std::in_place_type<RecurrentState>, sizes.state, sizes.input);
                }
            }
        }
        if (h.rope.dims > 0) {
            frequencies_ = h.rope.frequencies(model.rope_factors(context).values);
            windowed_frequencies_ = h.windowed_rope.frequencies({});
        }
    }

    int room() const override { return room_; }
    void keep(int length, const std::vector<int32_t>& path, bool was_read) override {
        // A chain that is kept whole moves nothing; waking threads for that takes longer than going through the layers.
        const bool moves = !path.empty() && path.back() + 1 != static_cast<int>(path.size());
        touch(length + static_cast<int>(path.size()));
        for_each_layer(moves ? model_.num_threads() : 1, [&](auto& state, int) { state.keep(length, path, was_read); });
    }
    void keep_states(const std::vector<int>& lengths, int most, int anchor) override {
        for_each<RecurrentState>([&](RecurrentState& state) { state.keep_states(lengths, most, anchor); });
    }
    int reachable(int length) const override {
        for (int before = -1; before != length;) {
            before = length;
            for_all(layers_, [&](const auto& state) { length = state.reachable(length); });
        }
        return length;
    }
    // Returns memory to the system if it is large.
    int cut(int length) override {
        length = reachable(length);
        const bool release = length < touched_ && (touched_ - length) * model_.cell_bytes() >= kBytesWorthReleasing;
        const int end = padded(touched_, kLanes);
        for_all(layers_, [&](auto& state) {
            state.cut(length);
            if (release) {
                state.release(length, end);
            }
        });
        touched_ = release ? length : touched_;
        return length;
    }
    int copy(const TextState& from, int length) override {
        const auto& source = static_cast<const PackedState&>(from);
        length = source.reachable(length);
        touch(length);
        for_each_layer(model_.num_threads(), [&](auto& state, int layer) {
            state.copy(std::get<std::decay_t<decltype(state)>>(source.layers_[layer]), length);
        });
        return length;
    }
    void stretch(int length, int longer) override {
        touch(longer);
        for_each_layer(model_.num_threads(), [&](auto& state, int) { state.stretch(length, longer); });
    }
    // Of each layer the number of its numbers, then these.
    std::vector<int32_t> shape() const override {
        std::vector<int32_t> all;
        for_all(layers_, [&](const auto& state) {
            const std::vector<int32_t> shape = state.shape();
            all.push_back(static_cast<int32_t>(shape.size()));
            all.insert(all.end(), shape.begin(), shape.end());
        });
        return all;
    }
    std::vector<Piece> pieces(int length) override {
        std::vector<Piece> pieces;
        for_all(layers_, [&](auto& state) { state.add_pieces(length, pieces); });
        return pieces;
    }
    void resume(int length, const std::vector<int32_t>& shape) override {
        touch(length);
        auto at = shape.begin();
        for_all(layers_, [&](auto& state) {
            const int32_t count = at == shape.end() ? -1 : *at++;
            require(count >= 0 && count <= shape.end() - at && state.resume(length, {at, at + count}),
                    "no text has this shape");
            at += count;
        });
    }
    size_t num_bytes(int length) const override {
        size_t bytes = 0;
        for_all(layers_, [&](const auto& state) { bytes += state.num_bytes(length); });
        return bytes;
    }

    // All pending rows of the next pass, from `first` on, of a reading or else of a tree. Returns where the one before
    // each of them is to be written.
    int32_t* begin(int num_committed, int first, int num_rows, bool is_reading) {
        parents_.resize(first + num_rows);
        touch(num_committed + first + num_rows);
        for_each<RecurrentState>([&](RecurrentState& state) { state.begin(first, num_rows, is_reading); });
        return parents_.data() + first;
    }
    // The pending row that is `back` rows before a pending one, or -1 - i for the committed row i rows before the last.
    int ancestor(int row, int back) const {
        for (; row >= 0 && back > 0; --back) {
            row = parents_[row];
        }
        return row - back;
    }
    const std::vector<int32_t>& parents() const { return parents_; }
    // Of a layer that has one, or attends to another one's.
    KvState& kv(int layer) { return std::get<KvState>(layers_[kv_at_[layer]]); }
    RecurrentState& recurrent(int layer) { return std::get<RecurrentState>(layers_[recurrent_at_[layer]]); }
    // Of rotary positions, in layers without a window and with one.
    const std::vector<double>& frequencies(bool windowed) const {
        return windowed ? windowed_frequencies_ : frequencies_;
    }

private:
    // Memory is given back from so many bytes on; a prompt that fills them again takes far longer than the system does.
    static constexpr size_t kBytesWorthReleasing = 1 << 20;
    // Rows that are committed at a time: asking the system takes as long as some arithmetic.
    static constexpr int kRowsToCommit = 512;

    // Calls act(state) for every layer.
    template <class Layers, class Act>
    static void for_all(Layers& layers, const Act& act) {
        for (auto& layer : layers) {
            std::visit(act, layer);
        }
    }
    // Calls act(state, index) for every layer, by so many threads.
    template <class Act>
    void for_each_layer(int num_threads, const Act& act) {
        ThreadPool::shared().run(static_cast<int>(layers_.size()), num_threads, [&](int layer, int) {
            std::visit([&](auto& state) { act(state, layer); }, layers_[layer]);
        });
    }
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
    void touch(int end) {
        if (end > committed_) {
            const int last = std::min(padded(end, kRowsToCommit), room_);
            for_each<KvState>([&](KvState& state) { state.cache.commit(committed_, last); });
            committed_ = last;
        }
        touched_ = std::max(touched_, end);
    }

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
