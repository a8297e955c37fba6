// How many threads a process computes with, from the kinds of cores that it may use. Threads are not bound to cores.
//
// Cores are of classes, fast ones and others of a fraction of their power. All help where there is much to compute.
// Where there is little, weights come from memory no faster for the slow ones, and what those have in hand is waited
// for. Some are apart, to work while the others sleep: outside the cache that those share, and slower still.
#pragma once

#include <string>
#include <vector>

namespace pystaged {

// A physical core; logical ones that share it count once.
struct Core {
    int speed = 1;   // relative to that of others
    int cache = -1;  // number of its L3 cache, which others may share, or -1 where it has none or none is known
};

// Numbers of physical cores.
struct Cores {
    int found = 0;          // that this process may use
    int apart = 0;          // of those, left out because most others have an L3 cache, and they do not
    int quota = 0;          // as cpu_quota()
    int few = 0, many = 0;  // to compute on for few rows and for many, at least 1
};

// From so many rows on computing takes about as long as reading the weights, or longer.
constexpr int kAllCoresRows = 16;

// Chooses among the cores that a process may use; where the system names none, among as many as
// std::thread::hardware_concurrency() says. For few rows those of the fastest class of each cache, if at least half of
// all power is theirs, else all.
Cores choose_cores(std::vector<Core> cores, int quota);
// For this process, as it is now.
Cores choose_cores();

// Those that this process may use; none if the system does not say. Each system has its own way to find them.
std::vector<Core> find_cores();

// Those that logical CPUs belong to, as Linux's files under `root` have it; a CPU of which they say nothing is a core.
std::vector<Core> read_cores(const std::string& root, const std::vector<int>& cpus);

// CPUs that control groups (Linux, version 1 or 2) grant this process, rounded up, or 0 where they set no limit. Their
// files are looked for under `root`.
int cpu_quota(const std::string& root = "");

}  // namespace pystaged
