// What a text asks of a pass: to read a piece of its prompt, to verify a tree, to grow one. Several texts share a pass.
// This is the only way to evaluate rows.
#pragma once

#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "text/session.h"

namespace pystaged {

struct Work {
    enum class Kind {
        read,     // evaluates and commits tokens
        verify,   // evaluates a tree whose first row is its root, follows it from there and commits the path
        propose,  // appends pending rows, and finds the likeliest tokens after those that are judged
        rank,     // finds them after rows that are pending already
    };

    Kind kind = Kind::read;
    Session* session = nullptr;
    std::vector<int32_t> tokens, parents;  // parents[i]: the pending row before, or -1 for the last committed token
    int num_judged = 0;                    // how many of the last rows get logits, see Model::tap(): of verify all, of
                                           // rank those in `rows`
    int k = 0;                             // candidates after each judged row, perhaps none
    std::vector<Sampling> samplings;       // one, or of propose and rank one for each judged row
    Masks masks;                           // none, or one for each row of verify, or judged row of propose and rank
    // For each token another model's, where the session's reads them. Of a draft that reads them beside tokens, its
    // target's or those of its own rows before; of one that reads them as context, its target's with tokens that are
    // read, and none with a block that is proposed.
    HiddenRows hidden;
    bool embeds = false;          // of read: whether its result has each row as the head would read it
    std::vector<int32_t> rows{};  // of rank: the pending rows to judge
    // Keeps the session, if it is shared; not py::keep_alive, which ends the process where arguments are wrong.
    std::shared_ptr<Session> held = session->weak_from_this().lock();

    static Work read(Session& session, std::vector<int32_t> tokens, HiddenRows hidden = {}) {
        std::vector<int32_t> parents(tokens.size());
        std::iota(parents.begin(), parents.end(), -1);
        const int judged = session.model().taps_last_row() && !tokens.empty() ? 1 : 0;
        return {Kind::read, &session, std::move(tokens), std::move(parents), judged, 0, {}, {}, std::move(hidden)};
    }
    static Work verify(Session& session, std::vector<int32_t> tokens, std::vector<int32_t> parents,
                       const Sampling& sampling, int num_candidates = 0, Masks masks = {}) {
        const int n = static_cast<int>(tokens.size());
        return {Kind::verify,     &session, std::move(tokens), std::move(parents), n, num_candidates, {sampling},
                std::move(masks), {}};
    }
    static Work propose(Session& session, std::vector<int32_t> tokens, std::vector<int32_t> parents, int num_judged,
                        int k, std::vector<Sampling> samplings, Masks masks = {}, HiddenRows hidden = {}) {
        return {Kind::propose,        &session,         std::move(tokens), std::move(parents), num_judged, k,
                std::move(samplings), std::move(masks), std::move(hidden)};
    }
    static Work rank(Session& session, std::vector<int32_t> rows, int k, std::vector<Sampling> samplings,
                     Masks masks = {}) {
        Work work = propose(session, {}, {}, static_cast<int>(rows.size()), k, std::move(samplings), std::move(masks));
        work.kind = Kind::rank;
        work.rows = std::move(rows);
        return work;
    }
};

// Does all works in one pass, or in several where their rows are more than it takes or the backend does not mix texts.
// They are of sessions of one model, none of which comes twice. All or none: whatever fails leaves every session as it
// was, and so does what `interrupted` throws, which is called now and then.
std::vector<Outcome> run(const std::vector<const Work*>& works, const std::function<void()>& interrupted = {});

}  // namespace pystaged
