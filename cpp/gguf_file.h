// A GGUF file, read-only. Nothing in it is trusted: every type, count, offset and size is checked before use.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gguf.h"

namespace pystaged {

// A tensor's place in the mapped file.
struct TensorView {
    std::string name;
    ggml_type type;
    int64_t ne[GGML_MAX_DIMS];  // ne[0] varies fastest
    const uint8_t* data;
    size_t bytes;
};

class GgufFile {
public:
    // Throws ModelError when the file cannot be read or is not a whole, valid GGUF file.
    explicit GgufFile(const std::string& path);
    ~GgufFile();
    GgufFile(const GgufFile&) = delete;
    GgufFile& operator=(const GgufFile&) = delete;

    const std::string& path() const { return path_; }
    size_t bytes() const { return size_; }

    // Metadata. Each throws ModelError when the key is there with another type, or missing without a default.
    std::string text(const std::string& key) const;
    std::string text(const std::string& key, const std::string& otherwise) const;
    int64_t integer(const std::string& key, int64_t least, int64_t most) const;
    int64_t integer(const std::string& key, int64_t least, int64_t most, int64_t otherwise) const;
    float real(const std::string& key, float otherwise) const;
    bool flag(const std::string& key, bool otherwise) const;
    // The numbers or booleans of an array; nothing where the key is missing or no array.
    std::optional<std::vector<int64_t>> integers(const std::string& key) const;
    bool has(const std::string& name) const { return key(name) >= 0; }
    // The key of an array of that type and its length.
    std::optional<std::pair<int64_t, size_t>> array(const std::string& key, gguf_type type) const;
    const char* array_text(int64_t key_id, size_t index) const;

    bool has_tensor(const std::string& name) const;
    std::vector<std::string> tensor_names() const;
    // A tensor of exactly this shape (missing dimensions are 1).
    TensorView tensor(const std::string& name, std::vector<int64_t> shape) const;
    // A tensor of that name of any shape.
    TensorView tensor(const std::string& name) const;
    // Lets the system forget the pages of a tensor that has been copied.
    void release(const TensorView& tensor) const;

    [[noreturn]] void fail(const std::string& what) const;

private:
    int64_t key(const std::string& name) const;
    void map();

    struct Free {
        void operator()(gguf_context* context) const { gguf_free(context); }
    };

    std::string path_;
    std::unique_ptr<gguf_context, Free> context_;
    const uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Collects what ggml and llama.cpp log on this thread's behalf while it lives, instead of printing it.
class LogCapture {
public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    // The first error logged, without its newline, or "".
    const std::string& first_error() const { return first_error_; }

private:
    static void log(ggml_log_level level, const char* text, void* self);

    ggml_log_callback callback_ = nullptr;
    void* user_data_ = nullptr;
    std::string first_error_;
};

}  // namespace pystaged
