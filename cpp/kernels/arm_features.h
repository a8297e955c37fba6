// What the system says an Arm CPU has.
#pragma once

namespace pystaged {

bool cpu_has_dotprod();
bool cpu_has_i8mm();

const char* cpu_kernel();  // the name of the best kernel for it

}  // namespace pystaged
