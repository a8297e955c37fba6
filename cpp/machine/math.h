// Functions whose bits are the same with every C library.
#pragma once

namespace pystaged {

constexpr double kPi = 3.14159265358979323846;

// Natural logarithm, e^x, sine and cosine, to a few units in the last place. x is clamped to [-700, 700] for e^x, and
// its sine and cosine mean something below 2^20.
double own_log(double x);
double own_exp(double x);
void own_sin_cos(double x, double* sine, double* cosine);

}  // namespace pystaged
