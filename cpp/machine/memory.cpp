#include "machine/memory.h"

#include <new>
#include <utility>

namespace pystaged {

namespace {
constexpr size_t kHugePage = size_t(2) << 20;
}

Memory Memory::reserve(size_t bytes) {
    Memory result;
    if (bytes > 0) {
        result.data_ = result.base_ = new_pages(bytes);
        result.size_ = result.reserved_ = bytes;
    }
    return result;
}

void Memory::commit(size_t first, size_t last) {
    if (first < last) {
        first = first / page_bytes() * page_bytes();
        commit_pages(data_ + first, last - first);
    }
}

Memory::Memory(size_t bytes, bool huge) : size_(bytes) {
    if (bytes == 0) {
        return;
    }
    reserved_ = bytes + (huge ? kHugePage : 0);
    if (reserved_ < bytes) {
        throw std::bad_alloc();
    }
    Memory pages = reserve(reserved_);  // which frees them where committing fails
    pages.commit(0, reserved_);
    data_ = base_ = std::exchange(pages.base_, nullptr);
    if (huge) {
        data_ += (kHugePage - reinterpret_cast<uintptr_t>(base_) % kHugePage) % kHugePage;
        prefer_huge_pages(data_, bytes / kHugePage * kHugePage);
    }
}

Memory Memory::map(const File& file, size_t bytes) {
    Memory result;
    result.data_ = result.base_ = file.map(bytes);
    result.size_ = result.reserved_ = bytes;
    return result;
}

void Memory::release(size_t first, size_t last) {
    const size_t page = page_bytes();
    const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
    const uintptr_t begin = (start + first + page - 1) / page * page, end = (start + last) / page * page;
    if (begin < end) {
        empty_pages(reinterpret_cast<uint8_t*>(begin), end - begin);
    }
}

Memory::~Memory() {
    if (base_) {
        free_pages(base_, reserved_);
    }
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      base_(std::exchange(other.base_, nullptr)),
      reserved_(std::exchange(other.reserved_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(base_, other.base_);
    std::swap(reserved_, other.reserved_);
    return *this;
}

}  // namespace pystaged
