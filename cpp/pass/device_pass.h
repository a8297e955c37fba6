// A pass recorded in ggml's standard operations, for any of its devices. The cache lies where the layers do; only the
// logits asked for come back.
#pragma once

#include <array>

#include "device.h"
#include "pass/backend.h"

namespace pystaged {

// The passes of one text.
class DevicePass : public TextState {
public:
    DevicePass(const Model& model, int num_cells, int context);
    ~DevicePass() override;

    static constexpr int kMaxRows = 64;

    int room() const override { return static_cast<int>(places_.size()); }
    // Only says where a cell is; nothing moves on the device.
    void keep(int length, const std::vector<int32_t>& path, bool was_read) override;
    int copy(const TextState& from, int length) override;
    size_t num_bytes(int length) const override { return model_.cell_bytes() * length; }

    // As Backend has them.
    void compute(const Pass& pass);
    int shortlist_size() const { return shortlist_size_; }
    void read_shortlist(int32_t* tokens, float* logits) const;
    void read_logits(float* logits, float* maxima) const;

    // The operations of run_transformer().
    struct Value {
        ggml_tensor* rows = nullptr;
    };
    Value embed(int num_rows);
    Value tail(const Value& x, int first_row);
    Value norm(const Value& x, const Norm& norm);
    Value mix(const Value& x, const Value& input, int layer, int first_row);
    Value finish(const Value& x, int) { return x; }  // models that need it are not loaded into devices
    Value feed_forward(const Value& x, const Value& input, const Layer& layer);
    void tap(const Value&, int) const {}  // models on devices have no taps
    Value logits(const Value& x);

private:
    struct Built;

    void build_graph(int num_rows, int num_logits, int num_cells);
    void set_inputs(const Pass& pass);
    ggml_tensor* input(ggml_type type, int64_t cols, int64_t rows);
    ggml_tensor* normed(ggml_tensor* x, const Norm& norm);
    ggml_tensor* linear(ggml_tensor* x, const Linear& linear);
    ggml_tensor* heads(ggml_tensor* x, const Norm& norm, int num_heads, int layer);
    ggml_tensor* softcapped(ggml_tensor* x, float cap);
    // The branches of the kinds of mixers and feed-forward networks.
    Value branch(const Attention& attention, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const LatentAttention&, const Value&, const Value&, int layer, int first_row);
    Value branch(const ShortConvolution&, const Value&, const Value&, int layer, int first_row);
    Value branch(const DeltaNet&, const Value&, const Value&, int layer, int first_row);
    Value branch(const StateSpace&, const Value&, const Value&, int layer, int first_row);
    Value branch(const Dense& dense, const Value& x, const Value& input, const Norm& norm);
    // Models that have them are not loaded into devices.
    Value branch(const Experts&, const Value& x, const Value&, const Norm&) { return x; }
    // Queries, keys and values.
    std::array<ggml_tensor*, 3> qkv(const Attention& attention, ggml_tensor* x);
    ggml_tensor* attend(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v, ggml_tensor* mask, float scale, bool flash);
    // x + norm(W y + b), scaled as the model has it.
    Value add(const Value& x, ggml_tensor* y, const Linear& linear, const Norm& norm);
    bool supports_flash_attention(ggml_backend_dev_t device) const;
    int supported_shortlist(ggml_backend_dev_t device) const;

    struct FreeScheduler {
        void operator()(ggml_backend_sched_t scheduler) const { ggml_backend_sched_free(scheduler); }
    };

    ContextPtr cache_context(const DeviceMemory& memory, int device);

    const Model& model_;
    ggml_tensor* rope_factors_;  // or null
    std::vector<BackendPtr> backends_;
    std::vector<ContextPtr> contexts_;
    std::vector<BufferPtr> buffers_;
    std::vector<ggml_tensor*> keys_, values_;  // per layer, F16 [width of the heads, cells]
    std::vector<bool> flash_;                  // per layer
    std::vector<int> places_;                  // where each cell is
    int shortlist_size_ = 0;
    size_t most_nodes_;
    std::unique_ptr<ggml_backend_sched, FreeScheduler> scheduler_;
    std::unique_ptr<Built> built_;
};

// One text after another.
class DevicePasses : public Backend {
public:
    explicit DevicePasses(const Model& model) : Backend(model) {}

    std::unique_ptr<TextState> make_state(int num_rows, int context) const override {
        return std::make_unique<DevicePass>(model_, num_rows, context);
    }
    int max_rows() const override { return DevicePass::kMaxRows; }
    bool mixes_texts() const override { return false; }
    void compute(const Pass& pass) override { static_cast<DevicePass&>(*pass.segments[0].state).compute(pass); }
    int shortlist_size(const TextState& text) const override { return pass_of(text).shortlist_size(); }
    void read_shortlist(const TextState& text, int32_t* tokens, float* logits) const override {
        pass_of(text).read_shortlist(tokens, logits);
    }
    void read_logits(const TextState& text, float* logits, float* maxima) const override {
        pass_of(text).read_logits(logits, maxima);
    }

private:
    static const DevicePass& pass_of(const TextState& text) { return static_cast<const DevicePass&>(text); }
};

}  // namespace pystaged
