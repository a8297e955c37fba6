// A GGUF file, read-only. Nothing in it is trusted: every type, count, offset and size is checked before use.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <vector>

#include "error.h"
#include "gguf.h"
#include "llama.h"
#include "machine/digest.h"
#include "machine/pool.h"

namespace pystaged {

// Collects what ggml and llama.cpp log in this thread while it lives; what other threads log goes where it went before.
class LogCapture {
public:
    // Ours stays in place: whoever fetched it in the meantime may call it at any time.
    LogCapture() : outer_(capture_) {
        capture_ = this;
        const std::lock_guard<std::mutex> lock(OfProcess<Lock>::get().mutex);
        ggml_log_callback callback = nullptr;
        void* data = nullptr;
        llama_log_get(&callback, &data);
        if (callback != &LogCapture::log) {
            next_callback_ = callback;
            next_data_ = data;
            llama_log_set(&LogCapture::log, nullptr);
        }
    }
    ~LogCapture() { capture_ = outer_; }
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    // The first error logged, without its newline, or "".
    const std::string& first_error() const { return first_error_; }

private:
    static void log(ggml_log_level level, const char* text, void*) {
        if (!capture_) {
            std::unique_lock<std::mutex> lock(OfProcess<Lock>::get().mutex);
            const ggml_log_callback callback = next_callback_;
            void* data = next_data_;
            lock.unlock();
            if (callback) {
                callback(level, text, data);
            }
            return;
        }
        std::string& error = capture_->first_error_;
        // What follows the first error only says that loading failed.
        if (level == GGML_LOG_LEVEL_ERROR && error.empty()) {
            error = text;
            while (!error.empty() && error.back() == '\n') {
                error.pop_back();
            }
        }
    }

    struct Lock {
        std::mutex mutex;
    };
    static inline thread_local LogCapture* capture_ = nullptr;
    // Whose callback ours stands before; the process has one for all threads.
    static inline ggml_log_callback next_callback_ = nullptr;
    static inline void* next_data_ = nullptr;

