// The Python face of the engine: conversions, the GIL, and errors; no logic. Each file adds its part to the module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "error.h"

namespace pystaged {

namespace py = pybind11;

using Ints = py::array_t<int32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Integers only: a float array would be truncated silently by a plain cast.
std::vector<int32_t> to_ints(const py::object& values, const char* name);
// An argument of that name.
template <const char* argument>
struct IntsOf : std::vector<int32_t> {};
inline constexpr char kTokens[] = "tokens", kParents[] = "parents", kRows[] = "rows", kBefore[] = "before",
                      kPath[] = "path", kLengths[] = "lengths";
py::array_t<int32_t> to_array(const std::vector<int32_t>& values);
// Text from a file, which may be no valid UTF-8.
py::str to_text(const std::string& bytes);
py::dict to_dict(const std::vector<std::pair<std::string, std::string>>& texts);
// A path as the system spells it: str, as Python decodes file names, bytes, or os.PathLike.
struct Path {
    std::string bytes;
};
Path to_path(const py::object& path);
// Throws what a signal handler of Python's raised.
void check_signals();
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
