// A model that libllama computes, on any of ggml's devices.
#pragma once

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <memory>

#include "llama/devices.h"
#include "llama/tokenizer.h"

namespace pystaged {

using LlamaContextPtr = std::unique_ptr<llama_context, FreeLlama>;

class LlamaModel {
public:
    static constexpr int kMostStates = 16;  // texts of a context, where layers are recurrent

    // Loads a GGUF file, its layers split over the devices by their free memory; `progress` is called now and then and
    // may throw. Throws ModelError for what libllama does not load or is no causal decoder, DeviceError where a device
    // fails.
    LlamaModel(const std::string& path, const Devices& devices, int num_threads, const std::function<void()>& progress)
        : devices_(devices), num_threads_(num_threads) {
        check_vocabulary(GgufFile(path));
        Devices used = devices;
        std::erase_if(used, [](auto each) { return ggml_backend_dev_type(each) == GGML_BACKEND_DEVICE_TYPE_CPU; });
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = used.empty() ? 0 : -1;
        used.push_back(nullptr);
        params.devices = used.data();
        params.check_tensors = true;
        // A mapped file that another program shortens ends the process.
        params.load_mode = LLAMA_LOAD_MODE_NONE;
        // Repacked weights crash on some CPUs.
        params.use_extra_bufts = false;
        Loading loading{progress, nullptr};
        params.progress_callback = go_on;
        params.progress_callback_user_data = &loading;
        {
            const LogCapture log;
            model_.reset(llama_model_load_from_file(path.c_str(), params));
            if (loading.error) {
                std::rethrow_exception(loading.error);
            }
            const std::string& said = log.first_error();
            require<ModelError>(model_ != nullptr, path,
                                ": llama.cpp does not load it: ", said.empty() ? "it does not say why" : said);
        }
        require<ModelError>(
            llama_model_has_decoder(get()) && !llama_model_has_encoder(get()) && !llama_model_is_diffusion(get()), path,
            kNoDecoder);
        measure(path);
    }

    llama_model* get() const { return model_.get(); }
    const Devices& devices() const { return devices_; }
    // A context for texts of so many positions together, under so many sequence ids. Throws DeviceError.
    LlamaContextPtr make_context(int num_cells, int num_rows, int num_ids, int num_back) const {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = num_cells;
        params.n_batch = params.n_ubatch = num_rows;
        params.n_seq_max = num_ids;
        params.n_rs_seq = num_back;
        params.n_outputs_max_per_seq = 0;
        params.n_threads = params.n_threads_batch = num_threads_;
        params.pooling_type = LLAMA_POOLING_TYPE_NONE;
        params.kv_unified = params.swa_full = params.no_perf = true;
        const LogCapture log;
        LlamaContextPtr context(llama_init_from_model(get(), params));
        const std::string& said = log.first_error();
        require<DeviceError>(context != nullptr, "llama.cpp makes no context of ", num_cells, " tokens",
                             said.empty() ? "" : ": " + said, "; is there enough memory?");
        return context;
    }
    bool has_windows() const { return llama_model_n_swa(get()) > 0; }
    bool is_recurrent() const { return llama_model_is_recurrent(get()) || llama_model_is_hybrid(get()); }
    // Bytes that a token takes, and the states of recurrent layers, as libllama writes them.
    size_t cell_bytes() const { return cell_bytes_; }
    size_t state_bytes() const { return state_bytes_; }
    // Rows of the last pass that a recurrent text can go back; 0 where libllama keeps no earlier states.
    int num_back() const { return num_back_; }

private:
    // Of the states of recurrent layers in a context; each text has one for every row that it may go back, and one
    // more. More rows than kMostBack seldom pay.
    static constexpr size_t kStateBytes = size_t(1) << 30;
    static constexpr int kMostBack = 7;
    static constexpr const char* kNoDecoder =
        ": the model does not write texts from left to right; choose a causal language model";

    struct Loading {
        const std::function<void()>& progress;
        std::exception_ptr error;
    };
    static bool go_on(float, void* data) {
        auto& loading = *static_cast<Loading*>(data);
        try {
            if (loading.progress) {
                loading.progress();
            }
        } catch (...) {
            loading.error = std::current_exception();
        }
        return !loading.error;
    }
    // From a text of one token, and then of two.
    void measure(const std::string& path) {
        const LogCapture quiet;
        const LlamaContextPtr context = make_context(256, 8, 1, is_recurrent() ? 1 : 0);
        require<ModelError>(llama_get_memory(context.get()), path, kNoDecoder);
        std::array<size_t, 2> bytes{};
        for (size_t& each : bytes) {
            const LogCapture log;
            llama_token token = 0;
            require<DeviceError>(llama_decode(context.get(), llama_batch_get_one(&token, 1)) == 0, path,
                                 ": llama.cpp's first pass fails: ", log.first_error());
            each = llama_state_seq_get_size(context.get(), 0);
        }
        cell_bytes_ = bytes[1] - std::min(bytes[0], bytes[1]);
        state_bytes_ = is_recurrent() ? bytes[0] - std::min(cell_bytes_, bytes[0]) : 0;
        if (llama_n_rs_seq(context.get()) > 0) {
            const size_t fitting = kStateBytes / std::max<size_t>(1, kMostStates * state_bytes_);
            num_back_ = static_cast<int>(std::clamp<size_t>(fitting, 2, kMostBack + 1)) - 1;
        }
    }

    Devices devices_;
    int num_threads_;
    std::unique_ptr<llama_model, FreeLlama> model_;
    size_t cell_bytes_ = 0, state_bytes_ = 0;
    int num_back_ = 0;
};

}  // namespace pystaged
