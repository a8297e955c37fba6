// A file's tensors as weights. The functions that load a part of a model (layers.cpp) name each tensor where they take
// it, with its shape. load_weights() runs twice: a dry run, after which it is known that the file is whole and how much
// memory its matrices take; then matrices are packed for our kernels, or found packed.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "model/hyperparameters.h"
#include "model/weights.h"
#include "weights/packed_file.h"

namespace pystaged {

class Loader {
public:
    Loader(const GgufFile& file, const Family& family, const Hyperparameters& numbers)
        : file(file), family(family), numbers(numbers) {}

    const GgufFile& file;
    const Family& family;
    const Hyperparameters& numbers;

    // What is taken after this is of the layer; before, of the model.
    void begin_layer(int index) {
        index_ = index;
        prefix_ = prefix_of(numbers.first_layer + index);
    }
    int index() const { return index_; }
    const LayerNumbers& layer() const { return numbers.layers[index_]; }

    bool has(const std::string& name) const { return file.has_tensor(prefix_ + name); }
    // A tensor of that shape. What is `extra`, an Extra, is null where the family lacks it, or where the file lacks it,
    // which it does in all layers or none. Throws ModelError for a tensor that is missing or of another shape.
    const TensorView* take(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0) {
        const std::string whole = prefix_ + name;
        if (extra & ~family.required) {
            if (!(extra & (family.optional | kOfAnyFamily))) {
                return nullptr;
            }
            const bool there = file.has_tensor(whole);
            (there ? seen_ : missed_).emplace(extra, whole);
            if (seen_.contains(extra) && missed_.contains(extra)) {
                file.fail("tensor '", missed_[extra], "' is missing, although '", seen_[extra], "' is there");
            }
            if (!there) {
                return nullptr;
            }
        }
        taken_.insert(whole);
        const auto found = tensors_.find(whole);
        return &(found != tensors_.end() ? found : tensors_.emplace(whole, file.tensor(whole, shape)).first)->second;
    }
    // A tensor that a file may have, and that nothing reads.
    void ignore(const std::string& name) { taken_.insert(prefix_ + name); }
    // Throws UnsupportedModelError where the file has a tensor that was not taken.
    void check_complete() const {
        // Of a model and the layer behind it that predicts further tokens, what belongs to the other one.
        const auto is_of_other = [&](const std::string& name) {
            if (family.reads == Reads::joined_with_tokens) {
                const std::string own = prefix_of(numbers.first_layer);
                return !name.starts_with(own) || name == own + "nextn.embed_tokens.weight" ||
                       name == own + "nextn.shared_head_head.weight";  // copies of the model's
            }
            return std::ranges::any_of(in_order(numbers.num_ahead), [&](int i) {
                return name.starts_with(prefix_of(numbers.first_layer + numbers.num_layers + i));
            });
        };
        for (const std::string& name : file.tensor_names()) {
            if (!taken_.count(name) && !is_of_other(name)) {
                file.refuse("tensor '", name, "' is none of architecture '", family.name,
                            "' as it is known here; without it the model would not be the one that was trained; choose "
                            "another file of it");
            }
        }
    }

    // A matrix of the file. Of a table rows are looked up; where the file has no head, the embedding is that, too.
    struct Matrix {
        const TensorView* tensor;
        bool is_table;
    };
    std::vector<Matrix> matrices() const {
        std::vector<Matrix> result;
        for (const auto& [name, is_table] : matrices_) {
            result.push_back({&tensors_.at(name), is_table});
        }
        return result;
    }

    // From now on tensors are read. Throws UnsupportedModelError for a type that has no packing. `content` is told of
    // each matrix where it is not empty. With `packed` matrices are taken from there; that they are what they should be
    // is not checked.
    void begin_packing(int num_threads, PackedContent& content, const PackedFile* packed = nullptr) {
        packing_ = true;
        num_threads_ = num_threads;
        content_ = &content;
        packed_ = packed;
        prefix_ = "";
        used_ = 0;
        size_t total = 0;
        for (const auto& [tensor, is_table] : matrices()) {
            try {
                // Two halves that are packed in turns are padded each.
                total += tensor->ne[2] *
                         (PackedMatrix::packed_bytes(tensor->type, int(tensor->ne[1]) + kBlock, int(tensor->ne[0])) +
                          kAlignment);
            } catch (const std::invalid_argument& error) {
                file.refuse("tensor '", tensor->name, "': ", error.what());
            }
        }
        if (!packed) {
            arena_ = Memory(total, /*huge=*/true);
        }
    }
    bool is_packing() const { return packing_; }
    // The memory that the matrices are in, and how much of it they take.
    Memory take_arena() { return std::move(arena_); }
    size_t used() const { return used_; }
    // What was taken besides at most, for a moment.
    size_t buffer_bytes() const { return buffer_bytes_; }

