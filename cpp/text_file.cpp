#include "text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "digest.h"
#include "error.h"

namespace pystaged {

namespace {

class File {
public:
    File(const std::string& path, int flags) : path_(path), number_(open(path.c_str(), flags | O_CLOEXEC)) {
        struct stat info = {};
        if (number_ < 0 || fstat(number_, &info) != 0) {
            const int reason = errno;
            finish();
            fail(std::strerror(reason));
        }
        left_ = static_cast<size_t>(info.st_size);
        if (!S_ISREG(info.st_mode)) {
            finish();
            fail("no file");
        }
    }
    ~File() { finish(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void write(const void* data, size_t bytes) {
        move(bytes,
             [&](size_t done) { return ::write(number_, static_cast<const uint8_t*>(data) + done, bytes - done); });
        digests_.push_back(digest(data, bytes));
    }
    void read(void* data, size_t bytes) {
        if (bytes > left_) {
            fail("damaged");
        }
        move(bytes, [&](size_t done) { return ::read(number_, static_cast<uint8_t*>(data) + done, bytes - done); });
        left_ -= bytes;
        digests_.push_back(digest(data, bytes));
    }
    // Of all that was written or read.
    uint64_t sum() const { return digest(digests_.data(), digests_.size() * sizeof(digests_[0])); }
    size_t left() const { return left_; }
    [[noreturn]] void fail(const std::string& what) const { throw ModelError(path_ + ": " + what); }

private:
    void finish() {
        if (number_ >= 0) {
            close(number_);
        }
        number_ = -1;
    }
    template <class Call>
    void move(size_t bytes, const Call& call) {
        for (size_t done = 0; done < bytes;) {
            const ssize_t count = call(done);
            if (count < 0 && errno != EINTR) {
                fail(std::strerror(errno));
            }
            if (count == 0) {
                fail("damaged");  // somebody cuts it short meanwhile
            }
            done += static_cast<size_t>(std::max<ssize_t>(count, 0));
        }
    }

    std::string path_;
    int number_;
    size_t left_ = 0;
    std::vector<uint64_t> digests_;
};

std::vector<int32_t> read_numbers(File& file) {
    uint64_t count = 0;
    file.read(&count, sizeof(count));
    if (count > file.left() / sizeof(int32_t)) {
        file.fail("damaged");
    }
    std::vector<int32_t> numbers(count);
    file.read(numbers.data(), count * sizeof(int32_t));
    return numbers;
}

void write_numbers(File& file, const std::vector<int32_t>& numbers) {
    const uint64_t count = numbers.size();
    file.write(&count, sizeof(count));
    file.write(numbers.data(), count * sizeof(int32_t));
}

void read_all(File& file, const std::string& head, const std::vector<Text*>& texts) {
    std::string found(std::min(head.size(), file.left()), 0);
    file.read(found.data(), found.size());
    if (found != head) {
        file.fail("of another model or version");
    }
    for (Text* text : texts) {
        const std::vector<int32_t> tokens = read_numbers(file), shape = read_numbers(file);
        if (tokens.size() > static_cast<size_t>(text->context)) {
            file.fail("longer than the context");
        }
        const int length = static_cast<int>(tokens.size());
        try {
            text->check_tokens(tokens);
            text->state->resume(length, shape);
        } catch (const std::invalid_argument&) {
            file.fail("damaged");
        }
        for (const Piece& piece : text->state->pieces(length)) {
            file.read(piece.data, piece.bytes);
        }
        text->committed = tokens;
    }
    const uint64_t sum = file.sum();
    uint64_t written = 0;
    file.read(&written, sizeof(written));
    if (written != sum || file.left() > 0) {
        file.fail("damaged");
    }
}

}  // namespace

void write_texts(const std::string& path, const std::string& head, const std::vector<Session*>& sessions) {
    const Session::Turn turn(sessions);
    File file(path, O_WRONLY | O_NOFOLLOW);
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
        if (!text->committed.empty() || !text->pending.empty()) {
            throw std::invalid_argument("texts are read into new sessions");
        }
    }
    // Without waiting for a pipe's other end.
    File file(path, O_RDONLY | O_NONBLOCK);
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
