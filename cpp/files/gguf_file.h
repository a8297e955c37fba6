// A GGUF file, read-only. Nothing in it is trusted: every type, count, offset and size is checked before use.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "error.h"
#include "gguf.h"
#include "machine/memory.h"

namespace pystaged {

// A tensor's place in the file.
struct TensorView {
    std::string name;
    ggml_type type;
    int64_t ne[GGML_MAX_DIMS];  // ne[0] varies fastest
    size_t at, bytes;
    int shard = 0;  // of a model in several files
};

class GgufFile {
public:
    // Throws ModelError when the file cannot be read or is not a whole, valid GGUF file. The first of several files
    // (...-00001-of-00003.gguf) stands for all of them, unless they are not wanted.
    explicit GgufFile(const std::string& path, bool with_others = true);

    const std::string& path() const { return path_; }
    // Of all files.
    size_t bytes() const;
    // A digest of the metadata, sizes and times of change of all files, and of the first weights of each tensor:
    // another for another model, and for one whose files were written since.
    uint64_t identity() const;

    // Metadata. text, integer, real and flag throw ModelError when the key is there with another type, or missing
    // without a default.
    std::string text(const std::string& key, const std::optional<std::string>& otherwise = {}) const;
    int64_t integer(const std::string& key, int64_t least, int64_t most, std::optional<int64_t> otherwise = {}) const;
    float real(const std::string& key, float otherwise) const;
    bool flag(const std::string& key, bool otherwise) const;
    // The numbers or booleans of an array; nothing where the key is missing or no array.
    std::optional<std::vector<int64_t>> integers(const std::string& key) const;
    bool has(const std::string& name) const { return key(name) >= 0; }
    // Keys and values of all that are no arrays, as libllama spells them.
    std::vector<std::pair<std::string, std::string>> spelled() const;
    // The key of an array of that type and its length.
    std::optional<std::pair<int64_t, size_t>> array(const std::string& key, gguf_type type) const;
    const char* array_text(int64_t id, size_t index) const { return gguf_get_arr_str(context_.get(), id, index); }

    bool has_tensor(const std::string& name) const;
    std::vector<std::string> tensor_names() const;
    // A tensor of exactly this shape (missing dimensions are 1).
    TensorView tensor(const std::string& name, std::vector<int64_t> shape) const;
    // A tensor of that name of any shape.
    TensorView tensor(const std::string& name) const;
    // A tensor's weights. Read, not mapped, because a mapped file that another program shortens ends the process.
    // Throws ModelError where they cannot be read or are not finite.
    Memory read(const TensorView& tensor, int num_threads = 1) const;
    // The same for a part that begins and ends between its blocks.
    void read(const TensorView& tensor, size_t first, size_t bytes, uint8_t* out) const;
    // Asks the system to begin reading it from the disk.
    void prefetch(const TensorView& tensor) const { holder(tensor).file_->prefetch(tensor.at, tensor.bytes); }

    // fail and require throw ModelError, refuse throws UnsupportedModelError; all name the file.
    template <class... Parts>
    [[noreturn]] void fail(const Parts&... parts) const {
        throw ModelError(say(path_, ": ", parts...));
    }
    template <class... Parts>
    void require(bool holds, const Parts&... parts) const {
        pystaged::require<ModelError>(holds, path_, ": ", parts...);
    }
    template <class... Parts>
    [[noreturn]] void refuse(const Parts&... parts) const {
        throw UnsupportedModelError(say(path_, ": ", parts...));
    }

private:
    int64_t key(const std::string& name) const { return gguf_find_key(context_.get(), name.c_str()); }
    // That of a value of this type, or less than 0 where there is none. Throws ModelError for another type.
    int64_t key(const std::string& name, gguf_type type, const std::string& words) const;
    void open_shards();

    struct Free {
        void operator()(gguf_context* context) const { gguf_free(context); }
    };

    // The file that a tensor lies in.
    const GgufFile& holder(const TensorView& tensor) const {
        return tensor.shard > 0 ? *shards_[tensor.shard - 1] : *this;
    }
    void read_bytes(size_t at, size_t bytes, uint8_t* out, const std::string& what) const;

    std::string path_;
    std::unique_ptr<File> file_;
    std::unique_ptr<gguf_context, Free> context_;
    std::vector<std::unique_ptr<GgufFile>> shards_;  // after the first
};

// Collects what ggml and llama.cpp log in this thread while it lives; what other threads log goes where it went before.
class LogCapture {
public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    // The first error logged, without its newline, or "".
    const std::string& first_error() const { return first_error_; }

private:
    static void log(ggml_log_level level, const char* text, void*);

    LogCapture* outer_;
    mutable std::string first_error_;  // written while it lives
};

}  // namespace pystaged
