// Packed weights kept in a file of their own, which several processes map: a page of text that says what they are of,
// then the weights as they lie in memory. Nothing in it is parsed: the text must be the one that is expected, and the
// weights must have the digest it ends with.
//
// A file that somebody cuts short while it is mapped ends the process, as with every mapped file; those who write it
// replace it instead.
#pragma once

#include <cstring>
#include <functional>

#include "files/gguf_file.h"
#include "weights/packed_matrix.h"

namespace pystaged {

constexpr size_t kTextBytes = 16 << 10;  // a path fits in, and it ends where a page of any system does

// Which weights of which file are packed, and how.
class PackedContent {
public:
    PackedContent() = default;
    explicit PackedContent(const GgufFile& file);

    // The next matrix is order.size() rows of tensors of that type.
    void add(ggml_type type, int cols, const RowOrder& order);
    // What a file of `bytes` of these weights with that digest begins with.
    std::string text(size_t bytes, uint64_t digest) const;
    bool empty() const { return source_.empty(); }
    const std::string& source() const { return source_; }

private:
    std::string source_;
    uint64_t matrices_ = 0;
};

class PackedFile {
public:
    // Maps it. Throws ModelError where it cannot be, or where it says that it is of another file or version.
    PackedFile(const std::string& path, const PackedContent& content);

    // The matrix of `bytes` that begins there. Throws ModelError where there is no room for it.
    const uint8_t* matrix(size_t at, size_t bytes) const;
    // Throws ModelError where it does not hold these weights.
    void check(const PackedContent& content, size_t used, int num_threads) const;
    Memory take() { return std::move(memory_); }

private:
    const uint8_t* weights() const { return memory_.data() + kTextBytes; }
    size_t bytes() const { return memory_.size() - kTextBytes; }
    bool begins_with(const std::string& text) const { return !std::memcmp(memory_.data(), text.data(), text.size()); }
    // Throws ModelError where it does not hold.
    void expect(bool holds, const char* otherwise) const { require<ModelError>(holds, path_, ": ", otherwise); }

    std::string path_;
    Memory memory_;
};

// Fills `path`, which exists. `check_interrupt` is called now and then and may throw. Throws ModelError where it cannot
// be written, perhaps for want of room.
void write_packed(const std::string& path, const PackedContent& content, const uint8_t* weights, size_t bytes,
                  int num_threads, const std::function<void()>& check_interrupt);

}  // namespace pystaged
