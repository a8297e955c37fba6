// The Python face of the engine: conversions, the GIL, and errors; no logic. Each file adds its part to the module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "error.h"

namespace pystaged {

namespace py = pybind11;

using Ints = py::array_t<int32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Integers only: a float array would be truncated silently by a plain cast.
inline std::vector<int32_t> to_ints(const py::object& values, const char* name) {
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

// An argument of that name.
template <const char* argument>
struct IntsOf : std::vector<int32_t> {};
inline constexpr char kTokens[] = "tokens", kParents[] = "parents", kRows[] = "rows", kBefore[] = "before",
                      kPath[] = "path", kLengths[] = "lengths";

inline py::array_t<int32_t> to_array(const std::vector<int32_t>& values) {
    return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Text from a file, which may be no valid UTF-8.
inline py::str to_text(const std::string& bytes) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

inline py::dict to_dict(const std::vector<std::pair<std::string, std::string>>& texts) {
    py::dict result;
    for (const auto& [key, value] : texts) {
        result[to_text(key)] = to_text(value);
    }
    return result;
}

// A path as the system spells it: str, as Python decodes file names, bytes, or os.PathLike.
struct Path {
    std::string bytes;
};
inline Path to_path(const py::object& path) {
    const std::string bytes = py::module_::import("os").attr("fsencode")(path).cast<py::bytes>();
    require(bytes.find('\0') == std::string::npos, "the path holds a null character");
    return {bytes};
}

// Throws what a signal handler of Python's raised.
inline void check_signals() {
    py::gil_scoped_acquire gil;
    require<py::error_already_set>(PyErr_CheckSignals() == 0);
}

// Of a call that needs no interpreter.
inline constexpr py::call_guard<py::gil_scoped_release> kReleased;
// The result of act(), which needs no interpreter.
template <class Act>
auto without_interpreter(const Act& act) {
    const py::gil_scoped_release release;
    return act();
}

void add_sampling(py::module_& m);
void add_models(py::module_& m);
void add_drafting(py::module_& m);
void add_sessions(py::module_& m);

}  // namespace pystaged

template <const char* argument>
struct pybind11::detail::type_caster<pystaged::IntsOf<argument>> {
    PYBIND11_TYPE_CASTER(pystaged::IntsOf<argument>, const_name("Sequence[int]"));
    bool load(handle source, bool) {
        static_cast<std::vector<int32_t>&>(value) = pystaged::to_ints(reinterpret_borrow<object>(source), argument);
        return true;
    }
};

template <>
struct pybind11::detail::type_caster<pystaged::Path> {
    PYBIND11_TYPE_CASTER(pystaged::Path, const_name("str | bytes | os.PathLike"));
    bool load(handle source, bool) {
        value = pystaged::to_path(reinterpret_borrow<object>(source));
        return true;
    }
};
