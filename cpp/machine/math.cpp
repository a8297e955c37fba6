#include "machine/math.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace pystaged {

// pi / 2 in three parts; the first two have 33 bits each, so that whole numbers up to 2^20 times them are exact.
constexpr double kHalfPi1 = 1.57079632673412561417e+00;
constexpr double kHalfPi2 = 6.07710050630396597660e-11;
constexpr double kHalfPi3 = 2.02226624879595063154e-21;
constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;

// sum of coefficients[i] * x^i
template <size_t n>
static double polynomial(const double (&coefficients)[n], double x) {
    double sum = coefficients[n - 1];
    for (size_t i = n - 1; i-- > 0;) {
        sum = sum * x + coefficients[i];
    }
    return sum;
}

// 2^k * m with m around 1, and the series of atanh((m - 1) / (m + 1)).
double own_log(double x) {
    if (!(x > 0) || std::isinf(x)) {
        return x == 0 ? -INFINITY : x > 0 ? x : NAN;
    }
    int exponent = 0;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752440) {
        m *= 2;
        --exponent;
    }
    const double s = (m - 1) / (m + 1), z = s * s;
    constexpr double kTerms[] = {1.0,      1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                 1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
    return exponent * kLn2High + (exponent * kLn2Low + 2 * s * polynomial(kTerms, z));
}

double own_exp(double x) {
    if (std::isnan(x)) {
        return x;
    }
    x = std::clamp(x, -700.0, 700.0);
    constexpr double kRound = 0x1.8p52;  // added and subtracted, it leaves a whole number
    const double n = (x * (1 / (kLn2High + kLn2Low)) + kRound) - kRound;
    const double r = (x - n * kLn2High) - n * kLn2Low, z = r * r, z2 = z * z;
    // The series, in pairs of terms that do not wait for each other.
    const auto pair = [r](double low, double high) { return low + high * r; };
    const double low = pair(1.0 / 2, 1.0 / 6) + pair(1.0 / 24, 1.0 / 120) * z;
    const double middle = pair(1.0 / 720, 1.0 / 5040) + pair(1.0 / 40320, 1.0 / 362880) * z;
    const double high = pair(1.0 / 3628800, 1.0 / 39916800) + pair(1.0 / 479001600, 1.0 / 6227020800.0) * z;
    const double sum = 1 + (r + z * (low + (middle + high * z2) * z2));
    const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof(power));
    return sum * power;
}

void own_sin_cos(double x, double* sine, double* cosine) {
    if (!(std::fabs(x) < 1 << 30)) {
        // Beyond any angle that means something; fmod is exact, and infinity becomes NaN.
        x = std::fmod(x, 2 * kPi);
        if (std::isnan(x)) {
            *sine = *cosine = x;
            return;
        }
    }
    const double n = std::nearbyint(x * (2 / kPi));
    const double r = ((x - n * kHalfPi1) - n * kHalfPi2) - n * kHalfPi3;
    const double z = r * r;
    constexpr double kSine[] = {1.0,          -1.0 / 6,        1.0 / 120,          -1.0 / 5040,
                                1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368000.0};
    constexpr double kCosine[] = {1.0,
                                  -1.0 / 2,
                                  1.0 / 24,
                                  -1.0 / 720,
                                  1.0 / 40320,
                                  -1.0 / 3628800,
                                  1.0 / 479001600.0,
                                  -1.0 / 87178291200.0,
                                  1.0 / 20922789888000.0};
    const double s = r * polynomial(kSine, z), c = polynomial(kCosine, z);
    switch (static_cast<int64_t>(n) & 3) {
        case 0: *sine = s, *cosine = c; break;
        case 1: *sine = c, *cosine = -s; break;
        case 2: *sine = -s, *cosine = -c; break;
        default: *sine = -c, *cosine = s; break;
    }
}

}  // namespace pystaged
