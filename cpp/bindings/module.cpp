#include "bindings/bindings.h"
#include "machine/measure.h"
#include "machine/self_test.h"
#include "machine/topology.h"
#include "sampling/sampler.h"

using namespace pystaged;

PYBIND11_MODULE(_core, m) {
    // Loads numpy now. In the first call that needs it, a signal handler that needs it too would wait for ever.
    py::dtype::of<float>();
    check_arithmetic(find_kernel(""));  // what it throws becomes an ImportError
    m.doc() = "The compiled engine behind pystaged; see _core.pyi.";
    static const py::handle model_error = py::exception<ModelError>(m, "ModelError", PyExc_OSError).release();
    static const py::handle unsupported =
        py::exception<UnsupportedModelError>(m, "UnsupportedModelError", model_error).release();
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const UnsupportedModelError& error) {
            PyErr_SetObject(unsupported.ptr(), to_text(error.what()).ptr());
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

    add_sampling(m);
    add_models(m);
    add_drafting(m);
    add_sessions(m);
}
