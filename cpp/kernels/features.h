// What a CPU has and the system lets programs use; x86_features.cpp or arm_features.cpp finds it. On x86-64 not by
// __builtin_cpu_supports: clang before 18 does not know all of these, and with some compilers for Windows it knows of
// none.
#pragma once

namespace pystaged {

bool cpu_has_avx2();  // with FMA and F16C
bool cpu_has_avx_vnni();
bool cpu_has_avx512_vnni();  // with F, DQ, BW and VL
bool cpu_has_dotprod();
bool cpu_has_i8mm();

const char* cpu_kernel();  // the name of the best kernel for it

}  // namespace pystaged
