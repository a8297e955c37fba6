// The four failures that are pystaged's own; everything else is a standard exception.
// The bindings map them to Python; std::invalid_argument becomes ValueError there.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace pystaged {

// Texts, numbers, and what functions return, side by side.
template <class... Parts>
std::string say(const Parts&... parts) {
    std::string text;
    const auto add = [&](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
            text += std::to_string(part);
        } else if constexpr (std::is_invocable_v<decltype(part)>) {
            text += part();
        } else {
            text += part;
        }
    };
    (add(parts), ...);
    return text;
}

// Throws an Error where the condition does not hold; it says these parts, if there are any.
template <class Error = std::invalid_argument, class... Parts>
void require(bool holds, const Parts&... parts) {
    if (!holds) {
        if constexpr (sizeof...(parts) > 0) {
            throw Error(say(parts...));
        } else {
            throw Error();
        }
    }
}

// A file that is missing, damaged, or of a kind that this engine does not run; logits that are not finite.
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