    // Each is empty for null, and until packing begins.
    Vector vector(const TensorView* tensor) {
        return tensor ? padded_rows(flat(tensor), int(tensor->ne[1]), int(tensor->ne[0]), false) : Vector();
    }
    // Whose weights a file has side by side for each channel.
    Vector convolution(const TensorView* tensor) {
        return padded_rows(flat(tensor), int(tensor->ne[0]), int(tensor->ne[1]), true);
    }
    // Without padding.
    Vector flat(const TensorView* tensor) {
        if (!packing_ || !tensor) {
            return {};
        }
        Vector result{read(*tensor)};
        buffer_bytes_ = std::max(buffer_bytes_, tensor->bytes + result.values.size() * sizeof(float));
        return result;
    }
    Linear table(const TensorView* tensor) {
        if (tensor) {
            matrices_[tensor->name] = true;
        }
        return linear(tensor);
    }
    Linear linear(const TensorView* weight, const TensorView* bias = nullptr) {
        return weight ? pack({{weight}, {bias}, in_order(int(weight->ne[1]))}) : Linear();
    }
    // The same of what take() finds.
    Vector vector(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0) {
        return vector(take(name, shape, extra));
    }
    Linear linear(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0) {
        return linear(take(name, shape, extra));
    }
    // name.weight and, in a family of layer norms, name.bias.
    Norm norm(const std::string& name, unsigned extra = 0) {
        const auto vector_of = [&](const char* what) { return vector(take(name + what, {numbers.width}, extra)); };
        return {vector_of(".weight"), family.has(kLayerNorm) ? vector_of(".bias") : Vector()};
    }

    // Tensors of which a matrix is made, the rows of all in this order, and of its bias, all or none.
    struct Stack {
        std::vector<const TensorView*> weights, biases;
        RowOrder order;
    };
    Linear pack(const Stack& stack) {
        if (!packing_) {
            for (const TensorView* weight : stack.weights) {
                matrices_.emplace(weight->name, false);
            }
            return {};
        }
        const ggml_type type = stack.weights[0]->type;
        const int cols = static_cast<int>(stack.weights[0]->ne[0]);
        const size_t row_bytes = ggml_row_size(type, cols);
        const auto read_rows = [&](int first, int count, uint8_t* rows) {
            for (const TensorView* weight : stack.weights) {
                const int size = static_cast<int>(weight->ne[1]), here = std::clamp(size - first, 0, count);
                if (here > 0) {
                    file.read(*weight, first * row_bytes, here * row_bytes, rows);
                }
                rows += here * row_bytes;
                count -= here;
                first = std::max(first - size, 0);
            }
        };
        if (!content_->empty()) {
            content_->add(type, cols, stack.order);
        }
        const int rows = static_cast<int>(stack.order.size());
        Linear result;
        try {
            if (packed_) {
                result.packed = PackedMatrix(type, rows, cols,
                                             packed_->matrix(used_, PackedMatrix::packed_bytes(type, rows, cols)));
            } else {
                for (const TensorView* weight : stack.weights) {
                    file.prefetch(*weight);
                }
                result.packed = PackedMatrix(type, cols, read_rows, stack.order, arena_.data() + used_, num_threads_);
                buffer_bytes_ = std::max(buffer_bytes_, num_threads_ * kLanes * row_bytes);
            }
        } catch (const std::invalid_argument& error) {
            file.fail("tensor '", stack.weights[0]->name, "': ", error.what());
        }
        used_ += (result.packed.bytes() + kAlignment - 1) / kAlignment * kAlignment;
        std::vector<float> values;
        for (const TensorView* bias : stack.biases) {
            const std::vector<float> next = bias ? read(*bias) : std::vector<float>();
            values.insert(values.end(), next.begin(), next.end());
        }
        if (!values.empty() && static_cast<int>(values.size()) <= *std::ranges::max_element(stack.order)) {
            file.fail("tensor '", stack.weights[0]->name, "' has fewer biases than rows");
        }
        result.bias.values.resize(values.empty() ? 0 : result.packed.padded_rows());
        for (size_t i = 0; i < stack.order.size() && !values.empty(); ++i) {
            result.bias.values[i] = stack.order[i] < 0 ? 0 : values[stack.order[i]];
        }
        return result;
    }
    // A matrix that is joined with others of the same input, and where the products of its rows begin.
    struct Member {
        const TensorView *weight, *bias;
        RowOrder order;
        size_t* place;
    };
    // Joins neighbours of one type; `stride` is of a row of all products, each matrix padded to kBlock.
    std::vector<Linear> pack_side_by_side(const std::vector<Member>& members, size_t& stride) {
        std::vector<Stack> matrices;
        int end = 0;
        for (const Member& member : members) {
            if (!matrices.empty() && matrices.back().weights[0]->type == member.weight->type) {
                matrices.back().order = stacked(std::move(matrices.back().order), member.order);
            } else {
                end = padded(end, kBlock);
                matrices.push_back({{}, {}, member.order});
            }
            matrices.back().weights.push_back(member.weight);
            matrices.back().biases.push_back(member.bias);
            *member.place = static_cast<size_t>(end);
            end += static_cast<int>(member.order.size());
        }
        stride = padded(end, kBlock);
        std::vector<Linear> packed;
        for (const Stack& each : matrices) {
            packed.push_back(pack(each));
        }
        return packed;
    }

