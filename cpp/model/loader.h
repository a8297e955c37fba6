// A file's tensors as weights. The functions that load a part of a model (layers.cpp) name each tensor where they take
// it, with its shape. load_weights() runs twice: a dry run, after which it is known that the file is whole and how much
// memory its matrices take; then matrices are packed for our kernels, or found packed.
#pragma once

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
    Loader(const GgufFile& file, const Family& family, const Hyperparameters& numbers);

    const GgufFile& file;
    const Family& family;
    const Hyperparameters& numbers;

    // What is taken after this is of the layer; before, of the model.
    void begin_layer(int index);
    int index() const { return index_; }
    const LayerNumbers& layer() const { return numbers.layers[index_]; }

    bool has(const std::string& name) const { return file.has_tensor(prefix_ + name); }
    // A tensor of that shape. What is `extra`, an Extra, is null where the family lacks it, or where the file lacks it,
    // which it does in all layers or none. Throws ModelError for a tensor that is missing or of another shape.
    const TensorView* take(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0);
    // A tensor that a file may have, and that nothing reads.
    void ignore(const std::string& name) { taken_.insert(prefix_ + name); }
    // Throws UnsupportedModelError where the file has a tensor that was not taken.
    void check_complete() const;

    // A matrix of the file. Of a table rows are looked up; where the file has no head, the embedding is that, too.
    struct Matrix {
        const TensorView* tensor;
        bool is_table;
    };
    std::vector<Matrix> matrices() const;

    // From now on tensors are read. Throws UnsupportedModelError for a type that has no packing. `content` is told of
    // each matrix where it is not empty. With `packed` matrices are taken from there; that they are what they should be
    // is not checked.
    void begin_packing(int num_threads, PackedContent& content, const PackedFile* packed = nullptr);
    bool is_packing() const { return packing_; }
    // The memory that the matrices are in, and how much of it they take.
    Memory take_arena() { return std::move(arena_); }
    size_t used() const { return used_; }
    // What was taken besides at most, for a moment.
    size_t buffer_bytes() const { return buffer_bytes_; }

    // Each is empty for null, and until packing begins.
    Vector vector(const TensorView* tensor);
    Vector convolution(const TensorView* tensor);  // whose weights a file has side by side for each channel
    Vector flat(const TensorView* tensor);         // without padding
    Linear table(const TensorView* tensor);
    Linear linear(const TensorView* weight, const TensorView* bias = nullptr);
    // The same of what take() finds.
    Vector vector(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0) {
        return vector(take(name, shape, extra));
    }
    Linear linear(const std::string& name, const std::vector<int64_t>& shape, unsigned extra = 0) {
        return linear(take(name, shape, extra));
    }
    // name.weight and, in a family of layer norms, name.bias.
    Norm norm(const std::string& name, unsigned extra = 0);

    // Tensors of which a matrix is made, the rows of all in this order, and of its bias, all or none.
    struct Stack {
        std::vector<const TensorView*> weights, biases;
        RowOrder order;
    };
    Linear pack(const Stack& stack);
    // A matrix that is joined with others of the same input, and where the products of its rows begin.
    struct Member {
        const TensorView *weight, *bias;
        RowOrder order;
        size_t* place;
    };
    // Joins neighbours of one type; `stride` is of a row of all products, each matrix padded to kBlock.
    std::vector<Linear> pack_side_by_side(const std::vector<Member>& members, size_t& stride);

    // The floats of a tensor, all rows in turn. Throws ModelError where they are of another type.
    std::vector<float> read(const TensorView& tensor) const;

private:
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
