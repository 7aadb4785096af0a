// The texts of enumerations that flags choose from.
#pragma once
#include <array>
#include <optional>
#include <string_view>

#include "model/fp8.h"
#include "run/options.h"

namespace llamac {

// In the order of the enumerators.
template <class E>
inline constexpr auto texts = nullptr;
template <>
inline constexpr std::array texts<bool> = {"off", "on"};
template <>
inline constexpr std::array texts<Init> = {"random", "load"};
template <>
inline constexpr std::array texts<ScheduleShape> = {"cosine", "linear", "constant", "wsd"};
template <>
inline constexpr std::array texts<MatmulDType> = {"storage", "fp8"};
template <>
inline constexpr std::array texts<Fp8Scaling> = {"tensor", "delayed", "row"};
template <>
inline constexpr std::array texts<Fp8Gradients> = {"e5m2", "e4m3"};
template <>
inline constexpr std::array texts<Fp8Weights> = {"recomputed", "stored"};

template <class E>
std::optional<E> find_choice(std::string_view text) {
    for (size_t i = 0; i < texts<E>.size(); i++)
        if (text == texts<E>[i]) return static_cast<E>(i);
    return std::nullopt;
}

}  // namespace llamac
