#include "text/text_file.h"

#include <algorithm>

#include "machine/digest.h"

namespace pystaged {

namespace {

class Stream {
public:
    Stream(const std::string& path, File::Use use) : path_(path), file_(path, use), left_(file_.size()) {
        expect(file_.is_regular(), "no file");
    }

    void write(const void* data, size_t bytes) {
        file_.write(data, bytes, at_);
        moved(data, bytes);
    }
    void read(void* data, size_t bytes) {
        expect(bytes <= left_ && file_.read(data, bytes, at_) == bytes, "damaged");
        left_ -= bytes;
        moved(data, bytes);
    }
    // Of all that was written or read.
    uint64_t sum() const { return digest(digests_.data(), digests_.size() * sizeof(digests_[0])); }
    size_t left() const { return left_; }
    // Throws ModelError where it does not hold.
    void expect(bool holds, const char* otherwise) const { require<ModelError>(holds, path_, ": ", otherwise); }

private:
    void moved(const void* data, size_t bytes) {
        at_ += bytes;
        digests_.push_back(digest(data, bytes));
    }

    std::string path_;
    File file_;
    size_t left_, at_ = 0;
    std::vector<uint64_t> digests_;
};

std::vector<int32_t> read_numbers(Stream& file) {
    uint64_t count = 0;
    file.read(&count, sizeof(count));
    file.expect(count <= file.left() / sizeof(int32_t), "damaged");
    std::vector<int32_t> numbers(count);
    file.read(numbers.data(), count * sizeof(int32_t));
    return numbers;
}

void write_numbers(Stream& file, const std::vector<int32_t>& numbers) {
    const uint64_t count = numbers.size();
    file.write(&count, sizeof(count));
    file.write(numbers.data(), count * sizeof(int32_t));
}

void read_all(Stream& file, const std::string& head, const std::vector<Text*>& texts) {
    std::string found(std::min(head.size(), file.left()), 0);
    file.read(found.data(), found.size());
    file.expect(found == head, "of another model or version");
    for (Text* text : texts) {
        const std::vector<int32_t> tokens = read_numbers(file), shape = read_numbers(file);
        file.expect(tokens.size() <= size_t(text->context), "longer than the context");
        const int length = static_cast<int>(tokens.size());
        try {
            text->check_tokens(tokens);
            text->state->resume(length, shape);
        } catch (const std::invalid_argument&) {
            file.expect(false, "damaged");
        }
        for (const Piece& piece : text->state->pieces(length)) {
            file.read(piece.data, piece.bytes);
        }
        text->committed = tokens;
    }
    const uint64_t sum = file.sum();
    uint64_t written = 0;
    file.read(&written, sizeof(written));
    file.expect(written == sum && file.left() == 0, "damaged");
}

}  // namespace

void write_texts(const std::string& path, const std::string& head, const std::vector<Session*>& sessions) {
    const Session::Turn turn(sessions);
    Stream file(path, File::Use::kWrite);
    file.write(head.data(), head.size());
    for (Text* text : turn.texts()) {
        text->check_open();
        text->check_nothing_pending("write_texts");
        write_numbers(file, text->committed);
        write_numbers(file, text->state->shape());
        for (const Piece& piece : text->state->pieces(static_cast<int>(text->committed.size()))) {
            file.write(piece.data, piece.bytes);
        }
    }
    const uint64_t sum = file.sum();
    file.write(&sum, sizeof(sum));
}

void read_texts(const std::string& path, const std::string& head, const std::vector<Session*>& sessions) {
    const Session::Turn turn(sessions);
    for (const Text* text : turn.texts()) {
        text->check_open();
        text->state->shape();  // devices have none
        require(text->committed.empty() && text->pending.empty(), "texts are read into new sessions");
    }
    Stream file(path, File::Use::kRead);
    try {
        read_all(file, head, turn.texts());
    } catch (...) {
        for (Text* text : turn.texts()) {
            text->state->cut(0);
            text->committed = {};
        }
        throw;
    }
}

}  // namespace pystaged
