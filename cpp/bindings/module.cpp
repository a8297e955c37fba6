#include "bindings/bindings.h"
#include "error.h"
#include "machine/self_test.h"

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

    add_kernels(m);
    add_sampling(m);
    add_models(m);
    add_drafting(m);
    add_sessions(m);
}
