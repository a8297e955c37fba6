// The Python face of the engine: conversions, the GIL, and errors; no logic.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <variant>

#include "draft_head.h"
#include "error.h"
#include "memory.h"
#include "recycled.h"
#include "session.h"
#include "thread_pool.h"
#include "tokenizer.h"
#include "work.h"

namespace py = pybind11;
using namespace pystaged;

namespace {

// Integers only: a float array would be truncated silently by a plain cast.
std::vector<int32_t> to_ints(const py::object& values, const char* name) {
    std::optional<py::array> array;
    try {
        array = py::array(values);
    } catch (py::error_already_set& error) {
        // Ctrl-C comes here too, and must not be taken for a wrong argument.
        if (!error.matches(PyExc_Exception)) {
            throw;
        }
    }
    const char kind = array && array->size() > 0 ? array->dtype().kind() : 'i';
    if (!array || array->ndim() != 1 || (kind != 'i' && kind != 'u')) {
        throw py::type_error(std::string(name) + " must be a one-dimensional array or list of integers");
    }
    if (kind == 'u' && array->attr("max")().cast<uint64_t>() > INT32_MAX) {
        throw py::value_error(std::string(name) + " holds a number that is out of range");
    }
    const py::array_t<int64_t, py::array::c_style | py::array::forcecast> wide(*array);
    std::vector<int32_t> result(wide.size());
    for (py::ssize_t i = 0; i < wide.size(); ++i) {
        const int64_t value = wide.data()[i];
        if (value < INT32_MIN || value > INT32_MAX) {
            throw py::value_error(std::string(name) + " holds " + std::to_string(value) + ", which is out of range");
        }
        result[i] = static_cast<int32_t>(value);
    }
    return result;
}

LogitRules make_rules(std::vector<std::pair<int32_t, float>> bias, std::vector<int32_t> end_tokens, int64_t min_length,
                      float repeat_penalty, float presence_penalty, float frequency_penalty, int repeat_last_n,
                      float dry_multiplier, float dry_base, int dry_allowed_length, int dry_last_n,
                      const std::vector<std::vector<int32_t>>& dry_breakers) {
    LogitRules rules{std::move(bias),  std::move(end_tokens), min_length,    repeat_penalty,
                     presence_penalty, frequency_penalty,     repeat_last_n, dry_multiplier,
                     dry_base,         dry_allowed_length,    dry_last_n,    {}};
    for (const std::vector<int32_t>& breaker : dry_breakers) {
        if (breaker.empty()) {
            throw py::value_error("a breaker of dry_breakers has no tokens");
        }
        rules.dry_breakers.emplace(breaker[0], std::vector<int32_t>(breaker.begin() + 1, breaker.end()));
    }
    check(rules);
    return rules;
}

std::vector<std::vector<int32_t>> breakers_of(const LogitRules& rules) {
    std::vector<std::vector<int32_t>> breakers;
    for (const auto& [first, rest] : rules.dry_breakers) {
        breakers.push_back({first});
        breakers.back().insert(breakers.back().end(), rest.begin(), rest.end());
    }
    return breakers;
}

Sampling make_sampling(float temperature, int top_k, float top_p, float min_p, uint64_t seed, float typical_p,
                       float xtc_probability, float xtc_threshold, bool temperature_last, int logprobs,
                       std::shared_ptr<LogitRules> rules) {
    const Sampling sampling{
        temperature,      top_k,   top_p, min_p, seed, typical_p, xtc_probability, xtc_threshold, temperature_last,
        std::move(rules), logprobs};
    check(sampling);
    return sampling;
}

using Samplings = std::variant<Sampling, std::vector<Sampling>>;

std::vector<Sampling> to_samplings(const Samplings& sampling) {
    const auto* one = std::get_if<Sampling>(&sampling);
    return one ? std::vector<Sampling>{*one} : std::get<1>(sampling);
}

using Ints = py::array_t<int32_t, py::array::c_style>;
using Longs = py::array_t<int64_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
// uint32[rows, words] or None.
using MaskArray = std::optional<py::array_t<uint32_t, py::array::c_style | py::array::forcecast>>;

Masks to_masks(const MaskArray& array) {
    if (!array) {
        return {};
    }
    if (array->ndim() != 2 || array->shape(1) < 1 || array->shape(1) > std::numeric_limits<int>::max()) {
        throw py::value_error("masks must be two-dimensional: a row of words for each that is judged");
    }
    return {{array->data(), array->data() + array->size()}, static_cast<int>(array->shape(1))};
}

void check_k(const Session& session, int k) {
    if (k < 1 || k > session.model().numbers().vocab_size) {
        throw py::value_error("k must be between 1 and the size of the vocabulary");
    }
}

void check_num_candidates(const Session& session, int num_candidates) {
    if (num_candidates < 0 || num_candidates > session.model().numbers().vocab_size) {
        throw py::value_error("num_candidates must be between 0 and the size of the vocabulary");
    }
}

// The keys, candidates and chances of those that are not free.
py::tuple to_arrays(const std::vector<RecycledCandidates::Entry>& slots) {
    const auto n = static_cast<py::ssize_t>(
        std::count_if(slots.begin(), slots.end(), [](const auto& entry) { return entry.key >= 0; }));
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

py::array_t<int32_t> to_array(const std::vector<int32_t>& values) {
    return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

// The path, the tokens, and the log-probabilities where there are any: of the tokens, and of the k likeliest in place
// of each, best first.
py::tuple to_tuple(const Followed& followed) {
    const py::tuple found = py::make_tuple(to_array(followed.path), to_array(followed.tokens));
    if (followed.logprobs.empty()) {
        return found;
    }
    const auto rows = static_cast<py::ssize_t>(followed.logprobs.size());
    const auto k = static_cast<py::ssize_t>(followed.logprobs[0].size()) - 1;
    py::array_t<float> of_tokens(rows), of_best({rows, k});
    py::array_t<int32_t> best({rows, k});
    for (py::ssize_t i = 0; i < rows; ++i) {
        const std::vector<Candidate>& row = followed.logprobs[i];
        of_tokens.mutable_at(i) = row[0].score;
        for (py::ssize_t j = 0; j < k; ++j) {
            best.mutable_at(i, j) = row[j + 1].token;
            of_best.mutable_at(i, j) = row[j + 1].score;
        }
    }
    return found + py::make_tuple(py::make_tuple(of_tokens, best, of_best));
}

// Text from a file, which may be no valid UTF-8.
py::str to_text(const std::string& bytes) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

py::dict to_dict(const std::vector<std::pair<std::string, std::string>>& texts) {
    py::dict result;
    for (const auto& [key, value] : texts) {
        result[to_text(key)] = to_text(value);
    }
    return result;
}

KvType to_kv_type(const std::string& name) {
    if (name != "f16" && name != "q8_0") {
        throw py::value_error("keys and values are stored as f16 or q8_0, not " + name);
    }
    return name == "f16" ? KvType::f16 : KvType::q8_0;
}

// A path as the system spells it: str, as Python decodes file names, bytes, or os.PathLike.
std::string to_path(const py::object& path) {
    const std::string bytes = py::module_::import("os").attr("fsencode")(path).cast<py::bytes>();
    if (bytes.find('\0') != std::string::npos) {
        throw py::value_error("the path holds a null character");
    }
    return bytes;
}

void check_signals() {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
    }
}

py::tuple to_candidates(const Outcome& outcome, size_t num_rows, int k) {
    const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(num_rows), k};
    return py::make_tuple(py::array_t<int32_t>(shape, outcome.tokens.data()),
                          py::array_t<float>(shape, outcome.scores.data()));
}

py::tuple to_verified(const Outcome& outcome, size_t num_rows, int num_candidates) {
    const py::tuple followed = to_tuple(outcome.followed);
    return num_candidates == 0 ? followed : py::tuple(followed + to_candidates(outcome, num_rows, num_candidates));
}

py::object to_result(const Work& work, const Outcome& outcome) {
    switch (work.kind) {
        case Work::Kind::read: return py::none();
        case Work::Kind::verify: return to_verified(outcome, work.tokens.size(), work.k);
        case Work::Kind::propose: break;
    }
    return to_candidates(outcome, work.num_judged, work.k);
}

py::list run_works(const py::object& works) {
    // A tuple of our own: what it holds stays, whatever another thread does to a list.
    const py::tuple held(works);
    std::vector<const Work*> native;
    std::function<void()> interrupted;
    for (const py::handle work : held) {
        if (!py::isinstance<Work>(work)) {
            throw py::type_error("run takes a sequence of Work");
        }
        native.push_back(&work.cast<const Work&>());
        if (native.back()->kind == Work::Kind::read) {
            interrupted = check_signals;
        }
    }
    std::vector<Outcome> outcomes;
    {
        const py::gil_scoped_release release;
        outcomes = run(native, interrupted);
    }
    py::list results;
    for (size_t i = 0; i < native.size(); ++i) {
        results.append(to_result(*native[i], outcomes[i]));
    }
    return results;
}

py::array_t<float> multiply(const std::string& type, const py::bytes& weights, int rows,
                            const py::array_t<float, py::array::c_style | py::array::forcecast>& x,
                            const std::string& kernel_name, int num_threads) {
    if (x.ndim() != 2 || rows < 1 || x.shape(1) < 1) {
        throw py::value_error("x must have shape [n, cols] and there must be at least one output");
    }
    if (num_threads < 1 || num_threads > ThreadPool::kMaxThreads) {
        throw py::value_error("num_threads must be between 1 and " + std::to_string(ThreadPool::kMaxThreads));
    }
    const FloatEnvironment pinned;
    const Kernel& kernel = find_kernel(kernel_name);
    ggml_type ggml = GGML_TYPE_COUNT;
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        if (ggml_type_name(static_cast<ggml_type>(t)) && type == ggml_type_name(static_cast<ggml_type>(t))) {
            ggml = static_cast<ggml_type>(t);
        }
    }
    if (ggml == GGML_TYPE_COUNT || ggml_blck_size(ggml) == 0) {
        throw py::value_error("'" + type + "' is no ggml type");
    }
    const int n = static_cast<int>(x.shape(0)), cols = static_cast<int>(x.shape(1));
    const std::string_view bytes = weights;
    if (cols % ggml_blck_size(ggml) != 0 || bytes.size() != ggml_row_size(ggml, cols) * rows) {
        throw py::value_error("the weights' size does not match their shape and type");
    }
    Memory storage(PackedMatrix::packed_bytes(ggml, rows, cols));
    const PackedMatrix matrix(ggml, rows, cols, reinterpret_cast<const uint8_t*>(bytes.data()), storage.data(),
                              num_threads);
    const int width = matrix.padded_cols();
    std::vector<float> values(size_t(n) * width);
    std::vector<int8_t> quants(values.size());
    std::vector<BlockFactors> factors(values.size() / kBlock);
    const QuantizedRows quantized{n, matrix.packing(), quants.data(), factors.data()};
    for (int i = 0; i < n; ++i) {
        std::copy_n(x.data() + size_t(i) * cols, cols, values.data() + size_t(i) * width);
        kernel.quantize(values.data() + size_t(i) * width, width, i, quantized);
    }
    std::vector<float> out(size_t(n) * matrix.padded_rows());
    Epilogue epilogue;
    epilogue.out = out.data();
    epilogue.stride = matrix.padded_rows();
    matrix.multiply(kernel, {n, width, values.data(), quantized}, epilogue, nullptr, num_threads);
    py::array_t<float> result({n, rows});
    for (int i = 0; i < n; ++i) {
        std::copy_n(out.data() + size_t(i) * matrix.padded_rows(), rows, result.mutable_data() + size_t(i) * rows);
    }
    return result;
}

