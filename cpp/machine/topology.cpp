#include "machine/topology.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace pystaged {

// The numbers in one of Linux's lists of CPUs, such as 0-3,8; none behind what is no such list.
static std::set<int> read_list(const std::string& path) {
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

int cpu_quota(const std::string& root) {
    double least = 0;
    // Microseconds of CPU time, and of each period, in one file or two; -1 or a word where there is no limit.
    const auto consider = [&](const std::string& path, const std::string& period_path) {
        double used = 0, period = 0;
        std::ifstream(path) >> used >> period;
        std::ifstream(period_path) >> period;
        if (used > 0 && period > 0) {
            least = least > 0 ? std::min(least, used / period) : used / period;
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
                    consider(folder + "/cpu.cfs_quota_us", folder + "/cpu.cfs_period_us");
                }
            } else {
                consider(mount + path + "/cpu.max", "");
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
    std::set<int> seen;
    std::vector<Core> cores;
    for (const int cpu : cpus) {
        const std::string folder = devices + "system/cpu/cpu" + std::to_string(cpu);
        const std::set<int> siblings = read_list(folder + "/topology/thread_siblings_list");
        const std::set<int> sharing = read_list(folder + "/cache/index3/shared_cpu_list");
        int capacity = 0;  // Arm's, 1,024 for the fastest
        std::ifstream(folder + "/cpu_capacity") >> capacity;
        const int speed = fast.empty() || fast.count(cpu) ? 1024 : 512;
        if (seen.insert(siblings.count(cpu) ? *siblings.begin() : cpu).second) {
            cores.push_back({capacity > 0 ? capacity : speed, sharing.count(cpu) ? *sharing.begin() : -1});
        }
    }
    return cores;
}

Cores choose_cores(std::vector<Core> cores, int quota) {
    if (cores.empty()) {
        cores.resize(std::max(1u, std::thread::hardware_concurrency()));
    }
    Cores result;
    result.quota = quota;
    result.found = static_cast<int>(cores.size());
    const auto lacks_cache = [](const Core& core) { return core.cache < 0; };
    if (2 * std::ranges::count_if(cores, lacks_cache) < result.found) {
        std::erase_if(cores, lacks_cache);
    }
    result.many = static_cast<int>(cores.size());
    result.apart = result.found - result.many;
    double power = 0, fast_power = 0;
    for (const Core& core : cores) {
        // Cores of one class differ by less. A cache of its own is a way of its own to memory.
        const auto faster = [&](const Core& other) {
            return core.speed < 0.75 * other.speed && (core.cache < 0 || core.cache == other.cache);
        };
        power += core.speed;
        if (std::ranges::none_of(cores, faster)) {
            fast_power += core.speed;
            ++result.few;
        }
    }
    const int most = quota > 0 ? quota : result.many;
    result.few = std::min(fast_power < power / 2 ? result.many : result.few, most);
    result.many = std::min(result.many, most);
    return result;
}

Cores choose_cores() {
    return choose_cores(find_cores(), cpu_quota());
}

}  // namespace pystaged
