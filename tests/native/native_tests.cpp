// Tests of the engine for a build with sanitizers: native_tests MODEL.gguf, a small model that may be of any type; of
// further ones, whether their passes allocate memory.
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "error.h"
#include "files/gguf_file.h"
#include "llama.h"
#include "llama/tokenizer.h"
#include "machine/math.h"
#include "sampling/sampler.h"
#include "state/packed_state.h"
#include "steps.h"
#include "text/text_file.h"

using namespace pystaged;

// Of this process, by C++.
std::atomic<size_t> num_allocations{0};

void* operator new(size_t bytes) {
    ++num_allocations;
    if (void* const memory = std::malloc(bytes)) {
        return memory;
    }
    throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    ++num_allocations;
    return std::malloc(bytes);
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
    std::free(memory);
}

namespace {

// A file's name that nothing else has.
std::string temporary(const std::string& name) {
    return (std::filesystem::temp_directory_path() / (name + std::to_string(std::random_device()()))).string();
}

// ---- Sampler ----

struct Logits {
    Array<float> values, maxima;
    int size;

    explicit Logits(int n) : values(padded(n, kRun)), maxima(padded(n, kRun) / kRun), size(n) {
        std::fill_n(values.data(), values.size(), -INFINITY);
        std::generate_n(values.data(), n, [] { return random_float(3); });
    }
    LogitsRow row(const Kernel& kernel) const {
        kernel.run_max(values.data(), static_cast<int>(values.size()), maxima.data());
        return {values.data(), maxima.data(), size, static_cast<int>(values.size())};
    }
};

void test_sampler() {
    const float nan = NAN, inf = INFINITY;
    for (const Sampling& bad : {Sampling{-1, 0, 1, 0, 0}, Sampling{nan, 0, 1, 0, 0}, Sampling{inf, 0, 1, 0, 0},
                                Sampling{1, -1, 1, 0, 0}, Sampling{1, 0, 0, 0, 0}, Sampling{1, 0, 1.5f, 0, 0},
                                Sampling{1, 0, nan, 0, 0}, Sampling{1, 0, 1, 1, 0}, Sampling{1, 0, 1, nan, 0}}) {
        CHECK_THROWS(std::invalid_argument, (check(bad), 0));
    }
    for (const uint64_t seed : {uint64_t(0), ~uint64_t(0)}) {
        for (const int64_t position : {int64_t(0), int64_t(1) << 40}) {
            for (const int32_t token : {0, 5, INT32_MAX}) {
                const float g = gumbel(seed, position, token);
                CHECK(g > -3.15f && g < 27.04f);
            }
        }
    }
    std::vector<Sampling> samplings;
    for (const float temperature : {0.0f, 1e-38f, 0.1f, 1.0f, 100.0f, 3e38f}) {
        for (const int top_k : {0, 1, 5, 1000000}) {
            for (const float top_p : {1.0f, 0.9f, 1e-6f}) {
                for (const float min_p : {0.0f, 0.1f, 0.999f}) {
                    samplings.push_back({temperature, top_k, top_p, min_p, 7});
                }
            }
        }
    }
    const Kernel& kernel = find_kernel("");
    Sampler sampler(kernel);
    for (const int size : {1, 3, 63, 64, 65, 1000}) {
        for (const float odd : {0.0f, nan, inf, -inf, 3e38f, -3e38f}) {
            for (const int how_many : {1, 2, size}) {
                const Logits logits(size);
                for (int i = 0; i < std::min(how_many, size); ++i) {
                    logits.values[random_int(0, size - 1)] = odd;
                }
                if (how_many == size) {
                    std::fill_n(logits.values.data(), size, odd);
                }
                const LogitsRow row = logits.row(kernel);
                for (const Sampling& sampling : samplings) {
                    const int32_t chosen = sampler.choose(sampling, row, 12, 2);
                    CHECK(chosen >= 0 && chosen < size);
                    for (const int k : {1, 4, size, size + 9}) {
                        const std::vector<Candidate>& found = sampler.candidates(sampling, row, 12, k, 2);
                        CHECK(found.size() <= static_cast<size_t>(std::min(k, size)));
                        for (const Candidate& c : found) {
                            CHECK(c.token >= 0 && c.token < size);
                        }
                        if (odd == 0) {
                            CHECK(!found.empty() && found.front().token == chosen);
                        }
                    }
                }
            }
        }
    }
}

void test_math() {
    for (int i = 0; i < 1000; ++i) {
        const double x = std::exp(random_float(20)), y = random_float(100);
        CHECK(std::fabs(own_log(x) - std::log(x)) <= 1e-15 * std::max(1.0, std::fabs(std::log(x))));
        CHECK(std::fabs(own_exp(y) / std::exp(y) - 1) < 1e-15 * std::max(1.0, std::fabs(y)));
    }
    CHECK(own_log(1) == 0 && own_log(0) == -INFINITY && own_log(INFINITY) == INFINITY && std::isnan(own_log(-1)));
    CHECK(own_exp(0) == 1 && own_exp(-INFINITY) < 1e-300 && std::isnan(own_exp(NAN)) && std::isnan(own_log(NAN)));
}

// The same in whatever rounding mode the caller is; and right far behind the beginning of a text.
void test_rope() {
    const Rope rope{.dims = 128, .scale = 0.3f, .yarn = true, .original_context = 4096};
    const std::vector<double> frequencies = rope.frequencies({});
    const double amplitude = rope.amplitude();
    for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
        std::fesetround(mode);
        CHECK(rope.frequencies({}) == frequencies && rope.amplitude() == amplitude);
        std::fesetround(FE_TONEAREST);
    }
    for (const float base : {10000.0f, 500000.0f, 1e6f}) {
        const Rope plain{.dims = 128, .base = base};
        for (const int position : {0, 1, 511, 8191, 131071, 1048575}) {
            float cosines[64], sines[64];
            rotation(plain.frequencies({}), plain.amplitude(), position, cosines, sines);
            for (int i = 0; i < 64; ++i) {
                const double angle = position * std::pow(double(base), -i / 64.0);
                CHECK(std::fabs(cosines[i] - std::cos(angle)) <= 7e-8 && std::fabs(sines[i] - std::sin(angle)) <= 7e-8);
            }
        }
    }
}

