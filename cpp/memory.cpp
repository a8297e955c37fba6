#include "memory.h"

#include <new>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace pystaged {

namespace {
constexpr size_t kHugePage = size_t(2) << 20;
}

Memory::Memory(size_t bytes, bool huge) : size_(bytes) {
    if (bytes == 0) {
        return;
    }
    reserved_ = bytes + (huge ? kHugePage : 0);
    if (reserved_ < bytes) {
        throw std::bad_alloc();
    }
    void* p = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        throw std::bad_alloc();
    }
    base_ = static_cast<uint8_t*>(p);
    data_ = base_;
    if (huge) {
        data_ += (kHugePage - reinterpret_cast<uintptr_t>(base_) % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
        madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
    }
}

Memory Memory::map(int descriptor, size_t bytes) {
    Memory result;
    void* p = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (p != MAP_FAILED) {
        result.data_ = result.base_ = static_cast<uint8_t*>(p);
        result.size_ = result.reserved_ = bytes;
    }
    return result;
}

void Memory::release(size_t first, size_t last) {
    static const size_t page = sysconf(_SC_PAGESIZE);
    const uintptr_t start = reinterpret_cast<uintptr_t>(data_);
    const uintptr_t begin = (start + first + page - 1) / page * page, end = (start + last) / page * page;
    if (begin < end) {
#ifdef __linux__
        constexpr int kAdvice = MADV_DONTNEED;
#else
        constexpr int kAdvice = MADV_FREE;
#endif
        madvise(reinterpret_cast<void*>(begin), end - begin, kAdvice);
    }
}

Memory::~Memory() {
    if (!base_) {
        return;
    }
    munmap(base_, reserved_);
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
