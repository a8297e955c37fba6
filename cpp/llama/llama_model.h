// A model that libllama computes, on any of ggml's devices.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "llama.h"
#include "llama/devices.h"

namespace pystaged {

struct FreeLlama {
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};
using LlamaContextPtr = std::unique_ptr<llama_context, FreeLlama>;

class LlamaModel {
public:
    static constexpr int kMostStates = 16;  // texts of a context, where layers are recurrent

    // Loads a GGUF file, its layers split over the devices by their free memory; `progress` is called now and then and
    // may throw. Throws ModelError for what libllama does not load or is no causal decoder, DeviceError where a device
    // fails.
    LlamaModel(const std::string& path, const Devices& devices, int num_threads, const std::function<void()>& progress);

    llama_model* get() const { return model_.get(); }
    const Devices& devices() const { return devices_; }
    // A context for texts of so many positions together, under so many sequence ids. Throws DeviceError.
    LlamaContextPtr make_context(int num_cells, int num_rows, int num_ids, int num_back) const;
    bool is_recurrent() const { return llama_model_is_recurrent(get()) || llama_model_is_hybrid(get()); }
    // Bytes that a token takes, and the states of recurrent layers, as libllama writes them.
    size_t cell_bytes() const { return cell_bytes_; }
    size_t state_bytes() const { return state_bytes_; }
    // Rows of the last pass that a recurrent text can go back; 0 where libllama keeps no earlier states.
    int num_back() const { return num_back_; }

private:
    void measure(const std::string& path);

    Devices devices_;
    int num_threads_;
    std::unique_ptr<llama_model, FreeLlama> model_;
    size_t cell_bytes_ = 0, state_bytes_ = 0;
    int num_back_ = 0;
};

}  // namespace pystaged
