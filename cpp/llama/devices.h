// ggml's devices, found by the names users give them.
#pragma once

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

}  // namespace pystaged
