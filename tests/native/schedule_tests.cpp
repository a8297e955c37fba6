// How well the pool's claims and the shares of products use machines of unequal cores: they are run here as they are,
// on modelled cores and by a modelled clock.
//
// A core multiplies and reads so much a second, all of them together read no more than the machine can, and whoever
// claims an index waits for those before it. Other costs of a pass are left out.
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "machine/pool.h"
#include "weights/product.h"

using namespace pystaged;

namespace {

// Seconds until a worker sees a job, or a caller its end; that a claim, or the word that an index is finished, keeps a
// cache line; and between two questions of a worker that leaves a job to others.
constexpr double kNotice = 0.3e-6, kLine = 0.1e-6, kPause = 0.5e-6;

struct Core {
    double products, bytes;     // a second
    double away = 0, time = 1;  // of each so many seconds, those in which another program has it

    // When work of so many seconds that begins at `from` ends.
    double end(double from, double seconds) const {
        const double own = time - away, periods = std::floor(from / time);
        const double done = periods * own + std::max(0.0, from - periods * time - away) + seconds;
        return away > 0 ? std::max(from, done + (std::floor(done / own) + 1) * away) : from + seconds;
    }
    double share() const { return 1 - away / time; }
};

struct Machine {
    const char* name;
    std::vector<Core> cores;
    double bytes;  // a second, of all cores together
    size_t fast;   // cores of the fastest kind, which come first
};

std::vector<Core> operator+(std::vector<Core> cores, const std::vector<Core>& more) {
    cores.insert(cores.end(), more.begin(), more.end());
    return cores;
}

struct Shape {
    int rows, cols;
    bool gated;
};

struct Network {
    const char* name;
    std::vector<Shape> shapes;  // of a layer: queries, keys and values; output; gate and up; down
    double many, few;           // what part of what the machine can do it is to reach, with many rows and with few
};

// One layer after another.
class Simulation {
public:
    Simulation(const Machine& machine, size_t num_threads)
        : machine_(machine), cores_(machine.cores.begin(), machine.cores.begin() + num_threads) {}

    // Returns the seconds that the products of a layer take.
    double layer(const Network& network, int n) {
        const double begin = time_;
        for (const Shape& shape : network.shapes) {
            multiply(shape, n);
        }
        return time_ - begin;
    }

    // What they would take if all cores did nothing else.
    double least(const Network& network, int n) const {
        double products = 0, bytes = 0, seconds = 0, all = 0;
        for (const Core& core : cores_) {
            products += core.products * core.share();
            bytes += core.bytes * core.share();
        }
        for (const Shape& shape : network.shapes) {
            all = double(padded(shape.rows, kBlock)) * shape.cols;
            seconds += std::max(all * n / products, all * kWeight / std::min(bytes, machine_.bytes));
        }
        return seconds;
    }

private:
    static constexpr double kWeight = 18.0 / 32;  // bytes

    struct Worker {
        double at = 0;        // when it does something next; while it reads, when it began
        double products = 0;  // that are left of its index
        double bytes = 0;
        int64_t begin = 0;
        enum { asks, works, done } state = asks;
    };

    // When it ends what it works on or asks for more, if those that work go on to draw on memory together.
    double end(size_t i, double drawn) const {
        const Worker& worker = workers_[i];
        if (worker.state != Worker::works) {
            return worker.at;
        }
        const double bytes = cores_[i].bytes * std::min(1.0, machine_.bytes / drawn);
        return cores_[i].end(std::max(time_, worker.at),
                             std::max(worker.products / cores_[i].products, worker.bytes / bytes));
    }

