#include "files/gguf_file.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <system_error>
#include <unordered_set>

#include "llama.h"
#include "machine/digest.h"
#include "machine/pool.h"

namespace pystaged {

namespace {

constexpr size_t kReadBytes = 4 << 20;  // that a thread reads at a time
constexpr size_t kSampleBytes = 4096;   // of a tensor, that tell it from others

thread_local LogCapture* capture = nullptr;

struct LogLock {
    std::mutex mutex;
};

// Whose callback ours stands before; the process has one for all threads.
ggml_log_callback next_callback = nullptr;
void* next_data = nullptr;

// A value of metadata, if it is an integer; an unsigned one above INT64_MAX becomes that.
std::optional<int64_t> integer_at(const gguf_context* context, int64_t id) {
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

// Why ggml does not take a file, of which it says `reason`.
std::string whats_wrong(FILE* file, size_t size, const std::string& reason) {
    char magic[4] = {};
    std::rewind(file);
    if (size == 0) {
        return "the file is empty";
    }
    if (std::fread(magic, 1, sizeof(magic), file) != sizeof(magic) || std::memcmp(magic, "GGUF", sizeof(magic)) != 0) {
        return "no GGUF file: it does not begin with the letters GGUF; name such a file, or the folder of a checkpoint";
    }
    // Without the function of ggml that says so.
    const size_t colon = reason.starts_with("gguf_init") ? reason.find(": ") : std::string::npos;
    const std::string words = colon == std::string::npos ? reason : reason.substr(colon + 2);
    return "truncated or damaged, get it again" + (words.empty() ? "" : " (" + words + ")");
}

}  // namespace

// Ours stays in place: whoever fetched it in the meantime may call it at any time.
LogCapture::LogCapture() : outer_(capture) {
    capture = this;
    const std::lock_guard<std::mutex> lock(OfProcess<LogLock>::get().mutex);
    ggml_log_callback callback = nullptr;
    void* data = nullptr;
    llama_log_get(&callback, &data);
    if (callback != &LogCapture::log) {
        next_callback = callback;
        next_data = data;
        llama_log_set(&LogCapture::log, nullptr);
    }
}

LogCapture::~LogCapture() {
    capture = outer_;
}

void LogCapture::log(ggml_log_level level, const char* text, void*) {
    if (!capture) {
        std::unique_lock<std::mutex> lock(OfProcess<LogLock>::get().mutex);
        const ggml_log_callback callback = next_callback;
        void* data = next_data;
        lock.unlock();
        if (callback) {
            callback(level, text, data);
        }
        return;
    }
    std::string& error = capture->first_error_;
    // What follows the first error only says that loading failed.
    if (level == GGML_LOG_LEVEL_ERROR && error.empty()) {
        error = text;
        while (!error.empty() && error.back() == '\n') {
            error.pop_back();
        }
    }
}

GgufFile::GgufFile(const std::string& path, bool with_others) : path_(path) {
    std::unique_ptr<FILE, File::Close> stream;
    try {
        file_ = std::make_unique<File>(path, File::Use::kRead);
        stream = file_->stream();
    } catch (const std::system_error& error) {
        fail("cannot open: ", error.what());
    }
    require(file_->is_regular(), "cannot open: it is no regular file");
    const size_t bytes_here = file_->size();
    {
        const LogCapture log;
        context_.reset(gguf_init_from_file_ptr(stream.get(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
        if (!context_) {
            fail(whats_wrong(stream.get(), bytes_here, log.first_error()));
        }
    }
    const size_t start = gguf_get_data_offset(context_.get());
    for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
        const size_t offset = gguf_get_tensor_offset(context_.get(), i);
        const size_t bytes = gguf_get_tensor_size(context_.get(), i);
        require(start <= bytes_here && offset <= bytes_here - start && bytes <= bytes_here - start - offset, "tensor '",
                gguf_get_tensor_name(context_.get(), i),
                "' lies beyond the end of the file; it is truncated or damaged, get it again");
    }
    if (with_others) {
        open_shards();
    }
}

void GgufFile::open_shards() {
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

size_t GgufFile::bytes() const {
    size_t sum = file_->size();
    for (const auto& shard : shards_) {
        sum += shard->file_->size();
    }
    return sum;
}

uint64_t GgufFile::identity() const {
    // What lies between the tensors' first weights is not read: time of change tells of it.
    std::vector<uint8_t> data(gguf_get_data_offset(context_.get()));
    read_bytes(0, data.size(), data.data(), "metadata");
    std::vector<uint64_t> parts = {file_->size(), static_cast<uint64_t>(file_->changed()),
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

int64_t GgufFile::key(const std::string& name, gguf_type type, const std::string& words) const {
    const int64_t id = key(name);
    require(id < 0 || gguf_get_kv_type(context_.get(), id) == type, "metadata '", name, "' is not ", words);
    return id;
}

std::string GgufFile::text(const std::string& name, const std::optional<std::string>& otherwise) const {
    const int64_t id = key(name, GGUF_TYPE_STRING, "a string");
    require(id >= 0 || otherwise, "metadata '", name, "' is missing");
    return id < 0 ? *otherwise : gguf_get_val_str(context_.get(), id);
}

int64_t GgufFile::integer(const std::string& name, int64_t least, int64_t most,
                          std::optional<int64_t> otherwise) const {
    const int64_t id = key(name);
    if (id < 0 && otherwise) {
        return *otherwise;
    }
    require(id >= 0, "metadata '", name, "' is missing");
    const std::optional<int64_t> value = integer_at(context_.get(), id);
    require(value.has_value(), "metadata '", name, "' is not an integer");
    require(*value >= least && *value <= most, "metadata '", name, "' is ", *value, ", outside ", least, " to ", most);
    return *value;
}

float GgufFile::real(const std::string& name, float otherwise) const {
    const int64_t id = key(name, GGUF_TYPE_FLOAT32, "a 32-bit float");
    return id < 0 ? otherwise : gguf_get_val_f32(context_.get(), id);
}

bool GgufFile::flag(const std::string& name, bool otherwise) const {
    const int64_t id = key(name, GGUF_TYPE_BOOL, "a boolean");
    return id < 0 ? otherwise : gguf_get_val_bool(context_.get(), id);
}

std::vector<std::pair<std::string, std::string>> GgufFile::spelled() const {
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

std::optional<std::vector<int64_t>> GgufFile::integers(const std::string& name) const {
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

std::optional<std::pair<int64_t, size_t>> GgufFile::array(const std::string& name, gguf_type type) const {
    const std::string words = say("an array of ", gguf_type_name(type));
    const int64_t id = key(name, GGUF_TYPE_ARRAY, words);
    if (id < 0) {
        return std::nullopt;
    }
    require(gguf_get_arr_type(context_.get(), id) == type, "metadata '", name, "' is not ", words);
    return std::make_pair(id, gguf_get_arr_n(context_.get(), id));
}

bool GgufFile::has_tensor(const std::string& name) const {
    return gguf_find_tensor(context_.get(), name.c_str()) >= 0 ||
           std::ranges::any_of(shards_, [&](const auto& shard) { return shard->has_tensor(name); });
}

std::vector<std::string> GgufFile::tensor_names() const {
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

TensorView GgufFile::tensor(const std::string& name) const {
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

TensorView GgufFile::tensor(const std::string& name, std::vector<int64_t> shape) const {
    TensorView view = tensor(name);
    shape.resize(GGML_MAX_DIMS, 1);
    std::string found, wanted;
    bool same = true;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        same = same && view.ne[i] == shape[i];
        found += (i ? " x " : "") + std::to_string(view.ne[i]);
        wanted += (i ? " x " : "") + std::to_string(shape[i]);
    }
    require(same, "tensor '", name, "' has shape ", found, " where ", wanted, " is needed");
    return view;
}

Memory GgufFile::read(const TensorView& tensor, int num_threads) const {
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

void GgufFile::read(const TensorView& tensor, size_t first, size_t bytes, uint8_t* out) const {
    const GgufFile& file = holder(tensor);
    file.read_bytes(tensor.at + first, bytes, out, "tensor '" + tensor.name + "'");
    file.require(ggml_validate_row_data(tensor.type, out, bytes), "tensor '", tensor.name,
                 "' holds weights that are not finite numbers; the file is damaged, get it again");
}

void GgufFile::read_bytes(size_t at, size_t bytes, uint8_t* out, const std::string& what) const {
    try {
        require(file_->read(out, bytes, at) == bytes, what,
                " cannot be read: the file became shorter while it was read");
    } catch (const std::system_error& error) {
        fail(what, " cannot be read: ", error.what());
    }
}

}  // namespace pystaged
