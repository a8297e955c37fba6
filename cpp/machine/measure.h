// How fast this machine reads and multiplies.
#pragma once

#include <cstddef>
#include <string>

namespace pystaged {

// Bytes per second at which threads read memory that no cache holds.
double read_bandwidth(size_t bytes, int num_threads);
// Multiply-adds per second of a kernel that reads no matrix.
double dot_rate(const std::string& kernel, int num_threads);

}  // namespace pystaged