    void multiply(const Shape& shape, int n) {
        const PackedMatrix matrix(GGML_TYPE_Q4_0, shape.rows, shape.cols, nullptr);
        Product product;
        product.weights = &matrix;
        product.x.n = n;
        product.epilogue.gated = shape.gated;
        shared_.share_out({ProductShape(product)}, static_cast<int>(cores_.size()));
        size_t unfinished = shared_.tasks.size();
        claims_.open(static_cast<int>(unfinished), shared_.num_threads, shared_.work);
        workers_.assign(shared_.num_threads, {});
        for (Worker& worker : workers_) {
            worker.at = time_ + (&worker == workers_.data() ? 0 : kNotice);
        }
        double claims_free = time_, counts_free = time_;
        while (unfinished > 0) {
            double drawn = 0;
            for (size_t i = 0; i < workers_.size(); ++i) {
                drawn += workers_[i].state == Worker::works ? cores_[i].bytes : 0;
            }
            size_t next = 0;
            double when = std::numeric_limits<double>::infinity();
            for (size_t i = 0; i < workers_.size(); ++i) {
                if (workers_[i].state != Worker::done && end(i, drawn) < when) {
                    when = end(i, drawn);
                    next = i;
                }
            }
            for (size_t i = 0; i < workers_.size(); ++i) {
                Worker& worker = workers_[i];
                const double begin = std::max(time_, worker.at), whole = end(i, drawn) - begin;
                if (worker.state == Worker::works && i != next && when > begin) {
                    worker.products *= 1 - (when - begin) / whole;
                    worker.bytes *= 1 - (when - begin) / whole;
                }
            }
            time_ = when;
            Worker& worker = workers_[next];
            const auto now = [&] { return static_cast<int64_t>(time_ * 1e9); };
            if (worker.state == Worker::works) {
                if (shared_.work > 0) {
                    claims_.took(static_cast<int>(next), now() - worker.begin);
                }
                --unfinished;
                worker.state = Worker::asks;
                worker.at = counts_free = std::max(counts_free, time_) + kLine;
                continue;
            }
            const int index = claims_.claim(static_cast<int>(next), now);
            if (index == Claims::kLeave) {
                worker.at = time_ + kPause;
            } else if (index == Claims::kNone) {
                worker.state = Worker::done;
            } else {
                const ProductTask& task = shared_.tasks[index];
                const double weights = double(task.last - task.first) * (shape.gated ? 2 : 1) * kBlock * shape.cols;
                worker.products = weights * (task.end - task.row);
                worker.bytes = weights * kWeight;
                worker.begin = now();
                worker.state = Worker::works;
                worker.at = claims_free = std::max(claims_free, time_) + kLine;
            }
        }
        time_ = std::max(time_, counts_free) + (shared_.num_threads > 1 ? kNotice : 0);
    }

    const Machine& machine_;
    std::vector<Core> cores_;
    Claims claims_;
    ProductTasks shared_;
    std::vector<Worker> workers_;
    double time_ = 0;
};

constexpr double G = 1e9;
const std::vector<Core> kFast(1, {150 * G, 18 * G}), kSlow(1, {60 * G, 9 * G}), kSlowest(1, {25 * G, 4 * G});

std::vector<Core> operator*(int n, const std::vector<Core>& core) {
    return std::vector<Core>(n, core[0]);
}

const Network kNetworks[] = {
    {"SmolLM2-135M", {{960, 576, false}, {576, 576, false}, {3072, 576, true}, {576, 1536, false}}, 0.80, 0.75},
    {"Llama-1B", {{3072, 2048, false}, {2048, 2048, false}, {16384, 2048, true}, {2048, 8192, false}}, 0.86, 0.90},
    {"Qwen3-4B", {{6144, 2560, false}, {2560, 4096, false}, {19456, 2560, true}, {2560, 9728, false}}, 0.86, 0.90},
    {"Llama-8B", {{6144, 4096, false}, {4096, 4096, false}, {28672, 4096, true}, {4096, 14336, false}}, 0.86, 0.90},
};

// Prints what part of what the cores could do is reached, and checks it where it is promised.
void test_machines() {
    Machine taken{"8, one taken", 8 * std::vector<Core>{{130 * G, 18 * G}}, 70 * G, 8};
    Core& core = taken.cores.back();
    core.away = 3e-3;
    core.time = 6e-3;
    const Machine machines[] = {
        {"2 equal", 2 * std::vector<Core>{{130 * G, 18 * G}}, 40 * G, 2},
        {"8 equal", 8 * std::vector<Core>{{130 * G, 18 * G}}, 70 * G, 8},
        {"4P+8E", 4 * kFast + 8 * kSlow, 60 * G, 4},
        {"6P+8E", 6 * kFast + 8 * kSlow, 70 * G, 6},
        {"6P+8E+2LPE", 6 * kFast + 8 * kSlow + 2 * kSlowest, 70 * G, 6},
        {"16 equal", 16 * std::vector<Core>{{250 * G, 30 * G}}, 70 * G, 16},
        taken,
    };
    constexpr int kWarm = 6, kLayers = 12;  // so many that say how fast each core is, and so many that are measured
    for (const Network& network : kNetworks) {
        for (const Machine& machine : machines) {
            std::printf("%-13s %-13s", network.name, machine.name);
            for (const int n : {1, 8, 16, 256}) {
                Simulation simulation(machine, n < 16 ? machine.fast : machine.cores.size());
                double seconds = 0;
                for (int layer = 0; layer < kWarm + kLayers; ++layer) {
                    const double its = simulation.layer(network, n);
                    seconds += layer < kWarm ? 0 : its;
                }
                const double part = kLayers * simulation.least(network, n) / seconds;
                std::printf("  %d rows: %.2f", n, part);
                // A pass waits for what a core that was taken has in hand, which matters less in a long one.
                const Core& last = machine.cores.back();
                CHECK(n != 256 || part >= network.many || (last.away > 0 && seconds < kLayers * last.time));
                CHECK(n > 8 || part >= network.few || last.away > 0);
            }
            std::printf("\n");
        }
    }
}

}  // namespace

int main() {
    test_machines();
    std::fprintf(stderr, failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
