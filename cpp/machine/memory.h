// Memory for weights, caches and what threads write side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "error.h"
#include "machine/system.h"

namespace pystaged {

// What one thread writes and another uses lies this far apart: a cache line has 64 bytes, and many CPUs move them in
// pairs.
constexpr size_t kCacheLine = 128;

// A vector that begins with a cache line.
template <class T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    // Within a block of the usual kind: glibc seldom hands out again what an aligned one leaves behind.
    T* allocate(size_t n) {
        void* const block = ::operator new(n * sizeof(T) + kCacheLine);
        const uintptr_t line = (reinterpret_cast<uintptr_t>(block) / kCacheLine + 1) * kCacheLine;
        reinterpret_cast<void**>(line)[-1] = block;
        return reinterpret_cast<T*>(line);
    }
    void deallocate(T* p, size_t) { ::operator delete(reinterpret_cast<void**>(p)[-1]); }
    friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
};
template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

// Page-aligned zeroed memory that becomes resident only where it is touched.
class Memory {
public:
    Memory() = default;
    // `huge` asks for huge pages: right for weights, which are read whole, wrong for sparse caches.
    explicit Memory(size_t bytes, bool huge = false) {
        const size_t reserved = bytes + (huge && bytes > 0 ? kHugePage : 0);
        require<std::bad_alloc>(reserved >= bytes);
        *this = reserve(reserved);
        commit(0, reserved);
        size_ = bytes;
        if (reserved > bytes) {
            data_ += (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
            prefer_huge_pages(data_, bytes / kHugePage * kHugePage);
        }
    }
    // Memory that may be touched only where it is committed: for what may stay sparse.
    static Memory reserve(size_t bytes) { return bytes > 0 ? Memory(new_pages(bytes), bytes) : Memory(); }
    // The first `bytes` of a file, which must not be written to. Throws ModelError where it cannot be mapped.
    static Memory map(const File& file, size_t bytes) { return {file.map(bytes), bytes}; }
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // Throws std::bad_alloc.
    void commit(size_t first, size_t last) {
        if (first < last) {
            first = first / page_bytes() * page_bytes();
            commit_pages(data_ + first, last - first);
        }
    }
    // Gives whole pages among these bytes back to the system. What they held, or zeros, is there afterwards.
    void release(size_t first, size_t last) {
        const size_t page = page_bytes();
        const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
        const uintptr_t begin = (start + first + page - 1) / page * page, end = (start + last) / page * page;
        if (begin < end) {
            empty_pages(reinterpret_cast<uint8_t*>(begin), end - begin);
        }
    }

private:
    static constexpr size_t kHugePage = size_t(2) << 20;
    struct Free {
        size_t bytes;
        void operator()(uint8_t* pages) const { free_pages(pages, bytes); }
    };
    Memory(uint8_t* pages, size_t bytes) : pages_(pages, {bytes}), data_(pages), size_(bytes) {}

    std::unique_ptr<uint8_t, Free> pages_;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace pystaged
