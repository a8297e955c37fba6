// Packed weights kept in a file of their own, which several processes map: a page of text that says what they are of,
// then the weights as they lie in memory. Nothing in it is parsed: the text must be the one that is expected, and the
// weights must have the digest it ends with.
//
// A file that somebody cuts short while it is mapped ends the process, as with every mapped file; those who write it
// replace it instead.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "files/gguf_file.h"
#include "weights/packed_matrix.h"

namespace pystaged {

constexpr size_t kTextBytes = 16 << 10;  // a path fits in, and it ends where a page of any system does

// Which weights of which file are packed, and how.
class PackedContent {
public:
    PackedContent() = default;
    explicit PackedContent(const GgufFile& file) {
        const uint16_t one = 1;
        source_ = say("pystaged packed weights\nof ", file.path(), "\nwhose content is ", hexadecimal(file.identity()),
                      "\nin layout ", PackedMatrix::kVersion,
                      *reinterpret_cast<const uint8_t*>(&one) ? "\n" : ", big-endian\n");
    }

    // The next matrix is order.size() rows of tensors of that type.
    void add(ggml_type type, int cols, const RowOrder& order) {
        const uint64_t sum[] = {matrices_, static_cast<uint64_t>(type), static_cast<uint64_t>(cols),
                                digest(order.data(), order.size() * sizeof(order[0]))};
        matrices_ = digest(sum, sizeof(sum));
    }
    // What a file of `bytes` of these weights with that digest begins with.
    std::string text(size_t bytes, uint64_t digest) const {
        std::string text = say(source_, "matrices ", hexadecimal(matrices_), "\n", bytes, " bytes of digest ",
                               hexadecimal(digest), "\n");
        require<ModelError>(text.size() <= kTextBytes, "the path is too long to keep packed weights");
        text.resize(kTextBytes);
        return text;
    }
    bool empty() const { return source_.empty(); }
    const std::string& source() const { return source_; }

private:
    std::string source_;
    uint64_t matrices_ = 0;
};

class PackedFile {
public:
    // Maps it. Throws ModelError where it cannot be, or where it says that it is of another file or version.
    PackedFile(const std::string& path, const PackedContent& content) : path_(path) {
        const File file(path, File::Use::kRead);
        expect(file.is_regular() && file.size() >= kTextBytes, "no packed weights");
        memory_ = Memory::map(file, file.size());
        expect(begins_with(content.source()), "packed weights of another file or version");
    }

    // The matrix of `bytes` that begins there. Throws ModelError where there is no room for it.
    const uint8_t* matrix(size_t at, size_t bytes) const {
        expect(at <= this->bytes() && bytes <= this->bytes() - at, kDamaged);
        return weights() + at;
    }
    // Throws ModelError where it does not hold these weights.
    void check(const PackedContent& content, size_t used, int num_threads) const {
        expect(bytes() == used && begins_with(content.text(used, digest_of(weights(), used, num_threads))), kDamaged);
    }
    Memory take() { return std::move(memory_); }
    // Fills `path`, which exists. `check_interrupt` is called now and then and may throw. Throws ModelError where it
    // cannot be written, perhaps for want of room.
    static void write(const std::string& path, const PackedContent& content, const uint8_t* weights, size_t bytes,
                      int num_threads, const std::function<void()>& check_interrupt) {
        const File file(path, File::Use::kWrite);
        // Parts end where huge pages do, so that the system may keep the file in such.
        for (size_t at = kTextBytes, end = kTextBytes + bytes; at < end;) {
            const size_t next = std::min((at / kPartBytes + 1) * kPartBytes, end);
            file.write(weights + at - kTextBytes, next - at, at);
            at = next;
            check_interrupt();
        }
        const std::string text = content.text(bytes, digest_of(weights, bytes, num_threads));
        file.write(text.data(), text.size(), 0);
    }

private:
    // Of which a digest is made, or that is written at a time: a huge page.
    static constexpr size_t kPartBytes = 2 << 20;
    static constexpr const char* kDamaged = "packed weights that are damaged";

    static uint64_t digest_of(const uint8_t* weights, size_t bytes, int num_threads) {
        std::vector<uint64_t> parts((bytes + kPartBytes - 1) / kPartBytes);
        ThreadPool::shared().run(static_cast<int>(parts.size()), num_threads, [&](int i, int) {
            const size_t first = i * kPartBytes;
            parts[i] = digest(weights + first, std::min(kPartBytes, bytes - first));
        });
        return digest(parts.data(), parts.size() * sizeof(parts[0]));
    }
    const uint8_t* weights() const { return memory_.data() + kTextBytes; }
    size_t bytes() const { return memory_.size() - kTextBytes; }
    bool begins_with(const std::string& text) const { return !std::memcmp(memory_.data(), text.data(), text.size()); }
    // Throws ModelError where it does not hold.
    void expect(bool holds, const char* otherwise) const { require<ModelError>(holds, path_, ": ", otherwise); }

    std::string path_;
    Memory memory_;
};

}  // namespace pystaged