// ---- Sessions ----

std::vector<float> logits_of(Session& session, int row) {
    std::vector<float> logits(session.model().numbers().vocab_size);
    session.logits(row, logits.data());
    return logits;
}

std::vector<int32_t> random_tokens(const Model& model, int n) {
    std::vector<int32_t> tokens(n);
    std::generate(tokens.begin(), tokens.end(), [&] { return random_int(0, model.numbers().vocab_size - 1); });
    return tokens;
}

// The beginning of a prompt, as a tree's rows that are a chain, of which the last one is judged.
struct ChainPass {
    std::unique_ptr<Backend> pass;
    std::unique_ptr<TextState> state;
    std::vector<PassRow> rows;
    std::vector<RowContext> contexts;
    std::vector<float> logits, maxima;
    Pass what;

    ChainPass(const Model& model, const std::vector<int32_t>& prompt, int most)
        : pass(make_packed_pass(model)),
          state(pass->make_state(most, most)),
          logits(model.numbers().logits_stride()),
          maxima(logits.size() / kRun) {
        for (int i = 0; i < most; ++i) {
            rows.push_back({prompt[i], i, i - 1});
            contexts.push_back({i + 1, i + 1, nullptr});
        }
        what.rows = rows.data();
        what.contexts = contexts.data();
        what.num_logits = 1;
        what.logits = logits.data();
        what.maxima = maxima.data();
    }
    void compute(int num_rows) {
        what.num_rows = num_rows;
        what.segments = {{state.get(), 0, num_rows, 0, 0}};
        pass->compute(what);
    }
};