    // The floats of a tensor, all rows in turn. Throws ModelError where they are of another type.
    std::vector<float> read(const TensorView& tensor) const {
        const size_t size = size_t(tensor.ne[0]) * tensor.ne[1];
        file.require(tensor.type == GGML_TYPE_F32 || tensor.type == GGML_TYPE_F16 || tensor.type == GGML_TYPE_BF16,
                     "tensor '", tensor.name, "' is of type ", ggml_type_name(tensor.type),
                     " where F32, F16 or BF16 is needed");
        const Memory data = file.read(tensor);
        std::vector<float> values(size);
        if (tensor.type == GGML_TYPE_F32) {
            std::copy_n(reinterpret_cast<const float*>(data.data()), size, values.data());
        } else {
            ggml_get_type_traits(tensor.type)->to_float(data.data(), values.data(), int64_t(size));
        }
        return values;
    }

private:
    static constexpr size_t kAlignment = 64;

    static std::string prefix_of(int layer) { return "blk." + std::to_string(layer) + "."; }

    // Rows of a matrix, or of what is `transposed` so far.
    static Vector padded_rows(const Vector& dense, int rows, int cols, bool transposed) {
        Vector result;
        const size_t stride = padded(cols, kBlock);
        result.values.resize(dense.present() ? rows * stride : 0);
        for (size_t i = 0; i < dense.values.size(); ++i) {
            const size_t row = transposed ? i % rows : i / cols, col = transposed ? i / rows : i % cols;
            result.values[row * stride + col] = dense.values[i];
        }
        return result;
    }

    std::string prefix_;
    int index_ = 0;
    std::map<std::string, TensorView> tensors_;      // that were taken
    std::set<std::string> taken_;                    // and what is not read
    std::map<unsigned, std::string> seen_, missed_;  // where an extra was, and where not
    std::map<std::string, bool> matrices_;           // and whether each is a table
    bool packing_ = false;
    int num_threads_ = 1;
    PackedContent* content_ = nullptr;
    const PackedFile* packed_ = nullptr;
    Memory arena_;
    size_t used_ = 0, buffer_bytes_ = 0;
};

// Takes all tensors of a model of the loader's family. Throws ModelError where one is missing, damaged, or of the wrong
// shape, or is only in some layers.
Weights load_weights(Loader& from);

}  // namespace pystaged
