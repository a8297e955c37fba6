// Steps of one session, each a Work in passes of its own.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "text/work.h"

namespace pystaged {

inline Outcome step(const Work& work, const std::function<void()>& interrupted = {}) {
    return std::move(run({&work}, interrupted)[0]);
}

// Evaluates and commits tokens.
inline void prefill(Session& session, const std::vector<int32_t>& tokens,
                    const std::function<void()>& interrupted = {}) {
    step(Work::read(session, tokens), interrupted);
}

// Appends pending rows, the last `num_logits` of which can be judged; -1 means all.
inline void evaluate(Session& session, const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents,
                     int num_logits = -1) {
    const int judged = num_logits == -1 ? static_cast<int>(tokens.size()) : num_logits;
    step(Work::propose(session, tokens, parents, judged, 0, {}));
}

inline Followed verify(Session& session, const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents,
                       const Sampling& sampling) {
    return step(Work::verify(session, tokens, parents, sampling)).followed;
}

}  // namespace pystaged
