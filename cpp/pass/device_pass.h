// A pass recorded in ggml's standard operations, for any of its devices. The cache lies where the layers do; only the
// logits asked for come back.
#pragma once

#include <array>

#include "llama/devices.h"
#include "pass/backend.h"
#include "state/device_states.h"

namespace pystaged {

// The passes of one text.
class DevicePass : public TextState {
public:
    DevicePass(const Model& model, int num_cells, int context);
    ~DevicePass() override;

    static constexpr int kMaxRows = 64;
    static constexpr int kMostPending = 64;  // rows of trees, where layers are recurrent

    int room() const override { return static_cast<int>(places_.size()); }
    // Only says where a cell is; nothing moves on the device.
    void keep(int length, const std::vector<int32_t>& path, bool was_read) override;
    // Of those that a reading reaches. They are kept in this machine's memory.
    void keep_states(const std::vector<int>& lengths, int most, int anchor) override {
        states_.kept().ask(lengths, most, anchor);
    }
    int reachable(int length) const override { return is_recurrent() ? states_.reachable(length) : length; }
    int cut(int length) override;
    int copy(const TextState& from, int length) override;
    void stretch(int length, int longer) override { states_.stretch(longer - length); }
    size_t num_bytes(int length) const override {
        return model_.cell_bytes() * length + (is_recurrent() ? model_.state_bytes() : 0) +
               states_.kept().all().size() * model_.kept_state_bytes();
    }

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
    void check_interruption() const {}
    Value branch(const Attention& attention, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const LatentAttention&, const Value&, const Value&, int layer, int first_row);
    Value branch(const ShortConvolution&, const Value&, const Value&, int layer, int first_row);
    Value branch(const DeltaNet&, const Value&, const Value&, int layer, int first_row);
    Value branch(const StateSpace&, const Value&, const Value&, int layer, int first_row);
    Value branch(const Dense& dense, const Value& x, const Value& input, const Norm& norm);
    Value branch(const Experts&, const Value&, const Value&, const Norm&);
    // Models that need what follows are not loaded into devices.
    Value finish(const Value& x, int) { return x; }
    void tap(const Value&, int) const {}  // models on devices have no taps
    Value logits(const Value& x);

private:
    // What makes a graph different from another one.
    struct Shape {
        int num_rows, num_logits;
        int num_cells;            // that attention reads
        int num_earlier = 0;      // rows before those of the pass that recurrent layers compute again
        int num_applied = 0;      // of all these, how many the state that is written includes
        bool is_reading = false;  // whose inputs are not kept

        bool operator==(const Shape& other) const {
            return num_rows == other.num_rows && num_logits == other.num_logits && num_cells == other.num_cells &&
                   num_earlier == other.num_earlier && num_applied == other.num_applied &&
                   is_reading == other.is_reading;
        }
    };
    // One graph and its inputs.
    struct Built {
        Shape shape;
        ContextPtr context;
        ggml_cgraph* graph = nullptr;
        ggml_tensor *tokens = nullptr, *positions = nullptr;
        ggml_tensor* places = nullptr;       // I64, where each row's key and value go
        ggml_tensor* mask = nullptr;         // F16 [cells, rows], 0 for what a row sees and -inf
        ggml_tensor* window_mask = nullptr;  // the same for windowed layers
        ggml_tensor* row_scales = nullptr;   // of queries
        // Of recurrent layers, as DeviceStates::Plan has them; null for no rows.
        ggml_tensor *from = nullptr, *earlier = nullptr, *own = nullptr, *to = nullptr;
        ggml_tensor* zero = nullptr;  // the index 0
        ggml_tensor *logits = nullptr, *shortlist = nullptr, *shortlist_logits = nullptr;
    };
    // A recurrent layer's memory: [size, 2] of what convolutions go on from and of the rest of a state, if there is
    // any, and [size, places] of inputs. Null elsewhere.
    struct Recurrent {
        ggml_tensor *tail = nullptr, *state = nullptr, *inputs = nullptr;
    };

    bool is_recurrent() const { return model_.numbers().is_recurrent(); }
    void compute_piece(const Pass& pass, const DeviceStates::Plan& plan);
    void build_graph(const Shape& shape);
    void set_inputs(const Pass& pass, const DeviceStates::Plan& plan);
    // Makes a state that is kept here, or none for zeros, the text's after so many rows.
    void load_state(int length, const KeptStates::Values* values);
    std::shared_ptr<KeptStates::Values> state_values(int64_t place) const;
    // Calls act(tensor, first) for each part of a state, which has its floats from `first` on.
    template <class Act>
    void for_each_part(const Act& act) const;
    ggml_tensor* input(ggml_type type, int64_t cols, int64_t rows);
    ggml_tensor* normed(ggml_tensor* x, const Norm& norm);
    ggml_tensor* linear(ggml_tensor* x, const Linear& linear);
    // `x`: [any multiple of heads, rows], where a head begins with head_dim numbers of its own.
    ggml_tensor* heads(ggml_tensor* x, const Norm& norm, int num_heads, int layer);
    ggml_tensor* softcapped(ggml_tensor* x, float cap);
    // A recurrent layer's inputs of the earlier rows and of those of the pass, [size, rows], which it keeps.
    ggml_tensor* all_inputs(ggml_tensor* own, int layer);
    // A causal convolution over all these rows, behind those that the state has.
    ggml_tensor* convolved(ggml_tensor* rows, const Vector& taps, int layer);
    // Of rows [first, first + count) of all, what they make behind a state, [width, count], and then the state after
    // them, as one operation.
    using Scan = std::function<ggml_tensor*(ggml_tensor* state, int first, int count)>;
    // The last `num_out` rows of what all rows make, [width, num_out]; null where there are none.
    ggml_tensor* scanned(const Scan& scan, ggml_tensor* state, int64_t width, int layer, int num_out);
    void write_state(ggml_tensor* memory, ggml_tensor* value, int layer);
    // An operation of a layer. Throws DeviceError where its device does not have it.
    ggml_tensor* checked(ggml_tensor* operation, int layer) const;
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

    // Of what the layers on a device keep of a text.
    ContextPtr cache_context(const DeviceMemory& memory, int device);

    const Model& model_;
    ggml_tensor* rope_factors_;  // or null
    std::vector<BackendPtr> backends_;
    std::vector<ContextPtr> contexts_;
    std::vector<BufferPtr> buffers_;
    std::vector<ggml_tensor*> keys_, values_;  // per layer, F16 [width of the heads, cells], or null
    std::vector<bool> flash_;                  // per layer
    std::vector<int> places_;                  // where each cell is
    std::vector<Recurrent> recurrent_;         // per layer
    std::vector<int32_t> parents_;             // of pending rows, where layers are recurrent
    DeviceStates states_{kMostPending};
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
