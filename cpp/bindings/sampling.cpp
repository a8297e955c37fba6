#include "bindings/bindings.h"
#include "sampling/sampler.h"

namespace pystaged {

// Values that are made of these fields, checked, and pickle as a tuple of them; `arguments` names them.
template <class Class, class T, class... Fields, class... Arguments>
static void add_fields(Class type, const std::tuple<Fields T::*...>& places, const Arguments&... arguments) {
    const auto make = [places](Fields... fields) {
        T made;
        std::apply([&](auto... place) { ((made.*place = std::move(fields)), ...); }, places);
        check(made);
        return made;
    };
    type.def(py::init(make), arguments...);
    type.def(py::pickle(
        [places](const T& made) {
            return std::apply([&](auto... place) { return std::make_tuple(made.*place...); }, places);
        },
        [make](const std::tuple<Fields...>& fields) { return std::apply(make, fields); }));
}

void add_sampling(py::module_& m) {
    using R = LogitRules;
    add_fields(py::class_<R, std::shared_ptr<R>>(m, "LogitRules"),
               std::make_tuple(&R::bias, &R::end_tokens, &R::min_length, &R::repeat_penalty, &R::presence_penalty,
                               &R::frequency_penalty, &R::repeat_last_n, &R::dry_multiplier, &R::dry_base,
                               &R::dry_allowed_length, &R::dry_last_n, &R::dry_breakers),
               py::kw_only(), py::arg("logit_bias") = R().bias, py::arg("end_tokens") = R().end_tokens,
               py::arg("min_length") = R().min_length, py::arg("repeat_penalty") = R().repeat_penalty,
               py::arg("presence_penalty") = R().presence_penalty, py::arg("frequency_penalty") = R().frequency_penalty,
               py::arg("repeat_last_n") = R().repeat_last_n, py::arg("dry_multiplier") = R().dry_multiplier,
               py::arg("dry_base") = R().dry_base, py::arg("dry_allowed_length") = R().dry_allowed_length,
               py::arg("dry_penalty_last_n") = R().dry_last_n, py::arg("dry_breakers") = R().dry_breakers);
    using S = Sampling;
    add_fields(py::class_<S>(m, "Sampling"),
               std::make_tuple(&S::temperature, &S::top_k, &S::top_p, &S::min_p, &S::seed, &S::typical_p,
                               &S::xtc_probability, &S::xtc_threshold, &S::temperature_last, &S::logprobs, &S::rules),
               py::arg("temperature") = S().temperature, py::arg("top_k") = S().top_k, py::arg("top_p") = S().top_p,
               py::arg("min_p") = S().min_p, py::arg("seed") = S().seed, py::kw_only(),
               py::arg("typical_p") = S().typical_p, py::arg("xtc_probability") = S().xtc_probability,
               py::arg("xtc_threshold") = S().xtc_threshold, py::arg("temperature_last") = S().temperature_last,
               py::arg("logprobs") = S().logprobs, py::arg("rules") = S().rules);
}

}  // namespace pystaged
