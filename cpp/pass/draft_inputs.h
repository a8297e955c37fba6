// What drafts read of other models' hidden states, and hand on.
#pragma once

#include "pass/workspace.h"

namespace pystaged {

// A draft's first rows: of an embedding's rows and hidden ones, joined in one row; or the hidden ones, while the first
// layer reads both (EAGLE-3); or hidden ones as context.
Value join_hidden(Workspace& w);
Value hidden_beside(Workspace& w, const Value& embedded);
Value hidden_context(Workspace& w);

// Of a draft without keys and values, what it hands on of its last rows.
void hand_on(Workspace& w, const Value& x);

// As Backend::add_markov(), of one pass.
void add_markov_rows(Workspace& w, const int32_t* before, int n, float* logits, float* maxima);

}  // namespace pystaged