// A prompt in passes of any size, and a pass that is interrupted between two layers.
void test_prompt(const std::string& path, const Kernel& kernel) {
    const auto model = std::make_shared<Model>(path, kernel.name, 2);
    const int length = std::min(model->numbers().max_context - 1, 2 * kMostPassRows + 70);
    const std::vector<int32_t> prompt = random_tokens(*model, length);
    Session session(model, 0);
    std::vector<float> expected;
    for (const std::vector<int>& pieces : {std::vector<int>{1}, {length}, {255, 2, 64, 33, 300}, {65, 7}}) {
        session.rewind(0);
        for (int at = 0, i = 0; at < length; ++i) {
            const int piece = std::min(pieces[i % pieces.size()], length - at);
            prefill(session, {prompt.begin() + at, prompt.begin() + at + piece});
            at += piece;
        }
        evaluate(session, {7}, {-1}, 1);
        const std::vector<float> logits = logits_of(session, 0);
        if (expected.empty()) {
            expected = logits;
        }
        CHECK(logits == expected);
        session.discard();
    }

    ChainPass pass(*model, prompt, 100);
    std::vector<float> whole(pass.logits.size());
    int calls = 0;
    std::function<void()> interrupted = [&] { ++calls; };
    pass.what.interrupted = &interrupted;
    pass.compute(100);
    whole = pass.logits;
    CHECK(calls == model->numbers().num_layers);
    interrupted = [&] {
        if (--calls == 0) {
            throw std::runtime_error("interrupted");
        }
    };
    CHECK_THROWS(std::runtime_error, (pass.compute(100), 0));
    pass.what.interrupted = nullptr;
    std::fill(pass.logits.begin(), pass.logits.end(), 0.0f);
    pass.compute(100);
    CHECK(pass.logits == whole);
}

// Of each size, the second pass takes no memory but what the first one left.
void test_allocations(const std::string& path) {
    const Model model(path, "", 2);
    const std::vector<int32_t> prompt = random_tokens(model, 100);
    ChainPass pass(model, prompt, 100);
    for (const int num_rows : {1, 7, 16, 64, 100, 3}) {
        pass.compute(num_rows);
        const size_t before = num_allocations;
        pass.compute(num_rows);
        CHECK(num_allocations == before);
    }
}

