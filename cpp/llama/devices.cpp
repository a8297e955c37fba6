#include "llama/devices.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <stdexcept>

#include "error.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"

namespace pystaged {

namespace {

constexpr size_t kTensorsPerContext = 256;

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

bool is_gpu(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

ggml_backend_reg_t rpc() {
    ggml_backend_reg_t found = ggml_backend_reg_by_name("RPC");
    if (!found) {
        throw DeviceError(
            "the installed llama-cpp-python is built without RPC; install it with: CMAKE_ARGS=-DGGML_RPC=on "
            "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python "
            "llama-cpp-python==" LLAMA_CPP_PYTHON_VERSION);
    }
    return found;
}

ggml_backend_dev_t find_device(const std::string& name) {
    const std::string wanted = lower(name);
    if (wanted == "ggml-cpu") {
        return cpu_device();
    }
    std::string names = "cpu, ggml-cpu";
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        const std::string own = lower(ggml_backend_dev_name(device));
        const std::string kind = lower(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)));
        const bool metal = kind == "metal" || kind == "mtl";
        if (own == wanted || (wanted == "metal" && metal) || (wanted == "gpu" && is_gpu(device))) {
            return device;
        }
        if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            names += std::string(", ") + ggml_backend_dev_name(device);
        }
    }
    throw DeviceError("there is no device '" + name + "' here; there are: " + names);
}

}  // namespace

std::vector<DeviceInfo> list_devices() {
    std::vector<DeviceInfo> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        DeviceInfo info{ggml_backend_dev_name(device), ggml_backend_dev_description(device), is_gpu(device), 0, 0};
        ggml_backend_dev_memory(device, &info.free_bytes, &info.total_bytes);
        found.push_back(info);
    }
    return found;
}

Devices find_devices(const std::string& name) {
    Devices found;
    if (name.rfind("rpc:", 0) == 0) {
        const auto add_server = reinterpret_cast<decltype(&ggml_backend_rpc_add_server)>(
            ggml_backend_reg_get_proc_address(rpc(), "ggml_backend_rpc_add_server"));
        for (const std::string& endpoint : split(name.substr(4))) {
            ggml_backend_reg_t server = add_server(endpoint.c_str());
            for (size_t i = 0; server && i < ggml_backend_reg_dev_count(server); ++i) {
                found.push_back(ggml_backend_reg_dev_get(server, i));
            }
        }
    } else {
        for (const std::string& part : split(name)) {
            found.push_back(find_device(part));
        }
    }
    if (found.empty()) {
        throw DeviceError("'" + name + "' names no device");
    }
    return found;
}

std::pair<int, int> rpc_version() {
    rpc();
    return {RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION};
}

void serve_devices(const std::string& endpoint, const std::string& device, int num_threads) {
    const auto start = reinterpret_cast<decltype(&ggml_backend_rpc_start_server)>(
        ggml_backend_reg_get_proc_address(rpc(), "ggml_backend_rpc_start_server"));
    Devices devices = find_devices(device);
    start(endpoint.c_str(), /*cache_dir=*/nullptr, static_cast<size_t>(num_threads), devices.size(), devices.data());
    throw DeviceError("cannot serve on " + endpoint + "; is the port taken?");
}

BufferPtr allocate(ggml_context* context, ggml_backend_dev_t device, const char* what) {
    BufferPtr buffer(ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_dev_buffer_type(device)));
    if (!buffer) {
        size_t needed = 0, free_bytes = 0, total = 0;
        for (ggml_tensor* t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
            needed += ggml_nbytes(t);
        }
        ggml_backend_dev_memory(device, &free_bytes, &total);
        throw DeviceError(std::string(what) + " of " + std::to_string(needed >> 20) + " MiB does not fit on device '" +
                          ggml_backend_dev_name(device) + "', which has " + std::to_string(free_bytes >> 20) +
                          " MiB free");
    }
    return buffer;
}

DeviceMemory::DeviceMemory(const Devices& devices) : devices_(devices), num_devices_(static_cast<int>(devices.size())) {
    double sum = 0;
    for (ggml_backend_dev_t device : devices_) {
        size_t free_bytes = 0, total = 0;
        ggml_backend_dev_memory(device, &free_bytes, &total);
        sum += static_cast<double>(std::max<size_t>(free_bytes, 1));
        shares_.push_back(sum);
    }
    for (double& share : shares_) {
        share /= sum;
    }
    if (devices_.back() != cpu_device()) {
        devices_.push_back(cpu_device());
    }
    contexts_.resize(devices_.size());
}

bool DeviceMemory::can_multiply(ggml_type type) {
    return type == GGML_TYPE_F32 || (ggml_get_type_traits(type)->to_float && ggml_get_type_traits_cpu(type)->vec_dot);
}

int DeviceMemory::device_of(int layer, int num_layers) const {
    const double middle = (layer + 0.5) / num_layers;
    const auto found = std::lower_bound(shares_.begin(), shares_.end(), middle);
    return std::min(static_cast<int>(found - shares_.begin()), num_devices_ - 1);
}

ggml_tensor* DeviceMemory::place(ggml_type type, int64_t cols, int64_t rows, int device, Source source) {
    auto& contexts = contexts_[device];
    if (contexts.empty() ||
        ggml_used_mem(contexts.back().get()) + ggml_tensor_overhead() > ggml_get_mem_size(contexts.back().get())) {
        contexts.emplace_back(ggml_init({ggml_tensor_overhead() * kTensorsPerContext, nullptr, /*no_alloc=*/true}));
        if (!contexts.back()) {
            throw std::bad_alloc();
        }
    }
    ggml_tensor* tensor = rows == 1 ? ggml_new_tensor_1d(contexts.back().get(), type, cols)
                                    : ggml_new_tensor_2d(contexts.back().get(), type, cols, rows);
    placed_.push_back({tensor, std::move(source)});
    return tensor;
}

void DeviceMemory::fill(const std::function<void()>& progress) {
    for (size_t i = 0; i < contexts_.size(); ++i) {
        for (const ContextPtr& context : contexts_[i]) {
            buffers_.push_back(allocate(context.get(), devices_[i], "a part of the weights"));
            ggml_backend_buffer_set_usage(buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
    }
    for (const auto& [tensor, source] : placed_) {
        source([t = tensor](const void* data) { ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t)); });
        if (progress) {
            progress();
        }
    }
    placed_.clear();
}

}  // namespace pystaged
