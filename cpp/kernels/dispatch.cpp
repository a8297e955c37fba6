#include <functional>
#include <stdexcept>

#include "features.h"
#include "kernel.h"

namespace pystaged {

#if !defined(__x86_64__) && !defined(__aarch64__)
const char* cpu_kernel() {
    return "scalar";
}
#endif

std::vector<const Kernel*> available_kernels() {
    std::vector<const Kernel*> found;
    for (const Kernel& kernel : std::initializer_list<std::reference_wrapper<const Kernel>>{PYSTAGED_KERNELS}) {
        if (kernel.supported()) {
            found.push_back(&kernel);
        }
    }
    return found;
}

const Kernel& find_kernel(const std::string& name) {
    const std::vector<const Kernel*> kernels = available_kernels();
    std::string names;
    for (const Kernel* kernel : kernels) {
        names += std::string(names.empty() ? "" : ", ") + kernel->name;
        if (name == kernel->name) {
            return *kernel;
        }
    }
    // Not the scalar one where the CPU can do better: that would be a hundred times slower without a word.
    if (name.empty() && (kernels.size() > 1 || std::string(cpu_kernel()) == kernels[0]->name)) {
        return *kernels[0];
    }
    throw std::invalid_argument(
        "no kernel '" + (name.empty() ? cpu_kernel() : name) + "' for this CPU in this build, which has: " + names +
        "; in a clone of pystaged, \"pip install --force-reinstall --no-deps .\" builds the one of this machine, "
        "and with PYSTAGED_KERNELS=all in the environment all of them");
}

}  // namespace pystaged
