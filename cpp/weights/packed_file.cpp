#include "weights/packed_file.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

#include "error.h"
#include "machine/digest.h"
#include "machine/pool.h"

namespace pystaged {

namespace {

constexpr size_t kTextBytes = 16 << 10;  // a path fits in, and it ends where a page of any system does
constexpr size_t kPartBytes = 2 << 20;   // of which a digest is made, or that is written at a time: a huge page
constexpr const char* kDamaged = "packed weights that are damaged";

std::string hexadecimal(uint64_t value) {
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
    return text;
}

uint64_t digest_of(const uint8_t* weights, size_t bytes, int num_threads) {
    std::vector<uint64_t> parts((bytes + kPartBytes - 1) / kPartBytes);
    ThreadPool::shared().run(static_cast<int>(parts.size()), num_threads, [&](int i, int) {
        const size_t first = i * kPartBytes;
        parts[i] = digest(weights + first, std::min(kPartBytes, bytes - first));
    });
    return digest(parts.data(), parts.size() * sizeof(parts[0]));
}

}  // namespace

PackedContent::PackedContent(const GgufFile& file) {
    const uint16_t one = 1;
    source_ = "pystaged packed weights\nof " + file.path() + "\nwhose content is " + hexadecimal(file.identity()) +
              "\nin layout " + std::to_string(PackedMatrix::kVersion) +
              (*reinterpret_cast<const uint8_t*>(&one) ? "\n" : ", big-endian\n");
}

void PackedContent::add(ggml_type type, int cols, const RowOrder& order) {
    const uint64_t sum[] = {matrices_, static_cast<uint64_t>(type), static_cast<uint64_t>(cols),
                            digest(order.data(), order.size() * sizeof(order[0]))};
    matrices_ = digest(sum, sizeof(sum));
}

std::string PackedContent::text(size_t bytes, uint64_t digest) const {
    std::string text = source_ + "matrices " + hexadecimal(matrices_) + "\n" + std::to_string(bytes) +
                       " bytes of digest " + hexadecimal(digest) + "\n";
    if (text.size() > kTextBytes) {
        throw ModelError("the path is too long to keep packed weights");
    }
    text.resize(kTextBytes);
    return text;
}

PackedFile::PackedFile(const std::string& path, const PackedContent& content) : path_(path) {
    try {
        const File file(path, File::Use::kRead);
        if (!file.is_regular() || file.size() < kTextBytes) {
            fail("no packed weights");
        }
        memory_ = Memory::map(file, file.size());
    } catch (const std::system_error& error) {
        fail(std::string("cannot open: ") + error.what());
    }
    if (std::memcmp(memory_.data(), content.source().data(), content.source().size()) != 0) {
        fail("packed weights of another file or version");
    }
}

const uint8_t* PackedFile::weights() const {
    return memory_.data() + kTextBytes;
}

size_t PackedFile::bytes() const {
    return memory_.size() - kTextBytes;
}

const uint8_t* PackedFile::matrix(size_t at, size_t bytes) const {
    if (at > this->bytes() || bytes > this->bytes() - at) {
        fail(kDamaged);
    }
    return weights() + at;
}

void PackedFile::check(const PackedContent& content, size_t used, int num_threads) const {
    if (bytes() != used) {
        fail(kDamaged);
    }
    const std::string text = content.text(bytes(), digest_of(weights(), bytes(), num_threads));
    if (std::memcmp(memory_.data(), text.data(), kTextBytes) != 0) {
        fail(kDamaged);
    }
}

void PackedFile::fail(const std::string& what) const {
    throw ModelError(path_ + ": " + what);
}

void write_packed(const std::string& path, const PackedContent& content, const uint8_t* weights, size_t bytes,
                  int num_threads, const std::function<void()>& check_interrupt) try {
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
} catch (const std::system_error& error) {
    throw ModelError(path + ": packed weights cannot be written: " + error.what());
}

}  // namespace pystaged