double read_bandwidth(size_t bytes, int num_threads) {
    const py::gil_scoped_release release;
    const Memory memory(bytes, /*huge=*/true);
    constexpr size_t kChunk = 1 << 18;
    const int chunks = static_cast<int>(bytes / kChunk);
    std::vector<uint64_t> sums(chunks);
    const Kernel& kernel = find_kernel("");
    std::vector<double> rates;
    for (int repeat = 0; repeat < 8; ++repeat) {
        // The first round writes, because untouched memory is one page of zeros.
        const auto start = std::chrono::steady_clock::now();
        ThreadPool::shared().run(chunks, num_threads, [&](int i, int) {
            uint8_t* chunk = memory.data() + i * kChunk;
            if (repeat == 0) {
                std::fill_n(chunk, kChunk, static_cast<uint8_t>(i));
            } else {
                sums[i] += kernel.read(chunk, kChunk);
            }
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        if (repeat > 0) {
            rates.push_back(static_cast<double>(chunks) * kChunk / seconds.count());
        }
    }
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
}

double dot_rate(const std::string& kernel_name, int num_threads) {
    const py::gil_scoped_release release;
    const Kernel& kernel = find_kernel(kernel_name);
    constexpr int kRounds = 50000;
    double best = 0;
    for (int repeat = 0; repeat < 50; ++repeat) {
        std::atomic<uint64_t> count{0};
        const auto start = std::chrono::steady_clock::now();
        ThreadPool::shared().run(num_threads, num_threads, [&](int, int) { count += kernel.dots(kRounds); });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(count) / seconds.count());
    }
    return best;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    // Loads numpy now. In the first call that needs it, a signal handler that needs it too would wait for ever.
    py::dtype::of<float>();
    m.doc() = "The compiled engine behind pystaged; see _core.pyi.";
    static const py::handle model_error = py::exception<ModelError>(m, "ModelError", PyExc_OSError).release();
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ModelError& error) {
            // The message may quote a damaged file.
            PyErr_SetObject(model_error.ptr(), to_text(error.what()).ptr());
        }
    });
    py::register_exception<DeviceError>(m, "DeviceError", PyExc_OSError);
    py::register_exception<ContextFullError>(m, "ContextFullError", PyExc_ValueError);

    m.def("kernels", [] {
        std::vector<std::string> names;
        for (const Kernel* kernel : available_kernels()) {
            names.push_back(kernel->name);
        }
        return names;
    });
    m.def(
        "metadata", [](const py::object& path) { return to_dict(GgufFile(to_path(path)).spelled()); }, py::arg("path"));
    m.def("physical_cores", &physical_cores);
    m.def("cpu_quota", [](const py::object& root) { return cpu_quota(to_path(root)); }, py::arg("root") = "");
    m.def("devices", [] {
        py::list result;
        for (const DeviceInfo& info : list_devices()) {
            result.append(
                py::make_tuple(info.name, to_text(info.description), info.gpu, info.free_bytes, info.total_bytes));
        }
        return result;
    });
    m.def("rpc_version", &rpc_version);
    m.def("serve_devices", &serve_devices, py::arg("endpoint"), py::arg("device"), py::arg("num_threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("gumbel", py::vectorize(&gumbel), py::arg("seed"), py::arg("position"), py::arg("token"));
    m.def(
        "rotation",
        [](int position, int dims, float base) {
            Rope rope;
            rope.dims = dims;
            rope.base = base;
            py::array_t<float> cosines(dims / 2), sines(dims / 2);
            rotation(rope.frequencies({}), rope.amplitude(), position, cosines.mutable_data(), sines.mutable_data());
            return py::make_tuple(cosines, sines);
        },
        py::arg("position"), py::arg("dims"), py::arg("base") = 10000.0f);
    m.def("multiply", &multiply, py::arg("type"), py::arg("weights"), py::arg("rows"), py::arg("x"),
          py::arg("kernel") = "", py::arg("num_threads") = 1);
    m.def("read_bandwidth", &read_bandwidth, py::arg("num_bytes"), py::arg("num_threads"));
    m.def("dot_rate", &dot_rate, py::arg("kernel"), py::arg("num_threads"));

    py::class_<LogitRules, std::shared_ptr<LogitRules>>(m, "LogitRules")
        .def(py::init(&make_rules), py::kw_only(), py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>(),
             py::arg("end_tokens") = std::vector<int32_t>(), py::arg("min_length") = 0,
             py::arg("repeat_penalty") = 1.0f, py::arg("presence_penalty") = 0.0f, py::arg("frequency_penalty") = 0.0f,
             py::arg("repeat_last_n") = 64, py::arg("dry_multiplier") = 0.0f, py::arg("dry_base") = 1.75f,
             py::arg("dry_allowed_length") = 2, py::arg("dry_penalty_last_n") = -1,
             py::arg("dry_breakers") = std::vector<std::vector<int32_t>>())
        .def(py::pickle(
            [](const LogitRules& r) {
                return py::make_tuple(r.bias, r.end_tokens, r.min_length, r.repeat_penalty, r.presence_penalty,
                                      r.frequency_penalty, r.repeat_last_n, r.dry_multiplier, r.dry_base,
                                      r.dry_allowed_length, r.dry_last_n, breakers_of(r));
            },
            [](const py::tuple& r) {
                return make_rules(r[0].cast<std::vector<std::pair<int32_t, float>>>(),
                                  r[1].cast<std::vector<int32_t>>(), r[2].cast<int64_t>(), r[3].cast<float>(),
                                  r[4].cast<float>(), r[5].cast<float>(), r[6].cast<int>(), r[7].cast<float>(),
                                  r[8].cast<float>(), r[9].cast<int>(), r[10].cast<int>(),
                                  r[11].cast<std::vector<std::vector<int32_t>>>());
            }));

    py::class_<Sampling>(m, "Sampling")
        .def(py::init(&make_sampling), py::arg("temperature") = 0.0f, py::arg("top_k") = 0, py::arg("top_p") = 1.0f,
             py::arg("min_p") = 0.0f, py::arg("seed") = 0, py::kw_only(), py::arg("typical_p") = 1.0f,
             py::arg("xtc_probability") = 0.0f, py::arg("xtc_threshold") = 0.1f, py::arg("temperature_last") = false,
             py::arg("logprobs") = -1, py::arg("rules") = std::shared_ptr<LogitRules>())
        .def(py::pickle(
            [](const Sampling& s) {
                return py::make_tuple(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.typical_p, s.xtc_probability,
                                      s.xtc_threshold, s.temperature_last, s.logprobs,
                                      std::const_pointer_cast<LogitRules>(s.rules));
            },
            [](const py::tuple& s) {
                return make_sampling(s[0].cast<float>(), s[1].cast<int>(), s[2].cast<float>(), s[3].cast<float>(),
                                     s[4].cast<uint64_t>(), s[5].cast<float>(), s[6].cast<float>(), s[7].cast<float>(),
                                     s[8].cast<bool>(), s[9].cast<int>(), s[10].cast<std::shared_ptr<LogitRules>>());
            }));

    py::class_<Tokenizer>(m, "Tokenizer")
        .def(py::init([](const py::object& path) {
                 const std::string bytes = to_path(path);
                 const py::gil_scoped_release release;
                 return std::make_unique<Tokenizer>(bytes);
             }),
             py::arg("path"))
        .def_property_readonly("num_tokens", &Tokenizer::num_tokens)
        .def_property_readonly("metadata", [](const Tokenizer& self) { return to_dict(self.metadata()); })
        .def(
            "encode",
            [](const Tokenizer& self, const py::str& text, bool add_special, bool parse_special) {
                // By Python's own encoder, whose error says what is wrong.
                const std::string bytes = text.attr("encode")("utf-8").cast<py::bytes>();
                std::vector<int32_t> tokens;
                {
                    const py::gil_scoped_release release;
                    tokens = self.encode(bytes, add_special, parse_special, check_signals);
                }
                return to_array(tokens);
            },
            py::arg("text"), py::arg("add_special") = true, py::arg("parse_special") = true)
        .def(
            "token_bytes",
            [](const Tokenizer& self, int32_t token, bool special) {
                return py::bytes(self.token_bytes(token, special));
            },
            py::arg("token"), py::arg("special") = false)
        .def(
            "decode",
            [](const Tokenizer& self, const py::object& tokens, bool special) {
                return to_text(self.decode(to_ints(tokens, "tokens"), special));
            },
            py::arg("tokens"), py::arg("special") = false)
        .def(
            "sequences_of",
            [](const Tokenizer& self, const py::str& text) {
                const std::string bytes = text.attr("encode")("utf-8").cast<py::bytes>();
                if (bytes.empty()) {
                    throw py::value_error("the text is empty");
                }
                const py::gil_scoped_release release;
                return self.sequences_of(bytes);
            },
            py::arg("text"))
        .def(
            "token_text", [](const Tokenizer& self, int32_t token) { return to_text(self.token_text(token)); },
            py::arg("token"))
        .def("is_control", &Tokenizer::is_control, py::arg("token"))
        .def_property_readonly("adds_bos", &Tokenizer::adds_bos)
        .def_property_readonly("adds_eos", &Tokenizer::adds_eos)
        .def_property_readonly("bos", &Tokenizer::bos)
        .def_property_readonly("eos", &Tokenizer::eos)
        .def_property_readonly("end_tokens",
                               [](const Tokenizer& self) {
                                   std::vector<int32_t> tokens;
                                   for (int32_t token = 0; token < self.num_tokens(); ++token) {
                                       if (self.is_end(token)) {
                                           tokens.push_back(token);
                                       }
                                   }
                                   return to_array(tokens);
                               })
        .def(
            "shared_with",
            [](const Tokenizer& self, const Tokenizer& other) {
                const std::vector<bool> shared = self.shared_with(other);
                py::array_t<bool> result(static_cast<py::ssize_t>(shared.size()));
                std::copy(shared.begin(), shared.end(), result.mutable_data());
                return result;
            },
            py::arg("other"))
        .def("is_end", &Tokenizer::is_end, py::arg("token"))
        .def("first_difference", &Tokenizer::first_difference, py::arg("other"))
        .def_property_readonly("fingerprint", &Tokenizer::fingerprint);

    py::class_<Model, std::shared_ptr<Model>>(m, "Model")
        .def(py::init([](const py::object& path, const std::string& kernel, int num_threads, const std::string& device,
                         const std::function<void()>& progress, const std::string& kv, const py::object& packed) {
                 const std::string bytes = to_path(path), packed_bytes = to_path(packed);
                 const KvType type = to_kv_type(kv);
                 const py::gil_scoped_release release;
                 return std::make_shared<Model>(bytes, kernel, num_threads,
                                                device == "cpu" ? Devices() : find_devices(device), progress, type,
                                                packed_bytes);
             }),
             py::arg("path"), py::arg("kernel") = "", py::arg("num_threads") = 0, py::arg("device") = "cpu",
             py::arg("progress") = std::function<void()>(), py::arg("kv") = "f16", py::arg("packed") = "")
        .def("tap", &Model::tap, py::arg("layers"))
        .def_property_readonly("matrix_bytes", &Model::matrix_bytes)
        .def_property_readonly("buffer_bytes", &Model::buffer_bytes)
        .def_property_readonly("is_mapped", &Model::is_mapped)
        .def_property_readonly("packed_problem", [](const Model& self) { return to_text(self.packed_problem()); })
        .def(
            "save_packed",
            [](const Model& self, const py::object& path) {
                const std::string bytes = to_path(path);
                const py::gil_scoped_release release;
                self.save_packed(bytes, check_signals);
            },
            py::arg("path"))
        .def_property_readonly("devices",
                               [](const Model& self) {
                                   std::vector<std::string> names;
                                   const DeviceMemory* memory = self.device_memory();
                                   for (int i = 0; memory && i < memory->num_devices(); ++i) {
                                       names.push_back(ggml_backend_dev_name(memory->devices()[i]));
                                   }
                                   return names;
                               })
        .def_property_readonly("name", [](const Model& self) { return to_text(self.name()); })
        .def_property_readonly("kernel", [](const Model& self) { return self.kernel().name; })
        .def_property_readonly("num_threads", &Model::num_threads)
        .def_property_readonly("taps", &Model::taps)
        .def_property_readonly("kv", [](const Model& self) { return self.kv_type() == KvType::f16 ? "f16" : "q8_0"; })
        .def_property_readonly("file_bytes", &Model::file_bytes)
        .def_property_readonly("weight_bytes", &Model::weight_bytes)
        .def_property_readonly("num_weights", &Model::num_weights)
        .def_property_readonly("weight_types",
                               [](const Model& self) {
                                   py::dict types;
                                   for (const auto& [type, bytes] : self.weight_types()) {
                                       types[py::str(type)] = bytes;
                                   }
                                   return types;
                               })
        .def_property_readonly("vocab_size", [](const Model& self) { return self.numbers().vocab_size; })
        .def_property_readonly("max_context", [](const Model& self) { return self.numbers().max_context; })
        .def_property_readonly("width", [](const Model& self) { return self.numbers().width; })
        .def_property_readonly("num_layers", [](const Model& self) { return self.numbers().num_layers; })
        .def_property_readonly("num_heads", [](const Model& self) { return self.numbers().num_heads; })
        .def_property_readonly("num_kv_heads", [](const Model& self) { return self.numbers().num_kv_heads; })
        .def_property_readonly("head_dim", [](const Model& self) { return self.numbers().head_dim; })
        .def_property_readonly("ffn_width", [](const Model& self) { return self.numbers().ffn_width; })
        .def_property_readonly("cell_bytes", &Model::cell_bytes)
        .def_property_readonly("windowed_cell_bytes", &Model::windowed_cell_bytes)
        .def_property_readonly("architecture", [](const Model& self) { return self.family().name; });

    py::class_<DraftHead>(m, "DraftHead")
        .def(py::init([](const py::object& path, const std::string& kernel) {
                 const std::string bytes = to_path(path);
                 const py::gil_scoped_release release;
                 return std::make_unique<DraftHead>(bytes, kernel);
             }),
             py::arg("path"), py::arg("kernel") = "")
        .def_property_readonly("name", [](const DraftHead& self) { return to_text(self.name()); })
        .def_property_readonly("taps", &DraftHead::taps)
        .def_property_readonly("width", &DraftHead::width)
        .def_property_readonly("tokens", [](const DraftHead& self) { return to_array(self.tokens()); })
        .def_property_readonly("weight_bytes", &DraftHead::weight_bytes)
        .def("check", &DraftHead::check, py::arg("target"))
        .def(
            "begin",
            [](const DraftHead& self, const Model& target, const Floats& states) {
                self.check(target);
                if (states.size() != static_cast<py::ssize_t>(target.state_size())) {
                    throw py::value_error("states must be those of one row: [taps, width]");
                }
                py::array_t<float> out(self.width());
                float* data = out.mutable_data();
                const py::gil_scoped_release release;
                self.begin(target, states.data(), data);
                return out;
            },
            py::arg("target"), py::arg("states"))
        .def(
            "step",
            [](const DraftHead& self, const Model& target, const Floats& states, const py::object& tokens, int k) {
                const std::vector<int32_t> ids = to_ints(tokens, "tokens");
                const auto n = static_cast<py::ssize_t>(ids.size());
                if (states.ndim() != 2 || states.shape(0) != n || states.shape(1) != self.width()) {
                    throw py::value_error("states must have shape [tokens, width]");
                }
                if (k < 0 || k > static_cast<int>(self.tokens().size())) {
                    throw py::value_error("k must be between 0 and the number of the head's tokens");
                }
                py::array_t<float> after({n, static_cast<py::ssize_t>(self.width())});
                py::array_t<int32_t> candidates({n, static_cast<py::ssize_t>(k)});
                py::array_t<float> logprobs({n, static_cast<py::ssize_t>(k)});
                float* after_data = after.mutable_data();
                int32_t* candidate_data = candidates.mutable_data();
                float* logprob_data = logprobs.mutable_data();
                {
                    const py::gil_scoped_release release;
                    self.step(target, states.data(), ids.data(), static_cast<int>(n), k, after_data, candidate_data,
                              logprob_data);
                }
                return py::make_tuple(after, candidates, logprobs);
            },
            py::arg("target"), py::arg("states"), py::arg("tokens"), py::arg("k"));

    py::class_<RecycledCandidates>(m, "RecycledCandidates")
        .def(py::init<size_t>(), py::arg("slots") = 1 << 16)
        .def_property_readonly_static("num_candidates",
                                      [](const py::object&) { return RecycledCandidates::num_candidates; })
        .def_property_readonly("num_learnt", &RecycledCandidates::num_learnt)
        .def(
            "learn",
            [](RecycledCandidates& self, const Ints& before, const Ints& tokens, const Ints& candidates,
               const Floats& logits) {
                if (before.ndim() != 1 || tokens.ndim() != 1 || before.size() != tokens.size() ||
                    candidates.ndim() != 2 || logits.ndim() != 2 || candidates.shape(0) != tokens.size() ||
                    logits.shape(0) != tokens.size() || logits.shape(1) != candidates.shape(1)) {
                    throw py::value_error("there must be a token before, a token, candidates and logits of each row");
                }
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
                if (keys.ndim() != 1 || candidates.ndim() != 2 || chances.ndim() != 2 ||
                    candidates.shape(0) != keys.size() || chances.shape(0) != keys.size() ||
                    candidates.shape(1) != kept || chances.shape(1) != kept) {
                    throw py::value_error("there must be a key, candidates and chances of each entry");
                }
                std::vector<RecycledCandidates::Entry> entries(keys.size());
                for (py::ssize_t i = 0; i < keys.size(); ++i) {
                    entries[i].key = keys.at(i);
                    std::copy_n(candidates.data(i, 0), kept, entries[i].tokens.begin());
                    std::copy_n(chances.data(i, 0), kept, entries[i].chances.begin());
                }
                self.restore(std::move(entries));
            },
            py::arg("keys"), py::arg("candidates"), py::arg("chances"));

    py::class_<Session>(m, "Session")
        .def(py::init([](std::shared_ptr<Model> model, int n_ctx) {
                 const py::gil_scoped_release release;
                 return std::make_unique<Session>(std::move(model), n_ctx);
             }),
             py::arg("model"), py::arg("n_ctx") = 0)
        .def(
            "prefill",
            [](Session& self, const py::object& tokens) {
                const std::vector<int32_t> ids = to_ints(tokens, "tokens");
                const py::gil_scoped_release release;
                self.prefill(ids, check_signals);
            },
            py::arg("tokens"))
        .def(
            "evaluate",
            [](Session& self, const py::object& tokens, const py::object& parents, std::optional<int> num_logits) {
                const std::vector<int32_t> ids = to_ints(tokens, "tokens"), before = to_ints(parents, "parents");
                if (num_logits && *num_logits < 0) {
                    throw py::value_error("num_logits must be between 0 and the number of tokens");
                }
                const py::gil_scoped_release release;
                self.evaluate(ids, before, num_logits.value_or(-1));
            },
            py::arg("tokens"), py::arg("parents"), py::arg("num_logits") = py::none())
        .def(
            "candidates",
            [](Session& self, const py::object& rows, int k, const Samplings& sampling, const MaskArray& masks) {
                const std::vector<Sampling> samplings = to_samplings(sampling);
                const Masks allowed = to_masks(masks);
                const std::vector<int32_t> indices = to_ints(rows, "rows");
                check_k(self, k);
                py::array_t<int32_t> tokens({static_cast<py::ssize_t>(indices.size()), static_cast<py::ssize_t>(k)});
                py::array_t<float> scores({static_cast<py::ssize_t>(indices.size()), static_cast<py::ssize_t>(k)});
                int32_t* token_data = tokens.mutable_data();
                float* score_data = scores.mutable_data();
                {
                    const py::gil_scoped_release release;
                    self.candidates(samplings, indices, k, token_data, score_data, allowed);
                }
                return py::make_tuple(tokens, scores);
            },
            py::arg("rows"), py::arg("k"), py::arg("sampling"), py::arg("masks") = py::none())
        .def(
            "follow",
            [](Session& self, const Sampling& sampling, int root) {
                Followed followed;
                {
                    const py::gil_scoped_release release;
                    followed = self.follow(sampling, root);
                }
                return to_tuple(followed);
            },
            py::arg("sampling"), py::arg("root") = 0)
        .def(
            "verify",
            [](Session& self, const py::object& tokens, const py::object& parents, const Sampling& sampling,
               int num_candidates, const MaskArray& masks) {
                const std::vector<int32_t> ids = to_ints(tokens, "tokens"), before = to_ints(parents, "parents");
                check_num_candidates(self, num_candidates);
                const Masks allowed = to_masks(masks);
                Outcome outcome;
                {
                    const py::gil_scoped_release release;
                    outcome = self.verify(ids, before, sampling, num_candidates, allowed);
                }
                return to_verified(outcome, ids.size(), num_candidates);
            },
            py::arg("tokens"), py::arg("parents"), py::arg("sampling"), py::arg("num_candidates") = 0,
            py::arg("masks") = py::none())
        .def(
            "commit",
            [](Session& self, const py::object& path) {
                const std::vector<int32_t> rows = to_ints(path, "path");
                const py::gil_scoped_release release;
                self.commit(rows);
            },
            py::arg("path"))
        .def("discard", &Session::discard, py::call_guard<py::gil_scoped_release>())
        .def("reachable", &Session::reachable, py::arg("length"), py::call_guard<py::gil_scoped_release>())
        .def("truncate", &Session::truncate, py::arg("length"), py::call_guard<py::gil_scoped_release>())
        .def("fork", &Session::fork, py::arg("length"), py::call_guard<py::gil_scoped_release>())
        .def("stretch", &Session::stretch, py::arg("length"), py::call_guard<py::gil_scoped_release>())
        .def("close", &Session::close, py::call_guard<py::gil_scoped_release>())
        .def(
            "logits",
            [](Session& self, int row) {
                py::array_t<float> out(self.model().numbers().vocab_size);
                float* data = out.mutable_data();
                const py::gil_scoped_release release;
                self.logits(row, data);
                return out;
            },
            py::arg("row"))
        .def_property_readonly("tokens",
                               [](Session& self) {
                                   std::vector<int32_t> tokens;
                                   {
                                       const py::gil_scoped_release release;
                                       tokens = self.tokens();
                                   }
                                   return to_array(tokens);
                               })
        .def_property_readonly("states",
                               [](Session& self) {
                                   std::vector<float> states;
                                   {
                                       const py::gil_scoped_release release;
                                       states = self.states();
                                   }
                                   const auto taps = static_cast<py::ssize_t>(self.model().taps().size());
                                   const py::ssize_t width = self.model().numbers().width;
                                   const auto size = static_cast<py::ssize_t>(states.size());
                                   const std::vector<py::ssize_t> shape{taps > 0 ? size / (taps * width) : 0, taps,
                                                                        width};
                                   return py::array_t<float>(shape, states.data());
                               })
        .def_property_readonly("num_pending",
                               [](Session& self) {
                                   const py::gil_scoped_release release;
                                   return self.num_pending();
                               })
        .def_property_readonly("closed",
                               [](Session& self) {
                                   const py::gil_scoped_release release;
                                   return self.closed();
                               })
        .def_property_readonly("n_ctx", &Session::context)
        .def_property_readonly("on_device", [](const Session& self) { return self.model().device_memory() != nullptr; })
        .def_property_readonly("num_bytes",
                               [](Session& self) {
                                   const py::gil_scoped_release release;
                                   return self.num_bytes();
                               })
        .def_property_readonly("cell_bytes", [](const Session& self) { return self.model().cell_bytes(); })
        .def_property_readonly("windowed_cell_bytes",
                               [](const Session& self) { return self.model().windowed_cell_bytes(); })
        .def_property_readonly("most_windowed", [](const Session& self) { return self.model().most_windowed(); })
        .def_property_readonly("weight_bytes", [](const Session& self) { return self.model().weight_bytes(); })
        .def_property_readonly("vocab_size", [](const Session& self) { return self.model().numbers().vocab_size; });

    // A work keeps its session.
    py::class_<Work>(m, "Work")
        .def_static(
            "read",
            [](Session& session, const py::object& tokens) { return Work::read(session, to_ints(tokens, "tokens")); },
            py::arg("session"), py::arg("tokens"), py::keep_alive<0, 1>())
        .def_static(
            "verify",
            [](Session& session, const py::object& tokens, const py::object& parents, const Sampling& sampling,
               int num_candidates, const MaskArray& masks) {
                check_num_candidates(session, num_candidates);
                return Work::verify(session, to_ints(tokens, "tokens"), to_ints(parents, "parents"), sampling,
                                    num_candidates, to_masks(masks));
            },
            py::arg("session"), py::arg("tokens"), py::arg("parents"), py::arg("sampling"),
            py::arg("num_candidates") = 0, py::arg("masks") = py::none(), py::keep_alive<0, 1>())
        .def_static(
            "propose",
            [](Session& session, const py::object& tokens, const py::object& parents, int num_judged, int k,
               const Samplings& sampling, const MaskArray& masks) {
                check_k(session, k);
                return Work::propose(session, to_ints(tokens, "tokens"), to_ints(parents, "parents"), num_judged, k,
                                     to_samplings(sampling), to_masks(masks));
            },
            py::arg("session"), py::arg("tokens"), py::arg("parents"), py::arg("num_judged"), py::arg("k"),
            py::arg("sampling"), py::arg("masks") = py::none(), py::keep_alive<0, 1>())
        .def_property_readonly(
            "session", [](const Work& self) { return self.session; }, py::return_value_policy::reference)
        .def_property_readonly("num_rows", [](const Work& self) { return self.tokens.size(); });
    m.def("run", &run_works, py::arg("works"));
}
