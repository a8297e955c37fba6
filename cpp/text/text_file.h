// Texts kept in a file: a head that says what they are of, then of each session its tokens, the shape of its state and
// the state as it lies in memory, and last a digest of all of that.
#pragma once

#include <vector>

#include "text/session.h"

namespace pystaged {

// Fills `path`, which exists. Throws ModelError where it cannot be written, perhaps for want of room, and
// std::invalid_argument where rows are pending.
void write_texts(const std::string& path, const std::string& head, const std::vector<Session*>& sessions);

// Reads the texts straight into new sessions of the same models. Throws ModelError where the file cannot be read, is
// damaged, or has another head; then the sessions are empty.
void read_texts(const std::string& path, const std::string& head, const std::vector<Session*>& sessions);

}  // namespace pystaged
