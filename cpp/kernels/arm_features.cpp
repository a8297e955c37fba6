#include "arm_features.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#elif defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

namespace pystaged {

#if defined(__APPLE__)

namespace {

bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace

bool cpu_has_dotprod() {
    return has("hw.optional.arm.FEAT_DotProd");
}

bool cpu_has_i8mm() {
    return has("hw.optional.arm.FEAT_I8MM");
}

#elif defined(__linux__)

bool cpu_has_dotprod() {
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}

bool cpu_has_i8mm() {
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
}

#elif defined(_WIN32)

bool cpu_has_dotprod() {
    return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
}

bool cpu_has_i8mm() {
    return IsProcessorFeaturePresent(66);  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
}

#else

bool cpu_has_dotprod() {
    return false;
}

bool cpu_has_i8mm() {
    return false;
}

#endif

const char* cpu_kernel() {
    return cpu_has_i8mm() ? "neon-i8mm" : cpu_has_dotprod() ? "neon-dotprod" : "neon";
}

}  // namespace pystaged
