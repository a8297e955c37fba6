#include <algorithm>

#include "bindings/bindings.h"
#include "drafting/recycled.h"

namespace pystaged {

namespace {

using Longs = py::array_t<int64_t, py::array::c_style>;

// The keys, candidates and chances of those that are not free.
py::tuple to_arrays(const std::vector<RecycledCandidates::Entry>& slots) {
    const py::ssize_t n = std::ranges::count_if(slots, [](const auto& entry) { return entry.key >= 0; });
    constexpr py::ssize_t kept = RecycledCandidates::num_candidates;
    py::array_t<int64_t> keys(n);
    py::array_t<int32_t> tokens({n, kept});
    py::array_t<float> chances({n, kept});
    py::ssize_t i = 0;
    for (const RecycledCandidates::Entry& entry : slots) {
        if (entry.key >= 0) {
            keys.mutable_at(i) = entry.key;
            std::copy(entry.tokens.begin(), entry.tokens.end(), tokens.mutable_data(i, 0));
            std::copy(entry.chances.begin(), entry.chances.end(), chances.mutable_data(i, 0));
            ++i;
        }
    }
    return py::make_tuple(keys, tokens, chances);
}

}  // namespace

void add_drafting(py::module_& m) {
    py::class_<RecycledCandidates>(m, "RecycledCandidates")
        .def(py::init<size_t>(), py::arg("slots") = 1 << 16)
        .def_property_readonly_static("num_candidates",
                                      [](const py::object&) { return RecycledCandidates::num_candidates; })
        .def_property_readonly("num_learnt", &RecycledCandidates::num_learnt)
        .def(
            "learn",
            [](RecycledCandidates& self, const Ints& before, const Ints& tokens, const Ints& candidates,
               const Floats& logits) {
                require(before.ndim() == 1 && tokens.ndim() == 1 && before.size() == tokens.size() &&
                            candidates.ndim() == 2 && logits.ndim() == 2 && candidates.shape(0) == tokens.size() &&
                            logits.shape(0) == tokens.size() && logits.shape(1) == candidates.shape(1),
                        "there must be a token before, a token, candidates and logits of each row");
                self.learn(static_cast<size_t>(tokens.size()), before.data(), tokens.data(),
                           static_cast<int>(candidates.shape(1)), candidates.data(), logits.data());
            },
            py::arg("before"), py::arg("tokens"), py::arg("candidates"), py::arg("logits"))
        .def(
            "chances",
            [](const RecycledCandidates& self, int32_t before, int32_t token) {
                const RecycledCandidates::Known known = self.chances(before, token);
                py::dict chances;
                for (const auto& [candidate, chance] : known.chances) {
                    chances[py::int_(candidate)] = chance;
                }
                return py::make_tuple(chances, known.num_tokens);
            },
            py::arg("before"), py::arg("token"))
        .def(
            "copy_from", [](RecycledCandidates& self, const RecycledCandidates& other) { self = other; },
            py::arg("other"))
        .def("entries", [](const RecycledCandidates& self) { return to_arrays(self.slots()); })
        .def(
            "restore",
            [](RecycledCandidates& self, const Longs& keys, const Ints& candidates, const Floats& chances) {
                constexpr int kept = RecycledCandidates::num_candidates;
                require(keys.ndim() == 1 && candidates.ndim() == 2 && chances.ndim() == 2 &&
                            candidates.shape(0) == keys.size() && chances.shape(0) == keys.size() &&
                            candidates.shape(1) == kept && chances.shape(1) == kept,
                        "there must be a key, candidates and chances of each entry");
                std::vector<RecycledCandidates::Entry> entries(keys.size());
                for (py::ssize_t i = 0; i < keys.size(); ++i) {
                    entries[i].key = keys.at(i);
                    std::copy_n(candidates.data(i, 0), kept, entries[i].tokens.begin());
                    std::copy_n(chances.data(i, 0), kept, entries[i].chances.begin());
                }
                self.restore(std::move(entries));
            },
            py::arg("keys"), py::arg("candidates"), py::arg("chances"));
}

}  // namespace pystaged
