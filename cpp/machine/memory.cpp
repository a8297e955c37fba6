#include "machine/memory.h"

#include "error.h"

namespace pystaged {

constexpr size_t kHugePage = size_t(2) << 20;

void Memory::commit(size_t first, size_t last) {
    if (first < last) {
        first = first / page_bytes() * page_bytes();
        commit_pages(data_ + first, last - first);
    }
}

Memory::Memory(size_t bytes, bool huge) {
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

void Memory::release(size_t first, size_t last) {
    const size_t page = page_bytes();
    const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
    const uintptr_t begin = (start + first + page - 1) / page * page, end = (start + last) / page * page;
    if (begin < end) {
        empty_pages(reinterpret_cast<uint8_t*>(begin), end - begin);
    }
}

}  // namespace pystaged
