#include "bindings/bindings.h"
#include "machine/measure.h"
#include "machine/pool.h"
#include "sampling/sampler.h"

namespace pystaged {

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
    m.def("read_bandwidth", &read_bandwidth, py::arg("num_bytes"), py::arg("num_threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("dot_rate", &dot_rate, py::arg("kernel"), py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace pystaged
