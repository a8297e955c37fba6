// Functions whose bits are the same with every C library, and what they need of the processor.
#pragma once

#include <cfenv>

namespace pystaged {

constexpr double kPi = 3.14159265358979323846;

// Natural logarithm, e^x, sine and cosine, to a few units in the last place. x is clamped to [-700, 700] for e^x, and
// its sine and cosine mean something below 2^20.
double own_log(double x);
double own_exp(double x);
void own_sin_cos(double x, double* sine, double* cosine);

// Floats as the language promises them, rounded to nearest and with subnormals, while it lives: other libraries change
// that for threads which then call us.
class FloatEnvironment {
public:
    FloatEnvironment() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatEnvironment() { std::fesetenv(&before_); }
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

private:
    std::fenv_t before_;
};

}  // namespace pystaged
