// The state of one text in a backend: what the mixers of its layers carry from row to row.
//
// Rows that are committed come first; behind them lie pending rows, numbered from 0 in the order they were evaluated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace pystaged {

struct Piece {
    void* data;
    size_t bytes;
};

class TextState {
public:
    TextState() = default;
    virtual ~TextState() = default;
    TextState(const TextState&) = delete;
    TextState& operator=(const TextState&) = delete;

    // How many rows fit, those that are pending included.
    virtual int room() const = 0;
    // Behind the first `length` rows, pending rows become committed: a path, from the committed end on, that was read
    // or else written. The other pending rows are lost, and what no later row needs may be given up. Nothing fails.
    virtual void keep(int length, const std::vector<int32_t>& path, bool was_read) = 0;
    // Pending rows from there on are lost. Nothing fails.
    virtual void drop(int /*first*/) {}
    // Recurrent layers are to keep their states after so many rows, rising, when the text reaches them, so that it can
    // go back to them; `most` at most, those from before included. Where there are more, some are dropped, but the one
    // after `anchor` rows last of all. Forgets what was asked for before.
    virtual void keep_states(const std::vector<int>& /*lengths*/, int /*most*/, int /*anchor*/) {}
    // The longest beginning of the text, of `length` rows at most, that rows can go on from.
    virtual int reachable(int length) const { return length; }
    // The text goes on from its first `length` rows, or as many of them as are reachable; returns how many.
    virtual int cut(int length) { return reachable(length); }
    // Begins as another text of the same model, of as many positions, does: with its first `length` rows, or as many of
    // them as are reachable there; returns how many.
    virtual int copy(const TextState& from, int length) = 0;
    // For timing alone: as if the first `length` rows went on to `longer`, all like the last one.
    virtual void stretch(int /*length*/, int /*longer*/) {}
    // For a file: what to give resume() before its pieces are filled, for a text whose `length` rows are committed.
    virtual std::vector<int32_t> shape() const {
        throw std::invalid_argument("texts that llama.cpp computes are not kept in files");
    }
    // The memory of a text of `length` rows, none of them pending, always in the same order.
    virtual std::vector<Piece> pieces(int /*length*/) { return {}; }
    // Becomes a text of `length` rows of that shape; its pieces are to be filled. Throws std::invalid_argument where no
    // text has it.
    virtual void resume(int /*length*/, const std::vector<int32_t>& /*shape*/) {
        throw std::invalid_argument("texts that llama.cpp computes are not kept in files");
    }
    // Bytes that the first `length` rows take.
    virtual size_t num_bytes(int length) const = 0;
};

}  // namespace pystaged
