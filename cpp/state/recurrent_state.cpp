#include "state/recurrent_state.h"

#include <cstring>

namespace pystaged {

RecurrentState::RecurrentState(size_t state_size, size_t input_size)
    : state_size_(state_size),
      input_size_(input_size),
      inputs_(Memory::reserve(2 * RecurrentSizes::kMostPending * input_size * sizeof(float))) {}

void RecurrentState::begin(int first, int num_rows, bool is_reading) {
    first_ = is_reading ? first : 0;
    num_reading_ = is_reading ? num_rows : 0;
    if (first_ == 0) {
        drop_reading();
    }
    if (!is_reading) {
        touch(first_pending_ + first + num_rows);
    }
}

void RecurrentState::touch(int rows) {
    if (rows > touched_) {
        inputs_.commit(touched_ * input_size_ * sizeof(float), rows * input_size_ * sizeof(float));
        touched_ = rows;
    }
}

// Memory for the states that are asked for between `length` and `num_rows` later.
std::vector<RecurrentState::Kept> RecurrentState::states_to_keep(int length, int num_rows) const {
    std::vector<Kept> found;
    for (const int wanted : kept_.asked()) {
        if (wanted > length && wanted < length + num_rows) {
            found.push_back({wanted, std::make_shared<Values>(state_size_)});
        }
    }
    return found;
}

void RecurrentState::reserve(float* inputs) {
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

void RecurrentState::applied() {
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

void RecurrentState::drop_reading() {
    ahead_.reset();
    next_ahead_.reset();
    read_.clear();
}

void RecurrentState::keep(int length, const std::vector<int32_t>& path, bool was_read) {
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

void RecurrentState::release_inputs() {
    const int needed = std::max(num_unapplied_, RecurrentSizes::kFewRows);
    if (touched_ > needed) {
        inputs_.release(needed * input_size_ * sizeof(float), touched_ * input_size_ * sizeof(float));
        touched_ = needed;
    }
}

void RecurrentState::cut(int length) {
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

void RecurrentState::copy(const RecurrentState& from, int length) {
    state_ = from.state_;
    length_ = from.length_;
    kept_.set(from.kept_.all());
    cut(length);
    touch(num_unapplied_);
    std::memcpy(inputs_.data(), from.inputs_.data(), num_unapplied_ * input_size_ * sizeof(float));
}

// The applied rows, then the lengths of states that are kept.
std::vector<int32_t> RecurrentState::shape() const {
    std::vector<int32_t> shape = {length_};
    for (const Kept& kept : kept_.all()) {
        shape.push_back(kept.length);
    }
    return shape;
}

void RecurrentState::add_pieces(int, std::vector<Piece>& pieces) {
    if (length_ > 0) {
        pieces.push_back({state_->data(), state_size_ * sizeof(float)});
    }
    for (const Kept& kept : kept_.all()) {
        pieces.push_back({kept.state->data(), state_size_ * sizeof(float)});
    }
    pieces.push_back({inputs_.data(), num_unapplied_ * input_size_ * sizeof(float)});
}

bool RecurrentState::resume(int length, const std::vector<int32_t>& shape) {
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

size_t RecurrentState::num_bytes(int length) const {
    if (length == 0) {
        return 0;
    }
    const auto& kept = kept_.all();
    const bool is_kept = !kept.empty() && kept.back().state == state_;
    const size_t states = kept.size() + (is_kept ? 0 : 1) + (ahead_ ? 1 : 0);
    return (states * state_size_ + touched_ * input_size_) * sizeof(float);
}

}  // namespace pystaged
