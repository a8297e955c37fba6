#include "gguf_file.h"

#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>

#include "error.h"
#include "llama.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace pystaged {

namespace {

// The log callback is one for the whole process.
std::mutex log_mutex;

}  // namespace

LogCapture::LogCapture() {
    log_mutex.lock();
    llama_log_get(&callback_, &user_data_);
    llama_log_set(&LogCapture::log, this);
}

LogCapture::~LogCapture() {
    llama_log_set(callback_, user_data_);
    log_mutex.unlock();
}

void LogCapture::log(ggml_log_level level, const char* text, void* self) {
    std::string& error = static_cast<LogCapture*>(self)->first_error_;
    // What follows the first error only says that loading failed.
    if (level == GGML_LOG_LEVEL_ERROR && error.empty()) {
        error = text;
        while (!error.empty() && error.back() == '\n') {
            error.pop_back();
        }
    }
}

GgufFile::GgufFile(const std::string& path) : path_(path) {
    std::string reason;
    {
        LogCapture log;
        context_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
        reason = log.first_error();
    }
    if (!context_) {
        fail(reason.empty() ? "not a valid GGUF file" : reason);
    }
    map();
    const size_t start = gguf_get_data_offset(context_.get());
    for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
        const size_t offset = gguf_get_tensor_offset(context_.get(), i);
        const size_t bytes = gguf_get_tensor_size(context_.get(), i);
        if (start > size_ || offset > size_ - start || bytes > size_ - start - offset) {
            fail(std::string("tensor '") + gguf_get_tensor_name(context_.get(), i) +
                 "' lies beyond the end of the file; it is truncated or damaged, get it again");
        }
    }
}

GgufFile::~GgufFile() {
    if (data_) {
        munmap(const_cast<uint8_t*>(data_), size_);
    }
}

void GgufFile::fail(const std::string& what) const {
    throw ModelError(path_ + ": " + what);
}

void GgufFile::map() {
    const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info = {};
    if (fd < 0 || fstat(fd, &info) != 0) {
        const std::string reason = std::strerror(errno);
        if (fd >= 0) {
            close(fd);
        }
        fail("cannot open: " + reason);
    }
    size_ = static_cast<size_t>(info.st_size);
    void* p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    close(fd);
    if (p == MAP_FAILED) {
        fail(std::string("cannot map: ") + std::strerror(error));
    }
    data_ = static_cast<const uint8_t*>(p);
    madvise(p, size_, MADV_SEQUENTIAL);
}

int64_t GgufFile::key(const std::string& name) const {
    return gguf_find_key(context_.get(), name.c_str());
}

std::string GgufFile::text(const std::string& name) const {
    const int64_t id = key(name);
    if (id < 0) {
        fail("metadata '" + name + "' is missing");
    }
    if (gguf_get_kv_type(context_.get(), id) != GGUF_TYPE_STRING) {
        fail("metadata '" + name + "' is not a string");
    }
    return gguf_get_val_str(context_.get(), id);
}

std::string GgufFile::text(const std::string& name, const std::string& otherwise) const {
    return key(name) < 0 ? otherwise : text(name);
}

int64_t GgufFile::integer(const std::string& name, int64_t least, int64_t most) const {
    const int64_t id = key(name);
    if (id < 0) {
        fail("metadata '" + name + "' is missing");
    }
    const gguf_context* context = context_.get();
    int64_t value = 0;
    switch (gguf_get_kv_type(context, id)) {
        case GGUF_TYPE_UINT8: value = gguf_get_val_u8(context, id); break;
        case GGUF_TYPE_INT8: value = gguf_get_val_i8(context, id); break;
        case GGUF_TYPE_UINT16: value = gguf_get_val_u16(context, id); break;
        case GGUF_TYPE_INT16: value = gguf_get_val_i16(context, id); break;
        case GGUF_TYPE_UINT32: value = gguf_get_val_u32(context, id); break;
        case GGUF_TYPE_INT32: value = gguf_get_val_i32(context, id); break;
        case GGUF_TYPE_INT64: value = gguf_get_val_i64(context, id); break;
        case GGUF_TYPE_UINT64: {
            const uint64_t wide = gguf_get_val_u64(context, id);
            value = wide > uint64_t(most) ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(wide);
            break;
        }
        default: fail("metadata '" + name + "' is not an integer");
    }
    if (value < least || value > most) {
        fail("metadata '" + name + "' is " + std::to_string(value) + ", outside " + std::to_string(least) + " to " +
             std::to_string(most));
    }
    return value;
}

