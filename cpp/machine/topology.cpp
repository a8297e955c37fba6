#include "machine/topology.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

namespace pystaged {

namespace {

// Cores of one class differ by less, in what single ones of them reach.
constexpr double kOfOneClass = 0.75;

// The numbers in one of Linux's lists of CPUs, such as 0-3,8; none behind what is no such list.
std::set<int> read_list(const std::string& path) {
    constexpr int kMost = 1 << 16;
    std::set<int> numbers;
    std::ifstream file(path);
    char next = ',';
    for (int first = 0; next == ',' && file >> first; file.get(next)) {
        int last = first;
        if (file.peek() == '-') {
            file.ignore() >> last;
        }
        for (int number = std::max(first, 0); file && number <= std::min(last, kMost); ++number) {
            numbers.insert(number);
        }
    }
    return numbers;
}

// Microseconds of CPU time in each period; zeros, or -1, where there is no limit.
struct Quota {
    double used = 0, period = 0;
};

Quota read_quota(const std::string& used_path, const std::string& period_path) {
    Quota quota;
    std::ifstream used(used_path);
    used >> quota.used;
    if (period_path.empty()) {
        used >> quota.period;
    } else {
        std::ifstream(period_path) >> quota.period;
    }
    return quota;
}

}  // namespace

int cpu_quota(const std::string& root) {
    double least = 0;
    const auto consider = [&](const Quota& quota) {
        if (quota.used > 0 && quota.period > 0) {
            const double cpus = quota.used / quota.period;
            least = least > 0 ? std::min(least, cpus) : cpus;
        }
    };
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // number:controllers:/path, without controllers in version 2
        std::istringstream fields(line);
        std::string number, controllers, path;
        if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':') ||
            !std::getline(fields, path)) {
            continue;
        }
        const bool first = ("," + controllers + ",").find(",cpu,") != std::string::npos;
        if (!first && !controllers.empty()) {
            continue;
        }
        // A group's limit binds those below it. In a container the path may be the host's, and only the root is there.
        for (path = path == "/" ? "" : path;; path.resize(path.rfind('/'))) {
            const std::string mount = root + "/sys/fs/cgroup";
            if (first) {
                for (const std::string& name : {controllers, std::string("cpu")}) {
                    const std::string folder = mount + "/" + name + path;
                    consider(read_quota(folder + "/cpu.cfs_quota_us", folder + "/cpu.cfs_period_us"));
                }
            } else {
                consider(read_quota(mount + path + "/cpu.max", ""));
            }
            if (path.find('/') == std::string::npos) {
                break;
            }
        }
    }
    return static_cast<int>(std::min(std::ceil(least), 1e6));
}

std::vector<Core> read_cores(const std::string& root, const std::vector<int>& cpus) {
    const std::string devices = root + "/sys/devices/";
    const std::set<int> fast = read_list(devices + "cpu_core/cpus");  // Intel's, where there are slow ones
    std::map<int, Core> cores;                                        // by the first of its logical CPUs
    for (const int cpu : cpus) {
        const std::string folder = devices + "system/cpu/cpu" + std::to_string(cpu);
        const std::set<int> siblings = read_list(folder + "/topology/thread_siblings_list");
        const std::set<int> sharing = read_list(folder + "/cache/index3/shared_cpu_list");
        int capacity = 0;  // Arm's, 1,024 for the fastest
        std::ifstream(folder + "/cpu_capacity") >> capacity;
        capacity = capacity > 0 ? capacity : fast.empty() || fast.count(cpu) ? 1024 : 512;
        cores[siblings.count(cpu) ? *siblings.begin() : cpu] = {capacity, sharing.count(cpu) ? *sharing.begin() : -1};
    }
    std::vector<Core> result;
    for (const auto& [first, core] : cores) {
        result.push_back(core);
    }
    return result;
}

Cores choose_cores(std::vector<Core> cores, int quota) {
    if (cores.empty()) {
        cores.resize(std::max(1u, std::thread::hardware_concurrency()));
    }
    Cores result;
    result.quota = quota;
    result.found = static_cast<int>(cores.size());
    const auto lacks_cache = [](const Core& core) { return core.cache < 0; };
    if (2 * std::count_if(cores.begin(), cores.end(), lacks_cache) < result.found) {
        cores.erase(std::remove_if(cores.begin(), cores.end(), lacks_cache), cores.end());
    }
    result.many = static_cast<int>(cores.size());
    result.apart = result.found - result.many;
    double power = 0, fast_power = 0;
    for (const Core& core : cores) {
        // A cache of its own is a way of its own to memory.
        const auto slows = [&](const Core& other) {
            return core.speed < kOfOneClass * other.speed && (core.cache < 0 || core.cache == other.cache);
        };
        const bool fast = std::none_of(cores.begin(), cores.end(), slows);
        result.few += fast;
        power += core.speed;
        fast_power += fast ? core.speed : 0;
    }
    if (fast_power < power / 2) {
        result.few = result.many;
    }
    if (quota > 0) {
        result.few = std::min(result.few, quota);
        result.many = std::min(result.many, quota);
    }
    return result;
}

Cores choose_cores() {
    return choose_cores(find_cores(), cpu_quota());
}

}  // namespace pystaged
