// The graph of a pass in ggml's standard operations, on any of its devices. The cache lies where the layers do; only
// the logits asked for come back.
#pragma once

#include "device.h"
#include "graph.h"

namespace pystaged {

class DeviceGraph : public Graph {
public:
    DeviceGraph(const Gpt2& model, int num_cells);
    ~DeviceGraph() override;

    int num_cells() const override { return static_cast<int>(places_.size()); }
    void compute(const Pass& pass) override;
    // Only says where a cell is; nothing moves on the device.
    void move(const std::vector<std::pair<int, int>>& cells) override;

    int shortlist_size() const override { return shortlist_size_; }
    void read_shortlist(int32_t* tokens, float* logits) override;
    void read_logits(float* out) override;

private:
    struct Built;

    ggml_tensor* embed(ggml_context* c, int num_rows) override;
    ggml_tensor* linear(ggml_context* c, ggml_tensor* x, const Dense& dense) override;
    ggml_tensor* attention(ggml_context* c, ggml_tensor* qkv, int layer, int first_row, const Linear* next) override;
    ggml_tensor* head(ggml_context* c, ggml_tensor* x) override;

    ggml_tensor* layer_norm(ggml_context* c, ggml_tensor* x, const LayerNorm& norm) const;
    void build_graph(int num_rows, int num_logits, int num_cells);
    bool supports_flash_attention(ggml_backend_dev_t device) const;
    int supported_shortlist(ggml_backend_dev_t device) const;

    struct FreeScheduler {
        void operator()(ggml_backend_sched_t scheduler) const { ggml_backend_sched_free(scheduler); }
    };

    ContextPtr cache_context(const DeviceMemory& memory, int device);

    std::vector<BackendPtr> backends_;
    std::vector<ContextPtr> contexts_;
    std::vector<BufferPtr> buffers_;
    std::vector<ggml_tensor*> keys_, values_;  // per layer, F16 [width, cells]
    std::vector<bool> flash_;                  // per layer
    std::vector<int> places_;                  // where each cell is
    int shortlist_size_ = 0;
    size_t most_nodes_;
    std::unique_ptr<ggml_backend_sched, FreeScheduler> scheduler_;
    std::unique_ptr<Built> built_;
};

}  // namespace pystaged
