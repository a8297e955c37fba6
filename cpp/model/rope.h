// Rotary positions: the angles by which queries and keys are turned at a position.
//
// Su et al. 2021, arXiv 2104.09864; stretched contexts by position interpolation (Chen et al. 2023, arXiv 2306.15595)
// and YaRN (Peng et al. 2023, arXiv 2309.00071).
#pragma once

#include <vector>

namespace pystaged {

struct Rope {
    int dims = 0;  // numbers of a head that are turned; 0 for none
    float base = 10000;
    float scale = 1;    // of positions
    bool yarn = false;  // high frequencies keep their positions
    float beta_fast = 32, beta_slow = 1;
    float magnitude = 1;  // of queries and keys, as ggml takes it: YaRN's own factor comes on top
    int original_context = 0;

    // Radians per position of each pair of dimensions; `factors` divide them, one for each pair or none. The same in
    // whatever rounding mode the calling thread is, and so is what follows.
    std::vector<double> frequencies(const std::vector<float>& factors) const;
    // By which sines and cosines are multiplied.
    double amplitude() const;
};

// cosines[dims / 2] and sines[dims / 2] at a position. In double throughout and by functions of our own, so that the
// floats are the same on every machine.
void rotation(const std::vector<double>& frequencies, double amplitude, int position, float* cosines, float* sines);

}  // namespace pystaged