void test_session(const std::string& path, const Kernel& kernel) {
    const auto model = std::make_shared<Model>(path, kernel.name, 2);
    Session session(model, 0), plain(model, 0);
    const int context = session.context();
    CHECK(context == model->numbers().max_context);
    for (int round = 0; round < 8; ++round) {
        const int room = context - static_cast<int>(session.tokens().size());
        const std::vector<int32_t> prompt = random_tokens(*model, random_int(0, std::min(20, room / 2)));
        prefill(session, prompt);
        const int n = random_int(1, std::min(70, room / 3));
        const std::vector<int32_t> tokens = random_tokens(*model, n);
        std::vector<int32_t> parents(n);
        for (int i = 0; i < n; ++i) {
            parents[i] = i == 0 ? -1 : random_int(std::max(0, i - 6), i - 1);
        }
        const int first = random_int(0, n);
        if (first > 0) {
            evaluate(session, {tokens.begin(), tokens.begin() + first}, {parents.begin(), parents.begin() + first});
        }
        if (first < n) {
            evaluate(session, {tokens.begin() + first, tokens.end()}, {parents.begin() + first, parents.end()});
        }
        CHECK(session.num_pending() == n);
        // A path to any row gives the bits that the same tokens give one by one.
        const int leaf = random_int(0, n - 1);
        std::vector<int32_t> way;
        for (int row = leaf; row >= 0; row = parents[row]) {
            way.insert(way.begin(), row);
        }
        plain.rewind(0);
        prefill(plain, session.tokens());
        for (const int row : way) {
            evaluate(plain, {tokens[row]}, {-1}, 1);
            CHECK(logits_of(plain, 0) == logits_of(session, row));
            plain.commit({0});
        }
        const Followed followed = session.follow({0.5f, 0, 1, 0, 3}, 0);
        CHECK(followed.path.front() == 0 && followed.path.size() == followed.tokens.size());
        const Sampling filtered{1, 3, 1, 0, 1}, other{1, 2, 1, 0, 1};
        const auto ranked = [&](const std::vector<Sampling>& samplings, const std::vector<int32_t>& rows) {
            return step(Work::rank(session, rows, 5, samplings));
        };
        Outcome found = ranked({filtered}, {0, n - 1});
        CHECK(found.tokens[2] >= 0 && found.tokens[3] == -1 && found.scores[3] == -INFINITY && found.tokens[7] >= 0 &&
              found.tokens[8] == -1);
        found = ranked({filtered, other}, {0, n - 1});
        CHECK(found.tokens[2] >= 0 && found.tokens[3] == -1 && found.tokens[6] >= 0 && found.tokens[7] == -1);
        CHECK_THROWS(std::invalid_argument, ranked({filtered, other}, {0}));
        CHECK_THROWS(std::invalid_argument, ranked({}, {0}));
        CHECK(ranked({filtered}, {}).tokens.empty());
        session.commit(way);
        CHECK(session.tokens() == plain.tokens());
        if (round % 3 == 2) {
            session.rewind(static_cast<int>(session.tokens().size()) / 2);
        }
    }

    // Errors leave everything as it was.
    session.rewind(3);
    const std::vector<int32_t> before = session.tokens();
    evaluate(session, {1, 2}, {-1, 0}, 1);
    CHECK_THROWS(std::invalid_argument, (evaluate(session, {1}, {2}), 0));
    CHECK(session.num_pending() == 2 && session.tokens() == before);
    session.discard();
    CHECK_THROWS(ContextFullError, (prefill(session, random_tokens(*model, context)), 0));
    const int too_many = context + 600;
    CHECK_THROWS(ContextFullError,
                 (evaluate(session, random_tokens(*model, too_many), std::vector<int32_t>(too_many, -1), 1), 0));
    const auto interrupted = [] { throw std::runtime_error("interrupted"); };
    if (context > kMostPassRows + 3) {
        CHECK_THROWS(std::runtime_error, (prefill(session, random_tokens(*model, kMostPassRows + 1), interrupted), 0));
    }
    CHECK(session.num_pending() == 0 && session.tokens() == before);
    prefill(session, random_tokens(*model, context - 3));
    prefill(session, {});
    CHECK_THROWS(ContextFullError, (evaluate(session, {0}, {-1}, 1), 0));
    session.rewind(context - 1);
    // At the very end there is still room for branches.
    evaluate(session, random_tokens(*model, 500), std::vector<int32_t>(500, -1), 1);
    session.commit({499});
    CHECK(static_cast<int>(session.tokens().size()) == context);
    session.close();
    CHECK_THROWS(std::invalid_argument, (evaluate(session, {0}, {-1}, 1), 0));
    Session smallest(model, 1);
    evaluate(smallest, {0}, {-1}, 1);
    CHECK_THROWS(ContextFullError, (evaluate(smallest, {0}, {0}, 1), 0));
    smallest.commit({0});
    CHECK(smallest.tokens().size() == 1);
}

// Sessions of one model on threads of their own, as Python's threads use them.
void test_concurrent_sessions(const std::string& path) {
    const auto model = std::make_shared<Model>(path, "", 2);
    const auto decode = [&](int seed) {
        Session session(model, 64);
        prefill(session, {seed, 2, 3});
        std::vector<int32_t> tokens{5};
        for (int step = 0; step < 12; ++step) {
            const Followed followed = verify(session, {tokens.back(), 1, 2}, {-1, 0, 0}, {1, 0, 1, 0, 7});
            tokens.insert(tokens.end(), followed.tokens.begin(), followed.tokens.end());
        }
        return tokens;
    };
    std::vector<std::vector<int32_t>> found(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] { found[i] = decode(i); });
    }
    // One more, shared by two threads.
    Session shared(model, 300);
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            for (int step = 0; step < 20; ++step) {
                evaluate(shared, {1}, {-1}, 0);
                shared.num_pending();
                shared.discard();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (int i = 0; i < 4; ++i) {
        CHECK(found[i] == decode(i));
    }
    CHECK_THROWS(std::runtime_error,
                 (prefill(shared, random_tokens(*model, kMostPassRows + 1), [&] { shared.discard(); }), 0));
}

