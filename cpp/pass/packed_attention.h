// What the two kinds of attention have in common.
#pragma once

#include "pass/workspace.h"

namespace pystaged {

// What attention does in a layer, and to which rows; norms, queries, keys and values are not set.
AttentionLayer attention_layer(const Workspace& w, int layer);
AttentionRows& attention_rows(Workspace& w, int num_inputs, int layer, int first_row);

// Attention of all heads, once they are written, as `output` reads it.
Value attend(Workspace& w, const AttentionLayer& how, const AttentionRows& rows, const Linear& output);

}  // namespace pystaged
