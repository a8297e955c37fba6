// Page-aligned memory that becomes resident only where it is touched: zeroed, or a file that is mapped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pystaged {

class Memory {
public:
    Memory() = default;
    // `huge` asks for huge pages: right for weights, which are read whole, wrong for sparse caches.
    explicit Memory(size_t bytes, bool huge = false);
    // The first `bytes` of a file, which must not be written to; empty where it cannot be mapped, with errno set.
    static Memory map(int descriptor, size_t bytes);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
    uint8_t* base_ = nullptr;
    size_t reserved_ = 0;
};

}  // namespace pystaged
