// The recurrence of gated delta nets, and of Mamba-2, whose deltas are given; see DeltaStep. A part of generic.h.
#pragma once

#include "vector.h"

void delta(const DeltaStep* steps, int count, int keys, float* tiles) {
    for (const DeltaStep* step = steps; step < steps + count; ++step) {
        const float* from = tiles + size_t(step->from) * keys * kLanes;
        float* to = tiles + size_t(step->to) * keys * kLanes;
        const Row decay = Row::set(step->decay);
        if (step->value) {
            Row sum[4] = {Row::set(0), Row::set(0), Row::set(0), Row::set(0)};
            for (int i = 0; i < keys; i += 4) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    sum[j] = fma(decay * Row::load(from + (i + j) * kLanes), Row::set(step->key[i + j]), sum[j]);
                }
            }
            const Row error = Row::load(step->value) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
            (Row::set(step->rate) * error).store(step->delta);
        }
        const Row change = Row::load(step->delta);
        Row sum[4] = {Row::set(0), Row::set(0), Row::set(0), Row::set(0)};
        for (int i = 0; i < keys; i += 4) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const Row kept = decay * Row::load(from + (i + j) * kLanes);
                const Row changed = fma(Row::set(step->key[i + j]), change, kept);
                changed.store(to + (i + j) * kLanes);
                if (step->out) {
                    sum[j] = fma(changed, Row::set(step->query[i + j]), sum[j]);
                }
            }
        }
        if (step->out) {
            (Row::set(step->scale) * ((sum[0] + sum[1]) + (sum[2] + sum[3]))).store(step->out);
        }
    }
}
