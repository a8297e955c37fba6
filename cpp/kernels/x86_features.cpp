#include "features.h"

#include <cpuid.h>

namespace pystaged {

namespace {

struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;

    explicit Leaf(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

bool has(unsigned word, unsigned bits) {
    return (word & bits) == bits;
}

constexpr unsigned bit(int i) {
    return 1u << i;
}

// Whether the system saves such vector registers; these are bits of XCR0.
bool saves(unsigned registers) {
    if (!has(Leaf(1).c, bit(27))) {
        return false;
    }
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return has(low, registers);
}

constexpr unsigned kAvx = bit(1) | bit(2);
#ifdef __APPLE__
constexpr unsigned kAvx512 = 0;  // set at a thread's first use
#else
constexpr unsigned kAvx512 = bit(5) | bit(6) | bit(7);
#endif

}  // namespace

bool cpu_has_avx2() {
    return has(Leaf(1).c, bit(12) | bit(28) | bit(29)) && has(Leaf(7).b, bit(5)) && saves(kAvx);
}

bool cpu_has_avx_vnni() {
    return cpu_has_avx2() && has(Leaf(7, 1).a, bit(4));
}

bool cpu_has_avx512_vnni() {
    const Leaf leaf(7);
    return cpu_has_avx2() && has(leaf.b, bit(16) | bit(17) | bit(30) | bit(31)) && has(leaf.c, bit(11)) &&
           saves(kAvx512);
}

const char* cpu_kernel() {
    return cpu_has_avx512_vnni() ? "avx512-vnni" : cpu_has_avx_vnni() ? "avx-vnni" : cpu_has_avx2() ? "avx2" : "scalar";
}

}  // namespace pystaged
