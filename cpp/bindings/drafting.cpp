#include "bindings/bindings.h"
#include "drafting/recycled.h"

namespace pystaged {

void add_drafting(py::module_& m) {
    using Entry = RecycledCandidates::Entry;
    using Entries = py::array_t<Entry, py::array::c_style>;
    PYBIND11_NUMPY_DTYPE(Entry, key, tokens, chances);
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
        .def("entries",
             [](const RecycledCandidates& self) {
                 std::vector<Entry> entries = self.slots();
                 std::erase_if(entries, [](const Entry& entry) { return entry.key < 0; });
                 return Entries(static_cast<py::ssize_t>(entries.size()), entries.data());
             })
        .def(
            "restore",
            [](RecycledCandidates& self, const Entries& entries) {
                self.restore({entries.data(), entries.data() + entries.size()});
            },
            py::arg("entries").noconvert());
}

}  // namespace pystaged
