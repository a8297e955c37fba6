#include "weights/packed_file.h"

#include <algorithm>
#include <system_error>
#include <vector>

#include "machine/digest.h"
#include "machine/pool.h"

namespace pystaged {

constexpr size_t kPartBytes = 2 << 20;  // of which a digest is made, or that is written at a time: a huge page
constexpr const char* kDamaged = "packed weights that are damaged";

static uint64_t digest_of(const uint8_t* weights, size_t bytes, int num_threads) {
    std::vector<uint64_t> parts((bytes + kPartBytes - 1) / kPartBytes);
    ThreadPool::shared().run(static_cast<int>(parts.size()), num_threads, [&](int i, int) {
        const size_t first = i * kPartBytes;
        parts[i] = digest(weights + first, std::min(kPartBytes, bytes - first));
    });
    return digest(parts.data(), parts.size() * sizeof(parts[0]));
}

PackedContent::PackedContent(const GgufFile& file) {
    const uint16_t one = 1;
    source_ =
        say("pystaged packed weights\nof ", file.path(), "\nwhose content is ", hexadecimal(file.identity()),
            "\nin layout ", PackedMatrix::kVersion, *reinterpret_cast<const uint8_t*>(&one) ? "\n" : ", big-endian\n");
}

void PackedContent::add(ggml_type type, int cols, const RowOrder& order) {
    const uint64_t sum[] = {matrices_, static_cast<uint64_t>(type), static_cast<uint64_t>(cols),
                            digest(order.data(), order.size() * sizeof(order[0]))};
    matrices_ = digest(sum, sizeof(sum));
}

std::string PackedContent::text(size_t bytes, uint64_t digest) const {
    std::string text =
        say(source_, "matrices ", hexadecimal(matrices_), "\n", bytes, " bytes of digest ", hexadecimal(digest), "\n");
    require<ModelError>(text.size() <= kTextBytes, "the path is too long to keep packed weights");
    text.resize(kTextBytes);
    return text;
}

PackedFile::PackedFile(const std::string& path, const PackedContent& content) : path_(path) {
    try {
        const File file(path, File::Use::kRead);
        expect(file.is_regular() && file.size() >= kTextBytes, "no packed weights");
        memory_ = Memory::map(file, file.size());
    } catch (const std::system_error& error) {
        throw ModelError(say(path_, ": cannot open: ", error.what()));
    }
    expect(begins_with(content.source()), "packed weights of another file or version");
}

const uint8_t* PackedFile::matrix(size_t at, size_t bytes) const {
    expect(at <= this->bytes() && bytes <= this->bytes() - at, kDamaged);
    return weights() + at;
}

void PackedFile::check(const PackedContent& content, size_t used, int num_threads) const {
    expect(bytes() == used && begins_with(content.text(used, digest_of(weights(), used, num_threads))), kDamaged);
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
