// The mixers of recurrent layers, in ggml's operations. See DeviceStates for what a pass reads and writes.
#include <cmath>

#include "error.h"
#include "pass/device_pass.h"

namespace pystaged {

namespace {

ggml_tensor* last_rows(ggml_context* c, ggml_tensor* x, int64_t count) {
    return ggml_view_2d(c, x, x->ne[0], count, x->nb[1], (x->ne[1] - count) * x->nb[1]);
}

// Columns of rows.
ggml_tensor* columns(ggml_context* c, ggml_tensor* x, int64_t first, int64_t count) {
    return ggml_view_2d(c, x, count, x->ne[1], x->nb[1], first * sizeof(float));
}

// Of rows [first, first + count), columns from `at` on as heads: [size, heads, count].
ggml_tensor* heads_of(ggml_context* c, ggml_tensor* x, int64_t size, int64_t heads, int64_t at, int64_t first,
                      int64_t count) {
    return ggml_view_3d(c, x, size, heads, count, size * sizeof(float), x->nb[1],
                        first * x->nb[1] + at * sizeof(float));
}

}  // namespace

ggml_tensor* DevicePass::checked(ggml_tensor* operation, int layer) const {
    const DeviceMemory& memory = *model_.device_memory();
    ggml_backend_dev_t device = memory.devices()[memory.device_of(layer, model_.numbers().num_layers)];
    if (!ggml_backend_dev_supports_op(device, operation)) {
        throw DeviceError(std::string("device '") + ggml_backend_dev_name(device) + "' lacks the operation " +
                          ggml_op_name(operation->op) + ", or has it for other shapes, which architecture '" +
                          model_.family().name + "' needs; load the model with device 'cpu'");
    }
    return operation;
}

ggml_tensor* DevicePass::all_inputs(ggml_tensor* own, int layer) {
    ggml_context* c = built_->context.get();
    ggml_tensor* memory = recurrent_[layer].inputs;
    if (!built_->shape.is_reading) {
        ggml_build_forward_expand(built_->graph, checked(ggml_set_rows(c, memory, own, built_->own), layer));
    }
    return built_->earlier ? ggml_concat(c, ggml_get_rows(c, memory, built_->earlier), own, 1) : own;
}

void DevicePass::write_state(ggml_tensor* memory, ggml_tensor* value, int layer) {
    ggml_context* c = built_->context.get();
    value = ggml_reshape_2d(c, value, memory->ne[0], 1);
    ggml_build_forward_expand(built_->graph, checked(ggml_set_rows(c, memory, value, built_->to), layer));
}

ggml_tensor* DevicePass::convolved(ggml_tensor* rows, const Vector& taps, int layer) {
    ggml_context* c = built_->context.get();
    const int64_t channels = rows->ne[0], num_rows = rows->ne[1], before = model_.numbers().conv_taps - 1;
    ggml_tensor* memory = recurrent_[layer].tail;
    ggml_tensor* tail = ggml_reshape_2d(c, ggml_get_rows(c, memory, built_->from), before, channels);
    ggml_tensor* all = ggml_concat(c, tail, ggml_transpose(c, rows), 0);  // each channel's rows side by side
    if (const int applied = built_->shape.num_applied; applied > 0) {
        tail = ggml_view_2d(c, all, before, channels, all->nb[1], applied * sizeof(float));
        write_state(memory, ggml_cont(c, tail), layer);
    }
    return ggml_reshape_2d(c, checked(ggml_ssm_conv(c, all, taps.device), layer), channels, num_rows);
}

ggml_tensor* DevicePass::scanned(const Scan& scan, ggml_tensor* state, int64_t width, int layer, int num_out) {
    ggml_context* c = built_->context.get();
    const int applied = built_->shape.num_applied, all = built_->shape.num_earlier + built_->shape.num_rows;
    ggml_tensor *memory = recurrent_[layer].state, *result = nullptr;
    int count = applied;
    if (applied > 0) {
        result = checked(scan(state, 0, applied), layer);
        state = ggml_view_1d(c, result, memory->ne[0], applied * width * sizeof(float));
        write_state(memory, state, layer);
    }
    if (applied < all && num_out > 0) {
        count = all - applied;
        result = checked(scan(state, applied, count), layer);
    }
    return num_out == 0 ? nullptr
                        : ggml_view_2d(c, result, width, num_out, width * sizeof(float),
                                       (count - num_out) * width * sizeof(float));
}

DevicePass::Value DevicePass::branch(const ShortConvolution& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    ggml_context* c = built_->context.get();
    const int width = model_.numbers().width;
    ggml_tensor* products = linear(input.rows, mixer.input[0]);
    ggml_tensor* own = ggml_mul(c, columns(c, products, 0, width), columns(c, products, 2 * width, width));
    ggml_tensor* mixed = convolved(all_inputs(own, index), mixer.taps, index);
    const int num_out = static_cast<int>(own->ne[1]) - first_row;
    if (num_out == 0) {
        return {own};
    }
    ggml_tensor* gate = last_rows(c, columns(c, products, width, width), num_out);
    return add(x, ggml_mul(c, last_rows(c, mixed, num_out), gate), mixer.output,
               model_.layers()[index].mixer_post_norm);
}

DevicePass::Value DevicePass::branch(const DeltaNet& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    ggml_context* c = built_->context.get();
    const Hyperparameters& h = model_.numbers();
    const DeltaNumbers& d = h.delta;
    const int size = d.head_dim;
    ggml_tensor* rates = ggml_sigmoid(c, linear(input.rows, mixer.input[2]));
    ggml_tensor* steps = ggml_add(c, linear(input.rows, mixer.input[3]), mixer.step.device);
    ggml_tensor* decays = ggml_mul(c, ggml_softplus(c, steps), mixer.decay.device);  // logarithms
    ggml_tensor* own = ggml_concat(c, linear(input.rows, mixer.input[0]), ggml_concat(c, rates, decays, 0), 0);
    ggml_tensor* all = all_inputs(own, index);
    const int64_t num_all = all->ne[1];
    const auto numbers_of_heads = [&](int at) {
        return ggml_reshape_3d(c, ggml_cont(c, columns(c, all, at, d.value_heads)), 1, d.value_heads, num_all);
    };
    rates = numbers_of_heads(d.channels());
    decays = numbers_of_heads(d.channels() + d.value_heads);
    ggml_tensor* rows = ggml_silu(c, convolved(columns(c, all, 0, d.channels()), mixer.taps, index));
    // x / sqrt(sum of squares + epsilon)
    ggml_tensor* unit = ggml_rms_norm(c, heads_of(c, rows, size, 2 * d.key_heads, 0, 0, num_all),
                                      h.norm_epsilon / static_cast<float>(size));
    unit = ggml_reshape_2d(c, ggml_scale(c, unit, 1 / std::sqrt(static_cast<float>(size))), 2 * d.keys(), num_all);
    const auto scan = [&](ggml_tensor* state, int first, int count) {
        const auto part = [&](ggml_tensor* numbers) {
            return ggml_view_3d(c, numbers, 1, d.value_heads, count, numbers->nb[1], numbers->nb[2],
                                first * numbers->nb[2]);
        };
        return ggml_gated_delta_net(c, heads_of(c, unit, size, d.key_heads, 0, first, count),
                                    heads_of(c, unit, size, d.key_heads, d.keys(), first, count),
                                    heads_of(c, rows, size, d.value_heads, 2 * d.keys(), first, count), part(decays),
                                    part(rates), ggml_reshape_4d(c, state, size, size, d.value_heads, 1), 1);
    };
    const int num_out = static_cast<int>(own->ne[1]) - first_row;
    ggml_tensor* state = ggml_get_rows(c, recurrent_[index].state, built_->from);
    ggml_tensor* mixed = scanned(scan, state, d.values(), index, num_out);
    if (num_out == 0) {
        return {own};
    }
    mixed = normed(ggml_reshape_3d(c, mixed, size, d.value_heads, num_out), {mixer.norm, {}});
    ggml_tensor* gate = ggml_silu(c, linear(last_rows(c, input.rows, num_out), mixer.input[1]));
    return add(x, ggml_mul(c, ggml_reshape_2d(c, mixed, d.values(), num_out), gate), mixer.output,
               model_.layers()[index].mixer_post_norm);
}

DevicePass::Value DevicePass::branch(const StateSpace& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    ggml_context* c = built_->context.get();
    const SpaceNumbers& d = model_.numbers().space;
    ggml_tensor* products = linear(input.rows, mixer.input[0]);
    ggml_tensor* own = ggml_cont(c, columns(c, products, d.inner(), d.channels() + d.heads));
    ggml_tensor* all = all_inputs(own, index);
    ggml_tensor* steps = ggml_add(c, ggml_cont(c, columns(c, all, d.channels(), d.heads)), mixer.step.device);
    ggml_tensor* rows = convolved(columns(c, all, 0, d.channels()), mixer.taps, index);
    if (mixer.taps_bias.present()) {
        rows = ggml_add(c, rows, mixer.taps_bias.device);
    }
    rows = ggml_silu(c, rows);
    const auto scan = [&](ggml_tensor* state, int first, int count) {
        const int64_t keys = d.inner(), queries = keys + d.keys();
        state = ggml_reshape_4d(c, state, d.state_dim, d.head_dim, d.heads,
                                ggml_nelements(state) / (d.state_dim * d.inner()));
        return ggml_ssm_scan(c, state, heads_of(c, rows, d.head_dim, d.heads, 0, first, count),
                             ggml_view_2d(c, steps, d.heads, count, steps->nb[1], first * steps->nb[1]),
                             mixer.decay.device, heads_of(c, rows, d.state_dim, d.groups, keys, first, count),
                             heads_of(c, rows, d.state_dim, d.groups, queries, first, count),
                             state->ne[3] == 1 ? built_->zero : built_->from, 1);
    };
    const int num_out = static_cast<int>(own->ne[1]) - first_row;
    ggml_tensor* mixed = scanned(scan, recurrent_[index].state, d.inner(), index, num_out);
    if (num_out == 0) {
        return {own};
    }
    ggml_tensor* values = heads_of(c, rows, d.head_dim, d.heads, 0, rows->ne[1] - num_out, num_out);
    mixed =
        ggml_add(c, ggml_reshape_3d(c, mixed, d.head_dim, d.heads, num_out), ggml_mul(c, values, mixer.skip.device));
    ggml_tensor* gate = ggml_cont(c, last_rows(c, columns(c, products, 0, d.inner()), num_out));
    mixed = ggml_swiglu_split(c, gate, ggml_reshape_2d(c, mixed, d.inner(), num_out));
    if (mixer.norm.present()) {
        mixed = normed(ggml_reshape_3d(c, mixed, d.inner() / d.groups, d.groups, num_out), {mixer.norm, {}});
        mixed = ggml_reshape_2d(c, mixed, d.inner(), num_out);
    }
    return add(x, mixed, mixer.output, model_.layers()[index].mixer_post_norm);
}

}  // namespace pystaged
