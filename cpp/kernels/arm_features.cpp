#include "features.h"

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

namespace {

#if defined(__APPLE__)
constexpr const char *kDotprod = "hw.optional.arm.FEAT_DotProd", *kI8mm = "hw.optional.arm.FEAT_I8MM";

bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
#elif defined(__linux__)
struct Feature {
    unsigned long word, bit;
};
constexpr Feature kDotprod{AT_HWCAP, HWCAP_ASIMDDP}, kI8mm{AT_HWCAP2, HWCAP2_I8MM};

bool has(Feature feature) {
    return getauxval(feature.word) & feature.bit;
}
#elif defined(_WIN32)
// PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE and PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE, which older headers lack
constexpr DWORD kDotprod = 43, kI8mm = 66;

bool has(DWORD feature) {
    return IsProcessorFeaturePresent(feature);
}
#else
constexpr bool kDotprod = false, kI8mm = false;

bool has(bool feature) {
    return feature;
}
#endif

}  // namespace

bool cpu_has_dotprod() {
    return has(kDotprod);
}

bool cpu_has_i8mm() {
    return has(kI8mm);
}

const char* cpu_kernel() {
    return cpu_has_i8mm() ? "neon-i8mm" : cpu_has_dotprod() ? "neon-dotprod" : "neon";
}

}  // namespace pystaged
