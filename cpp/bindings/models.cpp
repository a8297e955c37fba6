#include <pybind11/functional.h>

#include "bindings/bindings.h"
#include "text/executor.h"

namespace pystaged {

static KvType to_kv_type(const std::string& name) {
    require(name == "f16" || name == "q8_0", "keys and values are stored as f16 or q8_0, not ", name);
    return name == "f16" ? KvType::f16 : KvType::q8_0;
}

// A change of a model that has no sessions yet.
static auto before_sessions(void (Model::*change)(int)) {
    return [change](Model& self, int value) {
        const auto lock = Executor::none_of(self);
        (self.*change)(value);
    };
}

void add_models(py::module_& m) {
    m.def("metadata", [](const Path& path) { return to_dict(GgufFile(path.bytes).spelled()); }, py::arg("path"));
    m.def("devices", [] {
        py::list result;
        for (const DeviceInfo& info : list_devices()) {
            result.append(
                py::make_tuple(info.name, to_text(info.description), info.gpu, info.free_bytes, info.total_bytes));
        }
        return result;
    });
    m.def(
        "file_identity", [](const Path& path) { return GgufFile(path.bytes).identity(); }, py::arg("path"), kReleased);
    m.def(
        "quantize",
        [](const Path& source, const Path& out, int file_type, bool allow_requantize, bool dry_run) {
            llama_model_quantize_params params = llama_model_quantize_default_params();
            params.ftype = static_cast<llama_ftype>(file_type);
            params.allow_requantize = allow_requantize;
            params.dry_run = dry_run;
            return llama_model_quantize(source.bytes.c_str(), out.bytes.c_str(), &params) == 0;
        },
        py::arg("source"), py::arg("out"), py::arg("file_type"), py::arg("allow_requantize"), py::arg("dry_run"),
        kReleased);
    m.def("rpc_version", &rpc_version);
    m.def("serve_devices", &serve_devices, py::arg("endpoint"), py::arg("device"), py::arg("num_threads"), kReleased);

    py::class_<Tokenizer>(m, "Tokenizer")
        .def(py::init([](const Path& path) {
                 return without_interpreter([&] { return std::make_unique<Tokenizer>(path.bytes); });
             }),
             py::arg("path"))
        .def_property_readonly("num_tokens", &Tokenizer::num_tokens)
        .def_property_readonly("metadata", [](const Tokenizer& self) { return to_dict(self.metadata()); })
        .def(
            "encode",
            [](const Tokenizer& self, const py::str& text, bool add_special, bool parse_special) {
                // By Python's own encoder, whose error says what is wrong.
                const std::string bytes = text.attr("encode")("utf-8").cast<py::bytes>();
                return to_array(
                    without_interpreter([&] { return self.encode(bytes, add_special, parse_special, check_signals); }));
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
            [](const Tokenizer& self, const IntsOf<kTokens>& tokens, bool special) {
                return to_text(self.decode(tokens, special));
            },
            py::arg("tokens"), py::arg("special") = false)
        .def(
            "token_text", [](const Tokenizer& self, int32_t token) { return to_text(self.token_text(token)); },
            py::arg("token"))
        .def("is_control", &Tokenizer::is_control, py::arg("token"))
        .def_property_readonly("adds_bos", &Tokenizer::adds_bos)
        .def_property_readonly("bos", &Tokenizer::bos)
        .def_property_readonly("eos", &Tokenizer::eos)
        .def_property_readonly("suppressed", &Tokenizer::suppressed)
        .def_property_readonly("mask_token", &Tokenizer::mask_token)
        .def_property_readonly("infill_tokens", &Tokenizer::infill_tokens)
        .def_property_readonly("end_tokens",
                               [](const Tokenizer& self) {
                                   std::vector<int32_t> tokens = in_order(self.num_tokens());
                                   std::erase_if(tokens, [&](int32_t token) { return !self.is_end(token); });
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
        .def_property_readonly("fingerprint", &Tokenizer::fingerprint);

    py::class_<Model, std::shared_ptr<Model>>(m, "Model")
        .def(py::init([](const Path& path, const std::string& kernel, int num_threads, const std::string& device,
                         const std::function<void()>& progress, const std::string& kv, const Path& packed,
                         std::shared_ptr<Model> target, bool other_pairs, bool other_feedback) {
                 require((!other_pairs && !other_feedback) || target,
                         "another form is for drafts that read a target's hidden states");
                 const KvType type = to_kv_type(kv);
                 const py::gil_scoped_release release;
                 return std::make_shared<Model>(
                     path.bytes, kernel, num_threads, device == "cpu" ? Devices() : find_devices(device), progress,
                     type, packed.bytes, std::move(target), DraftForm{other_pairs, other_feedback});
             }),
             py::arg("path"), py::arg("kernel") = "", py::arg("num_threads") = 0, py::arg("device") = "cpu",
             py::arg("progress") = std::function<void()>(), py::arg("kv") = "f16", py::arg("packed") = "",
             py::arg("target") = nullptr, py::arg("other_pairs") = false, py::arg("other_feedback") = false)
        .def("cut_head", before_sessions(&Model::cut_head), py::arg("rows"))
        .def("reserve", before_sessions(&Model::reserve), py::arg("num_cells"))
        .def(
            "tap",
            [](Model& self, std::vector<int> layers, bool all_rows, bool last_row) {
                const auto lock = Executor::none_of(self);
                self.tap(std::move(layers), all_rows, last_row);
            },
            py::arg("layers"), py::arg("all_rows") = false, py::arg("last_row") = false)
        .def_property_readonly("matrix_bytes", [](const Model& self) { return self.facts().matrix_bytes; })
        .def_property_readonly("buffer_bytes", [](const Model& self) { return self.facts().buffer_bytes; })
        .def_property_readonly("is_mapped", [](const Model& self) { return self.facts().is_mapped; })
        .def_property_readonly("packed_problem", [](const Model& self) { return to_text(self.facts().packed_problem); })
        .def(
            "save_packed", [](const Model& self, const Path& path) { self.save_packed(path.bytes, check_signals); },
            py::arg("path"), kReleased)
        .def_property_readonly(
            "devices",
            [](const Model& self) {
                std::vector<std::string> names;
                for (ggml_backend_dev_t device : self.llama() ? self.llama()->devices() : Devices()) {
                    names.push_back(ggml_backend_dev_name(device));
                }
                return names;
            })
        .def_property_readonly("name", [](const Model& self) { return to_text(self.facts().name); })
        .def_property_readonly("kernel", [](const Model& self) { return self.kernel().name; })
        .def_property_readonly("num_threads", &Model::num_threads)
        .def_property_readonly("num_few_threads", [](const Model& model) { return model.num_threads_for(1); })
        .def_property_readonly("taps", &Model::taps)
        .def_property_readonly("kv", [](const Model& self) { return self.kv_type() == KvType::f16 ? "f16" : "q8_0"; })
        .def_property_readonly("file_bytes", [](const Model& self) { return self.facts().file_bytes; })
        .def_property_readonly("weight_bytes", [](const Model& self) { return self.facts().weight_bytes; })
        .def_property_readonly("num_weights", [](const Model& self) { return self.facts().num_weights; })
        .def_property_readonly("weight_types",
                               [](const Model& self) { return py::dict(py::cast(self.facts().weight_types)); })
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
        .def_property_readonly("target_layers", [](const Model& self) { return self.numbers().target_layers; })
        .def_property_readonly("borrows_cells", &Model::borrows_cells)
        .def_property_readonly("head_tokens", [](const Model& self) { return to_array(self.weights().head_tokens); })
        .def_property_readonly("block_size", [](const Model& self) { return self.numbers().block_size; })
        .def_property_readonly("is_anchored", [](const Model& self) { return self.numbers().is_anchored; })
        .def_property_readonly("has_markov", [](const Model& self) { return self.numbers().markov_rank > 0; })
        .def_property_readonly("mask_token", [](const Model& self) { return self.numbers().mask_token; })
        .def_property_readonly("most_pending", &Model::most_pending)
        .def_property_readonly("is_chained", &Model::is_chained)
        .def_property_readonly("state_bytes", &Model::state_bytes)
        .def_property_readonly("kept_state_bytes", &Model::kept_state_bytes)
        .def_property_readonly("architecture", [](const Model& self) { return self.family().name; });
}

}  // namespace pystaged