int64_t GgufFile::integer(const std::string& name, int64_t least, int64_t most, int64_t otherwise) const {
    return key(name) < 0 ? otherwise : integer(name, least, most);
}

float GgufFile::real(const std::string& name, float otherwise) const {
    const int64_t id = key(name);
    if (id < 0) {
        return otherwise;
    }
    if (gguf_get_kv_type(context_.get(), id) != GGUF_TYPE_FLOAT32) {
        fail("metadata '" + name + "' is not a 32-bit float");
    }
    return gguf_get_val_f32(context_.get(), id);
}

bool GgufFile::flag(const std::string& name, bool otherwise) const {
    const int64_t id = key(name);
    if (id < 0) {
        return otherwise;
    }
    if (gguf_get_kv_type(context_.get(), id) != GGUF_TYPE_BOOL) {
        fail("metadata '" + name + "' is not a boolean");
    }
    return gguf_get_val_bool(context_.get(), id);
}

std::optional<std::vector<int64_t>> GgufFile::integers(const std::string& name) const {
    const gguf_context* context = context_.get();
    const int64_t id = key(name);
    if (id < 0 || gguf_get_kv_type(context, id) != GGUF_TYPE_ARRAY) {
        return std::nullopt;
    }
    const size_t size = gguf_get_arr_n(context, id);
    const gguf_type type = gguf_get_arr_type(context, id);
    if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_BOOL) {
        fail("metadata '" + name + "' is not an array of 32-bit integers or booleans");
    }
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
    const int64_t id = key(name);
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(context_.get(), id) != GGUF_TYPE_ARRAY || gguf_get_arr_type(context_.get(), id) != type) {
        fail("metadata '" + name + "' is not an array of " + gguf_type_name(type));
    }
    return std::make_pair(id, gguf_get_arr_n(context_.get(), id));
}

const char* GgufFile::array_text(int64_t key_id, size_t index) const {
    return gguf_get_arr_str(context_.get(), key_id, index);
}

bool GgufFile::has_tensor(const std::string& name) const {
    return gguf_find_tensor(context_.get(), name.c_str()) >= 0;
}

std::vector<std::string> GgufFile::tensor_names() const {
    std::vector<std::string> names;
    for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
        names.emplace_back(gguf_get_tensor_name(context_.get(), i));
    }
    return names;
}

TensorView GgufFile::tensor(const std::string& name) const {
    const int64_t id = gguf_find_tensor(context_.get(), name.c_str());
    if (id < 0) {
        fail("tensor '" + name + "' is missing");
    }
    TensorView view{name, gguf_get_tensor_type(context_.get(), id), {}, nullptr, 0};
    std::memcpy(view.ne, gguf_get_tensor_ne(context_.get(), id), sizeof(view.ne));
    view.bytes = gguf_get_tensor_size(context_.get(), id);
    view.data = data_ + gguf_get_data_offset(context_.get()) + gguf_get_tensor_offset(context_.get(), id);
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
    if (!same) {
        fail("tensor '" + name + "' has shape " + found + " where " + wanted + " is needed");
    }
    return view;
}

void GgufFile::release(const TensorView& tensor) const {
    // Whole pages inside the tensor; neighbours may not have been read yet.
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(tensor.data) + tensor.bytes) / page * page;
    if (first < last) {
        madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
}

}  // namespace pystaged
