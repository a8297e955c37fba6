#include "bindings/bindings.h"

#include <optional>

namespace pystaged {

std::vector<int32_t> to_ints(const py::object& values, const char* name) {
    if (py::isinstance<Ints>(values)) {  // as trees are
        const auto ints = py::reinterpret_borrow<Ints>(values);
        if (ints.ndim() == 1) {
            return {ints.data(), ints.data() + ints.size()};
        }
    }
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
    require<py::type_error>(array && array->ndim() == 1 && (kind == 'i' || kind == 'u'), name,
                            " must be a one-dimensional array or list of integers");
    require(kind == 'i' || array->attr("max")().cast<uint64_t>() <= INT32_MAX, name,
            " holds a number that is out of range");
    const py::array_t<int64_t, py::array::c_style | py::array::forcecast> wide(*array);
    std::vector<int32_t> result(wide.size());
    for (py::ssize_t i = 0; i < wide.size(); ++i) {
        const int64_t value = wide.data()[i];
        require(value >= INT32_MIN && value <= INT32_MAX, name, " holds ", value, ", which is out of range");
        result[i] = static_cast<int32_t>(value);
    }
    return result;
}

py::array_t<int32_t> to_array(const std::vector<int32_t>& values) {
    return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

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

Path to_path(const py::object& path) {
    const std::string bytes = py::module_::import("os").attr("fsencode")(path).cast<py::bytes>();
    require(bytes.find('\0') == std::string::npos, "the path holds a null character");
    return {bytes};
}

void check_signals() {
    py::gil_scoped_acquire gil;
    require<py::error_already_set>(PyErr_CheckSignals() == 0);
}

}  // namespace pystaged
