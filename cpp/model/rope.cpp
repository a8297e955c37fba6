#include "model/rope.h"

#include <algorithm>
#include <cmath>

#include "machine/math.h"

namespace pystaged {

// e^x by a series of its own: a unit in the last place of a frequency would change texts.
static double frequency_exp(double x) {
    constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
    const double n = std::nearbyint(x / (kLn2High + kLn2Low));
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double sum = 1;
    for (int i = 16; i > 0; --i) {
        sum = 1 + r / i * sum;
    }
    return std::ldexp(sum, static_cast<int>(n));
}

std::vector<double> Rope::frequencies(const std::vector<float>& factors) const {
    const FloatEnvironment pinned;
    const double log_base = own_log(base);
    double low = 0, high = 0;
    if (yarn) {
        // The pair that turns `turns` times within the original context.
        const auto pair = [&](double turns) {
            return dims * own_log(original_context / (turns * 2 * kPi)) / (2 * log_base);
        };
        low = std::max(0.0, std::floor(pair(beta_fast)));
        high = std::min(dims - 1.0, std::ceil(pair(beta_slow)));
    }
    std::vector<double> result(dims / 2);
    for (int i = 0; i < dims / 2; ++i) {
        double frequency = frequency_exp(-2.0 * i / dims * log_base);
        if (!factors.empty()) {
            frequency /= factors[i];
        }
        const double kept = yarn ? 1 - std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0) : 0;
        result[i] = frequency * ((1 - kept) * scale + kept);
    }
    return result;
}

double Rope::amplitude() const {
    const FloatEnvironment pinned;
    return yarn ? magnitude * (1 + 0.1 * own_log(1.0 / scale)) : magnitude;
}

void rotation(const std::vector<double>& frequencies, double amplitude, int position, float* cosines, float* sines) {
    for (size_t i = 0; i < frequencies.size(); ++i) {
        double sine, cosine;
        own_sin_cos(position * frequencies[i], &sine, &cosine);
        cosines[i] = static_cast<float>(cosine * amplitude);
        sines[i] = static_cast<float>(sine * amplitude);
    }
}

}  // namespace pystaged
