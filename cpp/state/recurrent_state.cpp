#include "state/recurrent_state.h"

#include <algorithm>
#include <cstring>

namespace pystaged {

RecurrentState::RecurrentState(size_t state_size, size_t input_size)
    : state_size_(state_size), input_size_(input_size), inputs_(2 * kMostPending * input_size * sizeof(float)) {
    kept_.reserve(kMostKept + 1);
}

void RecurrentState::reserve() {
    stops_.clear();
    before_.reset();
    if (!state_) {
        state_ = std::make_shared<Values>(state_size_);
    }
    next_ = num_unapplied_ > 0 && state_.use_count() > 1 ? std::make_shared<Values>(state_size_) : state_;
    if (num_unapplied_ > kBeforeEnd && length_ + num_unapplied_ == read_to_) {
        before_ = std::make_shared<Values>(state_size_);
        stops_.push_back({num_unapplied_ - kBeforeEnd, before_->data()});
    }
    if (num_unapplied_ > 0) {
        stops_.push_back({num_unapplied_, next_->data()});
    }
}

void RecurrentState::applied() {
    state_ = std::move(next_);
    length_ += num_unapplied_;
    num_unapplied_ = 0;
    if (before_) {
        keep_state(length_ - kBeforeEnd, before_);
        before_.reset();
    }
    if (length_ == read_to_ && length_ > 0) {
        keep_state(length_, state_);
    }
}

// Where there are too many, that one goes which is nearest to the one before it, as seen from the end: so they lie the
// closer the nearer the end is.
void RecurrentState::keep_state(int length, const std::shared_ptr<Values>& state) {
    if (!kept_.empty() && kept_.back().length >= length) {
        return;
    }
    kept_.push_back({length, state});
    if (kept_.size() <= kMostKept) {
        return;
    }
    const auto gap = [&](size_t i) {
        const int before = i == 0 ? 0 : kept_[i - 1].length;
        return double(kept_[i].length - before) / (length - before);
    };
    size_t least = 0;
    for (size_t i = 1; i + 1 < kept_.size(); ++i) {
        least = gap(i) < gap(least) ? i : least;
    }
    kept_.erase(kept_.begin() + least);
}

void RecurrentState::keep(int length, const std::vector<int32_t>& path, bool was_read) {
    // Inputs only move towards the front, so going along the path never overwrites those that are still to move.
    for (const int32_t row : path) {
        if (first_pending_ + row != num_unapplied_) {
            std::memmove(input(num_unapplied_), pending(row), input_size_ * sizeof(float));
        }
        ++num_unapplied_;
    }
    first_pending_ = num_unapplied_;
    if (was_read) {
        read_to_ = length + static_cast<int>(path.size());
    }
    release_inputs();
}

void RecurrentState::release_inputs() {
    const int needed = std::max(num_unapplied_, kFewRows);
    if (touched_ > needed) {
        inputs_.release(needed * input_size_ * sizeof(float), inputs_.size());
        touched_ = needed;
    }
}

int RecurrentState::reachable(int length) const {
    if (length >= length_) {
        return length;
    }
    int found = 0;
    for (const Kept& kept : kept_) {
        found = kept.length <= length ? kept.length : found;
    }
    return found;
}

void RecurrentState::cut(int length) {
    while (!kept_.empty() && kept_.back().length > length) {
        kept_.pop_back();
    }
    next_.reset();
    before_.reset();
    if (length >= length_) {
        num_unapplied_ = length - length_;
    } else {
        state_ = length > 0 ? kept_.back().state : nullptr;
        length_ = length;
        num_unapplied_ = 0;
    }
    first_pending_ = num_unapplied_;
    read_to_ = std::min(read_to_, length);
    release_inputs();
}

void RecurrentState::copy(const RecurrentState& from, int length) {
    state_ = from.state_;
    length_ = from.length_;
    kept_ = from.kept_;
    kept_.reserve(kMostKept + 1);
    read_to_ = from.read_to_;
    cut(length);
    touch(0);
    std::memcpy(inputs_.data(), from.inputs_.data(), num_unapplied_ * input_size_ * sizeof(float));
}

void RecurrentState::stretch(int length, int longer) {
    length_ += longer - length;
}

size_t RecurrentState::num_bytes(int length) const {
    const size_t states = (length > 0 ? 1 : 0) + kept_.size(), rows = length > 0 ? touched_ : 0;
    return (states * state_size_ + rows * input_size_) * sizeof(float);
}

}  // namespace pystaged
