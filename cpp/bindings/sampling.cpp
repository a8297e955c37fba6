#include "bindings/bindings.h"
#include "sampling/sampler.h"

namespace pystaged {

static LogitRules make_rules(std::vector<std::pair<int32_t, float>> bias, std::vector<int32_t> end_tokens,
                             int64_t min_length, float repeat_penalty, float presence_penalty, float frequency_penalty,
                             int repeat_last_n, float dry_multiplier, float dry_base, int dry_allowed_length,
                             int dry_last_n, const std::vector<std::vector<int32_t>>& dry_breakers) {
    LogitRules rules{std::move(bias),  std::move(end_tokens), min_length,    repeat_penalty,
                     presence_penalty, frequency_penalty,     repeat_last_n, dry_multiplier,
                     dry_base,         dry_allowed_length,    dry_last_n,    {}};
    for (const std::vector<int32_t>& breaker : dry_breakers) {
        require(!breaker.empty(), "a breaker of dry_breakers has no tokens");
        rules.dry_breakers.emplace(breaker[0], std::vector<int32_t>(breaker.begin() + 1, breaker.end()));
    }
    check(rules);
    return rules;
}

static std::vector<std::vector<int32_t>> breakers_of(const LogitRules& rules) {
    std::vector<std::vector<int32_t>> breakers;
    for (const auto& [first, rest] : rules.dry_breakers) {
        breakers.push_back({first});
        breakers.back().insert(breakers.back().end(), rest.begin(), rest.end());
    }
    return breakers;
}

static Sampling make_sampling(float temperature, int top_k, float top_p, float min_p, uint64_t seed, float typical_p,
                              float xtc_probability, float xtc_threshold, bool temperature_last, int logprobs,
                              std::shared_ptr<LogitRules> rules) {
    const Sampling sampling{
        temperature,      top_k,   top_p, min_p, seed, typical_p, xtc_probability, xtc_threshold, temperature_last,
        std::move(rules), logprobs};
    check(sampling);
    return sampling;
}

// Pickles as a tuple of the arguments it is made of.
template <class T, class... Fields, class FieldsOf>
static auto pickled(T (*make)(Fields...), const FieldsOf& fields_of) {
    return py::pickle(fields_of,
                      [make](const std::tuple<std::decay_t<Fields>...>& fields) { return std::apply(make, fields); });
}

void add_sampling(py::module_& m) {
    py::class_<LogitRules, std::shared_ptr<LogitRules>>(m, "LogitRules")
        .def(py::init(&make_rules), py::kw_only(), py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>(),
             py::arg("end_tokens") = std::vector<int32_t>(), py::arg("min_length") = 0,
             py::arg("repeat_penalty") = 1.0f, py::arg("presence_penalty") = 0.0f, py::arg("frequency_penalty") = 0.0f,
             py::arg("repeat_last_n") = 64, py::arg("dry_multiplier") = 0.0f, py::arg("dry_base") = 1.75f,
             py::arg("dry_allowed_length") = 2, py::arg("dry_penalty_last_n") = -1,
             py::arg("dry_breakers") = std::vector<std::vector<int32_t>>())
        .def(pickled(&make_rules, [](const LogitRules& r) {
            return std::make_tuple(r.bias, r.end_tokens, r.min_length, r.repeat_penalty, r.presence_penalty,
                                   r.frequency_penalty, r.repeat_last_n, r.dry_multiplier, r.dry_base,
                                   r.dry_allowed_length, r.dry_last_n, breakers_of(r));
        }));

    py::class_<Sampling>(m, "Sampling")
        .def(py::init(&make_sampling), py::arg("temperature") = 0.0f, py::arg("top_k") = 0, py::arg("top_p") = 1.0f,
             py::arg("min_p") = 0.0f, py::arg("seed") = 0, py::kw_only(), py::arg("typical_p") = 1.0f,
             py::arg("xtc_probability") = 0.0f, py::arg("xtc_threshold") = 0.1f, py::arg("temperature_last") = false,
             py::arg("logprobs") = -1, py::arg("rules") = std::shared_ptr<LogitRules>())
        .def(pickled(&make_sampling, [](const Sampling& s) {
            return std::make_tuple(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.typical_p, s.xtc_probability,
                                   s.xtc_threshold, s.temperature_last, s.logprobs,
                                   std::const_pointer_cast<LogitRules>(s.rules));
        }));
}

}  // namespace pystaged
