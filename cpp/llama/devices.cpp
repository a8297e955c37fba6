#include "llama/devices.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "error.h"
#include "ggml-rpc.h"

namespace pystaged {

static std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

static bool is_gpu(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

static std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

static ggml_backend_reg_t rpc() {
    ggml_backend_reg_t found = ggml_backend_reg_by_name("RPC");
    require<DeviceError>(
        found,
        "the installed llama-cpp-python is built without RPC; install it with: CMAKE_ARGS=-DGGML_RPC=on "
        "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python "
        "llama-cpp-python==" LLAMA_CPP_PYTHON_VERSION);
    return found;
}

static ggml_backend_dev_t find_device(const std::string& name) {
    const std::string wanted = lower(name);
    if (wanted == "ggml-cpu") {
        return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
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
    throw DeviceError(say("there is no device '", name, "' here; there are: ", names));
}

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
    if (name.starts_with("rpc:")) {
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
    require<DeviceError>(!found.empty(), "'", name, "' names no device");
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
    throw DeviceError(say("cannot serve on ", endpoint, "; is the port taken?"));
}

}  // namespace pystaged