    LogCapture* outer_;
    mutable std::string first_error_;  // written while it lives
};

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
    explicit GgufFile(const std::string& path, bool with_others = true) : path_(path), file_(path, File::Use::kRead) {
        require(file_.is_regular(), "cannot open: it is no regular file");
        const size_t bytes_here = file_.size();
        {
            const LogCapture log;
            ReadAhead reader{file_};
            context_.reset(gguf_init_from_callback(ReadAhead::read, &reader, 0, bytes_here, {true, nullptr}));
            require(context_ != nullptr, [&] { return whats_wrong(log.first_error()); });
        }
        const size_t start = gguf_get_data_offset(context_.get());
        for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
            const size_t offset = gguf_get_tensor_offset(context_.get(), i);
            const size_t bytes = gguf_get_tensor_size(context_.get(), i);
            require(start <= bytes_here && offset <= bytes_here - start && bytes <= bytes_here - start - offset,
                    "tensor '", gguf_get_tensor_name(context_.get(), i),
                    "' lies beyond the end of the file; it is truncated or damaged, get it again");
        }
        if (with_others) {
            open_shards();
        }
    }

    const std::string& path() const { return path_; }
    // Of all files.
    size_t bytes() const {
        size_t sum = file_.size();
        for (const auto& shard : shards_) {
            sum += shard->file_.size();
        }
        return sum;
    }
    // A digest of the metadata, sizes and times of change of all files, and of the first weights of each tensor:
    // another for another model, and for one whose files were written since.
    uint64_t identity() const {
        // What lies between the tensors' first weights is not read: time of change tells of it.
        std::vector<uint8_t> data(gguf_get_data_offset(context_.get()));
        read_bytes(0, data.size(), data.data(), "metadata");
        std::vector<uint64_t> parts = {file_.size(), static_cast<uint64_t>(file_.changed()),
                                       digest(data.data(), data.size())};
        for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
            data.resize(std::min(kSampleBytes, gguf_get_tensor_size(context_.get(), i)));
            read_bytes(gguf_get_data_offset(context_.get()) + gguf_get_tensor_offset(context_.get(), i), data.size(),
                       data.data(), std::string("tensor '") + gguf_get_tensor_name(context_.get(), i) + "'");
            parts.push_back(digest(data.data(), data.size()));
        }
        for (const auto& shard : shards_) {
            parts.push_back(shard->identity());
        }
        return digest(parts.data(), parts.size() * sizeof(parts[0]));
    }

    // Metadata. text, integer, real and flag throw ModelError when the key is there with another type, or missing
    // without a default.
    std::string text(const std::string& name, const std::optional<std::string>& otherwise = {}) const {
        const int64_t id = key(name, GGUF_TYPE_STRING, "a string");
        require(id >= 0 || otherwise, "metadata '", name, "' is missing");
        return id < 0 ? *otherwise : gguf_get_val_str(context_.get(), id);
    }
    int64_t integer(const std::string& name, int64_t least, int64_t most, std::optional<int64_t> otherwise = {}) const {
        const int64_t id = key(name);
        if (id < 0 && otherwise) {
            return *otherwise;
        }
        require(id >= 0, "metadata '", name, "' is missing");
        const std::optional<int64_t> value = integer_at(context_.get(), id);
        require(value.has_value(), "metadata '", name, "' is not an integer");
        require(*value >= least && *value <= most, "metadata '", name, "' is ", *value, ", outside ", least, " to ",
                most);
        return *value;
    }
    float real(const std::string& name, float otherwise) const {
        const int64_t id = key(name, GGUF_TYPE_FLOAT32, "a 32-bit float");
        return id < 0 ? otherwise : gguf_get_val_f32(context_.get(), id);
    }
    bool flag(const std::string& name, bool otherwise) const {
        const int64_t id = key(name, GGUF_TYPE_BOOL, "a boolean");
        return id < 0 ? otherwise : gguf_get_val_bool(context_.get(), id);
    }
    // The numbers or booleans of an array; nothing where the key is missing or no array.
    std::optional<std::vector<int64_t>> integers(const std::string& name) const {
        const gguf_context* context = context_.get();
        const int64_t id = key(name);
        if (id < 0 || gguf_get_kv_type(context, id) != GGUF_TYPE_ARRAY) {
            return std::nullopt;
        }
        const size_t size = gguf_get_arr_n(context, id);
        const gguf_type type = gguf_get_arr_type(context, id);
        require(type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32 || type == GGUF_TYPE_BOOL, "metadata '", name,
                "' is not an array of 32-bit integers or booleans");
        const auto* data = static_cast<const uint8_t*>(gguf_get_arr_data(context, id));
        std::vector<int64_t> values(size);
        for (size_t i = 0; i < size; ++i) {
            if (type == GGUF_TYPE_BOOL) {
                values[i] = data[i] != 0;
                continue;
            }
            uint32_t bits;
            std::memcpy(&bits, data + 4 * i, sizeof(bits));
            values[i] = type == GGUF_TYPE_INT32 ? static_cast<int32_t>(bits) : static_cast<int64_t>(bits);
        }
        return values;
    }
    bool has(const std::string& name) const { return key(name) >= 0; }
    // Keys and values of all that are no arrays, as libllama spells them.
    std::vector<std::pair<std::string, std::string>> spelled() const {
        const gguf_context* context = context_.get();
        std::vector<std::pair<std::string, std::string>> result;
        for (int64_t id = 0; id < gguf_get_n_kv(context); ++id) {
            std::string value;
            switch (gguf_get_kv_type(context, id)) {
                case GGUF_TYPE_STRING: value = gguf_get_val_str(context, id); break;
                case GGUF_TYPE_BOOL: value = gguf_get_val_bool(context, id) ? "true" : "false"; break;
                case GGUF_TYPE_UINT64: value = std::to_string(gguf_get_val_u64(context, id)); break;
                case GGUF_TYPE_FLOAT32: value = std::to_string(gguf_get_val_f32(context, id)); break;
                case GGUF_TYPE_FLOAT64: value = std::to_string(gguf_get_val_f64(context, id)); break;
                case GGUF_TYPE_ARRAY: continue;
                default: value = std::to_string(integer_at(context, id).value());
            }
            result.emplace_back(gguf_get_key(context, id), std::move(value));
        }
        return result;
    }
    // The key of an array of that type and its length.
    std::optional<std::pair<int64_t, size_t>> array(const std::string& name, gguf_type type) const {
        const std::string words = say("an array of ", gguf_type_name(type));
        const int64_t id = key(name, GGUF_TYPE_ARRAY, words);
        if (id < 0) {
            return std::nullopt;
        }
        require(gguf_get_arr_type(context_.get(), id) == type, "metadata '", name, "' is not ", words);
        return std::make_pair(id, gguf_get_arr_n(context_.get(), id));
    }
    const char* array_text(int64_t id, size_t index) const { return gguf_get_arr_str(context_.get(), id, index); }

    bool has_tensor(const std::string& name) const {
        return gguf_find_tensor(context_.get(), name.c_str()) >= 0 ||
               std::ranges::any_of(shards_, [&](const auto& shard) { return shard->has_tensor(name); });
    }
    std::vector<std::string> tensor_names() const {
        std::vector<std::string> names;
        for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
            names.emplace_back(gguf_get_tensor_name(context_.get(), i));
        }
        for (const auto& shard : shards_) {
            const std::vector<std::string> more = shard->tensor_names();
            names.insert(names.end(), more.begin(), more.end());
        }
        return names;
    }
    // A tensor of exactly this shape (missing dimensions are 1).
    TensorView tensor(const std::string& name, std::vector<int64_t> shape) const {
        const TensorView view = tensor(name);
        shape.resize(GGML_MAX_DIMS, 1);
        const auto spelled = [](const int64_t* ne) { return say(ne[0], " x ", ne[1], " x ", ne[2], " x ", ne[3]); };
        require(std::equal(shape.begin(), shape.end(), view.ne), "tensor '", name, "' has shape ", spelled(view.ne),
                " where ", spelled(shape.data()), " is needed");
        return view;
    }
    // A tensor of that name of any shape.
    TensorView tensor(const std::string& name) const {
        const int64_t id = gguf_find_tensor(context_.get(), name.c_str());
        for (size_t i = 0; id < 0 && i < shards_.size(); ++i) {
            if (shards_[i]->has_tensor(name)) {
                TensorView view = shards_[i]->tensor(name);
                view.shard = static_cast<int>(i) + 1;
                return view;
            }
        }
        require(id >= 0, "tensor '", name, "' is missing");
        TensorView view{name, gguf_get_tensor_type(context_.get(), id), {}, 0, 0};
        std::memcpy(view.ne, gguf_get_tensor_ne(context_.get(), id), sizeof(view.ne));
        view.bytes = gguf_get_tensor_size(context_.get(), id);
        view.at = gguf_get_data_offset(context_.get()) + gguf_get_tensor_offset(context_.get(), id);
        return view;
    }
    // A tensor's weights. Read, not mapped, because a mapped file that another program shortens ends the process.
    // Throws ModelError where they cannot be read or are not finite.
    Memory read(const TensorView& tensor, int num_threads = 1) const {
        Memory data(tensor.bytes);
        // Blocks of weights are not cut.
        const size_t part = kReadBytes / ggml_type_size(tensor.type) * ggml_type_size(tensor.type);
        const int parts = static_cast<int>((tensor.bytes + part - 1) / part);
        ThreadPool::shared().run(parts, num_threads, [&](int i, int) {
            const size_t first = i * part;
            read(tensor, first, std::min(tensor.bytes - first, part), data.data() + first);
        });
        return data;
    }
    // The same for a part that begins and ends between its blocks.
    void read(const TensorView& tensor, size_t first, size_t bytes, uint8_t* out) const {
        const GgufFile& file = holder(tensor);
        file.read_bytes(tensor.at + first, bytes, out, "tensor '" + tensor.name + "'");
        file.require(ggml_validate_row_data(tensor.type, out, bytes), "tensor '", tensor.name,
                     "' holds weights that are not finite numbers; the file is damaged, get it again");
    }
    // Asks the system to begin reading it from the disk.
    void prefetch(const TensorView& tensor) const { holder(tensor).file_.prefetch(tensor.at, tensor.bytes); }

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
    static constexpr size_t kReadBytes = 4 << 20;  // that a thread reads at a time
    static constexpr size_t kSampleBytes = 4096;   // of a tensor, that tell it from others

    // A value of metadata, if it is an integer; an unsigned one above INT64_MAX becomes that.
    static std::optional<int64_t> integer_at(const gguf_context* context, int64_t id) {
        switch (gguf_get_kv_type(context, id)) {
            case GGUF_TYPE_UINT8: return gguf_get_val_u8(context, id);
            case GGUF_TYPE_INT8: return gguf_get_val_i8(context, id);
            case GGUF_TYPE_UINT16: return gguf_get_val_u16(context, id);
            case GGUF_TYPE_INT16: return gguf_get_val_i16(context, id);
            case GGUF_TYPE_UINT32: return gguf_get_val_u32(context, id);
            case GGUF_TYPE_INT32: return gguf_get_val_i32(context, id);
            case GGUF_TYPE_INT64: return gguf_get_val_i64(context, id);
            case GGUF_TYPE_UINT64:
                return static_cast<int64_t>(std::min<uint64_t>(gguf_get_val_u64(context, id), INT64_MAX));
            default: return std::nullopt;
        }
    }

    // ggml asks for a few bytes at a time.
    struct ReadAhead {
        const File& file;
        std::vector<uint8_t> ahead = {};
        uint64_t first = 0;  // where they are in the file

        static size_t read(void* self, void* out, uint64_t at, size_t bytes) try {
            auto& [file, ahead, first] = *static_cast<ReadAhead*>(self);
            if (at < first || at - first + bytes > ahead.size()) {
                ahead.resize(std::max<size_t>(bytes, 64 << 10));
                ahead.resize(file.read(ahead.data(), ahead.size(), at));
                first = at;
            }
            bytes = std::min<size_t>(bytes, ahead.size() - (at - first));
            std::memcpy(out, ahead.data() + (at - first), bytes);
            return bytes;
        } catch (const std::exception&) {
            return 0;  // as at the end of the file
        }
    };

    // Why ggml does not take the file, of which it says `reason`.
    std::string whats_wrong(const std::string& reason) const {
        char magic[4] = {};
        if (file_.size() == 0) {
            return "the file is empty";
        }
        if (file_.read(magic, sizeof(magic), 0) < sizeof(magic) || std::memcmp(magic, "GGUF", sizeof(magic))) {
            return "no GGUF file: it does not begin with the letters GGUF; name such a file, or the folder of a "
                   "checkpoint";
        }
        // Without the function of ggml that says so.
        const std::string words = reason.substr(reason.starts_with("gguf_init") ? reason.find(": ") + 2 : 0);
        return "truncated or damaged, get it again" + (words.empty() ? "" : " (" + words + ")");
    }

    int64_t key(const std::string& name) const { return gguf_find_key(context_.get(), name.c_str()); }
    // That of a value of this type, or less than 0 where there is none. Throws ModelError for another type.
    int64_t key(const std::string& name, gguf_type type, const std::string& words) const {
        const int64_t id = key(name);
        require(id < 0 || gguf_get_kv_type(context_.get(), id) == type, "metadata '", name, "' is not ", words);
        return id;
    }
    void open_shards() {
        const int64_t count = integer("split.count", 0, 99999, 1);
        if (count <= 1) {
            return;
        }
        const auto suffix = [count](int64_t number) {
            char text[32];
            std::snprintf(text, sizeof(text), "-%05d-of-%05d.gguf", static_cast<int>(number), static_cast<int>(count));
            return std::string(text);
        };
        const std::string own = suffix(1);
        require(path_.ends_with(own), "the model lies in ", count, " files; name the first, which ends in '", own, "'");
        for (int64_t i = 2; i <= count; ++i) {
            const std::string path = path_.substr(0, path_.size() - own.size()) + suffix(i);
            shards_.push_back(std::make_unique<GgufFile>(path, false));
            shards_.back()->integer("split.no", i - 1, i - 1);
            shards_.back()->integer("split.count", count, count, count);
        }
        const std::vector<std::string> names = tensor_names();
        std::unordered_set<std::string> seen;
        for (const std::string& name : names) {
            require(seen.insert(name).second, "tensor '", name, "' stands in two of the model's files; get them again");
        }
        integer("split.tensors.count", names.size(), names.size(), names.size());
    }

    struct Free {
        void operator()(gguf_context* context) const { gguf_free(context); }
    };

    // The file that a tensor lies in.
    const GgufFile& holder(const TensorView& tensor) const {
        return tensor.shard > 0 ? *shards_[tensor.shard - 1] : *this;
    }
    void read_bytes(size_t at, size_t bytes, uint8_t* out, const std::string& what) const {
        require(file_.read(out, bytes, at) == bytes, what,
                " cannot be read: the file became shorter while it was read");
    }

    std::string path_;
    File file_;
    std::unique_ptr<gguf_context, Free> context_;
    std::vector<std::unique_ptr<GgufFile>> shards_;  // after the first
};

}  // namespace pystaged
