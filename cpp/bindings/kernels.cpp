#include "bindings/bindings.h"
#include "machine/measure.h"
#include "machine/topology.h"
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
    py::class_<Cores>(m, "Cores")
        .def_readonly("found", &Cores::found)
        .def_readonly("apart", &Cores::apart)
        .def_readonly("quota", &Cores::quota)
        .def_readonly("few", &Cores::few)
        .def_readonly("many", &Cores::many);
    m.def(
        "choose_cores",
        [](const Path& root, const std::optional<std::vector<int>>& cpus) {
            return cpus ? choose_cores(read_cores(root.bytes, *cpus), cpu_quota(root.bytes)) : choose_cores();
        },
        py::arg("root") = "", py::arg("cpus") = py::none());
    m.def("gumbel", py::vectorize(&gumbel), py::arg("seed"), py::arg("position"), py::arg("token"));
    m.def("read_bandwidth", &read_bandwidth, py::arg("num_bytes"), py::arg("num_threads"), kReleased);
    m.def("dot_rate", &dot_rate, py::arg("kernel"), py::arg("num_threads"), kReleased);
}

}  // namespace pystaged
