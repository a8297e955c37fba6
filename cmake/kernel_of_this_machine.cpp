// Prints which kernel CMake is to build for the CPU that it runs on.
#include <cstdio>

#if defined(__x86_64__)
#include "../cpp/kernels/x86_features.cpp"
#elif defined(__aarch64__)
#include "../cpp/kernels/arm_features.cpp"
#endif

int main() {
    std::puts(pystaged::cpu_kernel());
}
