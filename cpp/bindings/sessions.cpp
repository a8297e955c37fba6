#include <functional>
#include <limits>
#include <optional>
#include <variant>

#include "bindings/bindings.h"
#include "state/kept_cells.h"
#include "text/text_file.h"
#include "text/work.h"

namespace pystaged {

namespace {

using Samplings = std::variant<Sampling, std::vector<Sampling>>;

std::vector<Sampling> to_samplings(const Samplings& sampling) {
    const auto* one = std::get_if<Sampling>(&sampling);
    return one ? std::vector<Sampling>{*one} : std::get<1>(sampling);
}

// uint32[rows, words] or None.
using MaskArray = std::optional<py::array_t<uint32_t, py::array::c_style | py::array::forcecast>>;

Masks to_masks(const MaskArray& array) {
    if (!array) {
        return {};
    }
    require(array->ndim() == 2 && array->shape(1) >= 1 && array->shape(1) <= std::numeric_limits<int>::max(),
            "masks must be two-dimensional: a row of words for each that is judged");
    return {{array->data(), array->data() + array->size()}, static_cast<int>(array->shape(1))};
}

void check_count(const Session& session, const char* name, int least, int count) {
    require(count >= least && count <= session.model().numbers().vocab_rows, name, " must be between ", least,
            " and the size of the vocabulary");
}

// A property that waits for its turn without the interpreter.
template <class T>
auto waiting(T (Session::*get)()) {
    return [get](Session& self) { return without_interpreter([&] { return (self.*get)(); }); };
}

// [rows, width].
template <class T>
py::array_t<T> to_matrix(size_t rows, size_t width, const T* values) {
    return py::array_t<T>({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(width)}, values);
}

py::array to_matrix(const HiddenRows& hidden) {
    return to_matrix(hidden.rows.size(), hidden.width, hidden.values().data());
}

// The path, the tokens, and the log-probabilities where there are any: of the tokens, and of the k likeliest in place
// of each, best first.
py::tuple to_tuple(const Followed& followed) {
    const py::tuple found = py::make_tuple(to_array(followed.path), to_array(followed.tokens));
    if (followed.logprobs.empty()) {
        return found;
    }
    const auto rows = static_cast<py::ssize_t>(followed.path.size());
    const auto k = static_cast<py::ssize_t>(followed.logprobs.size()) / rows - 1;
    const py::ssize_t step = sizeof(Candidate), stride = (1 + k) * step;
    const Candidate *own = followed.logprobs.data(), *best = own + (k > 0 ? 1 : 0);
    const auto matrix = [&](const auto* first) {
        return py::array_t<std::decay_t<decltype(*first)>>({rows, k}, {stride, step}, first);
    };
    return found + py::make_tuple(py::make_tuple(py::array_t<float>({rows}, {stride}, &own->score),
                                                 matrix(&best->token), matrix(&best->score)));
}

// [rows, k] each.
py::tuple to_candidates(const Outcome& outcome, size_t num_rows, int k) {
    return py::make_tuple(to_matrix(num_rows, k, outcome.tokens.data()), to_matrix(num_rows, k, outcome.scores.data()));
}

py::object to_result(const Work& work, const Outcome& outcome) {
    if (work.kind == Work::Kind::read) {
        return work.embeds ? py::object(to_matrix(outcome.embeddings)) : py::none();
    }
    if (work.kind == Work::Kind::verify && work.k == 0) {
        return to_tuple(outcome.followed);
    }
    const py::tuple candidates = to_candidates(outcome, work.num_judged, work.k);
    return work.kind == Work::Kind::verify ? py::tuple(to_tuple(outcome.followed) + candidates) : candidates;
}

py::list run_works(const py::object& works) {
    // A tuple of our own: what it holds stays, whatever another thread does to a list.
    const py::tuple held(works);
    std::vector<const Work*> native;
    std::function<void()> interrupted;
    for (const py::handle work : held) {
        require<py::type_error>(py::isinstance<Work>(work), "run takes a sequence of Work");
        native.push_back(&work.cast<const Work&>());
        if (native.back()->kind == Work::Kind::read) {
            interrupted = check_signals;
        }
    }
    const std::vector<Outcome> outcomes = without_interpreter([&] { return run(native, interrupted); });
    py::list results;
    for (size_t i = 0; i < native.size(); ++i) {
        results.append(to_result(*native[i], outcomes[i]));
    }
    return results;
}

}  // namespace

void add_sessions(py::module_& m) {
    py::class_<HiddenRows>(m, "HiddenRows")
        .def_readonly("width", &HiddenRows::width)
        .def("__len__", [](const HiddenRows& self) { return self.rows.size(); })
        .def("__getitem__",
             [](const HiddenRows& self, const py::slice& slice) {
                 size_t start = 0, stop = 0, step = 0, length = 0;
                 require<py::error_already_set>(slice.compute(self.rows.size(), &start, &stop, &step, &length));
                 HiddenRows part{self.width, {}, self.of_draft};
                 for (size_t i = 0; i < length; ++i, start += step) {
                     part.rows.push_back(self.rows[start]);
                 }
                 return part;
             })
        .def("__add__",
             [](const HiddenRows& self, const HiddenRows& other) {
                 if (self.rows.empty() || other.rows.empty()) {
                     return self.rows.empty() ? other : self;
                 }
                 require(self.width == other.width && self.of_draft == other.of_draft,
                         "hidden rows of different models do not go together");
                 HiddenRows both = self;
                 both.rows.insert(both.rows.end(), other.rows.begin(), other.rows.end());
                 return both;
             })
        .def("copy", &HiddenRows::copied)
        .def("numpy", [](const HiddenRows& self) { return to_matrix(self); });

    py::class_<Session, std::shared_ptr<Session>>(m, "Session")
        // Not py::init of the types: where memory ends in that, pybind11 ends the process.
        .def(py::init([](std::shared_ptr<Model> model, int n_ctx, std::shared_ptr<Session> target) {
                 const py::gil_scoped_release release;
                 return std::make_shared<Session>(std::move(model), n_ctx, std::move(target));
             }),
             py::arg("model"), py::arg("n_ctx") = 0, py::arg("target") = nullptr)
        .def(
            "likeliest",
            [](Session& self, const IntsOf<kRows>& rows, const IntsOf<kBefore>& before, int k) {
                check_count(self, "k", 1, k);
                const Outcome found = without_interpreter([&] { return self.likeliest(rows, before, k); });
                return to_candidates(found, rows.size(), k);
            },
            py::arg("rows"), py::arg("before"), py::arg("k"))
        .def(
            "follow",
            [](Session& self, const Sampling& sampling, int root) {
                return to_tuple(without_interpreter([&] { return self.follow(sampling, root); }));
            },
            py::arg("sampling"), py::arg("root") = 0)
        .def(
            "commit", [](Session& self, const IntsOf<kPath>& path) { self.commit(path); }, py::arg("path"), kReleased)
        .def("discard", &Session::discard, kReleased)
        .def(
            "keep_states",
            [](Session& self, const IntsOf<kLengths>& lengths, int most, int anchor) {
                self.keep_states(lengths, most, anchor);
            },
            py::arg("lengths"), py::arg("most"), py::arg("anchor") = -1, kReleased)
        .def("reachable", &Session::reachable, py::arg("length"), kReleased)
        .def("rewind", &Session::rewind, py::arg("length"), kReleased)
        .def(
            "fork", [](Session& self, int length) { return std::shared_ptr<Session>(self.fork(length)); },
            py::arg("length"), kReleased)
        .def("stretch", &Session::stretch, py::arg("length"), kReleased)
        .def("close", &Session::close, kReleased)
        .def(
            "logits",
            [](Session& self, int row) {
                py::array_t<float> out(self.model().numbers().vocab_rows);
                float* data = out.mutable_data();
                const py::gil_scoped_release release;
                self.logits(row, data);
                return out;
            },
            py::arg("row"))
        .def_property_readonly("tokens", [](Session& self) { return to_array(waiting(&Session::tokens)(self)); })
        .def_property_readonly("hidden", waiting<HiddenRows>(&Session::hidden))
        .def(
            "hidden_of", [](Session& self, const IntsOf<kRows>& rows) { return self.hidden(rows); }, py::arg("rows"),
            kReleased)
        .def_property_readonly("num_pending", waiting(&Session::num_pending))
        .def_property_readonly("closed", waiting(&Session::closed))
        .def_property_readonly("n_ctx", &Session::context)
        .def_property_readonly("on_device", [](const Session& self) { return self.model().llama() != nullptr; })
        .def_property_readonly("num_bytes", waiting(&Session::num_bytes))
        .def_property_readonly("cell_bytes", [](const Session& self) { return self.model().cell_bytes(); })
        .def_property_readonly("windowed_cell_bytes",
                               [](const Session& self) { return self.model().windowed_cell_bytes(); })
        .def_property_readonly("most_windowed",
                               [](const Session& self) { return KeptCells::most(self.model().numbers().window); })
        .def_property_readonly("most_pending", [](const Session& self) { return self.model().most_pending(); })
        .def_property_readonly("state_bytes", [](const Session& self) { return self.model().state_bytes(); })
        .def_property_readonly("kept_state_bytes", [](const Session& self) { return self.model().kept_state_bytes(); })
        .def_property_readonly("weight_bytes", [](const Session& self) { return self.model().facts().weight_bytes; })
        .def_property_readonly("vocab_size", [](const Session& self) { return self.model().numbers().vocab_size; });

    py::class_<Work>(m, "Work")
        .def_static(
            "read",
            [](Session& session, const IntsOf<kTokens>& tokens, const HiddenRows* hidden) {
                return Work::read(session, tokens, hidden ? *hidden : HiddenRows());
            },
            py::arg("session"), py::arg("tokens"), py::arg("hidden") = py::none())
        .def_static(
            "embed",
            [](Session& session, const IntsOf<kTokens>& tokens) {
                Work work = Work::read(session, tokens);
                work.embeds = true;
                return work;
            },
            py::arg("session"), py::arg("tokens"))
        .def_static(
            "verify",
            [](Session& session, const IntsOf<kTokens>& tokens, const IntsOf<kParents>& parents,
               const Sampling& sampling, int num_candidates, const MaskArray& masks) {
                check_count(session, "num_candidates", 0, num_candidates);
                return Work::verify(session, tokens, parents, sampling, num_candidates, to_masks(masks));
            },
            py::arg("session"), py::arg("tokens"), py::arg("parents"), py::arg("sampling"),
            py::arg("num_candidates") = 0, py::arg("masks") = py::none())
        .def_static(
            "propose",
            [](Session& session, const IntsOf<kTokens>& tokens, const IntsOf<kParents>& parents, int num_judged, int k,
               const Samplings& sampling, const MaskArray& masks, const HiddenRows* hidden) {
                check_count(session, "k", 0, k);
                return Work::propose(session, tokens, parents, num_judged, k, to_samplings(sampling), to_masks(masks),
                                     hidden ? *hidden : HiddenRows());
            },
            py::arg("session"), py::arg("tokens"), py::arg("parents"), py::arg("num_judged"), py::arg("k"),
            py::arg("sampling"), py::arg("masks") = py::none(), py::arg("hidden") = py::none())
        .def_static(
            "rank",
            [](Session& session, const IntsOf<kRows>& rows, int k, const Samplings& sampling, const MaskArray& masks) {
                check_count(session, "k", 1, k);
                return Work::rank(session, rows, k, to_samplings(sampling), to_masks(masks));
            },
            py::arg("session"), py::arg("rows"), py::arg("k"), py::arg("sampling"), py::arg("masks") = py::none())
        .def_property_readonly(
            "session", [](const Work& self) { return self.session; }, py::return_value_policy::reference)
        .def_property_readonly("num_rows", [](const Work& self) { return self.tokens.size(); });
    m.def("run", &run_works, py::arg("works"));
    const auto of_sessions = [](auto act) {
        return [act](const py::object& path, const py::bytes& head, const py::object& sessions) {
            const py::tuple held(sessions);  // see run_works()
            std::vector<Session*> native;
            for (const py::handle session : held) {
                require<py::type_error>(py::isinstance<Session>(session), "sessions must be of type Session");
                native.push_back(&session.cast<Session&>());
            }
            const std::string file = to_path(path).bytes, begin = head;  // what it calls may change the list
            without_interpreter([&] { act(file, begin, native); });
        };
    };
    m.def("write_texts", of_sessions(&write_texts), py::arg("path"), py::arg("head"), py::arg("sessions"));
    m.def("read_texts", of_sessions(&read_texts), py::arg("path"), py::arg("head"), py::arg("sessions"));
}

}  // namespace pystaged
