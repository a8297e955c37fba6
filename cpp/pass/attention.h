// Attention of tree rows: each row sees the committed cells, its own ancestors, and itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <vector>

#include "state/kv_cache.h"

namespace pystaged {

// What attention does in one layer.
struct AttentionLayer {
    int num_heads = 0;
    int num_kv_heads = 0;  // each shared by num_heads / num_kv_heads heads, a GQA group
    int head_dim = 0;
    int value_dim = 0;  // of values, 0 for as wide as keys
    float scale = 1;    // of the scores
    float softcap = 0;  // of the scores, or 0 for none
    int window = 0;     // positions a row sees at most, itself included; 0 for all

    // Norms of each head before it is rotated: layer norms without bias, or else RMS.
    const float* q_norm = nullptr;  // [head_dim], or none
    const float* k_norm = nullptr;
    const float* v_norm = nullptr;
    const float* sinks = nullptr;  // [num_heads], scores of attending to nothing, or none
    bool own_norms = false;        // whether each head has its own: [heads][head_dim]
    bool layer_norms = false;
    float norm_epsilon = 0;
};

// As Segment, with what attention reads and writes of a layer's state.
struct AttentionSegment {
    KvCache* cache = nullptr;
    int first_row = 0, num_rows = 0;
    int first_cell = 0;  // row first_row + i writes its key and value into cell first_cell + i
};

// The rows of a pass.
struct AttentionRows {
    int n = 0;
    int begin = 0;                           // the first one that is in `qkv`; those before have only keys, elsewhere
    int first_row = 0;                       // attention is wanted from this one on
    std::vector<AttentionSegment> segments;  // all rows, in order
    const RowContext* contexts = nullptr;    // [n]
    int half = 0;                            // pairs of dimensions to rotate, 0 for none
    const float* cos = nullptr;              // [n][half]
    const float* sin = nullptr;              // [n][half]
    const float* row_scale = nullptr;        // [n] of the scores, or none
    // [n - begin][stride]. A row has queries [num_heads][head_dim]; from `gate_at` on, unless that is 0, the gates of
    // what they attend to, as many; and from `k_at` and `v_at` on keys and values, [num_kv_heads][head_dim] each, or
    // neither, or keys that are the values, too: what is missing lies at `stride`.
    float* qkv = nullptr;
    size_t stride = 0, gate_at = 0, k_at = 0, v_at = 0;
};

// What a segment asks of each KV head: to attend for its rows from `first_row` on, over chunks [first_chunk,
// last_chunk) of positions.
struct AttentionShare {
    int first_row = 0;
    int queries = 0;  // of these rows; see HeadChunk
    int first_chunk = INT_MAX, last_chunk = 0;
    int parts = 1;          // that the queries are split into, each a task
    size_t totals = 0;      // where its own begin in AttentionScratch::totals
    size_t unfinished = 0;  // where those of its parts begin in AttentionScratch::unfinished
    // Of a round:
    int first_task = 0, chunks = 0;
    size_t partials = 0;  // where its own begin in AttentionScratch::partials

    int first_of(int part) const { return queries * part / parts; }

    // How many of its chunks are in the round that goes through `at_once` of them after the first `done`.
    int chunks_of(int64_t done, int at_once) const {
        return static_cast<int>(std::clamp<int64_t>(last_chunk - first_chunk - done, 0, at_once));
    }
};

// Memory to attend in, of a size that does not depend on the contexts' lengths.
struct AttentionScratch {
    AttentionScratch(int num_threads, int head_dim) : scores(num_threads * attention_scratch(head_dim)) {}

    // Chunks are attended to in rounds whose partials take no more floats than this, or else one by one.
    size_t most_partials = 1 << 20;
    Lines<float> scores;    // [threads][attention_scratch()]
    Lines<float> partials;  // of each segment [kv heads][chunks of a round][queries][partial_stride()]; see HeadChunk
    Lines<float> totals;    // of each segment [kv heads][queries][partial_stride()]
    std::vector<std::atomic<int>> unfinished;  // of each segment [kv heads][parts], chunks of a round
    std::vector<AttentionShare> shares;        // of each segment
};

// Prepares the head that begins at `at` in rows [row, end) of `qkv`: queries and keys are normed and rotated in place,
// keys and values are written into the caches' cells of this pass.
void prepare_head(const Kernel& kernel, const AttentionLayer& how, const AttentionRows& rows, size_t at, int row,
                  int end);

// Attends, all heads being ready, for the rows from `first_row` on into out[n - first_row][out_stride], zero behind the
// heads, and into `quantized` where there is any (heads must be a multiple of kBlock wide).
void tree_attention(const Kernel& kernel, int num_threads, const AttentionLayer& how, const AttentionRows& rows,
                    float* out, size_t out_stride, const QuantizedRows& quantized, AttentionScratch& scratch);

}  // namespace pystaged
