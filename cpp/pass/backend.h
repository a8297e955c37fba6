// How passes of a model are computed over rows of one or more texts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "model/model.h"
#include "state/text_state.h"

namespace pystaged {

// Consecutive rows of one text.
struct Segment {
    TextState* state = nullptr;
    int first_row = 0, num_rows = 0;
    int num_committed = 0;  // of the text's rows
    int first_pending = 0;  // row first_row + i is the text's pending row first_pending + i
    // Whether they are of a reading: a chain behind the committed rows, in one pass or several, that is committed whole
    // or not at all.
    bool is_reading = false;
    TextState* lent = nullptr;  // of another model's text, whose keys and values the rows attend to, or none

    // Where layers with keys and values write those of the first row; the others' follow.
    int first_cell() const { return num_committed + first_pending; }
};

struct PassRow {
    int32_t token = 0, position = 0;
    int32_t parent = -1;           // the text's pending row before, or -1 for the last committed
    float* hidden = nullptr;       // where its taps go, [taps][width], or none
    float* embedding = nullptr;    // where it goes as the head would read it, [padded width], or none
    const float* input = nullptr;  // another model's hidden states that it reads, or none
    bool of_target = false;        // whether they are those of all its target's layers that it reads, else of one
};

// What one pass evaluates and where its results go. A text whose rows are not all next to each other has several
// segments.
struct Pass {
    int num_rows = 0;
    const PassRow* rows = nullptr;         // [num_rows]
    const RowContext* contexts = nullptr;  // [num_rows], the cells that a row sees where layers have keys and values
    std::vector<Segment> segments;         // all rows, in order
    int num_logits = 0;                    // how many of the last rows need logits
    float* logits = nullptr;               // [num_logits][logits stride]
    float* maxima = nullptr;               // [num_logits][logits stride / kRun], of each run of logits
    bool embeds = false;                   // whether a row has a place for its embedding
    // Whether the rows are no tokens but context, of which layers keep keys and values; see Reads.
    bool is_context = false;
    // Called between layers where they are computed one by one, or none; what it throws ends the pass.
    const std::function<void()>* interrupted = nullptr;
};

class Backend {
public:
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    // For a text of `context` positions; more rows than that give trees at its end room for branches.
    virtual std::unique_ptr<TextState> make_state(int num_rows, int context) = 0;
    // The maxima of a row with a logit that is not finite are not all finite.
    virtual void compute(const Pass& pass) = 0;
    // Adds to each of n rows of logits what the token before it says, and finds their maxima; both laid out as in Pass.
    // For a model with Markov weights.
    virtual void add_markov(const int32_t* /*before*/, int /*n*/, float* /*logits*/, float* /*maxima*/) {
        throw std::logic_error("the backend has no Markov weights");
    }

protected:
    explicit Backend(const Model& model) : model_(model) {}

    const Model& model_;
};

// With our kernels, bit-exact on the CPU; and by libllama.
std::unique_ptr<Backend> make_packed_pass(const Model& model);
std::unique_ptr<Backend> make_llama_pass(const Model& model);

}  // namespace pystaged
