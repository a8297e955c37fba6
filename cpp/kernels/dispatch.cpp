#include <stdexcept>

#include "kernel.h"

namespace pystaged {

extern const Kernel kScalarKernel;
#if defined(PYSTAGED_X86)
extern const Kernel kAvx2Kernel, kAvxVnniKernel, kAvx512VnniKernel;
#elif defined(PYSTAGED_ARM)
extern const Kernel kNeonKernel, kNeonDotprodKernel, kNeonI8mmKernel;
#endif

namespace {

const Kernel* const kKernels[] = {
#if defined(PYSTAGED_X86)
    &kAvx512VnniKernel,
    &kAvxVnniKernel,
    &kAvx2Kernel,
#elif defined(PYSTAGED_ARM)
    &kNeonI8mmKernel,
    &kNeonDotprodKernel,
    &kNeonKernel,
#endif
    &kScalarKernel,
};

}  // namespace

std::vector<const Kernel*> available_kernels() {
    std::vector<const Kernel*> found;
    for (const Kernel* kernel : kKernels) {
        if (kernel->supported()) {
            found.push_back(kernel);
        }
    }
    return found;
}

const Kernel& find_kernel(const std::string& name) {
    std::string names;
    for (const Kernel* kernel : available_kernels()) {
        if (name.empty() || name == kernel->name) {
            return *kernel;
        }
        names += std::string(names.empty() ? "" : ", ") + kernel->name;
    }
    throw std::invalid_argument("no kernel '" + name + "' on this CPU; choose one of: " + names);
}

}  // namespace pystaged
