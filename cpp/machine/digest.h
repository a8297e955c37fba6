// A digest against damage and mix-ups, not against malice, as fast as memory is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace pystaged {

inline uint64_t digest(const void* data, size_t bytes) {
    constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;  // odd: what differs in one word differs in the end
    constexpr int kLanes = 8;                          // as many products as are under way at a time
    const auto mix = [](uint64_t sum, uint64_t word) {
        sum ^= word;
        return (sum << 29 | sum >> 35) * kFactor;
    };
    uint64_t sums[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
    const auto add = [&](const uint8_t* in) {
        for (int i = 0; i < kLanes; ++i) {
            uint64_t word;
            std::memcpy(&word, in + i * sizeof(word), sizeof(word));
            sums[i] = mix(sums[i], word);
        }
    };
    uint8_t rest[sizeof(sums)] = {};
    const auto* in = static_cast<const uint8_t*>(data);
    const size_t whole = bytes / sizeof(rest) * sizeof(rest);
    for (size_t at = 0; at < whole; at += sizeof(rest)) {
        add(in + at);
    }
    if (whole < bytes) {
        std::memcpy(rest, in + whole, bytes - whole);
        add(rest);
    }
    uint64_t all = bytes;
    for (const uint64_t sum : sums) {
        all = mix(all, sum);
    }
    return all ^ all >> 32;
}

inline std::string hexadecimal(uint64_t value) {
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
    return text;
}

}  // namespace pystaged