#ifndef _WIN32
// A child of fork() lets go of an executor while the parent's threads are in it, or wait for their turn. Whoever hangs
// is killed.
void test_forked_child(const std::string& path) {
    const auto model = std::make_shared<Model>(path, "", 2);
    std::shared_ptr<Executor> executor = Executor::of(*model);
    std::thread waiting;
    {
        const Executor::Turn computing(*executor);
        waiting = std::thread([&] { const Executor::Turn next(*executor); });
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            executor.reset();
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    waiting.join();
}
#endif

// Works of several texts in passes of their own and of all, from threads whose texts overlap.
void test_works(const std::string& path, const Kernel& kernel) {
    const auto model = std::make_shared<Model>(path, kernel.name, 3);
    const Sampling sampling{1, 0, 1, 0, 7};
    const int n_ctx = std::min(model->numbers().max_context, 640);
    Session source(model, n_ctx);
    prefill(source, random_tokens(*model, n_ctx - 120));
    std::vector<std::unique_ptr<Session>> crowd, alone;
    for (const int length : {n_ctx - 120, 0, 33, 16, n_ctx - 150}) {
        crowd.push_back(source.fork(length));
        alone.push_back(source.fork(length));
    }
    const auto same = [&](size_t i, Session& a, Session& b) {
        CHECK(a.tokens() == b.tokens());
        evaluate(a, {1, 2}, {-1, 0});
        evaluate(b, {1, 2}, {-1, 0});
        CHECK(logits_of(a, static_cast<int>(i % 2)) == logits_of(b, static_cast<int>(i % 2)));
        a.discard();
        b.discard();
    };
    for (int round = 0; round < 3; ++round) {
        const std::vector<int32_t> piece = random_tokens(*model, 10), tree = random_tokens(*model, 6);
        const std::vector<int32_t> parents{-1, 0, 0, 1, 2, 2};
        const std::vector<Work> works{Work::propose(*crowd[0], tree, parents, 4, 3, {sampling}),
                                      Work::read(*crowd[1], piece), Work::verify(*crowd[2], tree, parents, sampling),
                                      Work::verify(*crowd[3], tree, parents, {}),
                                      Work::propose(*crowd[4], tree, parents, 2, 3, {sampling, {}})};
        const std::vector<Outcome> outcomes = run({&works[0], &works[1], &works[2], &works[3], &works[4]});
        evaluate(*alone[0], tree, parents, 4);
        const Outcome ranked = step(Work::rank(*alone[0], {2, 3, 4, 5}, 3, {sampling}));
        CHECK(outcomes[0].tokens == ranked.tokens && outcomes[0].scores == ranked.scores);
        prefill(*alone[1], piece);
        CHECK(outcomes[2].followed.tokens == verify(*alone[2], tree, parents, sampling).tokens);
        CHECK(outcomes[3].followed.path == verify(*alone[3], tree, parents, {}).path);
        CHECK(crowd[4]->num_pending() == 6);
        crowd[4]->discard();
        for (size_t i = 0; i < crowd.size(); ++i) {
            if (i == 0) {
                crowd[0]->commit({0, 2, 5});
                alone[0]->commit({0, 2, 5});
            }
            same(i, *crowd[i], *alone[i]);
        }
        // A failure at the end undoes what came before it.
        const Work bad = Work::read(*crowd[4], {-1}), twice = Work::read(*crowd[1], piece);
        CHECK_THROWS(std::invalid_argument, run({&works[1], &works[2], &bad}));
        CHECK_THROWS(std::invalid_argument, run({&works[1], &twice}));
        same(round, *crowd[2], *alone[2]);
    }

    const std::vector<int32_t> before = crowd[1]->tokens();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            for (int step = 0; step < 15; ++step) {
                Session &a = *crowd[(t + step) % 5], &b = *crowd[(t + 1 + step / 2) % 5], &c = *crowd[(t + 3) % 5];
                try {
                    if (&a != &b && step % 3 > 0) {
                        const Work first = Work::verify(a, {1, 2, 3}, {-1, 0, 0}, sampling);
                        const Work second = Work::propose(b, {4, 5}, {-1, 0}, 1, 2, {sampling});
                        run(step % 2 ? std::vector<const Work*>{&first, &second}
                                     : std::vector<const Work*>{&second, &first});
                        b.discard();
                    } else {
                        verify(c, {6}, {-1}, {});
                        c.fork(static_cast<int>(before.size()) / 2)->rewind(1);
                    }
                } catch (const std::invalid_argument&) {
                    c.discard();  // another thread has rows pending
                } catch (const ContextFullError&) {
                }
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (size_t i = 0; i < crowd.size(); ++i) {
        crowd[i]->discard();
        crowd[i]->rewind(std::min(static_cast<int>(crowd[i]->tokens().size()), n_ctx - 8));
        alone[i]->rewind(0);
        prefill(*alone[i], crowd[i]->tokens());
        same(i, *crowd[i], *alone[i]);
    }
    // What sessions share goes with the last of them.
    const std::weak_ptr<Executor> executor = Executor::of(*model);
    crowd.clear();
    alone.clear();
    CHECK(!executor.expired());
    source.close();
    CHECK(executor.expired());
}

// A backend is not silent about what it lacks.
void test_bare_backend(const std::string& path) {
    struct Bare : Backend {
        explicit Bare(const Model& model) : Backend(model) {}
        std::unique_ptr<TextState> make_state(int, int) override { return nullptr; }
        void compute(const Pass&) override {}
    };
    const Model model(path, "", 1);
    Bare backend(model);
    CHECK_THROWS(std::logic_error, (backend.add_markov(nullptr, 0, nullptr, nullptr), 0));
}

// ---- Files ----

void test_log_capture() {
    static std::string elsewhere;
    llama_log_set([](ggml_log_level, const char* text, void*) { elsewhere += text; }, nullptr);
    ggml_log_callback fetched = nullptr;
    void* data = nullptr;
    {
        const LogCapture capture;
        llama_log_get(&fetched, &data);
        std::thread([&] { fetched(GGML_LOG_LEVEL_ERROR, "another thread's", data); }).join();
        CHECK(capture.first_error().empty() && elsewhere == "another thread's");
        fetched(GGML_LOG_LEVEL_ERROR, "ours\n", data);
        fetched(GGML_LOG_LEVEL_ERROR, "and more\n", data);
        CHECK(capture.first_error() == "ours");
    }
    // Whoever fetched it may call it later.
    fetched(GGML_LOG_LEVEL_INFO, ", late", data);
    CHECK(elsewhere == "another thread's, late");
}

void test_tokenizer(const std::string& path) {
    const Tokenizer tokenizer(path);
    const std::string text("the \xc3\xa9 \xf0\x9f\xa6\x99\0\n\t x", 16);
    std::string back;
    for (const int32_t token : tokenizer.encode(text)) {
        back += tokenizer.token_bytes(token);
    }
    CHECK(back == text);
    CHECK(tokenizer.encode("").empty());
    CHECK(tokenizer.encode(std::string(5000, 'a')).size() > 10);
    (void)tokenizer.encode("\xff\xc3");
    int ends = 0;
    for (int32_t token = 0; token < tokenizer.num_tokens(); ++token) {
        (void)tokenizer.token_bytes(token);
        ends += tokenizer.is_end(token);
    }
    CHECK(ends > 0);
    for (const int32_t token : {-1, tokenizer.num_tokens(), INT32_MIN, INT32_MAX}) {
        CHECK_THROWS(std::invalid_argument, tokenizer.token_bytes(token));
        CHECK(!tokenizer.is_end(token));
    }
}

// Loads, or refuses with a message of its own.
void load(const std::string& path) {
    for (const bool model : {false, true}) {
        try {
            if (model) {
                Session session(std::make_shared<Model>(path, "", 2), 0);
                evaluate(session, {0, 0, 0}, {-1, 0, 0});
                session.follow({1, 0, 0.9f, 0, 0}, 0);
            } else {
                Tokenizer(path).encode("the tree");
            }
        } catch (const ModelError& error) {
            CHECK(std::strlen(error.what()) > path.size());
        } catch (const ContextFullError&) {
        }
    }
}

void test_damaged_files(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(in), {}};
    const std::string damaged = temporary("pystaged-native-");
    const auto attempt = [&](const std::string& content) {
        std::ofstream(damaged, std::ios::binary | std::ios::trunc) << content;
        load(damaged);
    };
    attempt(data);
    for (int i = 0; i < 50; ++i) {
        const size_t head = std::min<size_t>(data.size(), 8192);
        const size_t end = i < 30 ? head * i / 30 : head + (data.size() - head) * (i - 30) / 20;
        attempt(data.substr(0, end));
    }
    for (int i = 0; i < 200; ++i) {
        std::string changed = data;
        const int most = static_cast<int>(i % 2 ? data.size() : std::min<size_t>(data.size(), 8192)) - 1;
        for (int j = 0; j <= i % 3; ++j) {
            changed[random_int(0, most)] ^= static_cast<char>(1 << random_int(0, 7));
        }
        attempt(changed);
    }
    std::filesystem::remove(damaged);
    CHECK_THROWS(ModelError, Tokenizer{damaged});
    CHECK_THROWS(ModelError, Model(damaged, "", 0));
    CHECK_THROWS(std::invalid_argument, Model(path, "abacus", 0));
    CHECK_THROWS(std::invalid_argument, Model(path, "", -1));
    CHECK_THROWS(std::invalid_argument, Model(path, "", 257));
}

void test_packed_weights(const std::string& path) {
    const auto uninterrupted = [] {};
    const std::string packed = temporary("pystaged-native-packed-");
    const auto logits = [](const std::shared_ptr<Model>& model) {
        Session session(model, 16);
        evaluate(session, {1, 2, 3}, {-1, 0, 1});
        return logits_of(session, 2);
    };
    std::filesystem::remove(packed);
    const auto model = std::make_shared<Model>(path, "", 2, Devices(), uninterrupted, KvType::f16, packed);
    CHECK(!model->facts().is_mapped && model->facts().packed_problem.empty());
    CHECK_THROWS(ModelError, (model->save_packed(packed, uninterrupted), 0));
    std::ofstream(packed).close();
    model->save_packed(packed, uninterrupted);
    CHECK_THROWS(std::runtime_error, (model->save_packed(packed, [] { throw std::runtime_error("interrupted"); }), 0));
    auto mapped = std::make_shared<Model>(path, "", 2, Devices(), uninterrupted, KvType::f16, packed);
    CHECK(mapped->facts().is_mapped && logits(mapped) == logits(model));
    CHECK_THROWS(std::logic_error, (mapped->save_packed(packed, uninterrupted), 0));
    // However short it is.
    for (uintmax_t bytes = std::filesystem::file_size(packed); bytes > 0; bytes /= 2) {
        const std::string part = packed + ".part";
        std::filesystem::copy_file(packed, part, std::filesystem::copy_options::overwrite_existing);
        std::filesystem::resize_file(part, bytes - 1);
        const auto again = std::make_shared<Model>(path, "", 2, Devices(), uninterrupted, KvType::f16, part);
        CHECK(!again->facts().is_mapped && !again->facts().packed_problem.empty() && logits(again) == logits(model));
        std::filesystem::remove(part);
    }
    mapped.reset();  // a mapped file cannot be removed on Windows
    std::filesystem::remove(packed);
}

void test_text_files(const std::string& path) {
    const auto model = std::make_shared<Model>(path, "", 2);
    Session session(model, 200);
    std::vector<int32_t> tokens(100);
    std::iota(tokens.begin(), tokens.end(), 1);
    prefill(session, tokens);
    const std::string file = temporary("pystaged-native-text-");
    std::ofstream(file).close();
    write_texts(file, "head", {&session});
    Session again(model, 150);
    read_texts(file, "head", {&again});
    evaluate(session, {1}, {-1});
    evaluate(again, {1}, {-1});
    CHECK(again.tokens() == tokens && logits_of(again, 0) == logits_of(session, 0));
    std::ifstream in(file, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    in.close();
    Session empty(model, 150);
    for (int i = 0; i < 300; ++i) {
        // Counts and shapes lie in the first bytes.
        std::string harmed = whole.substr(0, i % 3 == 0 ? random_bits() % whole.size() : whole.size());
        if (!harmed.empty()) {
            harmed[random_bits() % std::min<size_t>(harmed.size(), i % 2 == 0 ? 1000 : whole.size())] ^= 1 << i % 8;
        }
        std::ofstream(file, std::ios::binary).write(harmed.data(), static_cast<std::streamsize>(harmed.size()));
        CHECK_THROWS(ModelError, (read_texts(file, "head", {&empty}), 0));
        CHECK(empty.tokens().empty());
    }
    std::filesystem::remove(file);
}

void test_shapes() {
    KeptCells all(0), windowed(50);
    for (const std::vector<int32_t>& bad : std::vector<std::vector<int32_t>>{
             {}, {0, 0, 0}, {-64, 0, 0, 0}, {64, 0, 64, 0}, {0, 70, 64, 0}, {0, 0, 128, 0}, {0, 0, 0, 101}}) {
        CHECK(!windowed.resume(100, bad) && !all.resume(100, bad));
    }
    CHECK(!all.resume(100, {0, 0, 64, 0}) && windowed.resume(100, {0, 10, 64, 80}));
    RecurrentState state(8, 4);
    for (const std::vector<int32_t>& bad : std::vector<std::vector<int32_t>>{
             {}, {-1}, {101}, {90, 0}, {90, 91}, {90, 5, 5}, std::vector<int32_t>(99, 90)}) {
        CHECK(!state.resume(100, bad));
    }
    CHECK(!state.resume(1000, {400}));
    CHECK(state.resume(100, {90, 20, 80}));
    std::vector<Piece> pieces;
    state.add_pieces(100, pieces);
    KvCache halves(KvType::f16, 2, 8, 40), eighths(KvType::q8_0, 2, 40, 33);
    halves.commit(0, 40);
    eighths.commit(0, 33);
    halves.add_pieces(0, 40, pieces);
    eighths.add_pieces(16, 33, pieces);
    for (const Piece& piece : pieces) {
        std::memset(piece.data, 1, piece.bytes);
    }
    CHECK(pieces.size() == 4 + 4 + 4);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: native_tests MODEL.gguf [MODEL.gguf...]\n");
        return 2;
    }
    const std::string path = argv[1];
#ifndef __SANITIZE_THREAD__  // under which they take very long or may not fork, and have no threads of their own
    test_sampler();
    test_math();
    test_rope();
#ifndef _WIN32
    test_forked_child(path);
#endif
    for (const Kernel* kernel : available_kernels()) {
        test_session(path, *kernel);
        test_prompt(path, *kernel);
        test_works(path, *kernel);
    }
#else
    test_works(path, find_kernel(""));
#endif
    std::for_each(argv + 1, argv + argc, test_allocations);
    test_bare_backend(path);
    test_packed_weights(path);
    test_text_files(path);
    test_shapes();
    test_concurrent_sessions(path);
    test_log_capture();
#ifndef __SANITIZE_THREAD__
    test_tokenizer(path);
    test_damaged_files(path);
#endif
    std::fprintf(stderr, failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
