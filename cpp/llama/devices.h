// ggml's devices: found by the names users give them, and their memory filled with weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend.h"

namespace pystaged {

using Devices = std::vector<ggml_backend_dev_t>;

struct DeviceInfo {
    std::string name, description;
    bool gpu = false;
    size_t free_bytes = 0, total_bytes = 0;
};

// What ggml's registry offers here.
std::vector<DeviceInfo> list_devices();

// The devices a name stands for: "ggml-cpu", "metal", "gpu" (the first there is), names of the registry in any case and
// separated by commas, or "rpc:HOST:PORT,HOST:PORT". Throws DeviceError, with what there is instead.
// For "rpc:" ggml ends the process when it cannot reach a server, so such a name belongs into a process of its own.
Devices find_devices(const std::string& name);

// Major and minor version of the RPC protocol spoken here. Throws DeviceError where ggml is built without RPC.
std::pair<int, int> rpc_version();

// Serves this machine's devices (find_devices) to other machines; returns only where it fails to.
void serve_devices(const std::string& endpoint, const std::string& device, int num_threads);

struct FreeBackend {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
struct FreeBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
struct FreeContext {
    void operator()(ggml_context* context) const { ggml_free(context); }
};
using BackendPtr = std::unique_ptr<ggml_backend, FreeBackend>;
using BufferPtr = std::unique_ptr<ggml_backend_buffer, FreeBuffer>;
using ContextPtr = std::unique_ptr<ggml_context, FreeContext>;

// Reserves memory on a device for all tensors of a context. Throws DeviceError where there is too little.
BufferPtr allocate(ggml_context* context, ggml_backend_dev_t device, const char* what);

// Tensors on several devices; the CPU is always among them and always the last.
class DeviceMemory {
public:
    explicit DeviceMemory(const Devices& devices);

    // Whether ggml multiplies by weights of that type.
    static bool can_multiply(ggml_type type);

    // Those asked for, without the CPU that only helps out.
    int num_devices() const { return num_devices_; }
    int cpu() const { return static_cast<int>(devices_.size()) - 1; }
    const Devices& devices() const { return devices_; }
    // Layers go to devices in order, in proportion to the memory that was free at first.
    int device_of(int layer, int num_layers) const;

    // Calls its argument with the data of a tensor.
    using Source = std::function<void(const std::function<void(const void*)>&)>;
    // A matrix that fill() copies from `source`.
    ggml_tensor* place(ggml_type type, int64_t cols, int64_t rows, int device, Source source);
    // Reserves memory for all tensors placed and copies their data, calling `progress` after each.
    void fill(const std::function<void()>& progress);

private:
    struct Placed {
        ggml_tensor* tensor;
        Source source;
    };

    Devices devices_;
    int num_devices_;
    std::vector<double> shares_;  // of all layers, up to and with each device
    std::vector<std::vector<ContextPtr>> contexts_;
    std::vector<BufferPtr> buffers_;
    std::vector<Placed> placed_;
};

}  // namespace pystaged
