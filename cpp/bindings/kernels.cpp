#include <algorithm>
#include <string_view>

#include "bindings/bindings.h"
#include "machine/measure.h"
#include "machine/memory.h"
#include "machine/pool.h"
#include "model/rope.h"
#include "sampling/sampler.h"
#include "weights/product.h"

namespace pystaged {

namespace {

py::array_t<float> multiply_arrays(const std::string& type, const py::bytes& weights, int rows, const Floats& x,
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
    for (int i = 0; i < n; ++i) {
        std::copy_n(x.data() + size_t(i) * cols, cols, values.data() + size_t(i) * width);
    }
    const std::vector<float> out = multiply(kernel, matrix, values, n, {}, num_threads);
    py::array_t<float> result({n, rows});
    for (int i = 0; i < n; ++i) {
        std::copy_n(out.data() + size_t(i) * matrix.padded_rows(), rows, result.mutable_data() + size_t(i) * rows);
    }
    return result;
}

}  // namespace

void add_kernels(py::module_& m) {
    m.def("kernels", [] {
        std::vector<std::string> names;
        for (const Kernel* kernel : available_kernels()) {
            names.push_back(kernel->name);
        }
        return names;
    });
    m.def("physical_cores", &physical_cores);
    m.def("cpu_quota", [](const py::object& root) { return cpu_quota(to_path(root)); }, py::arg("root") = "");
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
    m.def("multiply", &multiply_arrays, py::arg("type"), py::arg("weights"), py::arg("rows"), py::arg("x"),
          py::arg("kernel") = "", py::arg("num_threads") = 1);
    m.def("read_bandwidth", &read_bandwidth, py::arg("num_bytes"), py::arg("num_threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("dot_rate", &dot_rate, py::arg("kernel"), py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace pystaged
