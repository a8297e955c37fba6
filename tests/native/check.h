// What the native tests share. Buffers are exactly as long as their contracts say, so that a read or write past them is
// caught.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#ifdef __SANITIZE_THREAD__
// Children of fork() start threads of their own.
extern "C" const char* __tsan_default_options() {
    return "die_after_fork=0";
}
#endif

namespace {

int failures = 0;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            if (++failures == 20) {                                              \
                std::exit(1);                                                    \
            }                                                                    \
        }                                                                        \
    } while (false)

#define CHECK_THROWS(kind, expression) \
    do {                               \
        bool threw = false;            \
        try {                          \
            (void)(expression);        \
        } catch (const kind& error) {  \
            threw = *error.what();     \
        } catch (...) {                \
        }                              \
        CHECK(threw && #expression);   \
    } while (false)

std::mt19937 random_bits(1);

int random_int(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_bits);
}

float random_float(float deviation = 1) {
    return std::normal_distribution<float>(0, deviation)(random_bits);
}

// Aligned as the engine's own memory is, and not a byte longer than asked for.
template <class T>
class Array {
public:
    explicit Array(size_t size)
        : size_(size), data_(static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64)))) {
        std::fill_n(data_, size, T());
    }
    ~Array() { ::operator delete[](data_, std::align_val_t(64)); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) const { return data_[i]; }
    bool same(const Array& other) const { return !std::memcmp(data_, other.data_, size_ * sizeof(T)); }

private:
    size_t size_;
    T* data_;
};

bool same(const float* a, const float* b, size_t n) {
    return std::memcmp(a, b, n * sizeof(float)) == 0;
}

}  // namespace
