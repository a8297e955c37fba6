// The four failures that are pystaged's own; everything else is a standard exception.
// The bindings map them to Python; std::invalid_argument becomes ValueError there.
#pragma once

#include <stdexcept>
#include <string>

namespace pystaged {

// A model file that is missing, damaged, or of a kind this engine does not run.
struct ModelError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A model that our kernels do not compute; llama.cpp may.
struct UnsupportedModelError : ModelError {
    using ModelError::ModelError;
};

// A device that is missing, has too little memory, or failed in a pass.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// No position is left in the context for the rows asked for.
struct ContextFullError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace pystaged
